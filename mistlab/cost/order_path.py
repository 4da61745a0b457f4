"""The time of an iteration in any order of passes: the longest path through all passes.

A pass ends at the later of two times: its whole time (t) after its stage's pass before has ended,
and its shorter time (l) after its input has come. The shorter time leaves out fetches before the
pass and work after it, for which only the stage's next pass waits. A pass is longer if it follows
one whose last gradients are still to be reduced (``mistlab.cost.backward_turns``). The first
forward pass of a chunk also waits for the chunk's step, and its last backward pass is followed by
the other work that comes once an iteration, as in ``mistlab.cost.pipeline``. Where gradients of
weights have their own passes, the backward pass is shorter by their time.

Where a host issues passes, it issues a stage's passes one after another from the beginning, and
does not wait for the GPU: while a stage waits for its input, its host gets ahead.

Axes: C candidates, P parts of the model in order (``mistlab.schedule.placement``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.backward_turns import TurnTimes
from mistlab.cost.pipeline import StageTimes
from mistlab.schedule.order_text import PassKind
from mistlab.schedule.placement import StageChunk
from mistlab.schedule.stage_passes import PassKey, StagePass, StagePasses, in_turn

Table = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitTimes:
    """The changes of backward passes that leave gradients of weights to passes of their own (C, P).

    ``weights_s`` are the seconds of the passes for weights, ``less_s`` those by which the backward
    passes are shorter.
    """

    weights_s: Table
    less_s: Table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostTimes:
    """The host's seconds (C, P) to issue a part's forward pass, and its backward pass.

    It issues them block by block; ``blocks`` (C, P) are at least one.
    """

    forward_s: Table
    backward_s: Table
    blocks: Table

    @classmethod
    def of(cls, times: StageTimes, layers: Whole) -> Self:
        """The hosts of parts with these times, and so many blocks (C, P)."""
        return cls(
            forward_s=times.issued_forward_s,
            backward_s=times.issued_backward_s,
            blocks=np.maximum(layers, 1),
        )


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
    turned: TurnTimes | None = None,
    steps_apart: bool = False,
) -> Table:
    """Seconds (C) of one iteration in which stages run these passes; with a ``host`` the times are
    those of the GPU alone, and ``at_end`` says what the ends of parts consist of.

    With ``steps_apart`` a stage begins the next iteration when its own passes are over, so the
    iteration takes as long as the longest of all stages, each from its own beginning.
    """
    candidates = len(times.forward_s)
    # One candidate alone is counted in numbers, which takes a tenth of the time of short columns.
    maximum: Callable[[Any, Any], Any] = max if candidates == 1 else np.maximum
    if at_end is None:
        nothing = np.zeros_like(times.forward_s)
        at_end = EndTimes(reductions_s=nothing, steps_s=nothing)
    seconds = _PassSeconds(times, passes, split)
    ends: dict[PassKey, Any] = {}
    free: dict[int, Any] = {}
    begun: dict[int, Any] = {}
    hosts = None if host is None else _HostSeconds(host)
    ends_of_stages = _StageEnds(at_end, seconds.end_s, hosts, maximum)
    turns = _Turns(turned, passes)
    for one in in_turn(passes):
        part = seconds.part(one)
        own, through, extra = seconds.of(one)
        left = seconds.left_s(one)
        own = own + turns.before_s(one, part)
        end = free[one.stage] + (own - left) if one.stage in free else through
        if one.phase == "first_forward":
            end = end + seconds.begin_s[part]
        if one.needs is not None:
            comes = ends[one.needs] + seconds.sent_s(one)
            end = maximum(end, comes + through)
            if steps_apart and one.stage not in free:
                begun[one.stage] = comes - seconds.begin_s[part]
        end, last_block_s = end + extra, 0.0
        if hosts is not None:
            since_first_s, last_block_s = hosts.least_s(one, part, through + extra)
            end = maximum(end, since_first_s)
        computed = end
        end = maximum(end, last_block_s)
        free[one.stage], ends[one.key] = end + left, end
        if one.phase == "first_forward":
            free[one.stage] = end + left + seconds.after_first_s[part]
        if one.phase == "last_backward":
            ends_of_stages.add(one.stage, part, computed + left, last_block_s)
    longest = ends_of_stages.longest_s(free, begun)
    return np.array([longest]) if candidates == 1 else np.asarray(longest)


def _columns(of_parts: Table) -> list[Any]:
    """The seconds of each part: a column (C), or a number if there is one candidate alone."""
    return of_parts[0].tolist() if len(of_parts) == 1 else [*of_parts.T]


class _Turns:
    """By how much passes are longer because gradients of the pass before them are reduced."""

    def __init__(self, times: TurnTimes | None, passes: Sequence[StagePasses]) -> None:
        self.is_any = times is not None
        if times is not None:
            self.of_forward, self.of_others = _columns(times.forward_s), _columns(times.backward_s)
        self.reduce = ["W" if of_stage.splits_backward else "B" for of_stage in passes]
        self.reducing: dict[int, int] = {}

    def before_s(self, one: StagePass, part: int) -> Any:
        """The seconds of a pass through a part, which comes next on its stage."""
        if not self.is_any:
            return 0.0
        reducing = self.reducing.pop(one.stage, None)
        if one.kind == self.reduce[one.stage]:
            self.reducing[one.stage] = part
        if reducing is None:
            return 0.0
        return (self.of_forward if one.kind == "F" else self.of_others)[reducing]


class _StageEnds:
    """What stages do after the last backward passes of their parts: reductions, then steps."""

    def __init__(
        self,
        at_end: EndTimes,
        end_s: Sequence[Any],
        hosts: "_HostSeconds | None",
        maximum: Callable[[Any, Any], Any],
    ) -> None:
        self.reductions_s, self.steps_s = _columns(at_end.reductions_s), _columns(at_end.steps_s)
        self.rests_s = [
            maximum(end - steps, 0.0) for end, steps in zip(end_s, self.steps_s, strict=True)
        ]
        self.blocks = None if hosts is None else hosts.blocks
        self.maximum = maximum
        self.reduced: dict[int, Any] = {}
        self.stepping_s: dict[int, Any] = {}

    def add(self, stage: int, part: int, computed: Any, last_block: Any) -> None:
        """A part's last backward pass has computed, if all of its blocks were issued at once. Under
        a host, its ``last_block`` has computed then, and others were reduced while the pass waited
        for its host."""
        queued = self.reduced.get(stage, 0.0) + self.reductions_s[part]
        self.reduced[stage] = self.maximum(computed + self.rests_s[part], queued)
        self.stepping_s[stage] = self.stepping_s.get(stage, 0.0) + self.steps_s[part]
        if self.blocks is not None:
            of_block_s = self.reductions_s[part] / self.blocks[part]
            last_s = of_block_s - self.maximum(of_block_s - self.rests_s[part], 0.0)
            self.reduced[stage] = self.maximum(self.reduced[stage], last_block + last_s)

    def longest_s(self, ends: Mapping[int, Any], begun: Mapping[int, Any]) -> Any:
        """Seconds until all stages are over, each since it has begun, whose last passes have
        ended."""
        longest: Any = 0.0
        for stage, end in ends.items():
            over = self.maximum(end, self.reduced[stage]) + self.stepping_s[stage]
            longest = self.maximum(longest, over - begun.get(stage, 0.0))
        return longest


class _HostSeconds:
    """The hosts of stages, each of which issues its stage's passes one after another."""

    def __init__(self, times: HostTimes) -> None:
        self.of_kind = {"F": _columns(times.forward_s), "B": _columns(times.backward_s)}
        self.blocks = _columns(times.blocks)
        self.issued_s: dict[int, Any] = {}

    def least_s(self, one: StagePass, part: int, through: Any) -> tuple[Any, Any]:
        """Seconds until a pass has ended that computes for ``through`` seconds and is issued next:
        the GPU computes all blocks after the first was issued, and the last block after it was
        issued. Gradients of weights are issued with their B.
        """
        before = self.issued_s.get(one.stage, 0.0)
        own = 0.0 if one.kind == "W" else self.of_kind[one.kind][part]
        self.issued_s[one.stage] = before + own
        blocks = self.blocks[part]
        return before + own / blocks + through, before + own + through / blocks


