"""How long an iteration of a 1F1B pipeline takes, from what its stages take.

The answer is the longest chain of passes that wait for one another. A stage is occupied by G
forwards (tf) and G backwards (tb), of which it runs k - 1 ahead; a micro-batch that only passes
through waits for less of each (lf, lb: not for what the stage fetches before and finishes after).
Before its first forward a stage does what comes once an iteration (df), after its last backward the
rest of that (db); a part of these makes the pass itself longer (vf, vb). What the stages after one
mean to it are durations of two kinds, with the sends to them and back:

    around     from where a micro-batch leaves to where its gradient returns, if nothing else is on
    through    from where the first one leaves to where the last one's gradient returns

and a chain of the stage and those after it is one of

    it never waits               G t                                  t = tf + tb
    waits for the first          G t + around - (k - 1) tf
    waits for the last           G t + around - (k - 1) tb
    waits for both, G > k        G t + 2 around - (k - 1) t + rounds
    waits for what is between    l + through                          l = lf + lb

with vf for the first micro-batch and vb for the last. Between these two a chain may wait for other
micro-batches too, one after another: the forward that follows a gradient is that of the k-th
micro-batch after it. Each such round takes around - (k - 1) t longer than what the stage does
meanwhile, so a steady pipeline waits for its sends. Where one boundary between stages is slower
than the others, rounds of its two stages alone can be longer.

Chains begin where a micro-batch arrives, or with a stage's own df - vf at the iteration's
beginning; they end where a gradient is sent back, or with a stage's own db - vb. So the longest are
kept for each kind of beginning and end. For S equal stages with equal sends c and no extras the
iteration takes exactly (G + S - 1) t + 2 c (S + G - 2 - ceil((G - 1) / S)), without sends the
published (G - 1) max t + sum t (Mist, EuroSys 2025), which is longer for all others
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
        """What comes before the first micro-batch passes through, whenever that is."""
        first_s = self.forward_s + self.delta_forward_s
        return np.asarray(np.maximum(first_s - self.through_forward_s - self.within_forward_s, 0.0))

    @property
    def end_s(self) -> Table:
        """What comes after the last backward, whatever is done meanwhile."""
        return np.asarray(np.maximum(self.delta_backward_s - self.within_backward_s, 0.0))

    def of_stage(self, stage: int) -> Self:
        """One stage of several (C)."""
        return type(self)(**{e.name: getattr(self, e.name)[:, stage] for e in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chains:
    """The longest chains of a stage and those after it (C).

    ``around`` is of a steady micro-batch, ``around_first`` of the first and ``around_last`` of the
    last; ``nearest`` is around the foremost stage alone. Chains that begin with an extra are named
    ``begun``, those that end with one ``ended``, the one that does both is the ``whole``. Each
    grows with those of the stages after it and with the times of every stage.
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
        """The same from where a stage in front sends to these, and its gradients return."""
        crossed_s = (0.0, there_and_back_s / 2, there_and_back_s)
        return type(self)(
            **{name: getattr(self, name) + crossed_s[count] for name, count in CROSSINGS.items()}
        )


# How often chains cross over to a stage in front, both ways counted.
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
            # The last stage sends to no other.
            stage = replace(stage, point_to_point_s=np.zeros(candidates))
        chains = prepended(stage, chains, micro_batches, after + 1)
    return chains.whole


def no_stages(candidates: int) -> Chains:
    """What follows the last stage."""
    return Chains(**{entry.name: np.zeros(candidates) for entry in fields(Chains)})


def prepended(stage: StageTimes, after: Chains, micro_batches: Whole, stages: int) -> Chains:
    """The chains of a stage and those after it, ``stages`` in all."""
    after = after.from_in_front(stage.point_to_point_s)
    begin, end = stage.begin_s, stage.end_s
    nothing = np.zeros_like(begin)
    forward, backward = stage.through_forward_s, stage.through_backward_s
    first, last = forward + stage.within_forward_s, backward + stage.within_backward_s
    own = _Own(stage, after, micro_batches, stages)
    # Until the stage's first backward begins, and from when its last forward has ended.
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
    # One after another: a table of all takes longer to put together than to go through.
    return reduce(np.maximum, chains)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounds:
    """How often a chain goes round between the first micro-batch's round and the last one's (C).

    M forwards of the stage are left to choose from, of which a round takes as many as it has
    stages. So there are ``near`` rounds of two stages, or ``far`` rounds of all k. As M is seldom
    a multiple of k, as many of these as needed are ``nested``: the next stage goes round once more
    inside of another round, which takes k - 1.
    """

    near: Whole
    far: Whole
    nested: Whole

    @classmethod
    def of(cls, micro_batches: Whole, in_flight: Whole) -> Self:
        """The rounds of stages that hold so many of their micro-batches at once."""
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
    """What a stage does between any two of its waits, the first forward and the last backward as
    long as they are."""

    def __init__(self, stage: StageTimes, after: Chains, micro_batches: Whole, stages: int) -> None:
        in_flight = np.minimum(micro_batches, stages)
        forward, backward = stage.forward_s, stage.backward_s
        alternating = micro_batches - in_flight
        pairs, alone = alternating * (forward + backward), in_flight - 1
        # For a pass that its stage waited for, whatever else it needs is there.
        first = stage.through_forward_s + stage.within_forward_s
        last = stage.through_backward_s + stage.within_backward_s
        self.from_first_backward = pairs + alone * backward + last
        self.to_last_forward = first + alone * forward + pairs
        never = self.to_last_forward + in_flight * backward + stage.within_backward_s
        # With fewer micro-batches than stages, the last forward comes back with the first gradient.
        back_at_once = self.to_last_forward + after.nearest + self.from_first_backward
        self.all = np.where(stages > micro_batches, _longest(never, back_at_once), never)
        # Without passes that alternate, no forward waits for a backward.
        between = pairs + self._rounds(stage, after, micro_batches, in_flight)
        self.between = np.where(alternating > 0, between, -np.inf)

    def _rounds(
        self, stage: StageTimes, after: Chains, micro_batches: Whole, in_flight: Whole
    ) -> Table:
        """What rounds take beyond the passes that the stage does meanwhile."""
        counts = Rounds.of(micro_batches, in_flight)
        both = stage.forward_s + stage.backward_s
        # Nothing else is on while the next stage alone is waited for.
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
