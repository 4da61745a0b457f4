"""Computes the iteration time of a 1F1B pipeline from the times of its stages, and how much
exchanges of weights between replicas lengthen iterations.

The recurrence over stages is in ``mistlab.cost.chains``.

Axes: C candidates, S stages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Generic, Self

import numpy as np

from mistlab.core.arrays import Floats, Ints
from mistlab.cost.chains import (
    ISSUED,
    PASSES,
    Algebra,
    Chains,
    ColumnAlgebra,
    Counts,
    Length,
    Numbers,
    PassLengths,
    chained,
)
from mistlab.cost.order_times import StagesOnGroups, task_seconds
from mistlab.cost.stage import StageTimeModel
from mistlab.job.prediction import Prediction
from mistlab.plan.plan import Plan
from mistlab.stages.stage_batch import SENDS, StageBatch, StageTimes


def times_used(times: StageTimes) -> Sequence[str]:
    """The names of the stage times that the iteration time depends on; those of hosts are left out
    if no pass can be host-bound.
    """
    return PASSES if times.issued_backward_s.any() else _WITHOUT_HOST


def passes_of(times: StageTimes) -> PassLengths[Floats]:
    """The stage times that the critical path of a pipeline is computed from."""
    return PassLengths(**{name: getattr(times, name) for name in times_used(times)})


_WITHOUT_HOST = tuple(name for name in PASSES if name not in ISSUED)


def iteration_s(times: StageTimes, micro_batches: Ints) -> Floats:
    """The seconds of one iteration of each pipeline with ``micro_batches`` micro-batches."""
    candidates = len(times.forward_s)
    tables = {name: np.ascontiguousarray(getattr(times, name).T) for name in times_used(times)}
    # The last stage has no next stage to send to.
    for name in SENDS:
        tables[name] = tables[name].copy()
        tables[name][-1] = 0.0
    if candidates == 1:
        numbers = {name: table[:, 0].tolist() for name, table in tables.items()}
        return np.array([_whole_s(Numbers(), numbers, int(micro_batches[0]))])
    are_alike = bool((micro_batches == micro_batches[0]).all()) if candidates else False
    counted = int(micro_batches[0]) if are_alike else micro_batches
    columns = {name: list(table) for name, table in tables.items()}
    return _whole_s(ColumnAlgebra(candidates), columns, counted)


def _whole_s(
    algebra: Algebra[Length], tables: Mapping[str, Sequence[Length]], micro_batches: int | Ints
) -> Length:
    """The length of the longest chain of dependent passes through each pipeline.

    Each of ``tables`` has an entry for each stage.
    """
    stages = len(tables["forward_s"])
    chains = Chains.of_nothing(algebra.nothing)
    for after in range(stages):
        lengths = {name: table[stages - 1 - after] for name, table in tables.items()}
        chains = chained(
            algebra, PassLengths(**lengths), chains, Counts.of(micro_batches, after + 1)
        )
    return chains.whole


def no_stages(candidates: int) -> Chains[Floats]:
    """Chains of passes of zero length, to which stages are added from the last one on."""
    return Chains.of_nothing(np.zeros(candidates))


def prepended(
    stage: StageTimes, after: Chains[Floats], micro_batches: int | Ints, stages: int
) -> Chains[Floats]:
    """Extend the longest chains of passes of each pipeline by one more stage in front, the first of
    ``stages``.
    """
    columns = ColumnAlgebra(len(stage.forward_s))
    return chained(columns, passes_of(stage), after, Counts.of(micro_batches, stages))


# Computes the iteration time by the formula of the Mist paper (EuroSys 2025), stage by stage.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Published(Generic[Length]):
    """The terms of the Mist paper's iteration time for a stage and all stages after it.

    They are the slowest stage's time, the sum of the stages' times, and the longest extra time that
    no stage in front hides.

    Mist (EuroSys 2025) models a pipeline of G micro-batches as

    (G - 1) max t + sum t + max_i (d_i - sum of t_j over the stages j in front of i)

    where t is the time of a steady-state micro-batch in a stage, and d the extra time of the first
    and the last one, which stages in front hide in part. This package's own model is
    ``mistlab.cost.chains``; the objective is kept so that the published search can be compared.
    """

    slowest: Length
    together: Length
    unhidden: Length

    @classmethod
    def of_nothing(cls, nothing: Length) -> Self:
        """The terms of the Mist paper's iteration time after the last stage: zero."""
        return cls(slowest=nothing, together=nothing, unhidden=nothing)

    def whole(self, micro_batches: int) -> Length:
        """The iteration time of a pipeline of these stages by the formula of the Mist paper."""
        total: Length = self.slowest * (micro_batches - 1) + self.together + self.unhidden
        return total


