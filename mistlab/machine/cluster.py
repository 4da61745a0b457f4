"""A cluster: its groups of equal nodes with their hardware, and optionally a profile of delays
measured on it.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Self, TypeAlias

from mistlab.core.arrays import Bools, Floats, Ints
from mistlab.core.units import GBYTES, GIB_BYTES, MILLISECONDS
from mistlab.core.values import (
    MOST_GPUS_OF_NODE,
    MOST_NODES,
    Checked,
    bounded,
    check_fields,
    quantity,
    refuse,
)
from mistlab.engines.engine import Precision
from mistlab.machine.consistency import IN_GIB, OF_NODE
from mistlab.machine.hardware import Hardware
from mistlab.network.tiers import Network

# A group of equal nodes in a cluster whose nodes are of several kinds.


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup(Checked):
    """Neighbouring nodes of one kind in a cluster: their hardware and their number."""

    hardware: Hardware
    nodes: int = field(metadata=bounded(minimum=1, most=MOST_NODES))


# The profile of one cluster: delays measured there, and on no other cluster of the same hardware.
#
# A profile is never part of the hardware. A cluster has none unless one is requested by name.


if TYPE_CHECKING:
    from mistlab.network.link_times import TierTimes

    Ranks: TypeAlias = Ints
    Flags: TypeAlias = Bools
    Values: TypeAlias = Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Delays that were measured on one cluster only, with the training runs that show them.

    Where a pipeline reaches over several nodes and at least ``block_ranks`` ranks share a block, a
    host takes ``block_ms`` x (those ranks) ^ ``block_power`` longer to issue a block's forward and
    backward pass. From ``send_gpus`` GPUs on, and where at least ``send_ranks`` ranks share a
    block, a send between stages takes ``send_ms`` longer.

    Sends between nodes also take ``send_ms`` longer while data-parallel ranks all-reduce unsharded
    gradients (ZeRO-0): from ``whole_micro_batches`` micro-batches on, where there are at least
    ``whole_gpus`` GPUs or ``whole_ranks`` data-parallel ranks.
    """

    name: str
    block_ms: float = field(default=0.0, metadata=quantity(or_zero=True))
    block_ranks: int = field(default=2, metadata=bounded(minimum=2))
    block_power: float = field(default=1.0, metadata=quantity(or_zero=True))
    send_gpus: int = field(default=1, metadata=bounded(minimum=1))
    send_ranks: int = field(default=1 << 20, metadata=bounded(minimum=1))
    send_ms: float = field(default=0.0, metadata=quantity(or_zero=True))
    whole_micro_batches: int = field(default=1 << 20, metadata=bounded(minimum=1))
    whole_gpus: int = field(default=1, metadata=bounded(minimum=1))
    whole_ranks: int = field(default=2, metadata=bounded(minimum=2))
    source: str

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.source.strip():
            refuse("source", "is empty: name the runs in which these delays were measured")

    def block_s(self, ranks: Ranks, *, in_pipeline: Flags) -> Values:
        """The extra seconds that a host of this cluster takes to issue the kernels of a block's
        forward and backward pass.

        The block is shared by ``ranks`` tensor-parallel ranks.
        """
        waits = in_pipeline & (ranks >= self.block_ranks)
        return waits * self.block_ms * MILLISECONDS * ranks**self.block_power

    def is_beside_whole(self, data_ranks: Ranks, micro_batches: Ranks, gpus: int) -> Flags:
        """Whether sends between stages are delayed because data-parallel ranks all-reduce unsharded
        gradients (ZeRO-0) at the same time.
        """
        is_wide = (data_ranks >= self.whole_ranks) | (gpus >= self.whole_gpus)
        return is_wide & (data_ranks > 1) & (micro_batches >= self.whole_micro_batches)

    def send_s(self, ranks: Ranks, gpus: int, *, beside_whole: Flags | bool = False) -> Values:
        """The extra seconds that a send between stages takes on this cluster.

        A block is shared by ``ranks`` tensor-parallel ranks.
        """
        is_late = beside_whole | (ranks >= self.send_ranks) | (gpus >= self.send_gpus)
        late: Values = is_late.astype(float) * (self.send_ms * MILLISECONDS)
        return late


