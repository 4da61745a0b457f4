"""A machine: its GPU, its node, and where each number comes from.

The fields carry the units of hardware files, as datasheets give them; the properties are SI.
"""

from dataclasses import dataclass, field
from typing import Literal

from mistlab.machine.compute import Compute
from mistlab.machine.slowdowns import Interference
from mistlab.machine.transfers import Transfers
from mistlab.machine.whole_runs import Allocator, EngineCalibration
from mistlab.values.errors import refuse
from mistlab.values.units import GBYTES, GIB_BYTES, TFLOP
from mistlab.values.value import bounded, check_fields
from mistlab.values.workload import Precision

ProvenanceKind = Literal["datasheet", "measured", "borrowed"]
CALIBRATED = ("interference", "transfers", "compute", "allocator", "engines")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTflops:
    """Dense matrix-multiplication peaks of one GPU; None where it has no such arithmetic."""

    fp16: float = field(metadata=bounded(above=0))
    bf16: float | None = field(metadata=bounded(above=0))
    fp32: float = field(metadata=bounded(above=0))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU; ``memory_gib`` is what torch can use of the card."""

    memory_gib: float = field(metadata=bounded(above=0))
    memory_gbytes_per_s: float = field(metadata=bounded(above=0))
    peak_tflops: PeakTflops

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
        """Dense matrix-multiplication peak; refuses a precision that the GPU lacks."""
        peak: float | None = getattr(self.peak_tflops, precision)
        if peak is None:
            problem = f"{precision} is not in this GPU's arithmetic: give {self.precisions}"
            refuse("precision", problem)
        return peak * TFLOP

    @property
    def precisions(self) -> str:
        """The precisions that this GPU computes in, in words."""
        return "fp16, bf16 or fp32" if self.peak_tflops.bf16 is not None else "fp16 or fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of several GPUs.

    ``intra_node_gbytes_per_s`` is of one GPU towards the others, ``inter_node_gbytes_per_s`` of the
    node towards other nodes, ``host_link_gbytes_per_s`` of one GPU to host memory: one direction
    each.
    """

    gpus: int = field(metadata=bounded(minimum=1))
    host_memory_gib: float = field(metadata=bounded(above=0))
    intra_node_gbytes_per_s: float = field(metadata=bounded(above=0))
    inter_node_gbytes_per_s: float = field(metadata=bounded(above=0))
    host_link_gbytes_per_s: float = field(metadata=bounded(above=0))

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
    """Where a group of numbers comes from: how they were obtained, and from what in words."""

    kind: ProvenanceKind
    source: str

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.source.strip():
            problem = "is empty: name the datasheet, the measurement or the file borrowed from"
            refuse("source", problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The sources of a hardware file, group by group."""

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
    """What a hardware file holds; the groups from ``interference`` on are None until calibrated."""

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
