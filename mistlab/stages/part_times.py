"""The times of a model's parts in orders of passes other than 1F1B, besides those of their passes:
separate weight-gradient passes, hosts, work that is done once an iteration, and reductions that
lengthen the next pass.

Axes: C candidates, P parts of the model in order.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from mistlab.core.arrays import Floats, Ints
from mistlab.stages.stage_batch import StageTimes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnTimes:
    """How much longer a stage's pass takes if the pass before it still reduces gradients.

    A forward pass takes ``forward_s`` longer, a column for each part of the model to which the pass
    before may belong (C, P). The last gradients of a backward pass are reduced while the first
    layer of the next pass runs, or before it if weights must be fetched
    (``mistlab.cost.slot_work``). A forward pass leaves no gradients to reduce.

    If a stage has several chunks, a backward or weight-gradient pass may follow another one, which
    leaves ``left_s`` to reduce, by its part. Of this the pass's first layer hides
    ``hidden_backward_s`` or ``hidden_weights_s``, by the pass's own part; but since both slow each
    other down, the pass takes at least ``least_s`` longer.
    """

    forward_s: Floats
    left_s: Floats
    least_s: Floats
    hidden_backward_s: Floats
    hidden_weights_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitTimes:
    """The seconds of separate weight-gradient passes, and how much shorter backward passes get.

    ``weights_s`` are the seconds of the weight-gradient passes, with the reductions that layers
    wait for; in them, the first layer has computed after ``first_s``. ``less_s`` are the seconds by
    which the backward passes are shorter.
    """

    weights_s: Floats
    less_s: Floats
    first_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostTimes:
    """The seconds in which hosts issue a forward and a backward pass of each part of the model.

    A host issues a part's pass block by block; ``blocks`` (C, P), the number of blocks, is at least
    one.
    """

    forward_s: Floats
    backward_s: Floats
    blocks: Floats

    @classmethod
    def of(cls, times: StageTimes, layers: Ints) -> Self:
        """Take the seconds in which hosts issue passes from the times of the model's parts.

        The parts have these numbers of blocks (C, P).
        """
        return cls(
            forward_s=times.issued_forward_s,
            backward_s=times.issued_backward_s,
            blocks=np.maximum(layers, 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndTimes:
    """The gradient reductions and optimizer steps that each part of the model needs once an
    iteration, after its last backward pass.

    ``gathers_s`` are the seconds to gather one block's stepped weights again, before the part's
    first forward pass.
    ``reductions_s`` are the seconds to reduce all gradients of a part, if this begins in its last
    backward pass: a stage reduces one part after another, beside passes of other parts. ``tied_s``
    is the exchange of a tied embedding table, which comes after all reductions of its stage.
    ``steps_s`` is the work of a stage for a part after all of its passes and reductions, one part
    after another.
    """

    gathers_s: Floats
    reductions_s: Floats
    tied_s: Floats
    steps_s: Floats

    def rests_s(self, times: StageTimes, split: SplitTimes | None) -> Floats:
        """The seconds of gradient reductions that are left when the last backward pass of each part
        of the model has computed.

        If weight gradients have separate passes, their reduction begins when the first layer of
        the last such pass has computed; otherwise in the first layer of the last backward pass.
        """
        rests_s = np.maximum(times.end_s - self.steps_s, 0.0)
        if split is None:
            return rests_s
        beside_s = split.weights_s + times.within_backward_s - split.first_s
        return np.maximum(rests_s, self.reductions_s - beside_s)
