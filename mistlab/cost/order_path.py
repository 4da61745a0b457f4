"""The time of an iteration in any order of passes: the longest path through all passes.

A pass ends at the later of two times: its whole time (t) after its stage's pass before has ended,
and its shorter time (l) after its input has come. The shorter time leaves out fetches before the
pass and work after it. The first forward pass of a chunk also waits for the chunk's step, and its
last backward pass is followed by the other work that comes once an iteration, as in
``mistlab.cost.pipeline``. Where gradients of weights have their own passes, the backward pass is
shorter by their time.

Axes: C candidates, P parts of the model in order; with S stages, part c S + s is chunk c of stage
s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.pipeline import StageTimes
from mistlab.schedule.order_text import PassKind
from mistlab.schedule.stage_passes import PassKey, StagePass, StagePasses, in_turn

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitTimes:
    """The changes of backward passes that leave gradients of weights to passes of their own (C, P).

    ``weights_s`` are the seconds of the passes for weights. ``unhidden_s`` are the seconds that
    tensor-parallel ranks now wait for one another, which products for weights hid before.
    """

    weights_s: Table
    unhidden_s: Table


def order_iteration_s(
    times: StageTimes,
    passes: tuple[StagePasses, ...],
    split: SplitTimes | None = None,
    *,
    steps_apart: bool = False,
    steps_last: bool = False,
) -> Table:
    """Seconds (C) of one iteration in which stages run these passes.

    With ``steps_last`` a stage steps all of its chunks when its passes are over, one after another.
    With ``steps_apart`` a stage begins the next iteration when its own passes are over, so the
    iteration takes as long as the longest of all stages, each from its own beginning.
    """
    candidates = len(times.forward_s)
    # One candidate alone is counted in numbers, which takes a tenth of the time of short columns.
    maximum: Callable[[Any, Any], Any] = max if candidates == 1 else np.maximum
    seconds = _PassSeconds(times, passes, split)
    ends: dict[PassKey, Any] = {}
    free: dict[int, Any] = {}
    begun: dict[int, Any] = {}
    longest: Any = 0.0 if candidates == 1 else np.zeros(candidates)
    for one in in_turn(passes):
        own, through, extra = seconds.of(one)
        end = free[one.stage] + own if one.stage in free else through
        if one.phase == "first_forward":
            end = end + seconds.begin_s[seconds.part(one)]
        if one.needs is not None:
            comes = ends[one.needs] + seconds.sent_s(one)
            end = maximum(end, comes + through)
            if steps_apart and one.stage not in free:
                begun[one.stage] = comes
        end = end + extra
        free[one.stage] = ends[one.key] = end
        if one.phase == "last_backward":
            rest = seconds.end_s[seconds.part(one)]
            longest = maximum(longest, end + rest - begun.get(one.stage, 0.0))
    if steps_last:
        stages = len(passes)
        free = {stage: end + sum(seconds.end_s[stage::stages]) for stage, end in free.items()}
    for stage, end in free.items():
        longest = maximum(longest, end - begun.get(stage, 0.0))
    return np.array([longest]) if candidates == 1 else np.asarray(longest)


def order_bound_s(
    times: StageTimes, passes: Sequence[StagePasses], split: SplitTimes | None = None
) -> Table:
    """Seconds (C) that an iteration takes at least in such an order.

    A stage runs all its passes after the shortest way to the first of them, and before the shortest
    way on from the last.
    """
    seconds = _PassSeconds(times, passes, split)
    return np.atleast_1d(np.maximum.reduce([seconds.stage_s(of_stage) for of_stage in passes]))


class _PassSeconds:
    """The seconds of passes (C): on their stage, and for a micro-batch that only passes through.

    Those of one candidate alone are numbers.
    """

    def __init__(
        self, times: StageTimes, passes: Sequence[StagePasses], split: SplitTimes | None
    ) -> None:
        candidates, count = times.forward_s.shape
        parts = range(count)
        self.num_stages = len(passes)
        self.splits = [of_stage.splits_backward for of_stage in passes]
        of_part = [
            StageTimes(**{e.name: getattr(times, e.name)[:, part] for e in fields(times)})
            for part in parts
        ]

        def plain(column: Table) -> Any:
            return column.item() if candidates == 1 else column

        self.begin_s = [plain(one.begin_s) for one in of_part]
        self.end_s = [plain(one.end_s) for one in of_part]
        self.crossed_s = [plain(one.point_to_point_s / 2) for one in of_part]
        self.within_s = [
            (plain(one.within_forward_s), plain(one.within_backward_s)) for one in of_part
        ]
        self.own_s: dict[tuple[PassKind, int], tuple[Any, Any]] = {}
        for part, one in zip(parts, of_part, strict=True):
            self.own_s["F", part] = plain(one.forward_s), plain(one.through_forward_s)
            backward = one.backward_s, one.through_backward_s
            if self.splits[part % self.num_stages]:
                assert split is not None, "an order with W asks for the times of its parts"
                weights_s, unhidden_s = split.weights_s[:, part], split.unhidden_s[:, part]
                left = [np.maximum(own - weights_s, 0.0) + unhidden_s for own in backward]
                backward = left[0], left[1]
                self.own_s["W", part] = plain(weights_s), plain(weights_s)
            self.own_s["B", part] = plain(backward[0]), plain(backward[1])

    def of(self, one: StagePass) -> tuple[Table | float, Table | float, Table | float]:
        """The seconds of a pass after the pass before it, its seconds after its input has come, and
        seconds that count in both cases."""
        part = self.part(one)
        own, through = self.own_s[one.kind, part]
        extra: Table | float = 0.0
        if one.phase in ("first_forward", "last_backward"):
            extra = self.within_s[part][one.kind != "F"]
        return own, through, extra

    def sent_s(self, one: StagePass) -> Any:
        """The seconds to send a pass its input."""
        source = one.comes_from
        if source is None or source.stage == one.stage:
            return 0.0
        lower = source if one.kind == "F" else one
        return self.crossed_s[lower.chunk * self.num_stages + lower.stage]

    def stage_s(self, passes: StagePasses) -> Table:
        """The seconds of a stage's passes, with the shortest way in and out, or with work that it
        does meanwhile if this is longer."""
        first, *others = passes
        last = others[-1]
        seconds = self.of(first)[1] + sum(self.of(one)[0] for one in others)
        seconds = seconds + sum(self.of(one)[2] for one in passes)
        in_s = self._way_s("F", self.part(first))
        seconds = seconds + np.maximum(in_s, self.begin_s[self.part(first)])
        out_s: Table | float = self._way_s("B", self.part(last)) if last.kind == "B" else 0.0
        if last.phase == "last_backward":
            out_s = np.maximum(out_s, self.end_s[self.part(last)])
        return np.asarray(seconds + out_s)

    def _way_s(self, kind: PassKind, part: int) -> Table | float:
        """The shortest way from the model's beginning to a part, or back from it."""
        return sum((self.own_s[kind, one][1] + self._link(one) for one in range(part)), start=0.0)

    def part(self, one: StagePass) -> int:
        """The part of the model that a pass goes through."""
        return one.chunk * self.num_stages + one.stage

    def _link(self, part: int) -> Table | float:
        """The seconds to send a part's outcome to the next part."""
        return self.crossed_s[part] if self.num_stages > 1 else 0.0
