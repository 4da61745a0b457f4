"""The times of messages and collectives over a network whose nodes are joined by tiers of switches
(racks, pods, sites).

A group of ranks lies in one unit of a tier or in several. What crosses the border of a unit shares
the unit's link with what other groups send, as all groups of a cluster run the same collective at
once. Each rank of a ring sends as many bytes to the next rank, and a ring over units that ranks
fill in order leaves each of them once; over ``scattered`` units every message leaves one.

Axes: C transfers.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints
from mistlab.core.units import MICROSECONDS
from mistlab.network.tiers import ABOVE, NETWORK, NODE, Network

# The latency of a message between nodes; below, the rate of a tree all-reduce relative to a ring's.
# Both are constants with which NCCL chooses between rings and trees
# (https://github.com/NVIDIA/nccl, src/graph/tuning.cc: hwLat, simple protocol).
NETWORK_HOP_S = 14.0 * MICROSECONDS
RATE_OF_TREES = 0.9
# The names of tiers that a file does not name.
NAMES = ("node", "network")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTime:
    """The time of a message over links: a latency, and seconds per byte.

    A message takes the other way ``instead``, if this is given and faster. Large messages wait for
    the links of a ``tier``.
    """

    latency_s: float
    s_per_byte: float
    instead: "LinkTime | None" = None
    tier: str = ""

    def __call__(self, size_bytes: Floats, messages: int | Floats = 1) -> Floats:
        """The seconds (C) to send ``size_bytes`` (C) as this number of ``messages`` (C); zero bytes
        take no time.
        """
        seconds = messages * self.latency_s + size_bytes * self.s_per_byte
        if self.instead is not None:
            seconds = np.minimum(seconds, self.instead(size_bytes, messages))
        return np.asarray(np.where(size_bytes > 0, seconds, 0.0))

    def at_least(self, s_per_byte: float, tier: str) -> Self:
        """This link's time, but with no fewer seconds per byte than a ``tier`` takes."""
        if s_per_byte <= self.s_per_byte:
            return self
        return replace(self, s_per_byte=s_per_byte, tier=tier)

    @property
    def binding_tier(self) -> str:
        """The tier that limits large messages, on the faster of two algorithms (ring or tree)."""
        ways = [self]
        while ways[-1].instead is not None:
            ways.append(ways[-1].instead)
        return min(ways, key=lambda way: way.s_per_byte).tier


