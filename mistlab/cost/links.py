"""The times of a cluster's links: collectives, sends between stages, copies to and from the host.

The times of a shape of group that was not measured follow from the nearest measured shape. Over R
ranks a collective moves (R - 1) / R of its message past each link, so the rate of the links carries
over between shapes. Inside a node this rate is taken as it is. Across nodes all groups of a node
share its network, so a group's rate is proportional to the number of its ranks in the node. If
nothing was measured across nodes, the rate is the datasheet's.

Latency grows with the shape: a ring of R ranks has R - 1 hops, an all-reduce twice as many. For an
all-reduce across nodes the library may take a tree instead, which has fewer hops and moves more
bytes past each link. Each message takes the faster of the two.

Axes: C transfers.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.core.distinct import Known
from mistlab.core.units import MICROSECONDS
from mistlab.core.values import UncalibratedError
from mistlab.engines.engine import ExpertExchange, Precision
from mistlab.graph.graph import Collective
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import GroupTransfers, Line, Transfers
from mistlab.plan.dimensions import GROUPS, axes_of, degrees, names_of, num_gpus, ranks_of
from mistlab.plan.workload import ModelSpec
from mistlab.stages.stage_batch import StageBatch

Copy = Literal["host_to_device", "device_to_host"]

# The latency of one hop of a collective, by the figures with which NCCL chooses between rings and
# trees (NVIDIA/nccl, src/graph/tuning.cc: hwLat, simple protocol). Measured all-reduces inside
# nodes give 2.1 to 2.7 microseconds a hop over NVLink and 4.8 over PCIe.
NVLINK_HOP_S = 3.4 * MICROSECONDS
PCIE_HOP_S = 5.7 * MICROSECONDS
NETWORK_HOP_S = 14.0 * MICROSECONDS
# A node whose GPUs exchange data faster than this has NVLink.
FASTEST_PCIE_GBYTES_PER_S = 64.0
# The rate of a tree as a share of a ring's rate, by the same table
# (https://github.com/NVIDIA/nccl, src/graph/tuning.cc).
RATE_OF_TREES = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTime:
    """The time of a message: a latency, and seconds for each byte.

    A message takes the other way ``instead``, if this is given and faster.
    """

    latency_s: float
    s_per_byte: float
    instead: "LinkTime | None" = None

    def __call__(self, size_bytes: Floats, messages: int | Floats = 1) -> Floats:
        """Seconds (C) of ``messages`` (C) with ``size_bytes`` (C) in all; no bytes take no time."""
        seconds = messages * self.latency_s + size_bytes * self.s_per_byte
        if self.instead is not None:
            seconds = np.minimum(seconds, self.instead(size_bytes, messages))
        return np.asarray(np.where(size_bytes > 0, seconds, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """The measured latency and seconds a byte of a collective on one shape of group."""

    gpus_in_node: int
    nodes: int
    link: LinkTime


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """The times of one cluster's links."""

    cluster: Cluster
    transfers: Transfers

    @classmethod
    def of(cls, cluster: Cluster) -> "LinkTimes":
        """The times on calibrated hardware; refuses hardware without measured transfers."""
        transfers = cluster.hardware.transfers
        if transfers is None:
            message = (
                f"cluster.hardware: {cluster.hardware.name} has no transfers: measure them and "
                "run python -m experiments.calibrate --bandwidth TABLE.csv"
            )
            raise UncalibratedError(message)
        return cls(cluster=cluster, transfers=transfers)

    def collective(self, kind: Collective, *, gpus_in_node: int, nodes: int) -> LinkTime:
        """The time of a collective over groups of this shape."""
        ranks = gpus_in_node * nodes
        if ranks == 1:
            return LinkTime(latency_s=0.0, s_per_byte=0.0)
        if kind == "all_to_all" and nodes > 1:
            return self.to_all(gpus_in_node=gpus_in_node, nodes=nodes)
        measured = [
            one for group in self.transfers.groups if (one := _measured(group, kind)) is not None
        ]
        alike = [one for one in measured if (one.nodes > 1) == (nodes > 1)]
        if not alike and nodes == 1:
            message = (
                f"cluster.hardware: transfers of {self.cluster.hardware.name} have no {kind} "
                "inside a node: measure one and run "
                "python -m experiments.calibrate --collectives TABLE.csv"
            )
            raise UncalibratedError(message)
        near = _nearest(alike or measured, gpus_in_node, nodes)
        if near is None or not alike:
            s_per_byte = self._by_datasheet(kind, gpus_in_node, ranks)
        else:
            s_per_byte = self._as_measured(near, gpus_in_node, nodes)
        # The part of the measured latency beyond its shape's hops is the same for every shape.
        beyond_s = 0.0
        if near is not None:
            beyond_s = near.link.latency_s - self._ring_s(kind, near.gpus_in_node, near.nodes)

        def link(hops_s: float, s_per_byte: float, instead: LinkTime | None = None) -> LinkTime:
            latency_s = max(0.0, beyond_s + hops_s)
            return LinkTime(latency_s=latency_s, s_per_byte=s_per_byte, instead=instead)

        tree = None
        if kind == "all_reduce" and nodes > 1:
            of_tree = s_per_byte * ranks / (ranks - 1) / RATE_OF_TREES
            tree = link(self._tree_s(gpus_in_node, nodes), of_tree)
        return link(self._ring_s(kind, gpus_in_node, nodes), s_per_byte, tree)

    def to_all(self, *, gpus_in_node: int, nodes: int, copies: int = 0) -> LinkTime:
        """The time of an all-to-all, in which each rank sends equal parts to all others.

        Parts for the own node go over its links, parts for other nodes over the rank's own share of
        the network, all at once: unlike a ring's, no message waits for another one. If rows are so
        many ``copies`` of tokens, a token goes to each node once.
        """
        if nodes == 1:
            return self.collective("all_to_all", gpus_in_node=gpus_in_node, nodes=1)
        ranks, cluster = gpus_in_node * nodes, self.cluster
        network = cluster.inter_node_bytes_per_s / cluster.gpus_per_node
        across = (ranks - gpus_in_node) / ranks / network
        if copies:
            # The share of all nodes that a token's copies reach, over the copies for each node.
            across *= (1 - (1 - 1 / nodes) ** copies) * nodes / copies
        if gpus_in_node == 1:
            return LinkTime(latency_s=NETWORK_HOP_S, s_per_byte=across)
        inside = self.collective("all_to_all", gpus_in_node=gpus_in_node, nodes=1)
        # The bytes that stay in the node, or are passed on in it.
        stay = 1.0 if copies else gpus_in_node / ranks
        return LinkTime(
            latency_s=inside.latency_s + NETWORK_HOP_S,
            s_per_byte=max(across, inside.s_per_byte * stay),
        )

    def inside_layer(self, kind: Collective, *, gpus_in_node: int, nodes: int) -> LinkTime:
        """The time of a collective inside a layer, whose messages are small.

        Gathers and scatters are often measured on large messages alone, and then their line says
        too much of small ones. Half of an all-reduce, which has both, is another estimate. Inside a
        node an all-to-all moves as many bytes as a gather; across nodes it moves more.
        """
        own = self.collective(kind, gpus_in_node=gpus_in_node, nodes=nodes)
        if kind == "all_reduce" or (kind == "all_to_all" and nodes > 1):
            return own
        both = self.collective("all_reduce", gpus_in_node=gpus_in_node, nodes=nodes)
        half = LinkTime(latency_s=both.latency_s / 2, s_per_byte=both.s_per_byte / 2)
        return replace(own, instead=half)

    def _as_measured(self, near: "_Measured", gpus_in_node: int, nodes: int) -> float:
        """Seconds of each byte, from the seconds of a measured shape."""
        ranks, near_ranks = gpus_in_node * nodes, near.gpus_in_node * near.nodes
        # Bytes past a link for each byte of the message, relative to the measured shape.
        share = ((ranks - 1) / ranks) / ((near_ranks - 1) / near_ranks)
        if nodes > 1:
            share *= near.gpus_in_node / gpus_in_node
        return near.link.s_per_byte * share / self._override(across_nodes=nodes > 1)

    def _by_datasheet(self, kind: Collective, gpus_in_node: int, ranks: int) -> float:
        """Seconds of each byte across nodes, by the datasheet's rate of the network.

        A group's share of the rate is its ranks' share of the node's GPUs.
        """
        cluster = self.cluster
        rate = cluster.inter_node_bytes_per_s * gpus_in_node / cluster.gpus_per_node
        passes = 2.0 if kind == "all_reduce" else 1.0
        return passes * (ranks - 1) / ranks / rate

    def _ring_s(self, kind: Collective, gpus_in_node: int, nodes: int) -> float:
        """Seconds of all hops of a ring."""
        inside, across = (gpus_in_node - 1) * nodes, nodes - 1
        passes = 2 if kind == "all_reduce" else 1
        return passes * (inside * self._hop_in_node_s + across * NETWORK_HOP_S)

    def _tree_s(self, gpus_in_node: int, nodes: int) -> float:
        """Seconds of all hops of an all-reduce, up and down a tree of nodes.

        The GPUs of a node form a chain.
        """
        levels = math.ceil(math.log2(nodes))
        return 2 * ((gpus_in_node - 1) * self._hop_in_node_s + levels * NETWORK_HOP_S)

    @property
    def _hop_in_node_s(self) -> float:
        rate = self.cluster.hardware.node.intra_node_gbytes_per_s
        return NVLINK_HOP_S if rate > FASTEST_PCIE_GBYTES_PER_S else PCIE_HOP_S

    def send(self, *, across_nodes: bool, at_once: int) -> LinkTime:
        """The time of a send to a GPU of the next stage, while ``at_once`` GPUs of a node send."""
        cluster = self.cluster
        line = self.transfers.across_nodes if across_nodes else self.transfers.in_node
        if line is not None:
            rate = line.bytes_per_s * self._override(across_nodes=across_nodes)
        elif across_nodes:
            rate = cluster.inter_node_bytes_per_s
        else:
            rate = cluster.intra_node_bytes_per_s
        if across_nodes:
            rate = min(rate, cluster.inter_node_bytes_per_s / at_once)
        latency_s = line.latency_s if line else 0.0
        return LinkTime(latency_s=latency_s, s_per_byte=1 / rate)

    def part_of_network(self, at_once: int) -> float:
        """The share of a node's network that sends of ``at_once`` of its GPUs take."""
        link = self.send(across_nodes=True, at_once=at_once)
        return at_once / (link.s_per_byte * self.cluster.inter_node_bytes_per_s)

    def copy(self, direction: Copy) -> LinkTime:
        """The time of a copy between a GPU and its host, on all GPUs of the node at once."""
        measured = [g for g in self.transfers.groups if getattr(g, direction) is not None]
        if not measured:
            message = (
                f"cluster.hardware: transfers of {self.cluster.hardware.name} have no {direction}:"
                " measure copies and run python -m experiments.calibrate --bandwidth TABLE.csv"
            )
            raise UncalibratedError(message)
        busy = self.cluster.gpus_per_node
        near = min(measured, key=lambda g: (g.nodes, abs(math.log(g.gpus_in_node / busy))))
        line: Line = getattr(near, direction)
        return LinkTime(latency_s=line.latency_s, s_per_byte=1 / line.bytes_per_s)

    def _override(self, *, across_nodes: bool) -> float:
        """The rate that a plan file gives for a link, as a multiple of the hardware's own."""
        which = "inter_node_gbytes_per_s" if across_nodes else "intra_node_gbytes_per_s"
        given: float | None = getattr(self.cluster, which)
        usual: float = getattr(self.cluster.hardware.node, which)
        return 1.0 if given is None else given / usual


