"""The hardware of a machine: numbers of its GPU and its node, and their sources.

Fields have the units of datasheets, as hardware files do. Properties have SI units.
"""

from dataclasses import dataclass, field
from typing import Literal

from mistlab.machine.compute import Compute
from mistlab.machine.slowdowns import Interference
from mistlab.machine.transfers import Transfers
from mistlab.machine.whole_runs import Allocator, EngineCalibration
from mistlab.values.errors import refuse
from mistlab.values.limits import MOST_GPUS_OF_NODE
from mistlab.values.precision import Precision
from mistlab.values.units import GBYTES, GIB_BYTES, TFLOP
from mistlab.values.value import bounded, check_fields, quantity

ProvenanceKind = Literal["datasheet", "measured", "borrowed"]
_PRECISIONS: tuple[Precision, ...] = ("fp16", "bf16", "fp8", "fp4", "fp32")
CALIBRATED = ("interference", "transfers", "compute", "allocator", "engines")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTflops:
    """Peak rates of one GPU in dense matrix multiplication; None for a precision that it lacks."""

    fp16: float = field(metadata=quantity())
    bf16: float | None = field(metadata=quantity())
    fp32: float = field(metadata=quantity())
    fp8: float | None = field(default=None, metadata=quantity())
    fp4: float | None = field(default=None, metadata=quantity())

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. ``memory_gib`` is the part of its memory that torch can use, ``board_watts`` the
    most power that its board draws. ``cores`` are those of a CPU's part that stands in for a GPU.
    """

    memory_gib: float = field(metadata=quantity())
    memory_gbytes_per_s: float = field(metadata=quantity())
    peak_tflops: PeakTflops
    board_watts: float | None = field(default=None, metadata=quantity())
    cores: int | None = field(default=None, metadata=bounded(minimum=1))

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def memory_bytes(self) -> int:
        """Bytes that torch can use."""
        return round(self.memory_gib * GIB_BYTES)

    @property
    def memory_bytes_per_s(self) -> float:
        """Bandwidth of the GPU's own memory."""
        return self.memory_gbytes_per_s * GBYTES

    def peak_flop_per_s(self, precision: Precision) -> float:
        """Peak rate in dense matrix multiplication; refuses a precision that the GPU lacks."""
        peak: float | None = getattr(self.peak_tflops, precision)
        if peak is None:
            problem = f"{precision} is not in this GPU's arithmetic: give {self.precisions}"
            refuse("precision", problem)
        return peak * TFLOP

    @property
    def precisions(self) -> str:
        """The precisions that this GPU computes in, in words."""
        peaks = self.peak_tflops
        *others, last = [name for name in _PRECISIONS if getattr(peaks, name) is not None]
        return f"{', '.join(others)} or {last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of several GPUs.

    Bandwidths are for one direction: ``intra_node_gbytes_per_s`` from one GPU to the others of the
    node, ``inter_node_gbytes_per_s`` from the node to other nodes, ``host_link_gbytes_per_s`` from
    one GPU to host memory.
    """

    gpus: int = field(metadata=bounded(minimum=1, most=MOST_GPUS_OF_NODE))
    host_memory_gib: float = field(metadata=quantity())
    intra_node_gbytes_per_s: float = field(metadata=quantity())
    inter_node_gbytes_per_s: float = field(metadata=quantity())
    host_link_gbytes_per_s: float = field(metadata=quantity())

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def host_memory_bytes(self) -> int:
        """Bytes of host memory, for all GPUs together."""
        return round(self.host_memory_gib * GIB_BYTES)

    @property
    def intra_node_bytes_per_s(self) -> float:
        """Bandwidth of one GPU to the others of its node, one direction."""
        return self.intra_node_gbytes_per_s * GBYTES

    @property
    def inter_node_bytes_per_s(self) -> float:
        """Bandwidth of the node to other nodes, one direction."""
        return self.inter_node_gbytes_per_s * GBYTES

    @property
    def host_link_bytes_per_s(self) -> float:
        """Bandwidth of one GPU to host memory, one direction."""
        return self.host_link_gbytes_per_s * GBYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of a group of numbers, and the way in which they were obtained."""

    kind: ProvenanceKind
    source: str

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.source.strip():
            problem = "is empty: name the datasheet, the measurement or the file borrowed from"
            refuse("source", problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The source of each group of numbers in a hardware file."""

    gpu: Source
    node: Source
    interference: Source | None = None
    transfers: Source | None = None
    compute: Source | None = None
    allocator: Source | None = None
    engines: Source | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The content of a hardware file; groups from ``interference`` on are None until calibrated."""

    name: str
    description: str = ""
    gpu: Gpu
    node: Node
    interference: Interference | None = None
    transfers: Transfers | None = None
    compute: Compute | None = None
    allocator: Allocator | None = None
    engines: tuple[EngineCalibration, ...] | None = None
    provenance: Provenance

    def __post_init__(self) -> None:
        check_fields(self)
        for group in CALIBRATED:
            if (getattr(self, group) is None) != (getattr(self.provenance, group) is None):
                problem = f"goes with {group}: give both, or neither"
                refuse(f"provenance.{group}", problem)
        if not self.name.strip():
            problem = "is empty: give the hardware a name"
            refuse("name", problem)
