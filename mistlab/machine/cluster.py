"""A cluster is a number of nodes on which a plan runs: equal nodes, or groups of equal nodes."""

from bisect import bisect
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Self

from mistlab.machine.hardware import Hardware
from mistlab.machine.node_group import NodeGroup
from mistlab.machine.profile import Profile
from mistlab.values.errors import refuse
from mistlab.values.limits import MOST_GPUS_OF_NODE, MOST_NODES
from mistlab.values.precision import Precision
from mistlab.values.units import GBYTES, GIB_BYTES
from mistlab.values.value import bounded, check_fields, quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """So many nodes, with ``gpus_per_node`` GPUs used in each.

    The nodes have one hardware, unless the last of them are groups of ``others``. Figures of a
    cluster with several groups are those of its first group; ``of_groups`` has a cluster for each.

    The optional numbers replace numbers of all hardware: ``memory_gib`` is the memory of a GPU,
    ``host_memory_gib`` that of a node, and the bandwidths are those of ``Node``. Of the memory of
    every GPU plans leave ``keep_free_gib``. ``profile`` has the peculiarities of one such cluster.
    """

    hardware: Hardware
    nodes: int = field(metadata=bounded(minimum=1, maximum=MOST_NODES))
    gpus_per_node: int = field(metadata=bounded(minimum=1, most=MOST_GPUS_OF_NODE))
    memory_gib: float | None = field(default=None, metadata=quantity())
    host_memory_gib: float | None = field(default=None, metadata=quantity())
    intra_node_gbytes_per_s: float | None = field(default=None, metadata=quantity())
    inter_node_gbytes_per_s: float | None = field(default=None, metadata=quantity())
    keep_free_gib: float | None = field(default=None, metadata=quantity(zero=True))
    profile: Profile | None = None
    others: tuple[NodeGroup, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        others = sum(group.nodes for group in self.others)
        if others >= self.nodes:
            problem = (
                f"{self.nodes} are all in other groups, which have {others}: give at least one more"
            )
            refuse("nodes", problem)
        for group in self.groups:
            hardware = group.hardware
            if self.gpus_per_node > hardware.node.gpus:
                problem = (
                    f"{self.gpus_per_node} is more than a node of {hardware.name} has: "
                    f"give at most {hardware.node.gpus}, or a hardware file with a larger node"
                )
                refuse("gpus_per_node", problem)
        self._check_free()

    def _check_free(self) -> None:
        """Refuse to keep free all that torch's allocator may hold on a GPU, or more."""
        if self.keep_free_gib is None:
            return
        for group in self.of_groups:
            allocator = group.hardware.allocator
            outside_bytes = 0.0 if allocator is None else allocator.outside_bytes
            whole_gib = (group.whole_memory_bytes - outside_bytes) / GIB_BYTES
            if self.keep_free_gib >= whole_gib:
                problem = (
                    f"{self.keep_free_gib:g} leaves plans nothing of the {whole_gib:.1f} GiB of a "
                    f"GPU of {group.hardware.name}: give less, such as {whole_gib / 10:.1f}"
                )
                refuse("keep_free_gib", problem)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def alone(self) -> Self:
        """A cluster of only one GPU of this hardware."""
        return replace(self, nodes=1, gpus_per_node=1, others=())

    @property
    def groups(self) -> tuple[NodeGroup, ...]:
        """The groups of equal nodes, in the order of ranks."""
        first = self.nodes - sum(group.nodes for group in self.others)
        return (NodeGroup(hardware=self.hardware, nodes=first), *self.others)

    @property
    def name(self) -> str:
        """The hardware's name; of several groups the name and the nodes of each, as command lines
        give them."""
        if not self.others:
            return self.hardware.name
        return ",".join(f"{group.hardware.name}:{group.nodes}" for group in self.groups)

    @property
    def of_groups(self) -> tuple[Self, ...]:
        """For each group, this cluster as if all its nodes were of that group."""
        if not self.others:
            return (self,)
        return tuple(replace(self, hardware=one.hardware, others=()) for one in self.groups)

    @property
    def ranks_of_groups(self) -> tuple[range, ...]:
        """The ranks of each group."""
        sizes = (group.nodes * self.gpus_per_node for group in self.groups)
        return tuple(range(*ends) for ends in pairwise(accumulate(sizes, initial=0)))

    def group_of(self, rank: int) -> int:
        """The number of a rank's group; a rank beyond the cluster is in the last."""
        return bisect([one.stop for one in self.ranks_of_groups[:-1]], rank)

    def in_one_group(self, first_rank: int, num_gpus: int) -> bool:
        """Whether so many ranks from one on all lie in one group."""
        borders = [one.start for one in self.ranks_of_groups] if self.others else []
        return not any(first_rank < border < first_rank + num_gpus for border in borders)

    def like_rank(self, first_rank: int, num_gpus: int) -> int:
        """The first rank from which a stage of so many GPUs costs the same as from ``first_rank``:
        in the same group, at the same place in a node, and at the same borders of the group."""
        gpus = self.gpus_per_node
        if not self.others:
            return first_rank % gpus
        own = next(one for one in self.ranks_of_groups if first_rank in one)
        if first_rank == own.start or first_rank + num_gpus == own.stop:
            return first_rank
        # A stage that begins a node here does not begin the group.
        return own.start + (first_rank % gpus or gpus)

    @property
    def memory_bytes(self) -> int:
        """Bytes of one GPU that plans may take: those that torch can use, less what they keep
        free."""
        return self.whole_memory_bytes - round((self.keep_free_gib or 0.0) * GIB_BYTES)

    @property
    def whole_memory_bytes(self) -> int:
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