class _PassSeconds:
    """The seconds of passes (C): on their stage, and for a micro-batch that only passes through.

    Those of one candidate alone are numbers.
    """

    def __init__(
        self, times: StageTimes, passes: Sequence[StagePasses], split: SplitTimes | None
    ) -> None:
        candidates, count = times.forward_s.shape
        parts = range(count)
        placement = passes[0].placement
        self.num_stages, self.parts = len(passes), placement.parts
        self.splits = [passes[stage].splits_backward for stage in placement.stages]
        of_part = [times.of_stage(part) for part in parts]

        def plain(column: Table) -> Any:
            return column.item() if candidates == 1 else column

        self.begin_s = [plain(one.begin_s) for one in of_part]
        self.end_s = [plain(one.end_s) for one in of_part]
        self.after_first_s = [plain(one.after_first_s) for one in of_part]
        self.crossed_s = [plain(one.point_to_point_s / 2) for one in of_part]
        self.first_late_s = [plain(one.first_send_late_s) for one in of_part]
        self.within_s = [
            (plain(one.within_forward_s), plain(one.within_backward_s)) for one in of_part
        ]
        self.own_s: dict[tuple[PassKind, int], tuple[Any, Any]] = {}
        self.left: dict[tuple[PassKind, int], Any] = {}
        for part, one in zip(parts, of_part, strict=True):
            self.left["B", part] = 0.0 if self.splits[part] else plain(one.left_backward_s)
            self.own_s["F", part] = plain(one.forward_s), plain(one.through_forward_s)
            backward = one.backward_s, one.through_backward_s
            if self.splits[part]:
                assert split is not None, "an order with W asks for the times of its parts"
                weights_s, less_s = split.weights_s[:, part], split.less_s[:, part]
                # Reductions are left to the passes for weights.
                backward = backward[0], backward[1] + one.left_backward_s
                shorter = [np.maximum(own - less_s, 0.0) for own in backward]
                backward = shorter[0], shorter[1]
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

    def left_s(self, one: StagePass) -> Any:
        """The seconds for which a pass goes on when what it sends on has been computed."""
        return self.left.get((one.kind, self.part(one)), 0.0)

    def sent_s(self, one: StagePass) -> Any:
        """The seconds to send a pass its input."""
        source = one.comes_from
        if source is None or source.stage == one.stage:
            return 0.0
        lower = source if one.kind == "F" else one
        part = self.parts[StageChunk(lower.stage, lower.chunk)]
        late_s = self.first_late_s[part] if one.phase == "first_forward" else 0.0
        return self.crossed_s[part] + late_s

    def part(self, one: StagePass) -> int:
        """The part of the model that a pass goes through."""
        return self.parts[StageChunk(one.stage, one.chunk)]
