"""Network topologies: tiers of links and switches, from the links inside a node to those between
sites.

Each tier joins units of the tier below: GPUs to a node, nodes to a leaf, leaves to a spine, and so
on. Messages that leave a unit use the unit's link into the tier, which all of its GPUs share.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from mistlab.core.units import GBYTES, MICROSECONDS
from mistlab.core.values import (
    MOST_GPUS_OF_NODE,
    Checked,
    bounded,
    check_fields,
    quantity,
    refuse,
    within,
)

# The largest number of GPUs that one tier may join.
MOST_GPUS = 1 << 30
# The indices of the tiers of a network: inside a node, between nodes, and the first tier above
# these.
NODE, NETWORK, ABOVE = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier(Checked):
    """A tier of a network: links and switches that join units of the tier below (nodes, racks,
    ...).

    It connects ``gpus`` GPUs.

    ``gbytes_per_s`` is the rate at which a unit of the tier below sends into the tier, in one
    direction. Or it is the sum of the rates inside that unit, divided by the ``oversubscription``.
    A message through the tier has a total latency of ``latency_us``. Switches with ``reduces`` can
    add up all-reduces. A unit's nodes may be ``scattered``: numbered over the units in turn, so
    that neighbours in a ring are in different units. With ``rails``, the GPUs at the same position
    of all nodes share a switch: messages to other positions are first forwarded inside nodes, if
    the node's tier ``forwards``, or pass through the tier above.
    """

    name: str
    gpus: int = field(metadata=bounded(minimum=1, most=MOST_GPUS))
    gbytes_per_s: float | None = field(default=None, metadata=quantity())
    oversubscription: float | None = field(default=None, metadata=bounded(minimum=1))
    latency_us: float | None = field(
        default=None,
        metadata=bounded(minimum=0, least=0.05, most=1e7, usual="microseconds (0.04 ms are 40)"),
    )
    reduces: bool = False
    scattered: bool = False
    rails: bool = False
    forwards: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The tiers of a network, lowest first: inside a node, between nodes, and optionally tiers
    above.
    """

    name: str = "given"
    tiers: tuple[Tier, ...]
    source: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.tiers) <= NETWORK:
            refuse(
                "tiers",
                f"{len(self.tiers)} is too few: give one inside a node and one between nodes at "
                "least",
            )
        for index, tier in enumerate(self.tiers):
            with within(f"tiers.{index}"):
                self._check_name(index)
                _check_place(tier, index)
                if index > NODE:
                    _check_nests(self.tiers[index - 1], tier)
        stated = [index for index, one in enumerate(self.tiers) if one.latency_us is not None]
        for below, index in pairwise(stated):
            _check_latency(self.tiers[below], self.tiers[index], index)

    def _check_name(self, index: int) -> None:
        names = [tier.name for tier in self.tiers]
        if not names[index].strip():
            refuse("name", "is empty: give what messages are to call the tier, such as leaf")
        if names.index(names[index]) < index:
            refuse("name", f"{names[index]!r} is not unique among the tiers: give another name")

    @property
    def node(self) -> Tier:
        """The tier of links inside a node."""
        return self.tiers[NODE]

    @property
    def between(self) -> Tier:
        """The tier of links and switches between nodes."""
        return self.tiers[NETWORK]

    @property
    def nodes(self) -> int:
        """The number of nodes that the network joins."""
        return self.tiers[-1].gpus // self.node.gpus

    def nodes_below(self, index: int) -> int:
        """The number of nodes in each of the units (such as racks) that the tier with this index
        joins.
        """
        return self.tiers[index - 1].gpus // self.node.gpus

    def nodes_alike(self, nodes: int) -> int:
        """After how many nodes the positions of nodes in racks, pods and other units of the network
        repeat.

        Among the first ``nodes`` nodes it is the size of a unit in the lowest tier that joins all
        of them.
        """
        # With scattered numbering, consecutive nodes are in different units, so no two nodes have
        # the same position.
        if any(one.scattered for one in self.tiers):
            return nodes
        return self.nodes_below(self.joins(nodes))

    def joins(self, nodes: int) -> int:
        """The index of the lowest tier that joins the first ``nodes`` nodes, or of the tier between
        nodes if that is higher.
        """
        gpus = nodes * self.node.gpus
        wide = (
            place for place in range(NETWORK, len(self.tiers)) if self.tiers[place].gpus >= gpus
        )
        return next(wide, len(self.tiers) - 1)

    def bytes_per_s(self, index: int, node_bytes_per_s: float) -> float:
        """The bytes per second that a unit (a node, rack, ...) sends into the tier with this index,
        derived from those that a node sends into the network.
        """
        if index == NETWORK:
            return node_bytes_per_s
        tier = self.tiers[index]
        if tier.gbytes_per_s is not None:
            return tier.gbytes_per_s * GBYTES
        units = self.tiers[index - 1].gpus // self.tiers[index - 2].gpus
        below = self.bytes_per_s(index - 1, node_bytes_per_s)
        return units * below / (tier.oversubscription or 1.0)

    def latency_s(self, index: int, of_network_s: float) -> float:
        """The latency of a message through the tier with this index.

        It is the latency stated by the highest tier up to this one, otherwise ``of_network_s``.
        """
        stated = (self.tiers[one].latency_us for one in range(index, NODE, -1))
        latency_us = next((one for one in stated if one is not None), None)
        return of_network_s if latency_us is None else latency_us * MICROSECONDS


