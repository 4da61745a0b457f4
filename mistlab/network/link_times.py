"""The times of messages and collectives over a network in which tiers of switches (racks, pods,
sites) join the nodes.

A group of ranks is in one unit of a tier or in several. Messages across the border of a unit share
the unit's link with the messages of other groups, since all groups of a cluster run the same
collective at once. In a ring each rank sends equally many bytes to the next rank. If ranks fill
units in order, a ring leaves each unit once; if they are ``scattered``, every message leaves a
unit.

Axes: C transfers.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints
from mistlab.core.units import MICROSECONDS
from mistlab.network.tiers import ABOVE, NETWORK, NODE, Network

# The latency of a message between nodes in seconds and, below, the rate of a tree all-reduce
# relative to a ring's. NCCL chooses between rings and trees by the same constants
# (https://github.com/NVIDIA/nccl, src/graph/tuning.cc: hwLat, simple protocol).
NETWORK_HOP_S = 14.0 * MICROSECONDS
RATE_OF_TREES = 0.9
# The names of the two lowest tiers (inside a node, between nodes) of a cluster without a network
# file.
NAMES = ("node", "network")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTime:
    """The time of a message or collective over links: a latency, and seconds per byte.

    ``instead`` is the time by another algorithm, if there is one; a message takes the faster of the
    two. ``tier`` is the network tier whose links limit large messages.
    """

    latency_s: float
    s_per_byte: float
    instead: "LinkTime | None" = None
    tier: str = ""

    def __call__(self, size_bytes: Floats, messages: int | Floats = 1) -> Floats:
        """The seconds in which ``size_bytes`` are sent as this number of ``messages``; zero bytes
        take no time.
        """
        seconds = messages * self.latency_s + size_bytes * self.s_per_byte
        if self.instead is not None:
            seconds = np.minimum(seconds, self.instead(size_bytes, messages))
        return np.asarray(np.where(size_bytes > 0, seconds, 0.0))

    def at_least(self, s_per_byte: float, tier: str) -> Self:
        """A copy of this link time with at least ``s_per_byte`` seconds per byte, which ``tier``
        causes.
        """
        if s_per_byte <= self.s_per_byte:
            return self
        return replace(self, s_per_byte=s_per_byte, tier=tier)

    @property
    def binding_tier(self) -> str:
        """The network tier that limits large messages, for the faster of two algorithms (such as
        ring and tree).
        """
        ways = [self]
        while ways[-1].instead is not None:
            ways.append(ways[-1].instead)
        return min(ways, key=lambda way: way.s_per_byte).tier


class GroupSpread(NamedTuple):
    """How a communication group is spread over a cluster: the most ranks in a node, the number of
    nodes, and the number of units (racks, pods) of each higher tier.
    """

    gpus_in_node: int
    nodes: int
    units: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks in the group."""
        return self.gpus_in_node * self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTimes:
    """Computes the times of messages and collectives over the tiers of switches that join a
    cluster's nodes.

    A node sends ``node_bytes_per_s`` into the lowest tier.
    """

    network: Network
    nodes: int
    gpus_per_node: int
    node_bytes_per_s: float

    @property
    def places(self) -> range:
        """The indices of the tiers above the one between nodes, up to the lowest tier that joins
        all of the cluster's nodes.
        """
        return range(ABOVE, self.network.joins(self.nodes) + 1)

    def latency_s(self, index: int = NETWORK) -> float:
        """The latency in seconds of a message through the tier with this index."""
        return self.network.latency_s(index, NETWORK_HOP_S)

    def collective(self, kind: str, link: LinkTime, shape: GroupSpread) -> LinkTime:
        """The time of a collective over all tiers that its group crosses, from its time ``link``
        without the higher tiers.

        It runs as a ring or, if ``link`` has this alternative and it is faster, as a tree.
        """
        passes = 2.0 if kind == "all_reduce" else 1.0
        tree, ring = link.instead, passes * (shape.ranks - 1) / shape.ranks
        slower = self._slower(link, ring, shape)
        for index, units in self._crossed(shape):
            tier = self.network.tiers[index]
            groups = self._gpus_of_unit(index) * units / shape.ranks
            hops, crossings = units - 1, 1.0
            if tier.scattered:
                # With scattered numbering, consecutive nodes are in different units of the tier, so
                # each node of a ring sends to another unit.
                hops, crossings = shape.nodes - 1, shape.nodes / units
            s_per_byte = slower * ring * groups * crossings / self._bytes_per_s(index)
            later_s = self._later_s(index)
            link = replace(link, latency_s=link.latency_s + passes * hops * later_s)
            link = link.at_least(s_per_byte, tier.name)
            if tree is not None:
                levels = math.ceil(math.log2(units))
                tree = replace(tree, latency_s=tree.latency_s + 2 * levels * later_s)
                of_tree = s_per_byte * shape.ranks / (shape.ranks - 1) / RATE_OF_TREES
                tree = tree.at_least(of_tree, tier.name)
        return replace(link, instead=tree)

    def summed_in_switches(
        self, over_nodes: LinkTime, inside: LinkTime, shape: GroupSpread
    ) -> LinkTime | None:
        """The time of an all-reduce that the switches of all crossed tiers add up; None if a tier's
        switches cannot.

        It comes after a reduction ``inside`` each node. ``over_nodes`` is the time of a ring if
        only the tier between nodes limited it.
        """
        crossed = [NETWORK, *(index for index, _ in self._crossed(shape))]
        tiers = self.network.tiers
        if shape.nodes == 1 or not all(tiers[index].reduces for index in crossed):
            return None
        # Partial sums go up to the highest crossed switch, and the result comes down again.
        latency_s = inside.latency_s + 2 * self.latency_s(crossed[-1])
        slower = self._slower(over_nodes, 2 * (shape.ranks - 1) / shape.ranks, shape)
        node = slower * self.gpus_per_node / shape.gpus_in_node / self.node_bytes_per_s
        link = LinkTime(latency_s=latency_s, s_per_byte=inside.s_per_byte, tier=inside.tier)
        link = link.at_least(node, tiers[NETWORK].name)
        for index, units in self._crossed(shape):
            groups = slower * self._gpus_of_unit(index) * units / shape.ranks
            link = link.at_least(groups / self._bytes_per_s(index), tiers[index].name)
        return link

    def _slower(self, link: LinkTime, ring: float, shape: GroupSpread) -> float:
        """The factor by which a ring between nodes is slower than its nominal rate: measured
        between nodes, and assumed for higher tiers.
        """
        by_rate = ring * self.gpus_per_node / shape.gpus_in_node / self.node_bytes_per_s
        return max(1.0, link.s_per_byte / by_rate)

    def to_all(self, link: LinkTime, shape: GroupSpread, reached: float = 1.0) -> LinkTime:
        """The time of an all-to-all over all tiers that its group crosses, from its time ``link``
        without the higher tiers.

        Each rank sends equal parts to all others at once. Of the parts for other units, only the
        share ``reached`` is sent.
        """
        ranks = shape.ranks
        for index, units in self._crossed(shape):
            elsewhere = reached * (1 - 1 / units)
            share = self._gpus_of_unit(index) / self._bytes_per_s(index)
            link = replace(link, latency_s=link.latency_s + self._later_s(index))
            link = link.at_least(elsewhere * share, self.network.tiers[index].name)
        if self._leaves_rails and shape.nodes > 1 and shape.gpus_in_node > 1:
            # Messages to GPUs at other positions of other nodes leave their rail, the switch that
            # joins the GPUs at one position of all nodes.
            others = reached * (shape.nodes - 1) * (shape.gpus_in_node - 1) / ranks
            share = self._gpus_of_unit(ABOVE) / self._bytes_per_s(ABOVE)
            link = link.at_least(others * share, self.network.tiers[ABOVE].name)
        return link

    @property
    def forwards(self) -> bool:
        """Whether nodes forward messages internally, so that messages to GPUs at other positions of
        other nodes stay on rails.
        """
        return self.network.between.rails and not self._leaves_rails

    def send(self, link: LinkTime, index: int, senders: int) -> LinkTime:
        """The time of a message through the tier with index ``index``, from its time ``link``
        inside a unit (rack).

        Meanwhile ``senders`` GPUs of a stage send.
        """
        if link.instead is not None:
            link = replace(link, instead=self.send(link.instead, index, senders))
        for level in range(ABOVE, index + 1):
            at_once = min(float(senders), self._gpus_of_unit(level))
            link = replace(link, latency_s=link.latency_s + self._later_s(level))
            link = link.at_least(at_once / self._bytes_per_s(level), self.network.tiers[level].name)
        return link

    def parts_of_units(self, link: LinkTime, index: int, senders: int) -> list[float]:
        """The share of each higher tier's uplink that messages at the rate of ``link`` need while
        ``senders`` GPUs of a stage send.

        The tiers are those above the one between nodes, up to ``index``.
        """
        return [
            min(float(senders), self._gpus_of_unit(level))
            / (link.s_per_byte * self._bytes_per_s(level))
            for level in range(ABOVE, index + 1)
        ]

    def to_offset(self, link: LinkTime, shape: GroupSpread, away: int) -> LinkTime:
        """The time in which every rank of a group sends to the rank ``away`` positions further, all
        at once.

        ``link`` is the time between two nodes of the same unit (rack).
        """
        for index, units in self._crossed(shape):
            gpus = self._gpus_of_unit(index)
            at_once = min(away * gpus * units / shape.ranks, gpus)
            link = replace(link, latency_s=link.latency_s + self._later_s(index))
            link = link.at_least(at_once / self._bytes_per_s(index), self.network.tiers[index].name)
        return link

    def place_of(self, shape: GroupSpread) -> int:
        """The index of the highest tier that a communication group crosses, at least that of the
        tier between nodes.
        """
        return max((place for place, _ in self._crossed(shape)), default=NETWORK)

    def between_ends(self, link: LinkTime, senders: int) -> LinkTime:
        """The time of an exchange between GPUs at the start of the cluster and as many at its end.

        There are ``senders`` of each; ``link`` is the time between two nodes of the same unit
        (rack).
        """
        ends = np.array([0, self.nodes - 1])
        apart = [place for place in self.places if np.ptp(self.units_of(ends, place))]
        return self.send(link, max(apart, default=NETWORK), senders)

    def units_of(self, nodes: Ints, index: int) -> Ints:
        """The index of the unit (rack, pod) that each node is in, in the tier with this index."""
        network = self.network
        number, within = np.zeros_like(nodes), nodes
        for level in range(network.joins(self.nodes), index - 1, -1):
            below = network.nodes_below(level)
            units = network.tiers[level].gpus // network.node.gpus // below
            if network.tiers[level].scattered:
                within, unit = np.divmod(within, units)
            else:
                unit, within = np.divmod(within, below)
            number = number * units + unit
        return number

    def sends_through(self, first: Ints, ranks: Ints) -> Ints:
        """The index of the highest tier that messages from a stage to the next one cross, if each
        has ``ranks`` ranks.

        The first stage begins at rank ``first``. The result is ``NODE`` if all ranks are in one
        node.
        """
        gpus = self.gpus_per_node
        highest = np.full_like(first, NODE)
        highest[(first + 2 * ranks - 1) // gpus != first // gpus] = NETWORK
        if self._leaves_rails:
            highest[(highest == NETWORK) & (ranks % gpus != 0)] = ABOVE
        for index in self.places:
            if self.network.tiers[index].scattered:
                leaves = self._apart(first, first + ranks, index)
                last = first + ranks - 1
                leaves |= self._apart(last, last + ranks, index)
            else:
                leaves = self._apart(first, first + 2 * ranks - 1, index)
            highest[leaves] = index
        return highest

    def _apart(self, here: Ints, there: Ints, index: int) -> Bools:
        """Whether the ranks ``here`` and ``there`` are in different units of a tier, for each
        pair.
        """
        gpus = self.gpus_per_node
        here_units, there_units = (self.units_of(ranks // gpus, index) for ranks in (here, there))
        return np.asarray(here_units != there_units)

    @property
    def _leaves_rails(self) -> bool:
        """Whether messages to GPUs at other positions of other nodes go through the tier above the
        rails, since nodes do not forward them.
        """
        between = self.network.between
        return between.rails and not between.forwards and len(self.network.tiers) > ABOVE

    def _crossed(self, shape: GroupSpread) -> list[tuple[int, int]]:
        """The tiers of which a group spans several units, each with its index and the number of
        these units.
        """
        several = zip(self.places, shape.units, strict=False)
        return [(place, units) for place, units in several if units > 1]

    def _gpus_of_unit(self, index: int) -> float:
        """The mean number of the cluster's GPUs in a unit (rack, pod) of a tier."""
        units = math.ceil(self.nodes / self.network.nodes_below(index))
        return self.nodes * self.gpus_per_node / units

    def _bytes_per_s(self, index: int) -> float:
        return self.network.bytes_per_s(index, self.node_bytes_per_s)

    def _later_s(self, index: int) -> float:
        """The difference between the latency of a message through a tier and through the tier
        below.
        """
        return self.latency_s(index) - self.latency_s(index - 1)
