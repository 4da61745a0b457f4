"""The time of an iteration in any order of passes: the longest path through all passes.

A pass ends at the later of two times: its whole time (t) after its stage's pass before has ended,
and its shorter time (l) after its input has come. The shorter time leaves out fetches before the
pass and work after it. The first forward pass of a chunk also waits for the chunk's step, and its
last backward pass is followed by the other work that comes once an iteration, as in
``mistlab.cost.pipeline``. Where gradients of weights have their own passes, the backward pass is
shorter by their time.

Where a host issues passes, it issues a stage's passes one after another from the beginning, and
does not wait for the GPU: while a stage waits for its input, its host gets ahead.

Axes: C candidates, P parts of the model in order; with S stages, part c S + s is chunk c of stage
s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostTimes:
    """The host's seconds (C, P) to issue a part's forward pass, and its backward pass.

    It issues them block by block; ``blocks`` (C, P) are at least one.
    """

    forward_s: Table
    backward_s: Table
    blocks: Table

    def issued_s(self, one: StagePass, part: int) -> Table | float:
        """The host's seconds (C) to issue a pass; gradients of weights come with their B."""
        if one.kind == "W":
            return 0.0
        of_kind = self.forward_s if one.kind == "F" else self.backward_s
        return np.asarray(of_kind[:, part])

    def least_s(self, one: StagePass, part: int, through: Table | float) -> Table:
        """Seconds (C) from when the host begins to issue a pass that computes for ``through``
        seconds, until this pass has ended: the GPU computes the last block after it was issued, and
        all blocks after the first was issued."""
        issued, blocks = self.issued_s(one, part), self.blocks[:, part]
        return np.maximum(issued + through / blocks, issued / blocks + through)

    def whole_s(self, micro_batches: Table, num_stages: int) -> Table:
        """Seconds (C) in which the slowest host issues all passes of so many micro-batches (C)."""
        both = self.forward_s + self.backward_s
        stages = [both[:, stage::num_stages].sum(axis=1) for stage in range(num_stages)]
        return np.asarray(np.maximum.reduce(stages) * micro_batches)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndTimes:
    """What comes once an iteration on each part (C, P).

    ``reductions_s`` are the seconds to reduce all gradients, as far as this begins in a part's last
    backward pass: a stage reduces one part after another, beside passes of other parts.
    ``steps_s`` are those of what a stage does for a part when all of its passes and reductions are
    over, one part after another.
    """

    reductions_s: Table
    steps_s: Table


def order_iteration_s(
    times: StageTimes,
    passes: tuple[StagePasses, ...],
    split: SplitTimes | None = None,
    *,
    host: HostTimes | None = None,
    at_end: EndTimes | None = None,
    steps_apart: bool = False,
) -> Table:
    """Seconds (C) of one iteration in which stages run these passes; with a ``host`` the times are
    those of the GPU alone, and ``at_end`` says what the ends of parts consist of.

    With ``steps_apart`` a stage begins the next iteration when its own passes are over, so the
    iteration takes as long as the longest of all stages, each from its own beginning.
    """
    if at_end is None:
        nothing = np.zeros_like(times.forward_s)
        at_end = EndTimes(reductions_s=nothing, steps_s=nothing)
    seconds = _PassSeconds(times, passes, split)
    ends: dict[PassKey, Table] = {}
    free: dict[int, Table] = {}
    begun: dict[int, Table | float] = {}
    issued: dict[int, Table | float] = {}
    reduced: dict[int, Table] = {}
    steps_s = np.zeros((len(times.forward_s), len(passes)))
    for one in in_turn(passes):
        own, through, extra = seconds.of(one)
        end = free[one.stage] + own if one.stage in free else through
        if one.phase == "first_forward":
            end = end + seconds.begin_s[seconds.part(one)]
        if one.needs is not None:
            comes = ends[one.needs] + seconds.sent_s(one)
            end = np.maximum(end, comes + through)
            if steps_apart and one.stage not in free:
                begun[one.stage] = comes - seconds.begin_s[seconds.part(one)]
        if host is not None:
            before, part = issued.get(one.stage, 0.0), seconds.part(one)
            end = np.maximum(end, before + host.least_s(one, part, through))
            issued[one.stage] = before + host.issued_s(one, part)
        end = np.asarray(end + extra)
        free[one.stage] = ends[one.key] = end
        if one.phase == "last_backward":
            part = seconds.part(one)
            own_steps_s = at_end.steps_s[:, part]
            rest = np.maximum(seconds.end_s[part] - own_steps_s, 0.0)
            queued = reduced.get(one.stage, 0.0) + at_end.reductions_s[:, part]
            reduced[one.stage] = np.maximum(end + rest, queued)
            steps_s[:, one.stage] += own_steps_s
    lengths = [
        np.maximum(end, reduced[stage]) + steps_s[:, stage] - begun.get(stage, 0.0)
        for stage, end in free.items()
    ]
    return np.asarray(np.maximum.reduce(lengths))


def order_bound_s(
    times: StageTimes, passes: Sequence[StagePasses], split: SplitTimes | None = None
) -> Table:
    """Seconds (C) that an iteration takes at least in such an order.

    A stage runs all its passes after the shortest way to the first of them, and before the shortest
    way on from the last.
    """
    seconds = _PassSeconds(times, passes, split)
    return np.asarray(np.maximum.reduce([seconds.stage_s(of_stage) for of_stage in passes]))


class _PassSeconds:
    """The seconds of passes (C): on their stage, and for a micro-batch that only passes through."""

    def __init__(
        self, times: StageTimes, passes: Sequence[StagePasses], split: SplitTimes | None
    ) -> None:
        parts = range(times.forward_s.shape[1])
        self.num_stages = len(passes)
        self.splits = [of_stage.splits_backward for of_stage in passes]
        of_part = [
            StageTimes(**{e.name: getattr(times, e.name)[:, part] for e in fields(times)})
            for part in parts
        ]
        self.begin_s = [one.begin_s for one in of_part]
        self.end_s = [one.end_s for one in of_part]
        self.crossed_s: list[Table] = [one.point_to_point_s / 2 for one in of_part]
        self.within_s = [(one.within_forward_s, one.within_backward_s) for one in of_part]
        self.own_s: dict[tuple[PassKind, int], tuple[Table, Table]] = {}
        for part, one in zip(parts, of_part, strict=True):
            self.own_s["F", part] = one.forward_s, one.through_forward_s
            backward = one.backward_s, one.through_backward_s
            if self.splits[part % self.num_stages]:
                assert split is not None, "an order with W asks for the times of its parts"
                weights_s, unhidden_s = split.weights_s[:, part], split.unhidden_s[:, part]
                left = [np.maximum(own - weights_s, 0.0) + unhidden_s for own in backward]
                backward = left[0], left[1]
                self.own_s["W", part] = weights_s, weights_s
            self.own_s["B", part] = backward

    def of(self, one: StagePass) -> tuple[Table | float, Table | float, Table | float]:
        """The seconds of a pass after the pass before it, its seconds after its input has come, and
        seconds that count in both cases."""
        part = self.part(one)
        own, through = self.own_s[one.kind, part]
        extra: Table | float = 0.0
        if one.phase in ("first_forward", "last_backward"):
            extra = self.within_s[part][one.kind != "F"]
        return own, through, extra

    def sent_s(self, one: StagePass) -> Table | float:
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
