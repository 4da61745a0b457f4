"""The times of stages, for columns of candidates, by summing the slots of a schedule.

The length of a slot depends on a candidate's strategy (degrees, ZeRO level, offload ratios) and on
the types of its layers, not on the number of layers. The number of slots of each kind depends only
on the layers. So lengths are computed once for each distinct strategy, and slots are counted once
for each distinct set of layers. A candidate's time is the product of lengths and counts.

Axes: C candidates, S distinct strategies, J distinct sets of layers, K kinds of slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.beside_sends import STEADY, TURNS, Pass, sends_beside_arithmetic
from mistlab.cost.chains import ISSUED
from mistlab.cost.host_waits import Issued, held_by_host
from mistlab.cost.pass_seconds import (
    PassSeconds,
    PassSums,
    least_passes,
    longest_beside_sends,
    pass_sums,
    reduces_in_place,
    split_pass_seconds,
)
from mistlab.cost.slot_lengths import Kinds, Lengths
from mistlab.cost.slot_sums import FEW_ROWS, ROWS_AT_ONCE, summed_slots
from mistlab.cost.steady_rounds import within_round_s
from mistlab.cost.tasks import Kept, TaskModel, TaskSeconds, task_columns
from mistlab.cost.weight_gradients import weight_gradients_s
from mistlab.schedule import placement
from mistlab.schedule.slot_kinds import slot_counts
from mistlab.schedule.slot_table import IN_TURN
from mistlab.symbolic.distinct import Distinct, distinct_rows
from mistlab.values.dimensions import OFFLOADS, RECOMPUTED
from mistlab.values.stages import StageBatch, StageSeconds

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimeModel:
    """The times of a workload's stages on a cluster under one engine's schedule."""

    tasks: TaskModel

    def __call__(self, batch: StageBatch) -> StageSeconds:
        """The times of each candidate."""
        slots = StageSlots.of(self.tasks, batch)
        outside = slots.outside_passes()
        sends = self._are_beside(outside)
        if len(batch) <= FEW_ROWS:
            return self._under_host((batch,), slots.sums(sends=sends).passes(), outside)
        every, rows = slots.every()
        sums = every.sums(sends=sends)
        names = [entry.name for entry in fields(StageSeconds)]
        # Without a host, its times stay zero.
        found = np.zeros((len(names), len(batch)))
        # Few rows at once, so that what is computed between stays in the processor's cache.
        for start in range(0, len(batch), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            parts = (batch.chosen(some),), sums.chosen(rows[some]).passes(), outside.chosen(some)
            seconds = self._under_host(*parts)
            for name, column in zip(names, found, strict=True):
                if self.tasks.host is not None or name not in ISSUED:
                    column[some] = getattr(seconds, name)
        return StageSeconds(**dict(zip(names, found, strict=True)))

    def least(self, least: StageBatch, most: StageBatch) -> StageSeconds:
        """Times that no candidate undercuts whose positive ratios and numbers of recomputed blocks
        lie between those of two. Each is put together from the least parts."""
        rows = np.arange(len(least))
        differ = np.flatnonzero(least.value(RECOMPUTED) != most.value(RECOMPUTED))
        other_end = rows.copy()
        other_end[differ] = len(rows) + np.arange(len(differ))
        # A small table takes as long as a large one, so both ends are computed together.
        both = StageBatch.joined([least, _recomputing(least, most, differ)])
        slots = StageSlots.of(self.tasks, both)
        outside = slots.outside_passes().chosen(rows)
        is_beside = self._are_beside(outside)
        passes = slots.sums(sends=is_beside, kept="least").passes()
        copied = np.logical_or.reduce([most.value(name) > 0 for name in OFFLOADS])
        longest_s = self._longest_s(most, least, copied) if is_beside and copied.any() else {}
        found = least_passes((passes.chosen(rows), passes.chosen(other_end)), longest_s)
        return self._under_host((least, both.chosen(other_end)), found, outside)

    def _longest_s(
        self, most: StageBatch, least: StageBatch, chosen: NDArray[np.bool_]
    ) -> Mapping[Pass, Values]:
        """Seconds (C) of steady passes beside a send that goes on all through them, which none
        between two candidates exceeds; zero for those that are not chosen."""
        rows, recomputed = np.flatnonzero(chosen), RECOMPUTED
        differ = np.flatnonzero(chosen & (least.value(recomputed) != most.value(recomputed)))
        both = StageBatch.joined([most.chosen(rows), _recomputing(most, least, differ)])
        found = StageSlots.of(self.tasks, both).longest_beside_sends()
        longest: dict[Pass, Values] = {phase: np.zeros(len(most)) for phase in found}
        for phase, longest_s in found.items():
            longest[phase][rows] = longest_s[: len(rows)]
            other_s = longest_s[len(rows) :]
            longest[phase][differ] = np.maximum(longest[phase][differ], other_s)
        return longest

    def _are_beside(self, outside: "OutsidePasses") -> bool:
        """Whether any stage sends beside its passes."""
        blocks = self.tasks.template.sends in IN_TURN
        return not blocks and bool((outside.sent_s + outside.received_s).any())

    def _under_host(
        self, ends: Sequence[StageBatch], passes: PassSeconds, outside: "OutsidePasses"
    ) -> StageSeconds:
        """The times (C), under the engine's host if it has one; of a box, from both ``ends`` of its
        recomputed blocks."""
        passes, issued = held_by_host(passes, self.tasks.host, ends, self.tasks.cluster)
        return self._put_together(ends[0], passes, outside, issued)

    def _put_together(
        self, batch: StageBatch, passes: PassSeconds, outside: "OutsidePasses", issued: Issued
    ) -> StageSeconds:
        """The times (C), from those of passes, of what is outside of them and of hosts."""
        sends = self.tasks.template.sends
        blocking, meeting = float(sends in IN_TURN), float(sends == "meeting")
        received, sent, in_place = outside.received_s, outside.sent_s, outside.in_place
        times: Mapping[str, Values] = {
            **_times(
                passes,
                blocking * received,
                blocking * sent,
                meeting,
                in_place,
                batch,
            ),
            "left_backward_s": passes.inside["backward"] - passes.through["backward"],
            "point_to_point_s": 2 * (1 - blocking) * sent,
            "first_send_late_s": np.zeros(len(sent)),
            "within_round_s": np.zeros(len(sent)),
        }
        exposed_s = times["forward_s"] + times["backward_s"] - passes.computing
        if passes.beside_sends:
            times = _beside_sends(times, passes, outside, batch.in_flight)
        delta_backward_s = times["delta_backward_s"] + outside.tied_s
        of_host = issued.times(
            passes,
            np.maximum(batch.layers, 1),
            (passes.inside["backward"] + delta_backward_s, passes.after_last_s + outside.tied_s),
            (meeting * received, meeting * sent),
        )
        seconds = StageSeconds(
            **{**times, **of_host, "delta_backward_s": delta_backward_s},
            exposed_communication_s=exposed_s,
            step_s=passes.step_computing,
        )
        if not issued:
            return seconds
        waits_s = seconds.stable_s - seconds.forward_s - seconds.backward_s
        return replace(seconds, exposed_communication_s=exposed_s + waits_s)


def split_seconds(model: StageTimeModel, batch: StageBatch) -> Values:
    """Seconds (2, C) of passes for gradients of weights, and by which backward passes are shorter
    without them."""
    slots = StageSlots.of(model.tasks, batch)
    found = split_pass_seconds(
        slots.seconds,
        slots.kinds,
        slots.summed,
        weights_s=weight_gradients_s(slots.seconds),
        unhidden_s=slots.seconds.hidden_s,
    )
    return np.stack(found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutsidePasses:
    """The times of candidates (C) that are no part of their passes: sends there and back, how many
    times as long sends take beside arithmetic, and reductions of tied tables. Reductions of
    gradients ``in_place`` go on after the last backward pass has computed."""

    received_s: Values
    sent_s: Values
    send_slowed: Values
    together_slowed: Values
    tied_s: Values
    in_place: NDArray[np.bool_]

    def chosen(self, rows: NDArray[np.intp] | slice) -> "OutsidePasses":
        """The times of the candidates in these rows."""
        return OutsidePasses(
            **{entry.name: getattr(self, entry.name)[rows] for entry in fields(self)}
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSlots:
    """The slots of candidates: the times of tasks of distinct strategies (S), and how many slots
    of each kind distinct sets of layers have (K, J)."""

    tasks: TaskModel
    batch: StageBatch
    seconds: TaskSeconds
    strategies: Distinct
    stages: Distinct
    kinds: Kinds
    counts: Values

    @classmethod
    def of(cls, tasks: TaskModel, batch: StageBatch) -> "StageSlots":
        """The slots of each candidate."""
        names, types = task_columns(), tasks.types
        strategies = distinct_rows([batch.value(name) for name in names])
        stages = distinct_rows([batch.value(name) for name in types.columns])
        runs = types.runs(dict(zip(types.columns, stages.columns, strict=True)))
        kinds, counts = slot_counts(*runs, tasks.template.depth)
        return cls(
            tasks=tasks,
            batch=batch,
            seconds=tasks.seconds(dict(zip(names, strategies.columns, strict=True))),
            strategies=strategies,
            stages=stages,
            kinds=kinds,
            counts=counts,
        )

    def sums(self, *, sends: bool, kept: Kept = "own") -> PassSums:
        """The sums of passes, which may be beside ``sends``."""
        return pass_sums(self.seconds, self.kinds, self.summed, sends=sends, kept=kept)

    def longest_beside_sends(self) -> Mapping[Pass, Values]:
        """Seconds (C) of steady passes that no lesser work exceeds, beside sends without an end."""
        return longest_beside_sends(self.seconds, self.kinds, self.summed)

    def outside_passes(self) -> OutsidePasses:
        """The times of candidates that are no part of their passes."""
        batch, seconds, of_strategy = self.batch, self.seconds, self.strategies.index
        ways = seconds.receive_s[of_strategy], seconds.send_s[of_strategy]
        # The first stage ends last, so it has the time of tied tables.
        ties = batch.has_embedding * (1 - batch.shares_table) > batch.has_head
        send_slowed, together_slowed = sends_beside_arithmetic(seconds)
        return OutsidePasses(
            received_s=np.where(batch.has_embedding, 0.0, _sent_over(batch.comes_from, *ways)),
            sent_s=np.where(batch.has_head, 0.0, _sent_over(batch.goes_to, *ways)),
            send_slowed=send_slowed[of_strategy],
            together_slowed=together_slowed[of_strategy],
            tied_s=np.where(ties, seconds.tied_s[of_strategy], 0.0),
            in_place=reduces_in_place(seconds)[of_strategy],
        )

    def every(self) -> tuple["StageSlots", NDArray[np.intp]]:
        """Slots with the sums of all candidates, and each candidate's number (C) among them. If
        they are fewer, these are the slots of all strategies with all sets of layers."""
        rows, strategies, stages = len(self.batch), self.strategies, self.stages
        table = len(strategies.columns[0]), len(stages.columns[0])
        if prod(table) > rows:
            return self, np.arange(rows)
        strategy, stage = np.indices(table).reshape(2, -1)
        every = replace(
            self,
            strategies=replace(strategies, index=strategy),
            stages=replace(stages, index=stage),
        )
        return every, strategies.index * table[1] + stages.index

    def summed(self, lengths: Sequence[Lengths]) -> Values:
        """Seconds (L, C) of each of some lengths of slots."""
        return summed_slots(lengths, self.counts, self.strategies, self.stages)


def _recomputing(batch: StageBatch, other: StageBatch, rows: NDArray[np.intp]) -> StageBatch:
    """Some candidates with as many recomputed blocks as others."""
    return batch.chosen(rows).with_columns(**{RECOMPUTED: other.value(RECOMPUTED)[rows]})


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
        "turned_s": before_forward - np.maximum(passes.opening, received),
    }


def _sent_over(steps: NDArray[np.int64], previous_s: Values, next_s: Values) -> Values:
    """Seconds (C) of sends between each stage and the stage that is so many steps (C) away."""
    beside_s = np.where(steps == placement.PREVIOUS, previous_s, next_s)
    return np.where(steps == placement.HERE, 0.0, beside_s)


def _beside_sends(
    times: Mapping[str, Values],
    passes: PassSeconds,
    outside: OutsidePasses,
    in_flight: NDArray[np.int64],
) -> Mapping[str, Values]:
    """The times (C) of stages whose sends run beside the next pass.

    A pass is slowed by the send of the pass before it; no gradients are sent before the first
    forward. Sends to the next stage and back run beside the passes of stages that are taken to be
    alike. The last micro-batch's gradient goes back beside what is left of reductions in place, so
    both are done later.
    """
    sent, received, in_place = outside.sent_s, outside.received_s, outside.in_place
    forward, backward = (passes.beside_sends[phase] for phase in STEADY)
    turned_s, turned_back_s = np.zeros_like(received), np.zeros_like(sent)
    left_s, left_back_s, not_turned_s = received, sent, times["turned_s"]
    if TURNS[0] in passes.beside_sends:
        # A send begins in the turn, and what is left of it then goes on beside the pass.
        turn, back = (passes.beside_sends[name] for name in TURNS)
        turned_s, left_s = turn.lost_s(received), turn.left_s(received)
        turned_back_s, left_back_s = back.lost_s(sent), back.left_s(sent)
    lost_s, lost_back_s = forward.lost_s(left_s), backward.lost_s(left_back_s)
    if TURNS[0] in passes.beside_sends:
        not_turned_s = not_turned_s + turned_s + lost_s - forward.lost_s(received)
    within_s, ends_s = times["within_backward_s"], times["delta_backward_s"]
    if backward.is_of_box:
        # The send and the reductions of a box may be apart. A backward pass that usually takes as
        # long as the last one loses less than the least one.
        in_place = np.zeros_like(in_place)
        within_s, ends_s = (
            more_s
            + backward.if_usually_longer(np.maximum(more_s, 0.0)).lost_s(left_back_s)
            - lost_back_s
            for more_s in (within_s, ends_s)
        )
    rest_s = passes.inside["last_backward"] + passes.last_closing - passes.last_computed
    later_s = forward.later_s(sent) + backward.later_s(sent)
    first_late_s = np.maximum(forward.first_late_s(sent, outside.send_slowed) - later_s / 2, 0.0)
    in_round_s = within_round_s(sent, outside.together_slowed, in_flight)
    shared_s = np.where(in_place, np.clip(rest_s, 0.0, received), 0.0)
    return {
        **times,
        "forward_s": times["forward_s"] + turned_s + lost_s,
        "turned_s": not_turned_s,
        "backward_s": times["backward_s"] + turned_back_s + lost_back_s,
        "delta_forward_s": times["delta_forward_s"] - turned_s - lost_s,
        "delta_backward_s": ends_s + shared_s,
        "within_backward_s": within_s + shared_s,
        "point_to_point_s": times["point_to_point_s"] + later_s,
        # A single forward pass has no other after it.
        "first_send_late_s": np.where(in_flight > 1, first_late_s, 0.0),
        # No stage is in front of the first one, so no round goes past it and on.
        "within_round_s": np.where(received > 0, in_round_s, 0.0),
    }