def _measured(group: GroupTransfers, kind: Collective) -> _Measured | None:
    """A collective's own line, or a line derived from another collective's.

    An all-reduce is a reduce-scatter and an all-gather, which move equal bytes. An all-to-all moves
    as many bytes past each link as an all-gather of a message as large as one rank's rows.
    """
    own: Line | None = getattr(group, kind)
    half = group.reduce_scatter or group.all_gather
    if own is not None:
        parts, share = [own], 1.0
    elif kind == "all_reduce" and half is not None:
        parts, share = [half, group.all_gather or half], 1.0
    elif kind == "all_to_all" and half is not None:
        parts, share = [group.all_gather or half], 1.0
    elif kind != "all_reduce" and half is not None:
        parts, share = [half], 1.0
    elif kind != "all_reduce" and group.all_reduce is not None:
        parts, share = [group.all_reduce], 0.5
    else:
        return None
    return _Measured(
        gpus_in_node=group.gpus_in_node,
        nodes=group.nodes,
        link=LinkTime(
            latency_s=share * sum(line.latency_s for line in parts),
            s_per_byte=share * sum(1 / line.bytes_per_s for line in parts),
        ),
    )


def _nearest(measured: list[_Measured], gpus_in_node: int, nodes: int) -> _Measured | None:
    def distance(one: _Measured) -> float:
        ratios = (one.gpus_in_node / gpus_in_node, one.nodes / nodes)
        return sum(abs(math.log(ratio)) for ratio in ratios)

    return min(measured, key=distance, default=None)


