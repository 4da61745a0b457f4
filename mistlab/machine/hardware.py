"""Hardware: rates of a machine's GPU and links, constants fitted to runs, and their sources."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mistlab.core.units import GBYTES, GIB_BYTES, MIB_BYTES, MICROSECONDS, TFLOP
from mistlab.core.values import (
    MOST_GPUS_OF_NODE,
    MOST_NODES,
    MOST_RATE,
    Checked,
    bounded,
    check_fields,
    name_in,
    quantity,
    refuse,
)
from mistlab.engines.engine import Precision, names_for_plans
from mistlab.machine.consistency import (
    IN_GIB,
    IN_MIB,
    OF_BOARD,
    OF_HOST,
    OF_LINK,
    OF_MEMORY,
    OF_NETWORK,
    OF_NODE,
    OF_PEAK,
    OF_TIME,
    check_consistency,
)
from mistlab.machine.slowdowns import Interference

# The rate of a GPU inside a training step, for each class of operators (GEMMs, attention, ...).
#
# An operator takes ``flop / rate + bytes / bandwidth``: computing and moving bytes overlap little
# in practice, and the sum distinguishes a small GEMM, which moves many bytes per operation, from a
# large one.


OperatorClass = Literal[
    "matmul",
    "batched_matmul",
    "attention_forward",
    "attention_backward",
    "memory",
    "grouped_matmul",
    "matmul_8bit",
    "grouped_matmul_8bit",
    "matmul_4bit",
    "scan",
    "step",
]
# The classes of operators that have a rate in every hardware file; other classes may use one of
# their rates.
OPERATOR_CLASSES: tuple[OperatorClass, ...] = (
    *("matmul", "batched_matmul"),
    *("attention_forward", "attention_backward", "memory"),
)
AS_ANOTHER: Mapping[OperatorClass, OperatorClass] = {
    "grouped_matmul": "matmul",
    "matmul_8bit": "matmul",
    "grouped_matmul_8bit": "grouped_matmul",
    "matmul_4bit": "matmul_8bit",
    "scan": "memory",
    "step": "memory",
}
EIGHT_BIT = ("matmul_8bit", "grouped_matmul_8bit", "matmul_4bit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The rate of one class of operators: TFLOP/s in 16 bits, and GB/s of memory. A rate of None
    takes no time.

    GEMMs with weights are ``matmul``, the batched GEMMs of unfused attention ``batched_matmul``,
    those of experts ``grouped_matmul``. GEMMs of 8-bit and of 4-bit operands have classes of their
    own, with rates in operations of that precision, and so have both passes of fused attention.
    ``memory`` are operators that only move bytes, ``scan`` the scans of state-space blocks;
    ``step`` is the optimizer step, one kernel.
    """

    operators: OperatorClass
    tflops: float | None = field(default=None, metadata=quantity(most=MOST_RATE))
    gbytes_per_s: float | None = field(default=None, metadata=quantity(most=MOST_RATE))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tflops is None and self.gbytes_per_s is None:
            refuse(
                "tflops",
                "missing, as is gbytes_per_s: give at least one of the two rates, for the time of "
                f"{self.operators} operators",
            )

    @property
    def s_per_flop(self) -> float:
        """The seconds that one floating-point operation takes."""
        return 0.0 if self.tflops is None else 1 / (self.tflops * TFLOP)

    @property
    def s_per_byte(self) -> float:
        """The seconds that each byte read or written takes."""
        return 0.0 if self.gbytes_per_s is None else 1 / (self.gbytes_per_s * GBYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The rates of a GPU for all classes of operators, and the host's time to launch one kernel.

    ``host_computes`` says that the host's own cores are the device (a CPU in place of GPUs): then
    launches take time away from arithmetic and do not overlap with it. ``sustained`` is the share
    of these rates that whole training steps reach, under the GPU's power limit and between other
    kernels.
    """

    rates: tuple[Rate, ...]
    sustained: float = field(default=1.0, metadata=bounded(above=0, maximum=1))
    launch_us: float = field(metadata=quantity(or_zero=True, usual=OF_TIME))
    host_computes: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        given = sorted(rate.operators for rate in self.rates)
        needed = sorted({*given, *OPERATOR_CLASSES})
        if given != needed:
            classes = ", ".join(OPERATOR_CLASSES)
            refuse(
                "rates",
                f"has rates of {', '.join(given) or 'no operators'}: give one rate for {classes}",
            )

    def rate(self, operators: OperatorClass) -> Rate:
        """The rate of one class of operators, such as GEMMs."""
        return next(rate for rate in self.rates if rate.operators == self.given(operators))

    def given(self, operators: OperatorClass) -> OperatorClass:
        """The class whose rate these operators use: their own class if it has a measured rate,
        otherwise a similar one.
        """
        has = {rate.operators for rate in self.rates}
        while operators not in has:
            operators = AS_ANOTHER[operators]
        return operators

    @property
    def launch_s(self) -> float:
        """The seconds that the host takes to launch one kernel."""
        return self.launch_us * 1e-6


# The times of transfers between GPUs, and between a GPU and its host.
#
# A time is a linear function of the bytes: a latency and a bandwidth, valid for the measured sizes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The time of a transfer as a linear function of its bytes, fitted to sizes from
    ``smallest_mib`` to ``largest_mib``.
    """

    latency_us: float = field(metadata=quantity(or_zero=True, usual=OF_TIME))
    gbytes_per_s: float = field(metadata=quantity())
    smallest_mib: float = field(metadata=quantity())
    largest_mib: float = field(metadata=quantity())

    def __post_init__(self) -> None:
        check_fields(self)
        if self.largest_mib < self.smallest_mib:
            refuse(
                "largest_mib",
                f"{self.largest_mib:g} is below smallest_mib {self.smallest_mib:g}: give at least "
                "as much",
            )

    @property
    def latency_s(self) -> float:
        """The latency in seconds that every transfer takes."""
        return self.latency_us * MICROSECONDS

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth in bytes per second, which long transfers approach."""
        return self.gbytes_per_s * GBYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTransfers(Checked):
    """The times of transfers in a communication group of one shape (ranks in a node, nodes).

    The bytes of a collective are the whole message. All GPUs of a node run the transfer at once, so
    groups share the node's links, and copies share the host's memory.
    """

    gpus_in_node: int = field(metadata=bounded(minimum=1, most=MOST_GPUS_OF_NODE))
    nodes: int = field(metadata=bounded(minimum=1, most=MOST_NODES))
    all_gather: Line | None = None
    reduce_scatter: Line | None = None
    all_reduce: Line | None = None
    all_to_all: Line | None = None
    host_to_device: Line | None = None
    device_to_host: Line | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """The times of transfers, by shape of communication group (ranks in a node, nodes).

    ``in_node`` and ``across_nodes`` are the times of a send between two GPUs of one node, and of
    two nodes.
    """

    groups: tuple[GroupTransfers, ...]
    in_node: Line | None = None
    across_nodes: Line | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.groups:
            refuse("groups", "is empty: give the transfers of at least one group of GPUs")


# Constants fitted to whole runs: memory besides tensors, and bounds of predicted times.


# The largest half-width of bounds that is accepted, as a share; a larger number was probably meant
# in per cent.
MOST_FAR_OFF = 3
OF_SHARE = "as a share (8 % are 0.08)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator(Checked):
    """Memory of engine ``mistlab`` besides its tensors, inside and outside torch's allocator.

    An optimizer step needs scratch space for the largest layer's shard when activations are already
    freed; a head needs scratch space too. At the memory peak, activations can seldom use this
    space, so it is counted in addition: bytes for each parameter of that shard and of the head. The
    head's space is at most ``head_mib``, because larger measured heads took no more. A NCCL
    communicator takes ``communicator_mib`` on a GPU; None if that was not measured.
    """

    step_bytes_a_parameter: float = field(metadata=quantity(or_zero=True))
    head_bytes_a_parameter: float = field(metadata=quantity(or_zero=True))
    head_mib: float = field(metadata=quantity(or_zero=True, usual=IN_MIB))
    outside_mib: float = field(metadata=quantity(or_zero=True, usual=IN_MIB))
    communicator_mib: float | None = field(default=None, metadata=quantity(or_zero=True))

    @property
    def head_bytes(self) -> float:
        """The most bytes of scratch space that a model's head takes besides its tensors."""
        return self.head_mib * MIB_BYTES

    @property
    def outside_bytes(self) -> float:
        """The bytes that libraries (such as CUDA) allocate outside torch's allocator."""
        return self.outside_mib * MIB_BYTES

    @property
    def communicator_bytes(self) -> float:
        """The bytes that one NCCL communicator takes on a GPU; 0 if nobody measured them."""
        return 0.0 if self.communicator_mib is None else self.communicator_mib * MIB_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAt(Checked):
    """The size of a measured run: the model's hidden size, number of GPUs, sequence length."""

    hidden: int = field(metadata=bounded(minimum=1))
    gpus: int = field(metadata=bounded(minimum=1))
    sequence_length: int = field(metadata=bounded(minimum=1))

    def ratios(self, other: "MeasuredAt") -> Mapping[str, float]:
        """The factors, at least 1, by which hidden size, number of GPUs and sequence length differ
        from those of another run.
        """
        pairs = {
            "hidden size": (self.hidden, other.hidden),
            "number of GPUs": (self.gpus, other.gpus),
            "sequence length": (self.sequence_length, other.sequence_length),
        }
        return {name: max(pair) / min(pair) for name, pair in pairs.items()}

    def doublings(self, other: "MeasuredAt") -> float:
        """The distance to the size of another run: the doublings of width, GPUs and sequence
        length, added up.
        """
        return sum(map(math.log2, self.ratios(other).values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCalibration:
    """How far an engine's measured runs are from their predictions, which gives the bounds of
    predictions.

    90 % of measurements lie within the share ``half_width`` of their predictions, for runs that
    were left out of the fit while similar runs (with the sizes ``at``) were in it.
    ``far_half_width`` is the same share when all runs of one model width were left out; then the
    nearest other runs were ``reach`` doublings away.
    """

    engine: str = field(metadata=name_in(names_for_plans))
    half_width: float = field(metadata=quantity(most=MOST_FAR_OFF, usual=OF_SHARE))
    far_half_width: float = field(metadata=quantity(most=MOST_FAR_OFF, usual=OF_SHARE))
    reach: float = field(metadata=quantity())
    runs: int = field(metadata=bounded(minimum=0))
    at: tuple[MeasuredAt, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.at:
            refuse("at", "is empty: give hidden, gpus and sequence_length of a measured run")
        if self.far_half_width < self.half_width:
            refuse(
                "far_half_width",
                f"{self.far_half_width:g} is below half_width {self.half_width:g}: give at least "
                "as much",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRuns(Checked):
    """How far the runs of a user's own cluster and software are from their predictions on average.

    ``offset`` is the mean logarithm of measured over predicted time, in units of the square root of
    a run's way (``mistlab.cost.confidence``); above 0 runs are slower than predicted. ``runs`` is
    the number of runs, less one for each constant that was fitted to them.
    """

    engine: str = field(metadata=name_in(names_for_plans))
    offset: float
    runs: int = field(metadata=bounded(minimum=0))


# The hardware of a machine: figures of its GPU and its node, with their sources.
#
# Fields have the units of datasheets, as hardware files do. Properties have SI units.


ProvenanceKind = Literal["datasheet", "measured", "borrowed", "scaled", "restated"]
_PRECISIONS: tuple[Precision, ...] = ("fp16", "bf16", "fp8", "fp4", "tf32", "fp32")
# Nodes with more GPUs than this are racks of trays, such as NVL72.
MOST_IN_BOX = 16
CALIBRATED = ("interference", "transfers", "compute", "allocator", "engines")
# The groups of figures that may be taken from another GPU's hardware file.
LENT = CALIBRATED[:-1]
# A GPU's rates are used for other GPUs only if predictions for it have at most this half-width of
# errors. Chosen by hand: the best engine's is 0.36 on the A10G, where only unfused attention was
# measured, and at most 0.1 elsewhere.
MOST_HALF_WIDTH = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTflops(Checked):
    """Peak rates of one GPU for dense GEMMs, by precision; None for one that the GPU lacks."""

    fp16: float = field(metadata=quantity(usual=OF_PEAK))
    bf16: float | None = field(metadata=quantity(usual=OF_PEAK))
    fp32: float = field(metadata=quantity(usual=OF_PEAK))
    tf32: float | None = field(default=None, metadata=quantity(usual=OF_PEAK))
    fp8: float | None = field(default=None, metadata=quantity(usual=OF_PEAK))
    fp4: float | None = field(default=None, metadata=quantity(usual=OF_PEAK))


ArchitectureName = Literal[
    "volta",
    "turing",
    "ampere",
    "ampere-graphics",
    "ada",
    "hopper",
    "blackwell",
    "blackwell-graphics",
    "cdna2",
    "cdna3",
    "cdna4",
]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A GPU's architecture: vendor, line of products, and generation within that line."""

    maker: str
    line: str
    generation: int


ARCHITECTURES: Mapping[ArchitectureName, Architecture] = {
    "volta": Architecture("NVIDIA", "data centre", 0),
    "turing": Architecture("NVIDIA", "graphics", 1),
    "ampere": Architecture("NVIDIA", "data centre", 2),
    "ampere-graphics": Architecture("NVIDIA", "graphics", 2),
    "ada": Architecture("NVIDIA", "graphics", 3),
    "hopper": Architecture("NVIDIA", "data centre", 3),
    "blackwell": Architecture("NVIDIA", "data centre", 4),
    "blackwell-graphics": Architecture("NVIDIA", "graphics", 4),
    "cdna2": Architecture("AMD", "data centre", 2),
    "cdna3": Architecture("AMD", "data centre", 3),
    "cdna4": Architecture("AMD", "data centre", 4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(Checked):
    """A GPU's figures, such as ``memory_gib``, the part of its memory that torch can use.

    ``board_watts`` is its power limit. ``cores`` is only given for a CPU that is used in place of a
    GPU. If the GPU was not measured, its ``architecture`` determines whose calibrated rates are
    used.
    """

    memory_gib: float = field(metadata=quantity(usual=IN_GIB))
    memory_gbytes_per_s: float = field(metadata=quantity(usual=OF_MEMORY))
    peak_tflops: PeakTflops
    board_watts: float | None = field(default=None, metadata=quantity(usual=OF_BOARD))
    architecture: ArchitectureName | None = None
    cores: int | None = field(default=None, metadata=bounded(minimum=1))

    @property
    def memory_bytes(self) -> int:
        """The bytes of the GPU's memory that torch can use."""
        return round(self.memory_gib * GIB_BYTES)

    @property
    def memory_bytes_per_s(self) -> float:
        """Bandwidth of the GPU's own memory in bytes per second."""
        return self.memory_gbytes_per_s * GBYTES

    def has(self, precision: Precision) -> bool:
        """Whether the GPU supports a precision."""
        return getattr(self.peak_tflops, precision) is not None

    def peak_flop_per_s(self, precision: Precision) -> float:
        """Peak rate for dense matrix multiplication, in FLOP/s; refuses a precision it lacks."""
        peak: float | None = getattr(self.peak_tflops, precision)
        if peak is None:
            refuse("precision", f"{precision} is not supported by this GPU: give {self.precisions}")
        return peak * TFLOP

    @property
    def precisions(self) -> str:
        """The precisions that this GPU supports, as text for messages."""
        *others, last = [name for name in _PRECISIONS if self.has(name)]
        return f"{', '.join(others)} or {last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(Checked):
    """A machine with several GPUs: their number, links and host memory.

    Bandwidths are for one direction: ``intra_node_gbytes_per_s`` from one GPU to the others of the
    node, ``inter_node_gbytes_per_s`` from the node to other nodes, ``host_link_gbytes_per_s`` from
    one GPU to host memory.
    """

    gpus: int = field(metadata=bounded(minimum=1, most=MOST_GPUS_OF_NODE))
    host_memory_gib: float = field(metadata=quantity(usual=OF_NODE))
    intra_node_gbytes_per_s: float = field(metadata=quantity(usual=OF_LINK))
    inter_node_gbytes_per_s: float = field(metadata=quantity(usual=OF_NETWORK))
    host_link_gbytes_per_s: float = field(metadata=quantity(usual=OF_HOST))

    @property
    def is_rack(self) -> bool:
        """Whether the node is a rack of trays (NVL72), with more GPUs than one box has."""
        return self.gpus > MOST_IN_BOX

    @property
    def host_memory_bytes(self) -> int:
        """The bytes of the node's host memory, which all of its GPUs share."""
        return round(self.host_memory_gib * GIB_BYTES)

    @property
    def intra_node_bytes_per_s(self) -> float:
        """Bandwidth from one GPU to the others of its node, in bytes per second, one direction."""
        return self.intra_node_gbytes_per_s * GBYTES

    @property
    def inter_node_bytes_per_s(self) -> float:
        """Bandwidth from the node to other nodes, in bytes per second and one direction."""
        return self.inter_node_gbytes_per_s * GBYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasheetFigures(Checked):
    """The datasheet figures of the machine on which a hardware file's curves were measured.

    Where the file states another figure now, the curves that depend on it are scaled.
    """

    memory_gbytes_per_s: float = field(metadata=quantity(usual=OF_MEMORY))
    peak_tflops: PeakTflops
    board_watts: float | None = field(default=None, metadata=quantity(usual=OF_BOARD))
    intra_node_gbytes_per_s: float = field(metadata=quantity(usual=OF_LINK))
    inter_node_gbytes_per_s: float = field(metadata=quantity(usual=OF_NETWORK))
    host_link_gbytes_per_s: float = field(metadata=quantity(usual=OF_HOST))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a group of hardware figures comes from, and how the figures were obtained."""

    kind: ProvenanceKind
    source: str

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.source.strip():
            refuse(
                "source",
                "is empty: name the datasheet, the measurement or the file borrowed from",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance(Checked):
    """The source of each group of figures in a hardware file."""

    gpu: Source
    node: Source
    interference: Source | None = None
    transfers: Source | None = None
    compute: Source | None = None
    allocator: Source | None = None
    engines: Source | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The content of a hardware file.

    The groups of figures from ``interference`` on are None until they are calibrated (fitted to
    measurements).
    """

    name: str
    description: str = ""
    gpu: Gpu
    node: Node
    measured_with: DatasheetFigures | None = None
    interference: Interference | None = None
    transfers: Transfers | None = None
    compute: Compute | None = None
    allocator: Allocator | None = None
    engines: tuple[EngineCalibration, ...] | None = None
    own_runs: tuple[OwnRuns, ...] = ()
    provenance: Provenance

    def __post_init__(self) -> None:
        check_fields(self)
        for group in CALIBRATED:
            if (getattr(self, group) is None) != (getattr(self.provenance, group) is None):
                if getattr(self, group) is None:
                    refuse(group, f"missing, but provenance.{group} is given: give {group} too")
                kinds = "give its kind and source"
                refuse(f"provenance.{group}", f"missing, but {group} is given: {kinds}")
        if not self.name.strip():
            refuse("name", "is empty: give the hardware a name")
        check_consistency(self)

    @property
    def figures(self) -> DatasheetFigures:
        """The hardware's datasheet figures on which its measured rates and transfers depend."""
        return DatasheetFigures(
            memory_gbytes_per_s=self.gpu.memory_gbytes_per_s,
            peak_tflops=self.gpu.peak_tflops,
            board_watts=self.gpu.board_watts,
            intra_node_gbytes_per_s=self.node.intra_node_gbytes_per_s,
            inter_node_gbytes_per_s=self.node.inter_node_gbytes_per_s,
            host_link_gbytes_per_s=self.node.host_link_gbytes_per_s,
        )


def is_calibrated(hardware: Hardware) -> bool:
    """Whether a hardware file has all groups of figures that predictions need."""
    return all(getattr(hardware, group) is not None for group in LENT)


def can_lend(hardware: Hardware) -> bool:
    """Whether other GPUs may use this GPU's rates.

    They may if the rates were measured on it, and the half-width of its best engine's predictions
    is at most ``MOST_HALF_WIDTH``, if whole runs were measured.
    """
    compute = hardware.provenance.compute
    widths = [one.half_width for one in hardware.engines or ()]
    is_near = not widths or min(widths) <= MOST_HALF_WIDTH
    return compute is not None and compute.kind == "measured" and is_near
