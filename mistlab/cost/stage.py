"""The times of stages, for columns of candidates, by summing the slots of a schedule.

The length of a slot depends on a candidate's strategy (degrees, ZeRO level, offload ratios) and on
the types of its layers, not on the number of layers. The number of slots of each kind depends only
on the layers. So lengths are computed once for each distinct strategy, and slots are counted once
for each distinct set of layers. A candidate's time is the product of lengths and counts.

Axes: C candidates, S distinct strategies, J distinct sets of layers, K kinds of slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.beside_sends import STEADY
from mistlab.cost.host_waits import with_host
from mistlab.cost.pass_seconds import (
    PassSeconds,
    pass_seconds,
    reduces_in_place,
    split_pass_seconds,
)
from mistlab.cost.slot_lengths import HERE, Kinds, Lengths, Sums, of_layers
from mistlab.cost.tasks import TaskModel, TaskSeconds, task_columns
from mistlab.cost.weight_gradients import weight_gradients_s
from mistlab.schedule import placement
from mistlab.schedule.slot_kinds import slot_counts
from mistlab.schedule.slot_table import IN_TURN
from mistlab.symbolic.distinct import Distinct, distinct_rows
from mistlab.values.stages import StageBatch, StageSeconds

Values = NDArray[np.float64]

# With more products of strategies and layers for each candidate than this, candidates are summed
# one by one.
DENSE = 8
ROWS_AT_ONCE = 8192
# Up to so many candidates, as in plans, a candidate's sum does not depend on the others.
FEW_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimeModel:
    """The times of a workload's stages on a cluster under one engine's schedule.

    With ``is_least`` they are times that the same stages with larger positive ratios, and the same
    ratios of zero, do not undercut either. Unless a stage ``awaits_host``, they leave out the time
    in which a host issues passes.
    """

    tasks: TaskModel
    is_least: bool = False
    awaits_host: bool = True

    def slots(self, batch: StageBatch) -> tuple[Distinct, Kinds, TaskSeconds, Sums]:
        """The distinct strategies of candidates, the kinds of their slots, the times of tasks, and
        the function that sums lengths of slots over stages."""
        names = task_columns()
        strategies = distinct_rows([batch.value(name) for name in names])
        types = self.tasks.types
        stages = distinct_rows([batch.value(name) for name in types.columns])
        runs = types.runs(dict(zip(types.columns, stages.columns, strict=True)))
        kinds, counts = slot_counts(*runs, self.tasks.template.depth)
        seconds = self.tasks.seconds(dict(zip(names, strategies.columns, strict=True)))

        def summed(lengths: Sequence[Lengths]) -> Sequence[Values]:
            if len(batch) <= FEW_ROWS:
                return _summed_alike(lengths, counts, strategies, stages)
            return [_summed(one, counts[where], strategies, stages) for one, where in lengths]

        return strategies, kinds, seconds, summed

    def __call__(self, batch: StageBatch) -> StageSeconds:
        """The times of each candidate."""
        strategies, kinds, seconds, summed = self.slots(batch)
        everywhere = np.full(len(kinds), True)
        computing, step_s = summed(
            [(_computing(seconds, tasks, kinds), everywhere) for tasks in (("F", "B"), ("S",))]
        )
        ways = seconds.receive_s[strategies.index], seconds.send_s[strategies.index]
        received = np.where(batch.has_embedding, 0.0, _sent_over(batch.comes_from, *ways))
        sent = np.where(batch.has_head, 0.0, _sent_over(batch.goes_to, *ways))
        sends = self.tasks.template.sends
        blocking, meeting = float(sends in IN_TURN), float(sends == "meeting")
        overlapped = 1 - blocking
        is_beside = bool((overlapped * (sent + received)).any())
        passes = pass_seconds(seconds, kinds, summed, sends=is_beside, is_least=self.is_least)
        if self.awaits_host and self.tasks.host is not None:
            passes = with_host(passes, self.tasks.host, batch, self.tasks.cluster)
        in_place = reduces_in_place(seconds)[strategies.index]
        times: Mapping[str, Values] = {
            **_times(
                passes,
                blocking * received,
                blocking * sent,
                meeting,
                in_place,
                batch,
            ),
            "point_to_point_s": 2 * overlapped * sent,
        }
        exposed_s = times["forward_s"] + times["backward_s"] - computing
        if is_beside:
            times = _beside_sends(times, passes, sent, received, in_place & (not self.is_least))
        # The first stage ends last, so it has the time of tied tables.
        ties = batch.has_embedding * (1 - batch.shares_table) > batch.has_head
        tied = np.where(ties, seconds.tied_s[strategies.index], 0.0)
        return StageSeconds(
            **{
                **times,
                "delta_backward_s": times["delta_backward_s"] + tied,
            },
            exposed_communication_s=exposed_s,
            step_s=step_s,
        )


def split_seconds(model: StageTimeModel, batch: StageBatch) -> Values:
    """Seconds (2, C) of passes for gradients of weights, and by which backward passes are shorter
    without them."""
    _, kinds, seconds, summed = model.slots(batch)
    weights_s = weight_gradients_s(seconds)
    found = split_pass_seconds(
        seconds, kinds, summed, weights_s=weights_s, unhidden_s=seconds.hidden_s
    )
    return np.stack(found)


def _times(
    passes: PassSeconds,
    received: Values,
    sent: Values,
    meeting: float,
    in_place: NDArray[np.bool_],
    batch: StageBatch,
) -> Mapping[str, Values]:
    """The times (C) of steady passes, and of the first and the last pass.

    While a stage waits for a transfer, it fetches its next layers. A transfer counts at its
    receiver, whose micro-batch passes through when it is done; if both ends are in the transfer
    (``meeting`` is 1), it also keeps the sender from its next pass.
    """
    inside = passes.inside
    before_forward = np.maximum(passes.turn_at_first_layer, received)
    before_backward = np.maximum(passes.turn_at_last_layer, sent)
    first_s = inside["first_forward"] - inside["forward"]
    # The next pass fetches while the state of the last block leaves.
    fetched_s = np.where(batch.in_flight > 1, before_forward, before_backward)
    after_s = np.maximum(passes.first.after - fetched_s, 0.0)
    # Two sends, of which the second one comes after a backward pass and before the next forward.
    kept = meeting * (sent + received)
    last_s = np.where(in_place, passes.last_computed, inside["last_backward"]) - inside["backward"]
    return {
        "forward_s": inside["forward"] + before_forward + kept,
        "backward_s": inside["backward"] + before_backward,
        "through_forward_s": passes.through["forward"] + received,
        "through_backward_s": passes.through["backward"] + sent,
        "delta_forward_s": first_s
        + np.maximum(passes.first_opening, received)
        - before_forward
        - kept
        + after_s,
        "delta_backward_s": inside["last_backward"]
        + passes.last_closing
        - inside["backward"]
        + inside["step"],
        "within_forward_s": passes.first.within_s(
            inside["first_forward"], inside["forward"], batch.layers, batch.offload_weights > 0
        ),
        "within_backward_s": np.maximum(last_s, 0.0),
        "after_first_s": after_s,
    }


def _sent_over(steps: NDArray[np.int64], previous_s: Values, next_s: Values) -> Values:
    """Seconds (C) of sends between each stage and the stage that is so many steps (C) away."""
    beside_s = np.where(steps == placement.PREVIOUS, previous_s, next_s)
    return np.where(steps == placement.HERE, 0.0, beside_s)


def _beside_sends(
    times: Mapping[str, Values],
    passes: PassSeconds,
    sent: Values,
    received: Values,
    in_place: NDArray[np.bool_],
) -> Mapping[str, Values]:
    """The times (C) of stages whose sends run beside the next pass.

    A pass is slowed by the send of the pass before it; no gradients are sent before the first
    forward. Sends to the next stage and back run beside the passes of stages that are taken to be
    alike. The last micro-batch's gradient goes back beside what is left of reductions in place, so
    both are done later.
    """
    forward, backward = (passes.beside_sends[phase] for phase in STEADY)
    lost_s = forward.lost_s(received)
    rest_s = passes.inside["last_backward"] + passes.last_closing - passes.last_computed
    shared_s = np.where(in_place, np.clip(rest_s, 0.0, received), 0.0)
    return {
        **times,
        "forward_s": times["forward_s"] + lost_s,
        "backward_s": times["backward_s"] + backward.lost_s(sent),
        "delta_forward_s": times["delta_forward_s"] - lost_s,
        "delta_backward_s": times["delta_backward_s"] + shared_s,
        "within_backward_s": times["within_backward_s"] + shared_s,
        "point_to_point_s": times["point_to_point_s"]
        + forward.later_s(sent)
        + backward.later_s(sent),
    }


def _computing(seconds: TaskSeconds, tasks: Sequence[str], kinds: Kinds) -> Values:
    """Seconds (K, S) of some kinds of tasks, for the layer that computes in a slot."""
    of_type = np.sum([seconds.alone(task, "") for task in tasks], axis=0)
    return of_layers(of_type, kinds[:, HERE])


def _summed_alike(
    lengths: Sequence[Lengths], counts: Values, strategies: Distinct, stages: Distinct
) -> list[Values]:
    """Seconds (C) of each sum, added one kind of slot after another.

    So a sum is the same to the last digit, whatever other candidates and kinds of slots there are.
    """
    every = np.zeros((len(counts), len(lengths), len(strategies.columns[0])))
    for row, (of_kinds, where) in enumerate(lengths):
        every[where, row] = of_kinds
    terms = every.take(strategies.index, axis=2)
    terms *= counts[:, None, stages.index]
    return [*terms.sum(axis=0)]


def _summed(lengths: Values, counts: Values, strategies: Distinct, stages: Distinct) -> Values:
    """Seconds (C) from lengths of slots (K, S) and their counts (K, J)."""
    rows = len(strategies.index)
    if lengths.shape[1] * counts.shape[1] <= DENSE * rows:
        table = lengths.T @ counts
        return np.asarray(table[strategies.index, stages.index])
    result = np.empty(rows)
    lengths, counts = np.ascontiguousarray(lengths.T), np.ascontiguousarray(counts.T)
    for start in range(0, rows, ROWS_AT_ONCE):
        block = slice(start, start + ROWS_AT_ONCE)
        of_block = lengths[strategies.index[block]] * counts[stages.index[block]]
        result[block] = of_block.sum(axis=1)
    return result