class GroupSpread(NamedTuple):
    """How a group of ranks is spread: the most ranks in a node, the number of nodes, and for each
    tier above the network, lowest first, the number of its units (racks, pods) that the group
    spans.
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
    """The times of a cluster's tiers above its nodes; a node sends ``node_bytes_per_s`` into the
    network.
    """

    network: Network
    nodes: int
    gpus_per_node: int
    node_bytes_per_s: float

    @property
    def places(self) -> range:
        """The indices of the tiers above the network, up to the lowest that joins all nodes."""
        return range(ABOVE, self.network.joins(self.nodes) + 1)

    def latency_s(self, index: int = NETWORK) -> float:
        """The latency of a message through the tier at this index."""
        return self.network.latency_s(index, NETWORK_HOP_S)

    def collective(self, kind: str, link: LinkTime, shape: GroupSpread) -> LinkTime:
        """The time of a collective over all tiers that its group crosses, given its time over nodes
        alone: by a ring or, for all-reduces, by a tree or in-network reduction, whichever is
        fastest.
        """
        passes = 2.0 if kind == "all_reduce" else 1.0
        tree, ring = link.instead, passes * (shape.ranks - 1) / shape.ranks
        slower = self._slower(link, ring, shape)
        for index, units in self._crossed(shape):
            tier = self.network.tiers[index]
            groups = self._gpus_of_unit(index) * units / shape.ranks
            hops, crossings = units - 1, 1.0
            if tier.scattered:
                # Scattered numbering: neighbours in the ring are in different units, so each node
                # sends to another unit.
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
        """The time of an all-reduce that switches of all its tiers reduce, after a reduction
        ``inside`` each node; None if one of the tiers cannot reduce. ``over_nodes`` is a ring over
        nodes alone.
        """
        crossed = [NETWORK, *(index for index, _ in self._crossed(shape))]
        tiers = self.network.tiers
        if shape.nodes == 1 or not all(tiers[index].reduces for index in crossed):
            return None
        # Partial sums go up to the highest switch, and the result comes down again.
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
        """How many times as long a ring between nodes was measured to take as by its nominal rate;
        assumed for higher tiers, too.
        """
        by_rate = ring * self.gpus_per_node / shape.gpus_in_node / self.node_bytes_per_s
        return max(1.0, link.s_per_byte / by_rate)

    def to_all(self, link: LinkTime, shape: GroupSpread, reached: float = 1.0) -> LinkTime:
        """The time of an all-to-all over all tiers that its group crosses, given its time over
        nodes alone: each rank sends equal parts to all others at once, but to other units only the
        ``reached`` share.
        """
        ranks = shape.ranks
        for index, units in self._crossed(shape):
            elsewhere = reached * (1 - 1 / units)
            share = self._gpus_of_unit(index) / self._bytes_per_s(index)
            link = replace(link, latency_s=link.latency_s + self._later_s(index))
            link = link.at_least(elsewhere * share, self.network.tiers[index].name)
        if self._leaves_rails and shape.nodes > 1 and shape.gpus_in_node > 1:
            # Messages to GPUs at other positions of other nodes cannot stay on a rail (the switch
            # that joins GPUs at one position of all nodes).
            others = reached * (shape.nodes - 1) * (shape.gpus_in_node - 1) / ranks
            share = self._gpus_of_unit(ABOVE) / self._bytes_per_s(ABOVE)
            link = link.at_least(others * share, self.network.tiers[ABOVE].name)
        return link

    @property
    def forwards(self) -> bool:
        """Whether nodes forward messages internally, so that messages to GPUs at other positions
        stay on rails.
        """
        return self.network.between.rails and not self._leaves_rails

    def send(self, link: LinkTime, index: int, senders: int) -> LinkTime:
        """The time of a send through a tier while so many GPUs of a stage send, given its time
        between two nodes.
        """
        if link.instead is not None:
            link = replace(link, instead=self.send(link.instead, index, senders))
        for level in range(ABOVE, index + 1):
            at_once = min(float(senders), self._gpus_of_unit(level))
            link = replace(link, latency_s=link.latency_s + self._later_s(level))
            link = link.at_least(at_once / self._bytes_per_s(level), self.network.tiers[level].name)
        return link

    def parts_of_units(self, link: LinkTime, index: int, senders: int) -> list[float]:
        """For each tier above the network up to this index, lowest first: the share of a unit's
        uplink that a ``link`` takes while so many GPUs of a stage send.
        """
        return [
            min(float(senders), self._gpus_of_unit(level))
            / (link.s_per_byte * self._bytes_per_s(level))
            for level in range(ABOVE, index + 1)
        ]

    def to_offset(self, link: LinkTime, shape: GroupSpread, away: int) -> LinkTime:
        """The time in which every rank of a group sends to the rank at an offset, all at once,
        given the time between two nodes.
        """
        for index, units in self._crossed(shape):
            gpus = self._gpus_of_unit(index)
            at_once = min(away * gpus * units / shape.ranks, gpus)
            link = replace(link, latency_s=link.latency_s + self._later_s(index))
            link = link.at_least(at_once / self._bytes_per_s(index), self.network.tiers[index].name)
        return link

    def place_of(self, shape: GroupSpread) -> int:
        """The index of the highest tier that a group crosses; the network's if it crosses none
        above.
        """
        return max((place for place, _ in self._crossed(shape)), default=NETWORK)

    def between_ends(self, link: LinkTime, senders: int) -> LinkTime:
        """The time of an exchange between so many GPUs at one end of the cluster and as many at the
        other, given its time between two nodes.
        """
        ends = np.array([0, self.nodes - 1])
        apart = [place for place in self.places if np.ptp(self.units_of(ends, place))]
        return self.send(link, max(apart, default=NETWORK), senders)

    def units_of(self, nodes: Ints, index: int) -> Ints:
        """For each node, the index of its unit (rack, pod) among those that a tier joins."""
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
        """The index of the highest tier through which the ranks from ``first`` on send to ranks as
        many positions further; ``NODE`` if all are in one node.
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
        """Whether any two of these ranks are in different units of a tier."""
        gpus = self.gpus_per_node
        here_units, there_units = (self.units_of(ranks // gpus, index) for ranks in (here, there))
        return np.asarray(here_units != there_units)

    @property
    def _leaves_rails(self) -> bool:
        """Whether messages to GPUs at other positions of other nodes go through the tier above the
        rails.
        """
        between = self.network.between
        return between.rails and not between.forwards and len(self.network.tiers) > ABOVE

    def _crossed(self, shape: GroupSpread) -> list[tuple[int, int]]:
        """For each tier that a group crosses: its index, and the number of its units that the group
        spans.
        """
        several = zip(self.places, shape.units, strict=False)
        return [(place, units) for place, units in several if units > 1]

    def _gpus_of_unit(self, index: int) -> float:
        """The mean number of used GPUs in a unit of a tier."""
        units = math.ceil(self.nodes / self.network.nodes_below(index))
        return self.nodes * self.gpus_per_node / units

    def _bytes_per_s(self, index: int) -> float:
        return self.network.bytes_per_s(index, self.node_bytes_per_s)

    def _later_s(self, index: int) -> float:
        """How much longer the latency through a tier is than through the tier below."""
        return self.latency_s(index) - self.latency_s(index - 1)