def steady_s(stage: PassLengths[Floats]) -> Floats:
    """The seconds of a steady-state micro-batch in a stage: its passes, or the host's time to issue
    them if that is longer, and its sends, during which the stage computes nothing in this model.
    """
    both_s = stage.forward_s + stage.backward_s
    if stage.issued_forward_s is not None and stage.issued_backward_s is not None:
        both_s = np.maximum(both_s, stage.issued_forward_s + stage.issued_backward_s)
    return np.asarray(both_s + stage.point_to_point_s)


def extra_s(stage: PassLengths[Length]) -> Length:
    """The seconds that the first and the last micro-batch take in a stage beyond steady ones."""
    total: Length = (
        stage.begin_s
        + (stage.through_forward_s - stage.forward_s)
        + stage.within_forward_s
        + stage.after_first_s
        + stage.within_backward_s
        + stage.end_s
    )
    return total


def in_front(
    algebra: Algebra[Length], own_s: Length, own_extra_s: Length, after: Published[Length]
) -> Published[Length]:
    """The terms of the Mist paper's iteration time with one more stage in front.

    The stage takes ``own_s`` for a steady micro-batch, and ``own_extra_s`` for first and last ones.
    """
    return Published(
        slowest=algebra.longest("slowest", after.slowest, own_s),
        together=after.together + own_s,
        unhidden=algebra.longest("unhidden", own_extra_s, after.unhidden - own_s),
    )


# Splits the iteration time of a plan into four terms that add up to it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The four terms that add up to an iteration's time, or the differences between the terms of
    two iterations.

    They are the slowest stage's computation and exposed communication over all micro-batches, the
    other stages that a micro-batch passes through, and the rest: first and last micro-batches, the
    optimizer step, sends, and costs of the iteration as a whole.
    """

    computation_s: float
    exposed_communication_s: float
    other_stages_s: float
    rest_s: float

    @classmethod
    def of(cls, plan: Plan, prediction: Prediction) -> Self:
        """Split a plan's predicted iteration time into the four terms."""
        slowest = prediction.stages[slowest_stage(prediction)]
        exposed_s = plan.micro_batches * slowest.exposed_communication_s
        steady_s = plan.micro_batches * slowest.stable_s
        others_s = sum(stage.stable_s for stage in prediction.stages) - slowest.stable_s
        return cls(
            computation_s=steady_s - exposed_s,
            exposed_communication_s=exposed_s,
            other_stages_s=others_s,
            rest_s=prediction.iteration_s - steady_s - others_s,
        )

    def __sub__(self, other: Self) -> Self:
        names = [entry.name for entry in fields(self)]
        return type(self)(**{name: getattr(self, name) - getattr(other, name) for name in names})


def slowest_stage(prediction: Prediction) -> int:
    """The index of the stage whose steady micro-batches take longest."""
    stable = [stage.stable_s for stage in prediction.stages]
    return stable.index(max(stable))


# Computes how much exchanges of weights between replicas lengthen iterations if they overlap with
# further steps: by the exposed part, averaged over the steps between two exchanges.


def exchanges_s(model: StageTimeModel, batch: StageBatch) -> Floats:
    """The seconds in which each stage exchanges all of its weights with its replicas once."""
    counts = model.tasks.types.counts(batch.columns)
    return np.asarray((counts * task_seconds(model, batch).averaged_s()).sum(axis=0))


def asynchronous_exchanges_s(model: StagesOnGroups, plans: Sequence[Plan]) -> Floats:
    """The longest exchange of a rank with asynchronous parameter servers, and the longest time for
    which a server is busy with all ranks' messages, in seconds for each plan.

    All plans have equally many stages; the result is (2, plans).
    """

    def of_stages(stage_model: StageTimeModel, batch: StageBatch) -> Floats:
        counts = stage_model.tasks.types.counts(batch.columns)
        return np.stack(
            [
                (counts * each).sum(axis=0)
                for each in task_seconds(stage_model, batch).asynchronous_s()
            ]
        )

    exchanges_s = model.by_group(of_stages, StageBatch.of_plans(plans))
    return np.asarray(exchanges_s.reshape(2, len(plans), -1).max(axis=-1))


def with_late_exchanges(
    model: StagesOnGroups, plans: Sequence[Plan], iterations_s: Floats
) -> Floats:
    """The mean iteration time of each plan with exchanges of weights between replicas, from the
    times without them.

    All plans have equally many stages.
    """
    how = model.tasks.workload.reduction
    if not how.is_beside_steps:
        return iterations_s
    if how.asynchronous:
        both_s, busy_s = asynchronous_exchanges_s(model, plans)
        pairs = zip(iterations_s, both_s, busy_s, strict=True)
        return np.array([how.asynchronous_step_s(*one) for one in pairs])
    whole_s = model.by_group(exchanges_s, StageBatch.of_plans(plans)).reshape(len(plans), -1)
    longest_s = whole_s.max(axis=1) / how.fragments
    late_s = [how.mean_step_s(*both) for both in zip(iterations_s, longest_s, strict=True)]
    return np.array(late_s)
