"""The links that simulated sends between stages use: the networks of nodes, and the uplinks of
larger units of the network such as racks and pods.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mistlab.cost.tasks import TaskSeconds
from mistlab.network.tiers import NETWORK
from mistlab.schedule.placement import HERE, PREVIOUS, Placement
from mistlab.schedule.slots import Kind
from mistlab.stages.stage_batch import StageBatch
from simulators.graph import Use


def links_of_sends(
    of_stages: Sequence[TaskSeconds], batch: StageBatch, placement: Placement
) -> list[dict[Kind, tuple[Use, ...]]]:
    """For each part of the model, the uplinks and downlinks (of nodes, racks, pods, ...) that its
    sends use, and the share of each link's bandwidth that they take. Even numbers are links out of
    a node or unit, odd numbers links into it. A stage's first rank stands for all its ranks. If the
    networks at both ends are equal, a send takes the same share of each; if not, the bytes are
    limited by the slower one, and take a smaller share of the faster.
    """
    shapes = of_stages[0].shapes
    gpus, tiers = of_stages[0].model.cluster.gpus_per_node, of_stages[0].model.links.tiers
    units = [batch.first_rank.astype(np.int64) // gpus]
    if tiers is not None:
        units += [tiers.units_of(units[0], place) for place in tiers.places]
    # The links of all levels of the network are numbered together: first those of nodes, then those
    # of racks, and so on.
    begins = np.cumsum([0, *(int(of_tier.max()) + 1 for of_tier in units)])
    numbered = [of_tier + begin for of_tier, begin in zip(units, begins, strict=False)]
    uses: list[dict[Kind, tuple[Use, ...]]] = [{} for _ in placement.stages]
    for part, (sender, receiver) in enumerate(pairwise(placement.stages)):
        step = placement.goes_to(part)
        # Where stages form a loop, the last one sends to the first; that send stays inside the node
        # if there is only one node.
        stays = step == HERE or (receiver < sender and units[0][sender] == units[0][receiver])
        lower = receiver if step == PREVIOUS else sender
        if shapes.crosses_to_next[lower] and not stays:
            ends, tier = (of_stages[sender], of_stages[receiver]), int(shapes.place_to_next[lower])
            forward, backward = _shares(ends, sender, tier), _shares(ends, receiver, tier)[::-1]
            places = [(int(of[sender]), int(of[receiver])) for of in numbered]
            uses[part]["F"] = _used(places, forward)
            uses[part + 1]["B"] = _used([place[::-1] for place in places], backward)
    return uses


def _used(places: Sequence[tuple[int, int]], shares: Sequence[Sequence[float]]) -> tuple[Use, ...]:
    """The links that sends between these pairs of nodes (or racks, ...) use: up from the first and
    down to the second, with the bandwidth share at each end; none if both nodes are the same.
    """
    return tuple(
        use
        for (here, there), *of_ends in zip(places, *shares, strict=False)
        if here != there or places[0] == (here, there)
        for use in ((2 * here, of_ends[0]), (2 * there + 1, of_ends[1]))
    )


def _shares(
    ends: tuple[TaskSeconds, TaskSeconds], stage: int, tier: int
) -> tuple[Sequence[float], Sequence[float]]:
    """The shares of bandwidth that a send takes on the links at both of its ends, for each level of
    the network (node, rack, ...) up to ``tier``, if a stage has this many senders.
    """
    links, shapes = [end.model.links for end in ends], ends[0].shapes
    parts = [
        link.parts_of_links(
            at_once=int(shapes.senders_of_node[stage]),
            tier=max(tier, NETWORK),
            senders=int(shapes.senders[stage]),
        )
        for link in links
    ]
    if links[0] is not links[1]:
        rates = [one.cluster.inter_node_bytes_per_s for one in links]
        bytes_per_s = min(part[0] * rate for part, rate in zip(parts, rates, strict=True))
        parts = [[bytes_per_s / rate, *part[1:]] for part, rate in zip(parts, rates, strict=True)]
    # The part of a send that is waiting at its sender does not use the network.
    sender = ends[0]
    in_time = 1 - float(sender.late_s[stage] / sender.send_s[stage])
    here, there = ([in_time * one for one in part] for part in parts)
    return here, there
