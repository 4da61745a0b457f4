"""What sticks out of the slots of a stage: how long no arithmetic hides communication and copies.

A slot takes as long as its arithmetic, or longer. What it takes longer is exposed. It belongs to
the streams beside the arithmetic, each by how long it works on when the arithmetic alone would be
done; if all are done by then and only slowed the arithmetic down, by how long each works.

Axes: C candidates, S distinct strategies, K kinds of slots, P phases; the four streams first.
"""

import numpy as np

from mistlab.core.arrays import Floats, Ints
from mistlab.cost.side_by_side import LINK, until
from mistlab.cost.slot_work import SlotWork, slot_ends
from mistlab.cost.stage import StageSlots
from mistlab.machine.slowdowns import COMPUTE, STREAMS
from mistlab.schedule.slots import PHASES

_COPIES = [place for place in range(len(STREAMS)) if place not in (COMPUTE, LINK)]


def share_of_link(slots: StageSlots, micro_batches: Ints) -> Floats:
    """The share (C) of what is exposed in stages' slots that belongs to collectives between GPUs;
    the rest belongs to copies. The stages run so many micro-batches (C)."""
    alone = SlotWork(slots.seconds, slots.kinds).alone()
    ends = slot_ends(slots.seconds, alone, is_least=False)
    link_s, copies_s = _over_all(slots, _divided(alone, ends), micro_batches)
    both_s = link_s + copies_s
    # Tasks of a step run one after another as arithmetic, and no engine with such tasks copies.
    return np.where(both_s > 0, link_s / np.where(both_s > 0, both_s, 1.0), 1.0)


def _over_all(slots: StageSlots, one: Floats, micro_batches: Ints) -> Floats:
    """Seconds (2, C) of an iteration, from those of slots (2, P, K, S)."""
    every, found = np.ones(len(slots.kinds), dtype=np.bool_), np.zeros((2, len(slots.batch)))
    for number, phase in enumerate(PHASES):
        # A stage runs its first and its last pass once, and others as often as it is left to do.
        times = np.maximum(micro_batches - 1, 0) if phase in ("forward", "backward") else 1
        found += times * slots.summed([(one[:, number], every)])
    return found


def _divided(alone: Floats, ends: Floats) -> Floats:
    """Seconds (2, P, K, S) for which slots with these tasks (4, P, K, S) are longer than their
    arithmetic, of collectives and of copies."""
    arithmetic_s = alone[COMPUTE]
    exposed_s = until(STREAMS, ends, alone) - arithmetic_s
    beyond = np.clip(ends - arithmetic_s, 0.0, alone)
    beyond[COMPUTE] = 0.0
    others = alone.copy()
    others[COMPUTE] = 0.0
    weights = np.where(beyond.sum(axis=0) > 0, beyond, others)
    total = weights.sum(axis=0)
    shares = weights / np.where(total > 0, total, 1.0)
    return np.stack([exposed_s * shares[LINK], exposed_s * shares[_COPIES].sum(axis=0)])