# The latency of an all-reduce of a message so small that only hops count.
#
# A ring of n ranks passes the message on 2 (n - 1) times, so its latency grows with the ranks. A
# tree of nodes goes up and down its levels, whose number is the logarithm of the nodes.


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceLatency:
    """Seconds of an all-reduce over a ring, over a tree of nodes, and over the faster one; None
    where all ranks are in one node, which has no tree."""

    ring_s: float
    tree_s: float | None
    fastest_s: float


def all_reduce_latency(links: LinkTimes, size_bytes: float) -> AllReduceLatency:
    """The latency over all GPUs of a cluster."""
    cluster = links.cluster
    link = links.collective("all_reduce", gpus_in_node=cluster.gpus_per_node, nodes=cluster.nodes)
    tree = link.instead
    return AllReduceLatency(
        ring_s=link.latency_s + size_bytes * link.s_per_byte,
        tree_s=None if tree is None else tree.latency_s + size_bytes * tree.s_per_byte,
        fastest_s=float(link(np.array([size_bytes]))[0]),
    )


# The time of transfers, by a fitted latency and bandwidth. Axes: C transfers.


def transfer_s(size_bytes: Floats, line: Line) -> Floats:
    """Seconds (C) of transfers of ``size_bytes`` (C); a transfer of no bytes takes no time."""
    seconds = line.latency_s + size_bytes / line.bytes_per_s
    return np.asarray(np.where(size_bytes > 0, seconds, 0.0))


