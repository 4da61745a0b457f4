"""A cluster is a number of equal nodes of one hardware, on which a plan runs."""

from dataclasses import dataclass, field, replace
from typing import Self

from mistlab.machine.hardware import Hardware
from mistlab.machine.profile import Profile
from mistlab.values.errors import refuse
from mistlab.values.units import GBYTES, GIB_BYTES
from mistlab.values.value import bounded, check_fields
from mistlab.values.workload import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of one hardware, with ``gpus_per_node`` GPUs used in each.

    The optional fields replace numbers of the hardware: ``memory_gib`` is the memory of a GPU,
    ``host_memory_gib`` that of a node, and the bandwidths are those of ``Node``. ``profile`` has
    the peculiarities of one such cluster.
    """

    hardware: Hardware
    nodes: int = field(metadata=bounded(minimum=1))
    gpus_per_node: int = field(metadata=bounded(minimum=1))
    memory_gib: float | None = field(default=None, metadata=bounded(above=0))
    host_memory_gib: float | None = field(default=None, metadata=bounded(above=0))
    intra_node_gbytes_per_s: float | None = field(default=None, metadata=bounded(above=0))
    inter_node_gbytes_per_s: float | None = field(default=None, metadata=bounded(above=0))
    profile: Profile | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.gpus_per_node > self.hardware.node.gpus:
            problem = (
                f"{self.gpus_per_node} is more than a node of {self.hardware.name} has: "
                f"give at most {self.hardware.node.gpus}, or a hardware file with a larger node"
            )
            refuse("gpus_per_node", problem)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def alone(self) -> Self:
        """A cluster of only one GPU of this hardware."""
        return replace(self, nodes=1, gpus_per_node=1)

    @property
    def memory_bytes(self) -> int:
        """Bytes of one GPU that torch can use."""
        if self.memory_gib is None:
            return self.hardware.gpu.memory_bytes
        return round(self.memory_gib * GIB_BYTES)

    @property
    def memory_bytes_per_s(self) -> float:
        """Bandwidth of a GPU's own memory."""
        return self.hardware.gpu.memory_bytes_per_s

    def peak_flop_per_s(self, precision: Precision) -> float:
        """Peak rate of one GPU in dense matrix multiplication."""
        return self.hardware.gpu.peak_flop_per_s(precision)

    @property
    def host_memory_bytes(self) -> int:
        """Bytes of host memory of one node."""
        if self.host_memory_gib is None:
            return self.hardware.node.host_memory_bytes
        return round(self.host_memory_gib * GIB_BYTES)

    @property
    def intra_node_bytes_per_s(self) -> float:
        """Bandwidth of one GPU to the others of its node, one direction."""
        if self.intra_node_gbytes_per_s is None:
            return self.hardware.node.intra_node_bytes_per_s
        return self.intra_node_gbytes_per_s * GBYTES

    @property
    def inter_node_bytes_per_s(self) -> float:
        """Bandwidth of one node to other nodes, one direction."""
        if self.inter_node_gbytes_per_s is None:
            return self.hardware.node.inter_node_bytes_per_s
        return self.inter_node_gbytes_per_s * GBYTES

    @property
    def host_link_bytes_per_s(self) -> float:
        """Bandwidth of one GPU to host memory, one direction."""
        return self.hardware.node.host_link_bytes_per_s