# A cluster is a number of nodes on which a plan runs: all of one kind, or groups of nodes of
# several kinds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The nodes on which a plan runs, with ``gpus_per_node`` GPUs used in each.

    All nodes have the same ``hardware``, except that the last ones may be groups of ``others``.
    Attributes that describe one hardware are then those of the first group; ``of_groups`` has a
    cluster for each group.

    The optional numbers replace those of every hardware: ``memory_gib`` is the memory of a GPU,
    ``host_memory_gib`` that of a node, and the bandwidths are those of ``Node``. Plans leave
    ``keep_free_gib`` of each GPU's memory free. ``network`` has the tiers of links between nodes.
    ``profile`` holds delays that were measured on this cluster only.
    """

    hardware: Hardware
    nodes: int = field(metadata=bounded(minimum=1, maximum=MOST_NODES))
    gpus_per_node: int = field(metadata=bounded(minimum=1, most=MOST_GPUS_OF_NODE))
    memory_gib: float | None = field(default=None, metadata=quantity(most=1500, usual=IN_GIB))
    host_memory_gib: float | None = field(
        default=None, metadata=quantity(most=MOST_GPUS_OF_NODE * 1024, usual=OF_NODE)
    )
    intra_node_gbytes_per_s: float | None = field(default=None, metadata=quantity())
    inter_node_gbytes_per_s: float | None = field(default=None, metadata=quantity())
    keep_free_gib: float | None = field(default=None, metadata=quantity(or_zero=True))
    network: Network | None = None
    profile: Profile | None = None
    others: tuple[NodeGroup, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        others = sum(group.nodes for group in self.others)
        if others >= self.nodes:
            refuse(
                "nodes",
                f"{self.nodes} is not more than the {others} nodes in others: give at least "
                f"{others + 1}",
            )
        for group in self.groups:
            hardware = group.hardware
            if self.gpus_per_node > hardware.node.gpus:
                refuse(
                    "gpus_per_node",
                    f"{self.gpus_per_node} is more than a node of {hardware.name} has: give at "
                    f"most {hardware.node.gpus}, or a hardware file with a larger node",
                )
        self._check_free()
        self._check_network()

    def _check_network(self) -> None:
        """Refuse a network file whose nodes have another number of GPUs than the cluster's, or that
        joins fewer nodes than the cluster has.
        """
        if self.network is None:
            return
        for group in self.groups:
            if (gpus := group.hardware.node.gpus) != self.network.node.gpus:
                node = self.network.node
                refuse(
                    "network",
                    f"tier {node.name} has {node.gpus} gpus, but a node of {group.hardware.name} "
                    f"has {gpus}: give {gpus}, and multiples of it for the tiers above",
                )
        if self.nodes > self.network.nodes:
            refuse(
                "nodes",
                f"{self.nodes} is more than the {self.network.nodes} nodes that network "
                f"{self.network.name} connects: give at most {self.network.nodes}, or raise gpus "
                f"of its tier {self.network.tiers[-1].name}",
            )

    def _check_free(self) -> None:
        """Refuse ``keep_free_gib`` if it leaves no memory on a GPU for torch's allocator."""
        if self.keep_free_gib is None:
            return
        for group in self.of_groups:
            allocator = group.hardware.allocator
            outside_bytes = 0.0 if allocator is None else allocator.outside_bytes
            whole_gib = (group.whole_memory_bytes - outside_bytes) / GIB_BYTES
            if self.keep_free_gib >= whole_gib:
                refuse(
                    "keep_free_gib",
                    f"{self.keep_free_gib:g} leaves plans nothing of the {whole_gib:.1f} GiB of a "
                    f"GPU of {group.hardware.name}: give less, such as {whole_gib / 10:.1f}",
                )

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the cluster uses in all nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def alone(self) -> Self:
        """A cluster of a single GPU of the same hardware."""
        return replace(self, nodes=1, gpus_per_node=1, others=())

    @property
    def groups(self) -> tuple[NodeGroup, ...]:
        """The cluster's groups of equal nodes, in the order in which their ranks are numbered."""
        first = self.nodes - sum(group.nodes for group in self.others)
        return (NodeGroup(hardware=self.hardware, nodes=first), *self.others)

    @property
    def name(self) -> str:
        """The name of the cluster's hardware; for several groups of nodes as on the command line,
        such as ``l4-24gb:1,a100-40gb:2``.
        """
        if not self.others:
            return self.hardware.name
        return ",".join(f"{group.hardware.name}:{group.nodes}" for group in self.groups)

    @property
    def of_groups(self) -> tuple[Self, ...]:
        """Copies of this cluster, one for each group of nodes, in which all nodes have that group's
        hardware.
        """
        if not self.others:
            return (self,)
        return tuple(replace(self, hardware=one.hardware, others=()) for one in self.groups)

    @property
    def ranks_of_groups(self) -> tuple[range, ...]:
        """The ranks on each group of equal nodes, as ranges."""
        sizes = (group.nodes * self.gpus_per_node for group in self.groups)
        return tuple(range(*ends) for ends in pairwise(accumulate(sizes, initial=0)))

    def group_of(self, rank: int) -> int:
        """The index of the group of nodes that a rank is on; ranks beyond the cluster count to the
        last group.
        """
        return bisect([one.stop for one in self.ranks_of_groups[:-1]], rank)

    def in_one_group(self, first_rank: int, num_gpus: int) -> bool:
        """Whether ``num_gpus`` consecutive ranks from ``first_rank`` on are all on nodes of one
        kind.
        """
        borders = [one.start for one in self.ranks_of_groups] if self.others else []
        return not any(first_rank < border < first_rank + num_gpus for border in borders)

    def like_rank(self, first_rank: int, num_gpus: int) -> int:
        """The lowest rank at which a stage of ``num_gpus`` GPUs costs the same as at
        ``first_rank``.

        That is on nodes of the same kind, at the same position in a node, and next to nodes of
        another kind only if the stage at ``first_rank`` is.
        """
        gpus = self.ranks_alike
        if not self.others:
            return first_rank % gpus
        group_ranks = next(one for one in self.ranks_of_groups if first_rank in one)
        if first_rank == group_ranks.start or first_rank + num_gpus == group_ranks.stop:
            return first_rank
        # The stage begins at the first GPU of a node that is not the first of its group; the second
        # node of the group stands for all such nodes.
        return group_ranks.start + (first_rank % gpus or gpus)

    @property
    def memory_bytes(self) -> int:
        """The bytes of one GPU that plans may use: what torch can use, minus ``keep_free_gib``."""
        return self.whole_memory_bytes - round((self.keep_free_gib or 0.0) * GIB_BYTES)

    @property
    def whole_memory_bytes(self) -> int:
        """The bytes of one GPU that torch can use, including the reserve ``keep_free_gib``."""
        if self.memory_gib is None:
            return self.hardware.gpu.memory_bytes
        return round(self.memory_gib * GIB_BYTES)

    @property
    def memory_bytes_per_s(self) -> float:
        """Bandwidth of a GPU's own memory in bytes per second."""
        return self.hardware.gpu.memory_bytes_per_s

    def peak_flop_per_s(self, precision: Precision) -> float:
        """Peak rate of one GPU for dense matrix multiplication, in operations per second."""
        return self.hardware.gpu.peak_flop_per_s(precision)

    @property
    def host_memory_bytes(self) -> int:
        """Bytes of host memory of one node."""
        if self.host_memory_gib is None:
            return self.hardware.node.host_memory_bytes
        return round(self.host_memory_gib * GIB_BYTES)

    def given_gbytes_per_s(self, name: str) -> float | None:
        """A bandwidth that replaces the hardware's: the cluster's own field ``name`` or, if that is
        None, the rate in the network file; None if neither is given.
        """
        given: float | None = getattr(self, name)
        if given is not None or self.network is None:
            return given
        is_inside = name == "intra_node_gbytes_per_s"
        return (self.network.node if is_inside else self.network.between).gbytes_per_s

    @property
    def intra_node_bytes_per_s(self) -> float:
        """Bandwidth from one GPU to the others of its node, in bytes per second and one
        direction.
        """
        given = self.given_gbytes_per_s("intra_node_gbytes_per_s")
        return self.hardware.node.intra_node_bytes_per_s if given is None else given * GBYTES

    @property
    def inter_node_bytes_per_s(self) -> float:
        """Bandwidth from one node to other nodes, in bytes per second and one direction."""
        given = self.given_gbytes_per_s("inter_node_gbytes_per_s")
        return self.hardware.node.inter_node_bytes_per_s if given is None else given * GBYTES

    @property
    def tiers(self) -> TierTimes | None:
        """The times of links in the network's tiers above nodes (racks, pods); None if the cluster
        has no network file.
        """
        if self.network is None:
            return None
        # Imported here, since plans are read and written without NumPy.
        from mistlab.network.link_times import TierTimes  # noqa: PLC0415

        return TierTimes(
            network=self.network,
            nodes=self.nodes,
            gpus_per_node=self.gpus_per_node,
            node_bytes_per_s=self.inter_node_bytes_per_s,
        )

    @property
    def ranks_alike(self) -> int:
        """The distance in ranks after which stages have the same position in a node and in the
        network's racks and pods.
        """
        if self.network is None:
            return self.gpus_per_node
        return self.network.nodes_alike(self.nodes) * self.gpus_per_node
