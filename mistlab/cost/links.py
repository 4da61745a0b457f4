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
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mistlab.machine.cluster import Cluster
from mistlab.machine.transfers import GroupTransfers, Line, Transfers
from mistlab.symbolic.exchanges import Collective
from mistlab.values.errors import UncalibratedError
from mistlab.values.units import MICROSECONDS

Copy = Literal["host_to_device", "device_to_host"]
Values = NDArray[np.float64]

# The latency of one hop of a collective, by the figures with which NCCL chooses between rings and
# trees (NVIDIA/nccl, src/graph/tuning.cc: hwLat, simple protocol). Measured all-reduces inside
# nodes give 2.1 to 2.7 microseconds a hop over NVLink and 4.8 over PCIe.
NVLINK_HOP_S = 3.4 * MICROSECONDS
PCIE_HOP_S = 5.7 * MICROSECONDS
NETWORK_HOP_S = 14.0 * MICROSECONDS
# A node whose GPUs exchange data faster than this has NVLink.
FASTEST_PCIE_GBYTES_PER_S = 64.0
# The rate of a tree as a share of a ring's rate (the same file).
RATE_OF_TREES = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTime:
    """The time of a message: a latency, and seconds for each byte.

    A message takes the other way ``instead``, if this is given and faster.
    """

    latency_s: float
    s_per_byte: float
    instead: "LinkTime | None" = None

    def __call__(self, size_bytes: Values, messages: int | Values = 1) -> Values:
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
