"""How long slots of backward passes take whose gradients of weights are a pass of their own.

Axes: S distinct strategies, T types of layers, K kinds of slots; the four streams first.
"""

import numpy as np

from mistlab.cost.side_by_side import Streams, until
from mistlab.cost.slot_lengths import HERE, Values, of_layers, slot_ends
from mistlab.cost.slot_work import COMPUTE, SlotWork
from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.slot_table import KINDS

# Kinds of tasks that belong to gradients of weights.
_OF_GRADIENTS = frozenset({"R", "G"})


def split_slots(work: SlotWork, weights_s: Values, unhidden_s: Values) -> Values:
    """Seconds (4, K, S) of slots of whole backward passes, of passes for inputs and of passes for
    weights, and of what was hidden in them; the arguments are those of ``split_pass_seconds``."""
    here = work.kinds[:, HERE]
    products, waits = (of_layers(one, here) for one in (weights_s, unhidden_s))
    (whole,) = work.alone(("backward",)).swapaxes(0, 1)
    (inputs,) = work.alone(("backward",), without=_OF_GRADIENTS).swapaxes(0, 1)
    inputs[COMPUTE] += waits - products
    (weights,) = work.alone(("backward",), without={*KINDS} - _OF_GRADIENTS).swapaxes(0, 1)
    weights[COMPUTE] = products
    (fetched_s,) = work.fetched_s(("backward",)).sum(axis=0)
    whole_s, inputs_s, own_s = (_lasting(work, one) for one in (whole, inputs, weights))
    whole_s, inputs_s = np.maximum(whole_s, fetched_s), np.maximum(inputs_s, fetched_s)
    if len(work.evicts):
        for alone, lasting in ((whole, whole_s), (weights, own_s)):
            evicting_s = work.evicting_s(alone[:, :, work.evicts])
            lasting[:, work.evicts] = np.maximum(lasting[:, work.evicts], evicting_s)
    return np.stack([whole_s, inputs_s, own_s, waits])


def _lasting(work: SlotWork, alone: Streams) -> Values:
    """Seconds (K, S) of slots with tasks (4, K, S)."""
    alone = np.maximum(alone, 0.0)
    return until(STREAMS, slot_ends(work.seconds, alone, is_least=False), alone)
