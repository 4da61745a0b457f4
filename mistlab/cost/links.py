"""Computes the seconds of transfers between GPUs and between a GPU and its host: collectives, sends
between stages, host copies; and how long passes wait for copies of others.

Times for a shape of group that was not measured follow from the nearest measured shape. Over R
ranks a collective moves (R - 1) / R of its message past each link, so the rate of the links is the
same for all shapes. Inside a node this rate is used as it is. Across nodes, all groups of a node
share its network, so a group's rate is proportional to the number of its ranks in the node. If
nothing was measured across nodes, the rate is the datasheet's.

Latency grows with the shape: a ring of R ranks has R - 1 hops, an all-reduce twice as many. For an
all-reduce across nodes the library may take a tree instead, which has fewer hops and moves more
bytes past each link. Each message takes the faster of the two.

Axes: C transfers or candidates, S strategies.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.core.units import MICROSECONDS
from mistlab.core.values import UncalibratedError
from mistlab.cost.side_by_side import AHEAD
from mistlab.engines.engine import ExpertExchange, HostTime, Precision
from mistlab.graph.graph import Collective
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import GroupTransfers, Line, Transfers
from mistlab.network.link_times import (
    NAMES,
    NETWORK_HOP_S,
    RATE_OF_TREES,
    GroupSpread,
    LinkTime,
    TierTimes,
)
from mistlab.network.tiers import NETWORK, NODE
from mistlab.plan.dimensions import num_gpus, ranks_of
from mistlab.plan.workload import ModelSpec
from mistlab.stages.stage_batch import MOVED, StageBatch
from mistlab.stages.stage_shape import by_shape

Copy = Literal["host_to_device", "device_to_host"]

# The latency of one hop of a collective inside a node. Measured all-reduces inside nodes give 2.1
# to 2.7 microseconds a hop over NVLink and 4.8 over PCIe.
NVLINK_HOP_S = 3.4 * MICROSECONDS
PCIE_HOP_S = 5.7 * MICROSECONDS
# GPUs of a node whose links are faster than this are taken to have NVLink.
FASTEST_PCIE_GBYTES_PER_S = 64.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """The latency and the seconds per byte of a collective as measured, over groups with a number
    of GPUs in each of a number of nodes.
    """

    gpus_in_node: int
    nodes: int
    link: LinkTime


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """Computes the seconds of transfers on the links of one cluster: collectives, sends and host
    copies.
    """

    cluster: Cluster
    transfers: Transfers
    tiers: TierTimes | None = None

    @classmethod
    def of(cls, cluster: Cluster) -> "LinkTimes":
        """Make the transfer times of a cluster's links; refuses hardware on which no transfers were
        measured.
        """
        transfers = cluster.hardware.transfers
        if transfers is None:
            message = (
                f"cluster.hardware: {cluster.hardware.name} has no transfers (times of collectives "
                "and copies): measure them and run "
                "python -m experiments.calibrate --bandwidth TABLE.csv"
            )
            raise UncalibratedError(message)
        return cls(cluster=cluster, transfers=transfers, tiers=cluster.tiers)

    def collective(
        self, kind: Collective, *, gpus_in_node: int, nodes: int, units: tuple[int, ...] = ()
    ) -> LinkTime:
        """The time of a collective over groups of this shape (GPUs in a node, nodes).

        ``units`` is the number of units (such as racks) of each network tier above the nodes that
        the group spans.
        """
        if kind == "all_to_all" and nodes > 1:
            return self.to_all(gpus_in_node=gpus_in_node, nodes=nodes, units=units)
        over_nodes = self._over_nodes(kind, gpus_in_node, nodes)
        if self.tiers is None or nodes == 1:
            return over_nodes
        shape = GroupSpread(gpus_in_node, nodes, units)
        link = self.tiers.collective(kind, over_nodes, shape)
        if kind != "all_reduce":
            return link
        inside = self._over_nodes(kind, gpus_in_node, 1)
        summed = self.tiers.summed_in_switches(over_nodes, inside, shape)
        return link if summed is None else replace(summed, instead=link)

    def _over_nodes(self, kind: Collective, gpus_in_node: int, nodes: int) -> LinkTime:
        """The time of a collective over nodes, if all nodes were on one switch."""
        ranks = gpus_in_node * nodes
        if ranks == 1:
            return LinkTime(latency_s=0.0, s_per_byte=0.0)
        measured = [
            one for group in self.transfers.groups if (one := _measured(group, kind)) is not None
        ]
        alike = [one for one in measured if (one.nodes > 1) == (nodes > 1)]
        if not alike and nodes == 1:
            message = (
                f"cluster.hardware: transfers of {self.cluster.hardware.name} have no {kind} "
                "inside a node: measure this collective and run "
                "python -m experiments.calibrate --collectives TABLE.csv"
            )
            raise UncalibratedError(message)
        near = _nearest(alike or measured, gpus_in_node, nodes)
        if near is None or not alike:
            s_per_byte = self._by_datasheet(kind, gpus_in_node, ranks)
        else:
            s_per_byte = self._as_measured(near, gpus_in_node, nodes)
        # Whatever latency a measurement has beyond that of its hops is taken to be the same for
        # groups of any shape.
        beyond_s = 0.0
        if near is not None:
            beyond_s = near.link.latency_s - self._ring_s(kind, near.gpus_in_node, near.nodes)

        def link(hops_s: float, s_per_byte: float, instead: LinkTime | None = None) -> LinkTime:
            latency_s = max(0.0, beyond_s + hops_s)
            tier = self.tier_name(NETWORK if nodes > 1 else NODE)
            return LinkTime(latency_s=latency_s, s_per_byte=s_per_byte, instead=instead, tier=tier)

        tree = None
        if kind == "all_reduce" and nodes > 1:
            of_tree = s_per_byte * ranks / (ranks - 1) / RATE_OF_TREES
            tree = link(self._tree_s(gpus_in_node, nodes), of_tree)
        return link(self._ring_s(kind, gpus_in_node, nodes), s_per_byte, tree)

    def tier_name(self, index: int) -> str:
        """The name of the network tier with this index."""
        network = self.cluster.network
        return NAMES[index] if network is None else network.tiers[index].name

    def to_all(
        self, *, gpus_in_node: int, nodes: int, copies: int = 0, units: tuple[int, ...] = ()
    ) -> LinkTime:
        """The time of an all-to-all collective, in which each rank sends equal parts to all others.

        Parts for ranks of the same node go over the node's links, parts for other nodes over the
        rank's share of the network, all at once: unlike in a ring, no message waits for another
        one. If a token is sent in several ``copies`` (to several experts), it goes to each node
        only once.
        """
        if nodes == 1:
            return self._over_nodes("all_to_all", gpus_in_node, 1)
        # The expected number of nodes that the copies of a token reach, as a share of the copies: a
        # message between two nodes carries a token only once.
        reached = (1 - (1 - 1 / nodes) ** copies) * nodes / copies if copies else 1.0
        link = self._to_nodes(gpus_in_node, nodes, reached, passes_on=copies > 0)
        if self.tiers is None:
            return link
        return self.tiers.to_all(link, GroupSpread(gpus_in_node, nodes, units), reached)

    def _to_nodes(
        self, gpus_in_node: int, nodes: int, reached: float, *, passes_on: bool
    ) -> LinkTime:
        """The time of an all-to-all over nodes, if all nodes were on one switch."""
        ranks, cluster = gpus_in_node * nodes, self.cluster
        network = cluster.inter_node_bytes_per_s / cluster.gpus_per_node
        across = (ranks - gpus_in_node) / ranks / network * reached
        if gpus_in_node == 1:
            tier = self.tier_name(NETWORK)
            return LinkTime(latency_s=self._network_hop_s, s_per_byte=across, tier=tier)
        inside = self._over_nodes("all_to_all", gpus_in_node, 1)
        # If ranks forward tokens inside the node, the node's links carry all bytes, otherwise only
        # those that stay in the node.
        passes_on = passes_on or (self.tiers is not None and self.tiers.forwards)
        stay = 1.0 if passes_on else gpus_in_node / ranks
        link = LinkTime(
            latency_s=inside.latency_s + self._network_hop_s,
            s_per_byte=across,
            tier=self.tier_name(NETWORK),
        )
        return link.at_least(inside.s_per_byte * stay, inside.tier)

    def inside_layer(
        self, kind: Collective, *, gpus_in_node: int, nodes: int, units: tuple[int, ...] = ()
    ) -> LinkTime:
        """The time of a collective inside a layer, where messages are small.

        All-gathers and reduce-scatters are often measured with large messages only, and a line
        through these overestimates small messages. Half of an all-reduce, which consists of both,
        is a second estimate. Inside a node an all-to-all moves as many bytes as an all-gather;
        across nodes it moves more.
        """
        link = self.collective(kind, gpus_in_node=gpus_in_node, nodes=nodes, units=units)
        if kind == "all_reduce" or (kind == "all_to_all" and nodes > 1):
            return link
        both = self._summed_by_ranks(gpus_in_node, nodes, units)
        half = replace(
            both, latency_s=both.latency_s / 2, s_per_byte=both.s_per_byte / 2, instead=None
        )
        return replace(link, instead=half)

    def _summed_by_ranks(self, gpus_in_node: int, nodes: int, units: tuple[int, ...]) -> LinkTime:
        """The time of an all-reduce that ranks do in a ring, without the help of the network's
        switches.
        """
        link = self._over_nodes("all_reduce", gpus_in_node, nodes)
        if self.tiers is None or nodes == 1:
            return link
        return self.tiers.collective("all_reduce", link, GroupSpread(gpus_in_node, nodes, units))

    def _as_measured(self, near: "_Measured", gpus_in_node: int, nodes: int) -> float:
        """The seconds per byte of a collective over groups of this shape, derived from the measured
        shape that is nearest.
        """
        ranks, near_ranks = gpus_in_node * nodes, near.gpus_in_node * near.nodes
        # A rank sends this many bytes for each byte of the message, relative to a rank of the
        # measured group.
        share = ((ranks - 1) / ranks) / ((near_ranks - 1) / near_ranks)
        if nodes > 1:
            share *= near.gpus_in_node / gpus_in_node
        return near.link.s_per_byte * share / self._override(across_nodes=nodes > 1)

    def _by_datasheet(self, kind: Collective, gpus_in_node: int, ranks: int) -> float:
        """The seconds per byte of a collective across nodes, from the network's datasheet rate.

        A group's share of the rate is its ranks' share of the node's GPUs.
        """
        cluster = self.cluster
        rate = cluster.inter_node_bytes_per_s * gpus_in_node / cluster.gpus_per_node
        passes = 2.0 if kind == "all_reduce" else 1.0
        return passes * (ranks - 1) / ranks / rate

    def _ring_s(self, kind: Collective, gpus_in_node: int, nodes: int) -> float:
        """The latency of a collective over a ring of ranks: the sum of its hops."""
        inside, across = (gpus_in_node - 1) * nodes, nodes - 1
        passes = 2 if kind == "all_reduce" else 1
        return passes * (inside * self._hop_in_node_s + across * self._network_hop_s)

    def _tree_s(self, gpus_in_node: int, nodes: int) -> float:
        """The latency of an all-reduce over a tree of nodes: the sum of its hops up and down.

        The GPUs of a node form a chain.
        """
        levels = math.ceil(math.log2(nodes))
        return 2 * ((gpus_in_node - 1) * self._hop_in_node_s + levels * self._network_hop_s)

    @property
    def _hop_in_node_s(self) -> float:
        rate = self.cluster.hardware.node.intra_node_gbytes_per_s
        return NVLINK_HOP_S if rate > FASTEST_PCIE_GBYTES_PER_S else PCIE_HOP_S

    @property
    def _network_hop_s(self) -> float:
        return NETWORK_HOP_S if self.tiers is None else self.tiers.latency_s()

    def send(
        self, *, across_nodes: bool, at_once: int, tier: int = NETWORK, senders: int = 1
    ) -> LinkTime:
        """The time of a send to a GPU of the next stage, given how many GPUs send at the same time.

        ``at_once`` GPUs of each node send, and ``senders`` GPUs of all nodes share an uplink of the
        network tier numbered ``tier``.
        """
        link = self._send(across_nodes=across_nodes, at_once=at_once)
        if self.tiers is None or not across_nodes:
            return link
        return self.tiers.send(link, tier, senders)

    def _send(self, *, across_nodes: bool, at_once: int) -> LinkTime:
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
        tier = self.tier_name(NETWORK if across_nodes else NODE)
        return LinkTime(latency_s=latency_s, s_per_byte=1 / rate, tier=tier)

    def parts_of_links(self, *, at_once: int, tier: int = NETWORK, senders: int = 1) -> list[float]:
        """The share of each link's bandwidth that a send uses: of its node's network, and of the
        uplink of each network tier.

        ``at_once`` GPUs of the node send; ``senders`` GPUs share an uplink of each tier up to
        ``tier``.
        """
        link = self.send(across_nodes=True, at_once=at_once, tier=tier, senders=senders)
        parts = [at_once / (link.s_per_byte * self.cluster.inter_node_bytes_per_s)]
        if self.tiers is not None:
            parts += self.tiers.parts_of_units(link, tier, senders)
        return parts

    def copy(self, direction: Copy) -> LinkTime:
        """The time of a copy between a GPU and its host while all GPUs of the node copy."""
        measured = [g for g in self.transfers.groups if getattr(g, direction) is not None]
        if not measured:
            message = (
                f"cluster.hardware: transfers of {self.cluster.hardware.name} have no {direction} "
                "copies: measure them and run "
                "python -m experiments.calibrate --bandwidth TABLE.csv"
            )
            raise UncalibratedError(message)
        busy = self.cluster.gpus_per_node
        near = min(measured, key=lambda g: (g.nodes, abs(math.log(g.gpus_in_node / busy))))
        line: Line = getattr(near, direction)
        return LinkTime(latency_s=line.latency_s, s_per_byte=1 / line.bytes_per_s)

    def _override(self, *, across_nodes: bool) -> float:
        """The bandwidth that the user set for a cluster's link, as a multiple of the hardware's; 1
        if none was set.
        """
        which = "inter_node_gbytes_per_s" if across_nodes else "intra_node_gbytes_per_s"
        given = self.cluster.given_gbytes_per_s(which)
        usual: float = getattr(self.cluster.hardware.node, which)
        return 1.0 if given is None else given / usual


def _measured(group: GroupTransfers, kind: Collective) -> _Measured | None:
    """The fitted latency and seconds per byte of a collective on each measured shape of group; for
    a collective that was not measured, derived from another one's.

    An all-reduce is a reduce-scatter and an all-gather, which move equal bytes. An all-to-all moves
    as many bytes past each link as an all-gather whose message has the size of one rank's rows.
    """
    fitted: Line | None = getattr(group, kind)
    half = group.reduce_scatter or group.all_gather
    if fitted is not None:
        parts, share = [fitted], 1.0
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
    def distance(group: _Measured) -> float:
        ratios = (group.gpus_in_node / gpus_in_node, group.nodes / nodes)
        return sum(abs(math.log(ratio)) for ratio in ratios)

    return min(measured, key=distance, default=None)


# Computes the latency of an all-reduce whose message is so small that only the number of hops
# counts.


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceLatency:
    """The seconds of a small all-reduce over a ring, over a tree of nodes, and over the faster of
    both.

    There is no tree (None) where all ranks are in one node. A ring of n ranks forwards the message
    2 (n - 1) times, so its latency grows with the number of ranks. A tree goes up and down its
    levels, whose number is the logarithm of the number of nodes.
    """

    ring_s: float
    tree_s: float | None
    fastest_s: float


def all_reduce_latency(links: LinkTimes, size_bytes: float) -> AllReduceLatency:
    """The latency of an all-reduce of this size over all GPUs of a cluster, by ring and by tree."""
    cluster = links.cluster
    link = links.collective("all_reduce", gpus_in_node=cluster.gpus_per_node, nodes=cluster.nodes)
    tree = link.instead
    return AllReduceLatency(
        ring_s=link.latency_s + size_bytes * link.s_per_byte,
        tree_s=None if tree is None else tree.latency_s + size_bytes * tree.s_per_byte,
        fastest_s=float(link(np.array([size_bytes]))[0]),
    )


# Computes the seconds of transfers from a fitted latency and bandwidth.


def transfer_s(size_bytes: Floats, line: Line) -> Floats:
    """The seconds of transfers of ``size_bytes`` bytes; a transfer of zero bytes takes no time."""
    seconds = line.latency_s + size_bytes / line.bytes_per_s
    return np.asarray(np.where(size_bytes > 0, seconds, 0.0))


# Computes how much longer sends between stages take on a cluster with a profile (known to be slow).


def late_s(value: Callable[[str], NDArray[Any]], cluster: Cluster, global_batch: int) -> Floats:
    """The seconds by which a send between stages takes longer on a cluster with a profile (its
    measured slowness), for each strategy.
    """
    ranks = np.asarray(ranks_of("tensor", value)).astype(np.int64)
    profile, gpus = cluster.profile, cluster.num_gpus
    if profile is None:
        return np.zeros(len(ranks))
    data_ranks = np.asarray(value("data_parallel"))
    micro_batches = global_batch // (data_ranks * value("micro_batch"))
    are_whole = (value("zero") == 0) & (cluster.nodes > 1)
    beside = are_whole & profile.is_beside_whole(data_ranks, micro_batches, gpus)
    return profile.send_s(ranks, gpus, beside_whole=beside)


# Finds the rates of each stage's GPUs and hosts on a cluster whose nodes are of several kinds.


def groups_of(cluster: Cluster, ranks: Ints) -> Rows:
    """The index of the group of equal nodes in which each rank is; ranks beyond the cluster count
    to the last group.
    """
    ends = [one.stop for one in cluster.ranks_of_groups[:-1]]
    return np.searchsorted(ends, ranks, side="right")


def figure_at(
    cluster: Cluster, first_rank: Ints, figure: Callable[[Cluster], float]
) -> Floats | float:
    """A figure of the hardware that each stage runs on: that of the node with its first rank; a
    single number if all nodes are equal.
    """
    if not cluster.others:
        return figure(cluster)
    of_groups = np.array([figure(group) for group in cluster.of_groups])
    return np.asarray(of_groups[groups_of(cluster, first_rank)])


def in_one_group(cluster: Cluster, batch: StageBatch) -> Bools | bool:
    """A mask of the stages whose GPUs are all in one group of equal nodes."""
    if not cluster.others:
        return True
    last = batch.first_rank + num_gpus(batch.value).astype(np.int64) - 1
    return np.asarray(groups_of(cluster, batch.first_rank) == groups_of(cluster, last))


def mean_peak_flop_per_s(
    cluster: Cluster, precision: Precision, first_rank: int, gpus: int
) -> float:
    """The mean peak rate of consecutive GPUs, which begin at rank ``first_rank``."""
    if not cluster.others:
        return cluster.peak_flop_per_s(precision)
    # Every prediction calls this function, so it avoids making a cluster object for each group of
    # nodes.
    groups, node = cluster.groups, cluster.gpus_per_node
    end, total, begun = first_rank + gpus, 0.0, 0
    for number, group in enumerate(groups, 1):
        # GPUs beyond the cluster's last one count as being of the last group's kind.
        until = begun + group.nodes * node if number < len(groups) else end
        of_group = max(0, min(end, until) - max(first_rank, begun))
        total += of_group * group.hardware.gpu.peak_flop_per_s(precision)
        begun = until
    return total / gpus


# Computes how long ranks exchange tokens for their experts.

# Activations have 2 bytes a value and routing weights 4; a pass sends each copy of a token to its
# expert and back, and its routing weight in one direction.
ROW_BYTES, WEIGHT_BYTES = 2, 4


def exchanged_s(
    links: LinkTimes,
    exchange: ExpertExchange,
    model: ModelSpec,
    shape: tuple[Ints, ...],
) -> Callable[[Floats, Floats], Floats]:
    """Make the function that gives the seconds in which ranks with different experts exchange
    tokens in a pass, for each strategy.

    ``shape`` is the shape of each group (GPUs in a node, nodes), as in ``Shapes.groups``.
    """
    experts = model.experts
    copies = experts.active if experts is not None and exchange.once_a_node else 0
    width = (experts.hidden if experts is not None else 0) or model.hidden
    of_all = exchange.weights_of_all and experts is not None

    def seconds_of(size_bytes: Floats, messages: Floats) -> Floats:
        seconds = np.zeros_like(size_bytes)
        for rows, (gpus, spanned, units) in by_shape(shape):
            if gpus * spanned > 1:
                link = links.to_all(gpus_in_node=gpus, nodes=spanned, copies=copies, units=units)
                experts_per_rank = experts.count / (gpus * spanned) if experts is not None else 0.0
                waits_s = messages[rows] * exchange.waits_s(experts_per_rank)
                moved, told_s = size_bytes[rows], np.zeros(1)
                if of_all and experts is not None:
                    sent = moved / (2 * ROW_BYTES * width + WEIGHT_BYTES)
                    moved = moved + sent * WEIGHT_BYTES * (experts.count / spanned - 1)
                    # Only the forward pass gathers the routing of tokens; the backward pass uses it
                    # again.
                    gather = links.collective(
                        "all_gather", gpus_in_node=gpus, nodes=spanned, units=units
                    )
                    choices = sent / experts.active * experts.count * gpus * spanned
                    told_s = gather(choices) / 2
                sent_s = (link(moved, messages[rows]) + told_s) * (1 - exchange.hidden)
                seconds[rows] = sent_s + waits_s
        return seconds

    return seconds_of


def peculiar_s(value: Callable[[str], NDArray[Any]], cluster: Cluster) -> Floats:
    """The seconds by which hosts of a slow cluster (one with a profile) take longer to issue a
    block's forward and backward pass, for each candidate.
    """
    ranks = np.asarray(ranks_of("tensor", value))
    if cluster.profile is None or cluster.nodes == 1:
        return np.zeros(len(ranks))
    return cluster.profile.block_s(ranks, in_pipeline=num_gpus(value) < cluster.num_gpus)


def is_never_ahead(host: HostTime, batch: StageBatch, cluster: Cluster) -> Bools:
    """A mask of the candidates whose hosts are never ahead of their GPUs: ranks wait for the
    slowest of their hosts, or hosts for a pipeline's messages.
    """
    of_ranks_late = peculiar_s(batch.value, cluster) > 0
    in_pipeline = num_gpus(batch.value) < cluster.num_gpus
    return np.asarray(of_ranks_late | (host.waits_for_sends & in_pipeline))


# Computes by how much passes wait for copies that others have left.


def longer_again(times: Mapping[str, Floats], simulated_s: Floats) -> Mapping[str, Floats]:
    """How much longer forward passes are after a forward pass than after a backward one, and
    backward passes after a backward pass than after a forward one, by name of a stage's times.

    Passes that data leaves take ``simulated_s`` (6, C) after a pass of their own kind, then come
    their ``MOVED`` times; zero stands for other passes, which differ by ``turned_s``, in which
    gradients are reduced.
    """
    longer = {}
    for again_s, kind, sign in zip(simulated_s[:2], ("forward", "backward"), (-1, 1), strict=True):
        whole_s = np.maximum(again_s, times[f"through_{kind}_s"]) - times[f"{kind}_s"]
        longer[f"again_{kind}_s"] = np.where(again_s > 0, whole_s, sign * times["turned_s"])
    return {**longer, **dict(zip(MOVED, simulated_s[2:], strict=True))}


def left_by_steps(
    left_s: Floats, fetched_s: Floats, held_s: Floats, blocks: Ints
) -> Mapping[str, Floats]:
    """The seconds by which states that optimizer steps have left to copy keep a stage from its
    second pass, by name: ``stepped_s`` after a first pass that waited for nothing, and
    ``stepped_late_s`` after one that came late, before which all other steps were over.

    The copies go on for ``left_s``, while the second pass fetches for ``fetched_s``: if a stage
    has a single block, it waits for this block first. Passes that activations leave count
    ``held_s`` of the copies. ``blocks`` are those with offloaded weights, which step ahead of a
    late micro-batch only as far as buffers go.
    """
    late_s = np.maximum(left_s - np.maximum(held_s, fetched_s), 0.0)
    return {
        "stepped_s": np.where(blocks == 1, left_s, np.maximum(left_s - fetched_s, 0.0)),
        "stepped_late_s": np.where(blocks > AHEAD, late_s, 0.0),
    }
