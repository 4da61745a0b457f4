"""How much longer passes take that follow a pass whose last gradients are still to be reduced.

Where a stage has several chunks, a backward pass may follow another one, and a forward pass another
forward pass. The last gradients of a backward pass are reduced beside the first layer of the next
pass, whichever it is, or before it where weights are fetched (``mistlab.cost.turns``). After a
forward pass there is nothing to reduce.

Axes: C candidates, P parts of the model in order, K kinds of slots, S distinct strategies.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.side_by_side import until
from mistlab.cost.slot_lengths import HERE, UPPER, of_layers, slot_ends
from mistlab.cost.slot_work import COMPUTE, SlotWork
from mistlab.cost.stage import StageSlots, StageTimeModel
from mistlab.cost.turns import are_shared
from mistlab.cost.weight_gradients import weight_gradients_s
from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.slot_kinds import NOTHING
from mistlab.values.stages import StageBatch

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnTimes:
    """The seconds (C, P) by which a pass is longer that follows a part's pass with reductions: a
    forward pass, or another pass of any kind."""

    forward_s: Values
    backward_s: Values


def beside_backward(model: StageTimeModel, batch: StageBatch, *, splits: bool) -> Values:
    """Seconds by which a backward pass is longer that follows another one, because gradients are
    reduced beside its first layer, and whether they are (2, C). If backward passes are split, this
    is of passes for gradients of weights."""
    slots = StageSlots.of(model.tasks, batch)
    seconds, kinds = slots.seconds, slots.kinds
    is_below = (kinds[:, HERE] == NOTHING) & (kinds[:, UPPER] != NOTHING)
    layers = kinds[is_below, UPPER]
    computed_s = (
        weight_gradients_s(seconds)
        if splits
        else seconds.alone("B", "") + seconds.tensor_s["backward"]
    )
    layer_s = of_layers(computed_s, layers)
    (together,) = SlotWork(seconds, kinds[is_below]).alone(("backward",)).swapaxes(0, 1)
    together[COMPUTE] += layer_s
    ends = slot_ends(seconds, together, is_least=False)
    longer_s = np.maximum(until(STREAMS, ends, together) - layer_s, 0.0)
    (beside_s,) = slots.summed([(longer_s[None], is_below)])
    return np.stack([beside_s, are_shared(seconds)[slots.strategies.index]])
