"""The least time of an iteration in an order of passes, without a path through all passes.

In every order a stage runs all its passes. The first of them is a forward pass of its first chunk,
and waits until the first micro-batch has come through the first chunks of the stages in front. The
last backward pass is of its first chunk too, and its gradient goes back through the same chunks.
And a micro-batch passes through all parts of the model, there and back. Parts lie in a loop or in a
V (``mistlab.schedule.placement``): in both, the first chunks are the first parts.

Axes: C candidates, V chunks of a stage, S stages; P parts of the model in order.
"""

from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.chains import Chains
from mistlab.cost.pipeline import StageTimes
from mistlab.schedule.placement import Placement

Table = NDArray[np.float64]


def order_bound_s(
    times: StageTimes,
    placement: Placement,
    micro_batches: Table | int,
    *,
    splits: bool = False,
    steps_apart: bool = False,
) -> Table:
    """Seconds (C) that an iteration takes at least, from the times of parts (C, P).

    An order ``splits`` backward passes if gradients of weights have passes of their own: together
    the two are at least as long. With ``steps_apart`` no stage waits for the beginning of another.
    """
    own = _OfChunks(times, placement)
    alone_s = own.all_passes_s(np.asarray(micro_batches))
    before_s = own.begin_s[:, 0] if steps_apart else own.way_in_s()
    goes_back = not (splits or steps_apart)
    after_s = own.way_out_s() if goes_back else own.end_s[:, 0]
    longest = np.asarray((before_s + alone_s + after_s).max(axis=1))
    return np.maximum(longest, own.there_and_back_s()) if goes_back else longest


def in_front_s(
    stage: StageTimes,
    after: Chains[Table],
    micro_batches: int,
    *,
    is_last: bool,
    splits: bool = False,
    steps_apart: bool = False,
) -> Chains[Table]:
    """Bounds (C) of a stage and the stages after it, as the chains ``through`` and ``whole``; the
    others are zero.

    The stage's passes are those of all its chunks, what passes through it goes through its first
    chunk. ``through`` begins when the first micro-batch arrives. It ends when the last gradient is
    sent back; if none is waited for, when all stages are over.
    """
    first_s = stage.through_forward_s + stage.within_forward_s
    last_s = stage.through_backward_s + stage.within_backward_s
    steady_s = (micro_batches - 1) * (stage.forward_s + stage.backward_s)
    alone_s = steady_s + stage.backward_s - stage.through_backward_s + first_s + last_s
    goes_back = not (splits or steps_apart)
    if not goes_back:
        alone_s = alone_s + stage.end_s
    if is_last or steps_apart:
        through_s = alone_s
    elif goes_back:
        passed_s = first_s + last_s + stage.point_to_point_s
        through_s = np.maximum(alone_s, passed_s + after.through)
    else:
        passed_s = first_s + stage.point_to_point_s / 2
        through_s = np.maximum(alone_s, passed_s + after.through)
    whole_s = stage.begin_s + through_s + (stage.end_s if goes_back else 0.0)
    nothing = Chains.of_nothing(np.zeros_like(whole_s))
    return replace(nothing, through=through_s, whole=np.maximum(whole_s, after.whole))


class _OfChunks:
    """The times of parts (C, V, S)."""

    def __init__(self, times: StageTimes, placement: Placement) -> None:
        num_stages = placement.num_stages
        assert placement.stages[:num_stages] == (*range(num_stages),), "the first parts are first"
        shape = len(times.forward_s), -1, num_stages
        places = sorted(enumerate(placement.places), key=lambda one: (one[1].chunk, one[1].stage))
        parts = [part for part, _ in places]
        of = {e.name: getattr(times, e.name)[:, parts].reshape(shape) for e in fields(times)}
        self.through_forward_s, self.within_forward_s = (
            of["through_forward_s"],
            of["within_forward_s"],
        )
        self.through_backward_s, self.within_backward_s = (
            of["through_backward_s"],
            of["within_backward_s"],
        )
        self.forward_s, self.both_s = of["forward_s"], of["forward_s"] + of["backward_s"]
        self.begin_s, self.end_s = (
            one[:, parts].reshape(shape) for one in (times.begin_s, times.end_s)
        )
        self.crossed_s = of["point_to_point_s"] / 2 if num_stages > 1 else of["forward_s"] * 0.0
        self.last_stage = placement.last_stage

    def all_passes_s(self, micro_batches: Table) -> Table:
        """Seconds (C, S) of all passes of a stage, with what comes once an iteration between them:
        the first pass begins when its input has come."""
        once_s = (self.within_forward_s + self.within_backward_s).sum(axis=1)
        once_s = once_s + self.begin_s[:, 1:].sum(axis=1)
        first_s = self.through_forward_s[:, 0] - self.forward_s[:, 0]
        return np.asarray(micro_batches[..., None] * self.both_s.sum(axis=1) + once_s + first_s)

    def way_in_s(self) -> Table:
        """Seconds (C, S) until a stage's first pass can begin."""
        ready_s = self.begin_s[:, 0].copy()
        passed_s = self.through_forward_s[:, 0] + self.within_forward_s[:, 0]
        for stage in range(1, ready_s.shape[1]):
            comes_s = (
                ready_s[:, stage - 1] + passed_s[:, stage - 1] + self.crossed_s[:, 0, stage - 1]
            )
            ready_s[:, stage] = np.maximum(ready_s[:, stage], comes_s)
        return ready_s

    def way_out_s(self) -> Table:
        """Seconds (C, S) from the end of a stage's last backward pass."""
        left_s = self.end_s[:, 0].copy()
        passed_s = self.through_backward_s[:, 0] + self.within_backward_s[:, 0]
        for stage in range(1, left_s.shape[1]):
            goes_s = self.crossed_s[:, 0, stage - 1] + passed_s[:, stage - 1] + left_s[:, stage - 1]
            left_s[:, stage] = np.maximum(left_s[:, stage], goes_s)
        return left_s

    def there_and_back_s(self) -> Table:
        """Seconds (C) of one micro-batch through all parts and back."""
        passed_s = self.through_forward_s + self.within_forward_s + self.through_backward_s
        sent_s = 2 * self.crossed_s.sum(axis=(1, 2)) - 2 * self.crossed_s[:, -1, self.last_stage]
        return np.asarray(passed_s.sum(axis=(1, 2)) + sent_s)