def _check_nests(below: Tier, tier: Tier) -> None:
    """Refuse a tier whose size is not a multiple of the size of the tier below, and a tier of the
    same size.
    """
    if tier.gpus % below.gpus:
        down = tier.gpus // below.gpus * below.gpus
        near = " or ".join(f"{one}" for one in (down, down + below.gpus) if one)
        refuse(
            "gpus",
            f"{tier.gpus} GPUs of tier {tier.name} are not a whole number of units of tier "
            f"{below.name}, which have {below.gpus} GPUs each: give a multiple, such as {near}",
        )
    if tier.gpus == below.gpus:
        refuse(
            "gpus",
            f"{tier.gpus} GPUs of tier {tier.name} are a single unit of tier {below.name}: give a "
            "larger multiple, or leave the tier out",
        )


def _check_latency(below: Tier, tier: Tier, index: int) -> None:
    """Refuse a latency below the one that a lower tier states."""
    least, stated = below.latency_us or 0.0, tier.latency_us or 0.0
    if stated < least:
        refuse(
            f"tiers.{index}.latency_us",
            f"{stated:g} is less than the {least:g} of tier {below.name}, through which its "
            "messages pass: give at least that",
        )


def _check_place(tier: Tier, index: int) -> None:
    """Refuse fields that a tier at this index cannot have, such as rails above the tier between
    nodes.
    """
    if index == NODE:
        if tier.gpus > MOST_GPUS_OF_NODE:
            refuse(
                "gpus",
                f"{tier.gpus} is more GPUs than any node has: make the first tier that of a node",
            )
        for name in ("oversubscription", "reduces", "scattered", "rails"):
            if getattr(tier, name):
                refuse(
                    name,
                    f"{getattr(tier, name)} for tier {tier.name}, which is inside a node and has "
                    f"no {name}: leave it out",
                )
        return
    if tier.rails and index != NETWORK:
        refuse(
            "rails", "only the tier between nodes can have rails: move the key to the second tier"
        )
    if not tier.forwards and not tier.rails:
        refuse("forwards", f"false, but tier {tier.name} has no rails: leave it out")
    if tier.scattered and index == NETWORK:
        refuse(
            "scattered",
            "true, but this tier joins single nodes: give scattered to a higher tier",
        )
    _check_rate(tier, index)


def _check_rate(tier: Tier, index: int) -> None:
    """Refuse a tier whose rate is stated twice (by ``gbytes_per_s`` and ``oversubscription``) or
    not at all.
    """
    over, rate = tier.oversubscription, tier.gbytes_per_s
    if index == NETWORK and over is not None:
        refuse(
            "oversubscription",
            f"{over:g}, but the tier between nodes has no tier of links below it to compare with: "
            "give gbytes_per_s, a node's rate",
        )
    if over is not None and rate is not None:
        refuse("oversubscription", f"{over:g}, and gbytes_per_s gives the rate too: leave one out")
    if index > NETWORK and over is None and rate is None:
        refuse(
            "oversubscription",
            "missing: give 1 for uplinks as fast as all links below, or gbytes_per_s",
        )
