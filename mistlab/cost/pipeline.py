"""The time of an iteration of a 1F1B pipeline, from the times of its stages.

It is the time of the longest chain of passes that wait for one another. A stage is occupied by G
forwards (tf each) and G backwards (tb each), and runs k - 1 forwards ahead. A micro-batch that only
passes through waits for less of each pass (lf, lb): not for fetches before it and work after it.
Work that comes once an iteration is done before a stage's first forward (df) and after its last
backward (db); a part of it makes the pass itself longer (vf, vb). For a stage, the stages after it
are described by times of two kinds, which include the sends to them and back:

    around     from where a micro-batch leaves to where its gradient returns, if nothing else is on
    through    from where the first one leaves to where the last one's gradient returns

A chain of the stage and the stages after it is one of

    it never waits               G t                                  t = tf + tb
    waits for the first          G t + around - (k - 1) tf
    waits for the last           G t + around - (k - 1) tb
    waits for both, G > k        G t + 2 around - (k - 1) t + rounds
    waits for what is between    l + through                          l = lf + lb

plus vf for the first micro-batch and vb for the last. In between a chain may wait for other
micro-batches too, one after another: the forward after a gradient is that of the k-th micro-batch
after it. Each such round takes around - (k - 1) t longer than the stage's own work meanwhile, so a
steady pipeline waits for its sends. If one boundary between stages is slower than the others,
rounds of its two stages alone can be longer.

A chain begins when a micro-batch arrives, or with a stage's own df - vf at the beginning of the
iteration. It ends when a gradient is sent back, or with a stage's own db - vb. So the longest chain
is kept for each kind of beginning and end. For S equal stages with equal sends c and no extras the
iteration takes exactly (G + S - 1) t + 2 c (S + G - 2 - ceil((G - 1) / S)). Without sends this is
the published (G - 1) max t + sum t (Mist, EuroSys 2025), which is too long for all other pipelines
(docs/decisions/0008-pipeline-objective.md).

Axes: C candidates, S stages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Self

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Seconds of one stage (C), or of several (C, S), as in ``StageSeconds``."""

    forward_s: Table
    backward_s: Table
    through_forward_s: Table
    through_backward_s: Table
    delta_forward_s: Table
    delta_backward_s: Table
    within_forward_s: Table
    within_backward_s: Table
    point_to_point_s: Table

    def __post_init__(self) -> None:
        shapes = {getattr(self, entry.name).shape for entry in fields(self)}
        assert len(shapes) == 1, f"tables of unlike shapes: {shapes}"

    @property
    def begin_s(self) -> Table:
        """Work before the first micro-batch passes through, whenever it arrives."""
        first_s = self.forward_s + self.delta_forward_s
        return np.asarray(np.maximum(first_s - self.through_forward_s - self.within_forward_s, 0.0))

    @property
    def end_s(self) -> Table:
        """Work after the last backward, which delays no other stage."""
        return np.asarray(np.maximum(self.delta_backward_s - self.within_backward_s, 0.0))

    def of_stage(self, stage: int) -> Self:
        """One stage of several (C)."""
        return type(self)(**{e.name: getattr(self, e.name)[:, stage] for e in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chains:
    """The longest chains of a stage and all stages after it (C).

    ``around`` is for a steady micro-batch, ``around_first`` for the first and ``around_last`` for
    the last; ``nearest`` is around the foremost stage alone. A chain that begins with an extra is
    called ``begun``, a chain that ends with an extra ``ended``, and a chain that does both
    ``whole``. No chain becomes shorter if a chain of the stages after it, or a time of a stage,
    becomes longer.
    """

    nearest: Table
    around: Table
    around_first: Table
    around_last: Table
    around_begun: Table
    around_ended: Table
    through: Table
    through_begun: Table
    through_ended: Table
    whole: Table

    def from_in_front(self, there_and_back_s: Table) -> Self:
        """These chains as a stage in front sees them, with its sends to them and back."""
        crossed_s = (0.0, there_and_back_s / 2, there_and_back_s)
        return type(self)(
            **{name: getattr(self, name) + crossed_s[count] for name, count in CROSSINGS.items()}
        )


# How often each chain crosses the boundary to the stage in front, in both directions.
CROSSINGS: Mapping[str, int] = {
    **{entry.name: 2 for entry in fields(Chains)},
    **dict.fromkeys(("around_begun", "around_ended", "through_begun", "through_ended"), 1),
    "whole": 0,
}


def iteration_s(times: StageTimes, micro_batches: Whole) -> Table:
    """Seconds (C) of one iteration with ``micro_batches`` (C)."""
    candidates, stages = times.forward_s.shape
    chains = no_stages(candidates)
    for after in range(stages):
        stage = times.of_stage(stages - 1 - after)
        if after == 0:
            # The last stage sends nothing on.
            stage = replace(stage, point_to_point_s=np.zeros(candidates))
        chains = prepended(stage, chains, micro_batches, after + 1)
    return chains.whole


def no_stages(candidates: int) -> Chains:
    """The chains after the last stage, all of length zero."""
    return Chains(**{entry.name: np.zeros(candidates) for entry in fields(Chains)})


def prepended(stage: StageTimes, after: Chains, micro_batches: Whole, stages: int) -> Chains:
    """The chains of a stage and the stages after it, ``stages`` in all."""
    after = after.from_in_front(stage.point_to_point_s)
    begin, end = stage.begin_s, stage.end_s
    nothing = np.zeros_like(begin)
    forward, backward = stage.through_forward_s, stage.through_backward_s
    first, last = forward + stage.within_forward_s, backward + stage.within_backward_s
    own = _Own(stage, after, micro_batches, stages)
    # The time until the stage's first backward begins, and the time from its last forward's end.
    there, back = first + after.around_first, after.around_last + last
    there_begun = _longest(begin + there, after.around_begun)
    back_ended = _longest(back + end, after.around_ended)
    through_begun = _longest(begin + first + after.through, after.through_begun)
    through_ended = _longest(after.through + last + end, after.through_ended)
    return Chains(
        nearest=forward + backward + np.where(stages > micro_batches, after.nearest, 0.0),
        around=forward + after.around + backward,
        around_first=first + after.around_first + backward,
        around_last=forward + after.around_last + last,
        around_begun=_longest(begin + first + after.around_first, after.around_begun) + backward,
        around_ended=forward + _longest(after.around_last + last + end, after.around_ended),
        through=_longest(own.longest(nothing, there, back, nothing), first + after.through + last),
        through_begun=_longest(
            own.longest(begin, there_begun, back, nothing), through_begun + last
        ),
        through_ended=_longest(own.longest(nothing, there, back_ended, end), first + through_ended),
        whole=_longest(
            own.longest(begin, there_begun, back_ended, end),
            through_begun + last + end,
            begin + first + after.through_ended,
            after.whole,
        ),
    )


def _longest(*chains: Table) -> Table:
    # Pair by pair: stacking all tables would take longer than comparing them.
    return reduce(np.maximum, chains)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounds:
    """How often a chain goes round between the rounds of the first and the last micro-batch (C).

    Of the stage's forwards M are left, and a round takes as many of them as it has stages. So there
    are ``near`` rounds of two stages, or ``far`` rounds of all k stages. M is seldom a multiple of
    k, so some of these rounds are ``nested``: in such a round the next stage goes round once more,
    and the round takes k - 1 forwards.
    """

    near: Whole
    far: Whole
    nested: Whole

    @classmethod
    def of(cls, micro_batches: Whole, in_flight: Whole) -> Self:
        """The rounds of stages that hold ``in_flight`` of their micro-batches at once."""
        forwards = np.maximum(micro_batches - in_flight - 1, 0)
        rounds = -(-forwards // in_flight)
        nested = rounds * in_flight - forwards
        fits = nested <= rounds
        return cls(
            near=forwards // 2,
            far=np.where(in_flight > 2, np.where(fits, rounds - nested, forwards // in_flight), 0),
            nested=np.where((in_flight > 2) & fits, nested, 0),
        )


class _Own:
    """The work of a stage between any two of its waits, including longer first and last passes."""

    def __init__(self, stage: StageTimes, after: Chains, micro_batches: Whole, stages: int) -> None:
        in_flight = np.minimum(micro_batches, stages)
        forward, backward = stage.forward_s, stage.backward_s
        alternating = micro_batches - in_flight
        pairs, alone = alternating * (forward + backward), in_flight - 1
        # When a stage waited for a pass, everything else that the pass needs is there.
        first = stage.through_forward_s + stage.within_forward_s
        last = stage.through_backward_s + stage.within_backward_s
        self.from_first_backward = pairs + alone * backward + last
        self.to_last_forward = first + alone * forward + pairs
        never = self.to_last_forward + in_flight * backward + stage.within_backward_s
        # With fewer micro-batches than stages, the last forward passes before the first gradient
        # returns.
        back_at_once = self.to_last_forward + after.nearest + self.from_first_backward
        self.all = np.where(stages > micro_batches, _longest(never, back_at_once), never)
        # If passes do not alternate, no forward waits for a backward.
        between = pairs + self._rounds(stage, after, micro_batches, in_flight)
        self.between = np.where(alternating > 0, between, -np.inf)

    def _rounds(
        self, stage: StageTimes, after: Chains, micro_batches: Whole, in_flight: Whole
    ) -> Table:
        """The time of rounds beyond the passes that the stage does meanwhile."""
        counts = Rounds.of(micro_batches, in_flight)
        both = stage.forward_s + stage.backward_s
        # While the stage waits for the next stage alone, nothing else runs.
        near = after.nearest - both - (stage.backward_s - stage.through_backward_s)
        far = after.around - (in_flight - 1) * both
        nested = far - stage.point_to_point_s
        return _longest(
            np.zeros_like(both), counts.near * near, counts.far * far + counts.nested * nested
        )

    def longest(self, begins: Table, there: Table, back: Table, ends: Table) -> Table:
        """The longest chain that waits at this stage."""
        return _longest(
            begins + self.all + ends,
            there + self.from_first_backward + ends,
            begins + self.to_last_forward + back,
            there + self.between + back,
        )
