"""How long an iteration of a 1F1B pipeline takes, from what its stages take.

The answer is the longest chain of passes that wait for one another. A stage has G forwards (tf) and
G backwards (tb) to do, of which it runs k - 1 ahead; before its first forward it does what comes
once an iteration (df), after its last backward the rest of that (db). What the stages after it mean
to it are two durations:

    around     from where a micro-batch leaves to where its gradient returns, if nothing else is on
    through    from where the first one leaves to where the last one's gradient returns

and a chain of the stage and those after it is one of

    it never waits               G t                                  t = tf + tb
    waits for the first          G t + around - (k - 1) tf
    waits for the last           G t + around - (k - 1) tb
    waits for both, G > k        G t + 2 around - (k - 1) t
    waits for what is between    t + through

Chains begin where a micro-batch arrives, or with a stage's own df at the iteration's beginning;
they end where a gradient is sent back, or with a stage's own db. So the longest are kept for each
kind of beginning and end. Transfers that no stage waits for are added once each. For equal stages
without extras this is the published (G - 1) max t + sum t (Mist, EuroSys 2025), which is longer for
all others (docs/decisions/0008-pipeline-objective.md).

Axes: C candidates, S stages.
"""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Seconds of one stage (C), or of several (C, S); ``point_to_point_s`` is to the next stage and
    back."""

    forward_s: Table
    backward_s: Table
    delta_forward_s: Table
    delta_backward_s: Table
    point_to_point_s: Table

    def __post_init__(self) -> None:
        shapes = {getattr(self, entry.name).shape for entry in fields(self)}
        assert len(shapes) == 1, f"tables of unlike shapes: {shapes}"

    def of_stage(self, stage: int) -> Self:
        """One stage of several (C)."""
        return type(self)(**{e.name: getattr(self, e.name)[:, stage] for e in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chains:
    """The longest chains of a stage and those after it (C).

    Those that begin with an extra are named ``begun``, those that end with one ``ended``, the one
    that does both is the ``whole``. Each grows with those of the stages after it and with the times
    of every stage.
    """

    around: Table
    around_begun: Table
    around_ended: Table
    through: Table
    through_begun: Table
    through_ended: Table
    whole: Table
    point_to_point: Table

    @property
    def iteration_s(self) -> Table:
        """What an iteration of these stages takes (C)."""
        return self.whole + self.point_to_point


def iteration_s(times: StageTimes, micro_batches: NDArray[np.int64]) -> Table:
    """Seconds (C) of one iteration with ``micro_batches`` (C)."""
    candidates, stages = times.forward_s.shape
    chains = no_stages(candidates)
    for after in range(stages):
        stage = times.of_stage(stages - 1 - after)
        chains = prepended(stage, chains, micro_batches, np.minimum(micro_batches, after + 1))
    # The last stage has no next one.
    return chains.iteration_s - times.point_to_point_s[:, -1]


def no_stages(candidates: int) -> Chains:
    """What follows the last stage."""
    return Chains(**{entry.name: np.zeros(candidates) for entry in fields(Chains)})


def prepended(
    stage: StageTimes, after: Chains, micro_batches: NDArray[np.int64], in_flight: NDArray[np.int64]
) -> Chains:
    """The chains of a stage and those after it; ``in_flight`` is how many micro-batches it holds at
    once."""
    forward, backward = stage.forward_s, stage.backward_s
    begin, end = np.maximum(stage.delta_forward_s, 0.0), np.maximum(stage.delta_backward_s, 0.0)
    nothing = np.zeros_like(begin)

    def begun(plain: Table, with_begin: Table) -> Table:
        return np.maximum(begin + forward + plain, with_begin)

    def ended(plain: Table, with_end: Table) -> Table:
        return np.maximum(plain + backward + end, with_end)

    # Until the stage's first backward begins, and from when its last forward has ended.
    there, back = forward + after.around, after.around + backward
    there_begun = begun(after.around, after.around_begun)
    back_ended = ended(after.around, after.around_ended)
    through_begun = begun(after.through, after.through_begun)
    through_ended = ended(after.through, after.through_ended)
    own = _Own(stage, micro_batches, in_flight)
    return Chains(
        around=there + backward,
        around_begun=there_begun + backward,
        around_ended=forward + back_ended,
        through=_longest(
            own.longest(nothing, there, back, nothing), forward + after.through + backward
        ),
        through_begun=_longest(
            own.longest(begin, there_begun, back, nothing), through_begun + backward
        ),
        through_ended=_longest(
            own.longest(nothing, there, back_ended, end), forward + through_ended
        ),
        whole=_longest(
            own.longest(begin, there_begun, back_ended, end),
            through_begun + backward + end,
            begin + forward + after.through_ended,
            after.whole,
        ),
        point_to_point=after.point_to_point + stage.point_to_point_s,
    )


def _longest(*chains: Table) -> Table:
    return np.asarray(np.maximum.reduce(chains))


class _Own:
    """What a stage does between any two of its waits."""

    def __init__(
        self, stage: StageTimes, micro_batches: NDArray[np.int64], in_flight: NDArray[np.int64]
    ) -> None:
        alternating = micro_batches - in_flight
        pairs = alternating * (stage.forward_s + stage.backward_s)
        self.all = micro_batches * (stage.forward_s + stage.backward_s)
        self.from_first_backward = pairs + in_flight * stage.backward_s
        self.to_last_forward = in_flight * stage.forward_s + pairs
        # Without passes that alternate, no forward waits for a backward.
        self.between = np.where(alternating > 0, pairs, -np.inf)

    def longest(self, begins: Table, there: Table, back: Table, ends: Table) -> Table:
        """The longest chain that waits at this stage."""
        return _longest(
            begins + self.all + ends,
            there + self.from_first_backward + ends,
            begins + self.to_last_forward + back,
            there + self.between + back,
        )