# How groups of ranks lie on nodes: how many ranks share a node, and on how many nodes they are.
#
# Axes: C candidates for stages, S strategies.


# A mask of the strategies (S) whose groups have a shape, with its ranks in a node and its nodes.
OfShape = tuple[Bools, int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shapes:
    """The shape of each strategy's groups (S each), by name: ranks in a node, and nodes; and the
    ranks of each group.

    Neighbouring stages are taken to be as large as the stage itself.
    """

    groups: Mapping[str, tuple[Ints, Ints]]
    ranks: Mapping[str, Ints]
    crosses_to_next: Bools
    crosses_from_previous: Bools
    senders_of_node: Ints
    _several: dict[str, Sequence[OfShape]] = field(default_factory=dict, init=False, repr=False)

    def of_several(self, group: str) -> Sequence[OfShape]:
        """The strategies of each shape of a group, where it has several ranks."""
        if group not in self._several:
            several = (one for one in self.by_shape(group) if one[1] * one[2] > 1)
            self._several[group] = tuple(several)
        return self._several[group]

    def by_shape(self, group: str) -> Iterator[OfShape]:
        """The strategies of each shape of a group."""
        in_node, nodes = self.groups[group]
        for gpus, spanned in sorted({*zip(in_node.tolist(), nodes.tolist(), strict=True)}):
            yield (in_node == gpus) & (nodes == spanned), gpus, spanned

    def chosen(self, rows: Rows) -> Self:
        """The shapes of the strategies in these rows."""
        groups = self.groups.items()
        return type(self)(
            groups={name: (in_node[rows], nodes[rows]) for name, (in_node, nodes) in groups},
            ranks={name: ranks[rows] for name, ranks in self.ranks.items()},
            crosses_to_next=self.crosses_to_next[rows],
            crosses_from_previous=self.crosses_from_previous[rows],
            senders_of_node=self.senders_of_node[rows],
        )


def shape_on_nodes(
    group: str, value: Callable[[str], NDArray[Any]], first_rank: Ints, gpus_per_node: int
) -> tuple[Ints, Ints]:
    """The most ranks of a group in a node, and the number of its nodes.

    The stage begins at ``first_rank``, and ranks fill nodes in order. Of a stage whose groups lie
    on nodes in several ways, as five GPUs a node make it, it is the group on the most nodes, for
    which the others wait.
    """
    reach, apart = np.zeros_like(first_rank), np.ones_like(first_rank)
    step, are_alike = np.ones_like(first_rank), np.ones(first_rank.shape, dtype=bool)
    along = degrees(axes_of(group), value)
    for name, ranks in along.items():
        degree = ranks.astype(np.int64)
        if name in GROUPS[group]:
            # Ranks that are at least a node apart are all in different nodes.
            is_inside = step < gpus_per_node
            reach = reach + np.where(is_inside, (degree - 1) * step, 0)
            apart = apart * np.where(is_inside, 1, degree)
        step = step * degree
        are_alike &= (gpus_per_node % step == 0) | (step % gpus_per_node == 0)
    are_alike &= first_rank % np.minimum(step, gpus_per_node) == 0
    inside = (first_rank + reach) // gpus_per_node - first_rank // gpus_per_node + 1
    nodes = inside * apart
    for row in np.flatnonzero(~are_alike).tolist():
        axes = {name: int(ranks[row]) for name, ranks in along.items()}
        nodes[row] = _most_nodes(group, axes, first_rank[row], gpus_per_node)
    return -(-ranks_of(group, value).astype(np.int64) // nodes), nodes


def _most_nodes(group: str, axes: Mapping[str, int], first_rank: int, gpus_per_node: int) -> int:
    """The nodes of that group of a stage that lies on the most, by counting those of every one."""
    # The last axis of an array is the innermost, and so is the first one of a table.
    names = [*axes][::-1]
    shape = [axes[name] for name in names]
    nodes = (first_rank + np.arange(math.prod(shape)).reshape(shape)) // gpus_per_node
    members = [place for place, name in enumerate(names) if name in GROUPS[group]]
    rows = np.moveaxis(nodes, members, range(-len(members), 0))
    in_order = np.sort(rows.reshape(-1, math.prod(shape[place] for place in members)))
    return int((np.diff(in_order) > 0).sum(axis=1).max()) + 1


def shapes_of(
    known: Known[Shapes], columns: Mapping[str, NDArray[Any]], cluster: Cluster
) -> Shapes:
    """The shapes of each strategy's groups; ``known`` are those of meshes met before."""
    names = (*names_of("mesh"), "first_rank")
    shapes, rows = known(
        [columns[name] for name in names],
        lambda distinct: _shapes(dict(zip(names, distinct, strict=True)), cluster),
    )
    return shapes.chosen(rows)


def _shapes(columns: Mapping[str, NDArray[Any]], cluster: Cluster) -> Shapes:
    """The shapes of the groups, and the sends that cross nodes."""
    gpus = cluster.gpus_per_node
    value = columns.__getitem__
    first, ranks = columns["first_rank"].astype(np.int64), num_gpus(value).astype(np.int64)

    def crosses(before: Ints) -> Bools:
        """Whether a rank from ``before`` on and its peer in the next stage are in two nodes."""
        apart = (before + 2 * ranks - 1) // gpus != before // gpus
        return np.asarray((cluster.nodes > 1) & ((ranks >= gpus) | apart))

    return Shapes(
        groups={group: shape_on_nodes(group, value, first, gpus) for group in GROUPS},
        ranks={group: ranks_of(group, value).astype(np.int64) for group in GROUPS},
        crosses_to_next=crosses(first),
        crosses_from_previous=crosses(first - ranks),
        senders_of_node=np.minimum(ranks, gpus),
    )


# How much longer sends between stages take on a cluster with a profile.
#
# Axes: S strategies.


def late_s(value: Callable[[str], NDArray[Any]], cluster: Cluster, global_batch: int) -> Floats:
    """Seconds (S) that sends take longer by a cluster's profile."""
    ranks = np.asarray(ranks_of("tensor", value)).astype(np.int64)
    profile, gpus = cluster.profile, cluster.num_gpus
    if profile is None:
        return np.zeros(len(ranks))
    data_ranks = np.asarray(value("data_parallel"))
    micro_batches = global_batch // (data_ranks * value("micro_batch"))
    are_whole = (value("zero") == 0) & (cluster.nodes > 1)
    beside = are_whole & profile.is_beside_whole(data_ranks, micro_batches, gpus)
    return profile.send_s(ranks, gpus, beside_whole=beside)


# Figures of the GPUs and the hosts that a stage has, where groups of nodes are unlike.
#
# Axes: C candidates for stages.


def groups_of(cluster: Cluster, ranks: Ints) -> Rows:
    """The number of the group of each rank (C); ranks beyond the cluster are in the last."""
    ends = [one.stop for one in cluster.ranks_of_groups[:-1]]
    return np.searchsorted(ends, ranks, side="right")


def figure_at(
    cluster: Cluster, first_rank: Ints, figure: Callable[[Cluster], float]
) -> Floats | float:
    """A figure of the group of nodes at each stage's first rank (C); one number where all nodes are
    equal."""
    if not cluster.others:
        return figure(cluster)
    of_groups = np.array([figure(group) for group in cluster.of_groups])
    return np.asarray(of_groups[groups_of(cluster, first_rank)])


def in_one_group(cluster: Cluster, batch: StageBatch) -> Bools | bool:
    """Whether the GPUs of each stage (C) are in one group of nodes."""
    if not cluster.others:
        return True
    last = batch.first_rank + num_gpus(batch.value).astype(np.int64) - 1
    return np.asarray(groups_of(cluster, batch.first_rank) == groups_of(cluster, last))


def mean_peak_flop_per_s(
    cluster: Cluster, precision: Precision, first_rank: int, gpus: int
) -> float:
    """The peak rate of one of so many GPUs from a rank on, on average."""
    if not cluster.others:
        return cluster.peak_flop_per_s(precision)
    # Every prediction asks, so no cluster is made of a group here.
    groups, node = cluster.groups, cluster.gpus_per_node
    end, total, begun = first_rank + gpus, 0.0, 0
    for number, group in enumerate(groups, 1):
        # Ranks beyond the cluster are in the last group.
        until = begun + group.nodes * node if number < len(groups) else end
        of_group = max(0, min(end, until) - max(first_rank, begun))
        total += of_group * group.hardware.gpu.peak_flop_per_s(precision)
        begun = until
    return total / gpus


# How long ranks with different experts take to exchange copies of tokens.
#
# Axes: S strategies.

# A pass sends each copy of a token there and back, and its weight one way. Rows are in 16 bits and
# weights in 32; whether a token chose an expert is a byte.
ROW_BYTES, WEIGHT_BYTES = 2, 4


def exchanged_s(
    links: LinkTimes,
    exchange: ExpertExchange,
    model: ModelSpec,
    shape: tuple[Ints, Ints],
) -> Callable[[Floats, Floats], Floats]:
    """Seconds (S) of a pass's exchanges, for their bytes in all and their number (S each).

    ``shape`` says how many ranks of each group are in a node, and how many nodes it has.
    """
    experts = model.experts
    copies = experts.active if experts is not None and exchange.once_a_node else 0
    width = (experts.hidden if experts is not None else 0) or model.hidden
    of_all = exchange.weights_of_all and experts is not None

    def seconds_of(size_bytes: Floats, messages: Floats) -> Floats:
        seconds = np.zeros_like(size_bytes)
        in_node, nodes = shape
        for gpus, spanned in {*zip(in_node.tolist(), nodes.tolist(), strict=True)}:
            if gpus * spanned > 1:
                rows = (in_node == gpus) & (nodes == spanned)
                link = links.to_all(gpus_in_node=gpus, nodes=spanned, copies=copies)
                own = experts.count / (gpus * spanned) if experts is not None else 0.0
                waits_s = messages[rows] * exchange.waits_s(own)
                moved, told_s = size_bytes[rows], np.zeros(1)
                if of_all and experts is not None:
                    sent = moved / (2 * ROW_BYTES * width + WEIGHT_BYTES)
                    moved = moved + sent * WEIGHT_BYTES * (experts.count / spanned - 1)
                    # The backward pass knows from the forward pass what all tokens chose.
                    gather = links.collective("all_gather", gpus_in_node=gpus, nodes=spanned)
                    choices = sent / experts.active * experts.count * gpus * spanned
                    told_s = gather(choices) / 2
                sent_s = (link(moved, messages[rows]) + told_s) * (1 - exchange.hidden)
                seconds[rows] = sent_s + waits_s
        return seconds

    return seconds_of


def peculiar_s(value: Callable[[str], NDArray[Any]], cluster: Cluster) -> Floats:
    """Seconds (C) that a block's two passes are issued later by a cluster's profile."""
    ranks = np.asarray(ranks_of("tensor", value))
    if cluster.profile is None or cluster.nodes == 1:
        return np.zeros(len(ranks))
    return cluster.profile.block_s(ranks, in_pipeline=num_gpus(value) < cluster.num_gpus)
