"""Computes the times of pipeline stages: of passes, which may wait for the host that launches their
kernels, of sends, and of work once an iteration.

Axes: C candidates, S strategies, J sets of layers, K kinds of slots, R runs of equal layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Self

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.core.distinct import (
    FEW_ROWS,
    NOTHING,
    ROWS_AT_ONCE,
    Distinct,
    Lengths,
    distinct_rows,
    slot_counts,
    summed_slots,
)
from mistlab.cost.beside_sends import (
    STEADY,
    SUMS,
    BesideSend,
    OutsidePasses,
    Pass,
    beside_send_at_pace,
    left_by_last,
    longest_beside_sends,
    sent_over,
    slowed_by_sends,
    times_beside_sends,
)
from mistlab.cost.chains import ISSUED
from mistlab.cost.kernels import of_ranks
from mistlab.cost.layer_recurrences import leaving_s, queued_collectives
from mistlab.cost.links import is_never_ahead, left_by_steps, longer_again, peculiar_s
from mistlab.cost.pass_seconds import (
    ALONE,
    BETWEEN,
    ONCE,
    FirstPass,
    PassSeconds,
    PassSums,
    pass_sums,
)
from mistlab.cost.slot_work import HERE, first_pass_s, keep_all, leave_passes, stay_reduced
from mistlab.cost.tasks import Kept, TaskModel, TaskSeconds, task_columns
from mistlab.engines.engine import HostTime
from mistlab.graph.treatments import TREATMENTS
from mistlab.machine.cluster import Cluster
from mistlab.plan.dimensions import OFFLOADS, RECOMPUTED
from mistlab.schedule.slots import IN_TURN, PHASES, Phase
from mistlab.stages.stage_batch import LATE, LOST, SENDS, StageBatch, StageSeconds

# Computes the time in which a host issues passes, and the time of passes that wait for their host
# (host-bound).


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Issued:
    """The seconds in which a host issues a forward and a backward pass, for each candidate.

    They are 0 if no host issues passes, or if it never gets ahead of them. A host does not wait
    for its GPU: while a stage is idle, or has longer passes than usual, its host gets ahead. Host
    time is therefore kept apart from pass time, and an iteration takes the longer of two chains.
    """

    forward_s: Floats
    backward_s: Floats

    @classmethod
    def of_none(cls, candidates: int) -> Self:
        """Make issue times of zero, for candidates whose hosts are not modelled."""
        return cls(forward_s=np.zeros(candidates), backward_s=np.zeros(candidates))

    def __bool__(self) -> bool:
        """Whether any pass may be host-bound."""
        return bool(self.backward_s.any())

    def times(
        self,
        passes: PassSeconds,
        blocks: Ints,
        last_s: tuple[Floats, Floats],
        sends: tuple[Floats, Floats],
    ) -> Mapping[str, Floats]:
        """The seconds in which hosts issue stages' passes, by the names in ``ISSUED``.

        ``last_s`` are the seconds of the last pass with the work after it, and the least seconds
        after its last block. During ``sends`` (from or to the stages in front and behind), hosts
        issue nothing before the first block of a pass or after its last one.
        """
        if not self:
            return dict.fromkeys(ISSUED, np.zeros(len(blocks)))
        received_s, sent_s = sends
        forward_s, backward_s = passes.inside["forward"], passes.inside["backward"]
        after_last_s = last_s[1] + backward_s / blocks
        issued = {
            "issued_forward_s": self.forward_s + received_s + sent_s,
            "issued_backward_s": self.backward_s + received_s + sent_s,
            "issued_forward_late_s": _late_s(
                self.forward_s, blocks, forward_s, forward_s / blocks, sent_s
            ),
            "issued_backward_late_s": _late_s(
                self.backward_s, blocks, backward_s, backward_s / blocks, received_s
            ),
            "issued_end_s": _late_s(self.backward_s, blocks, last_s[0], after_last_s, received_s),
        }
        return {name: np.where(self.backward_s > 0, own, 0.0) for name, own in issued.items()}


def _late_s(
    issued_s: Floats, blocks: Ints, first_s: Floats, last_s: Floats, held_s: Floats
) -> Floats:
    """The seconds from when a host goes on after issuing a pass, until the GPU has computed that
    pass.

    The host took ``issued_s`` to issue the pass. The GPU needs ``first_s`` after the pass's first
    block was issued, and ``last_s`` after its last block. The host is blocked for ``held_s`` before
    it goes on.
    """
    return np.maximum(issued_s / blocks + first_s - issued_s, last_s) - held_s


def held_by_host(
    passes: PassSeconds,
    host: HostTime | None,
    ends: Sequence[StageBatch],
    cluster: Cluster,
    outside: OutsidePasses,
) -> tuple[PassSeconds, Issued]:
    """The times of passes, and the issue times of hosts that may be ahead of their GPU, which
    launch the first stage's first two layers before these compute.

    ``ends`` are the candidates or, for lower bounds over given ranges of choices, the ends of the
    ranges with the fewest and the most recomputed blocks.
    """
    batch = ends[0]
    if host is None:
        return passes, Issued.of_none(len(batch))
    forward_s, backward_s = np.minimum.reduce([issued_by_pass(host, end) for end in ends])
    waits = is_never_ahead(host, batch, cluster)
    if waits.any():
        if len(ends) > 1:
            longest_s = np.maximum.reduce([issued_s(host, end, cluster) for end in ends])
            held_s = np.where(waits & (longest_s > passes.computing), longest_s, 0.0)
            passes = least_with_host(passes, held_s)
        forward_s, backward_s = (np.where(waits, 0.0, own) for own in (forward_s, backward_s))
    ends_s = host.end_s * (batch.has_embedding + batch.has_head)
    of_block_s = (forward_s - ends_s) / np.maximum(batch.layers, 1)
    first_s = host.end_s + np.maximum(of_block_s - outside.embedded_s, 0.0)
    first_s = np.where(batch.has_embedding * (backward_s > 0), first_s, 0.0)
    passes = replace(passes, first_opening=np.maximum(passes.first_opening, first_s))
    return passes, Issued(forward_s=forward_s, backward_s=backward_s)


def least_with_host(passes: PassSeconds, held_s: Floats) -> PassSeconds:
    """Lower bounds of the times of passes, some of which may wait for their host, ``held_s`` at
    most.

    A steady pass may get longer by waiting for its host; what a first or last pass takes beyond
    it may then fall to zero, and a send beside it runs by itself meanwhile.
    """
    inside, may_wait = dict(passes.inside), held_s > 0

    def beyond(once: Floats, steady: Phase) -> Floats:
        return np.where(may_wait, np.minimum(once, inside[steady]), once)

    inside["first_forward"] = beyond(inside["first_forward"], "forward")
    inside["last_backward"] = beyond(inside["last_backward"], "backward")
    last_computed = beyond(passes.last_computed, "backward")
    beside = dict(passes.beside_sends)
    beside |= {phase: beside[phase].held_for(held_s) for phase in STEADY if phase in beside}
    return replace(passes, inside=inside, last_computed=last_computed, beside_sends=beside)


def issued_s(host: HostTime, batch: StageBatch, cluster: Cluster) -> Floats:
    """The seconds in which a host issues both a forward and a backward pass, for each candidate."""
    forward, backward = issued_by_pass(host, batch)
    return np.asarray(forward + backward + peculiar_s(batch.value, cluster) * batch.layers)


def issued_by_pass(host: HostTime, batch: StageBatch) -> tuple[Floats, Floats]:
    """The seconds in which a host issues a forward pass, and a backward pass with its
    recomputation, for each candidate, without delays by a cluster's profile.
    """
    twice = [row.dimension for row in TREATMENTS.values() if row.runs_again]
    again = np.sum([batch.value(name) for name in twice], axis=0)
    ends = host.end_s * (batch.has_embedding + batch.has_head)
    ranks, way = batch.value("context_parallel"), batch.value("context_exchange")
    forward_s, backward_s = of_ranks(host, ranks, way)
    forward = forward_s * batch.layers + ends
    return np.asarray(forward), np.asarray(backward_s * batch.layers + forward_s * again + ends)


# Computes the times of candidate stages as sums over their layers. The time of a layer depends on
# the candidate's parallel degrees, ZeRO level and offload ratios (its strategy), and is computed
# once for each distinct strategy.


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimeModel:
    """Computes the times of a workload's stages on a cluster under one engine's schedule."""

    tasks: TaskModel

    def __call__(self, batch: StageBatch) -> StageSeconds:
        """The times of each candidate stage."""
        return self.of_slots(StageSlots.of(self.tasks, batch))

    def of_slots(self, slots: "StageSlots") -> StageSeconds:
        """The times of each candidate stage, given the tasks that overlap while each layer
        computes.
        """
        batch, outside = slots.batch, slots.outside_passes()
        sends = self._are_beside(outside)
        if len(batch) <= FEW_ROWS:
            return self._under_host((batch,), slots.sums(sends=sends).passes(), outside)
        every, rows = slots.every()
        sums = every.sums(sends=sends)
        names = [entry.name for entry in fields(StageSeconds)]
        times = np.zeros((len(names), len(batch)))
        # Few candidates are computed at a time, so that intermediate results stay in the CPU's
        # cache.
        for start in range(0, len(batch), ROWS_AT_ONCE):
            chunk = slice(start, start + ROWS_AT_ONCE)
            parts = (batch.chosen(chunk),), sums.chosen(rows[chunk]).passes(), outside.chosen(chunk)
            seconds = self._under_host(*parts)
            for name, column in zip(names, times, strict=True):
                if self.tasks.host is not None or name not in ISSUED:
                    column[chunk] = getattr(seconds, name)
        return StageSeconds(**dict(zip(names, times, strict=True)))

    def least(self, least: StageBatch, most: StageBatch) -> StageSeconds:
        """Lower bounds of stage times for all choices between those of ``least`` and ``most``.

        Their positive offload ratios and numbers of recomputed blocks lie between those of the two.
        The bounds are sums of lower bounds.
        """
        rows = np.arange(len(least))
        differ = np.flatnonzero(least.value(RECOMPUTED) != most.value(RECOMPUTED))
        other_end = rows.copy()
        other_end[differ] = len(rows) + np.arange(len(differ))
        # Bounds of both ends of the range are computed together, since a small table takes as long
        # as a large one.
        both = StageBatch.joined([least, _recomputing(least, most, differ)])
        slots = StageSlots.of(self.tasks, both)
        outside = slots.outside_passes().chosen(rows)
        # Lower bounds must not assume that a send is beside reductions.
        outside = replace(outside, computing_slowed=np.ones(len(rows)))
        is_beside = self._are_beside(outside)
        passes = slots.sums(sends=is_beside, kept="least").passes()
        copied = np.logical_or.reduce([most.value(name) > 0 for name in OFFLOADS])
        longest_s = self._longest_s(most, least, copied) if is_beside and copied.any() else {}
        lower_bounds = least_passes((passes.chosen(rows), passes.chosen(other_end)), longest_s)
        return self._under_host((least, both.chosen(other_end)), lower_bounds, outside)

    def _longest_s(
        self, most: StageBatch, least: StageBatch, chosen: Bools
    ) -> Mapping[Pass, Floats]:
        """Upper bounds of the seconds of passes if a send runs all the time, for chosen candidates.

        The bounds are zero for candidates that are not ``chosen``.
        """
        rows, recomputed = np.flatnonzero(chosen), RECOMPUTED
        differ = np.flatnonzero(chosen & (least.value(recomputed) != most.value(recomputed)))
        both = StageBatch.joined([most.chosen(rows), _recomputing(most, least, differ)])
        beside_s = StageSlots.of(self.tasks, both).longest_beside_sends()
        longest: dict[Pass, Floats] = {phase: np.zeros(len(most)) for phase in beside_s}
        for phase, longest_s in beside_s.items():
            longest[phase][rows] = longest_s[: len(rows)]
            other_s = longest_s[len(rows) :]
            longest[phase][differ] = np.maximum(longest[phase][differ], other_s)
        return longest

    def _are_beside(self, outside: "OutsidePasses") -> bool:
        """Whether any candidate's sends may overlap with its passes."""
        blocks = self.tasks.template.sends in IN_TURN
        return not blocks and bool((outside.sent_s + outside.received_s).any())

    def _under_host(
        self, ends: Sequence[StageBatch], passes: PassSeconds, outside: "OutsidePasses"
    ) -> StageSeconds:
        """The stage times of each candidate, whose passes wait for the engine's host if it has one.

        ``ends`` are the candidates or, for lower bounds, the ends of ranges of choices.
        """
        host, cluster = self.tasks.host, self.tasks.cluster
        passes, issued = held_by_host(passes, host, ends, cluster, outside)
        return self._put_together(ends[0], passes, outside, issued)

    def _put_together(
        self, batch: StageBatch, passes: PassSeconds, outside: "OutsidePasses", issued: Issued
    ) -> StageSeconds:
        """Combine pass times, times outside passes and host issue times into stage times."""
        sends = self.tasks.template.sends
        blocking, meeting = float(sends in IN_TURN), float(sends == "meeting")
        received, sent, in_place = outside.received_s, outside.sent_s, outside.in_place
        times: Mapping[str, Floats] = {
            **dict.fromkeys((*SENDS, "within_round_s", *LOST, *LATE), np.zeros(len(sent))),
            **_times(passes, blocking * received, blocking * sent, meeting, in_place, batch),
            "held_forward_s": meeting * sent,
            "held_backward_s": meeting * received,
            "left_backward_s": passes.inside["backward"]
            - passes.through["backward"]
            + meeting * received,
            "point_to_point_s": 2 * (1 - blocking) * sent,
            "received_s": (1 - blocking) * received,
            "sent_s": (1 - blocking) * sent,
        }
        exposed_s = times["forward_s"] + times["backward_s"] - passes.computing
        rest_s = passes.inside["last_backward"] + passes.last_closing - passes.last_computed
        rest_s = np.where(in_place, rest_s, np.maximum(passes.reducing, outside.left_reduced_s))
        if passes.beside_sends:
            after = batch.in_flight, rest_s, passes.inside["step"]
            times = times_beside_sends(times, passes.beside_sends, outside, *after)
        elif blocking:
            # Reductions slow the last gradient's send as they slow arithmetic.
            slowed, names = outside.computing_slowed, ("delta_backward_s", "within_backward_s")
            last_s = np.minimum(received * (slowed - 1), rest_s * (1 - 1 / slowed))
            times = {**times, **{name: times[name] + last_s for name in names}}
        delta_backward_s = times["delta_backward_s"] + outside.after_s
        of_host = issued.times(
            passes,
            np.maximum(batch.layers, 1),
            (passes.inside["backward"] + delta_backward_s, passes.after_last_s + outside.after_s),
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSlots:
    """The seconds of each layer's tasks for each distinct strategy, and how many layers of each
    kind each distinct stage has: ``counts`` (K, J).
    """

    tasks: TaskModel
    batch: StageBatch
    seconds: TaskSeconds
    strategies: Distinct
    stages: Distinct
    kinds: Ints
    counts: Floats

    @classmethod
    def of(cls, tasks: TaskModel, batch: StageBatch) -> "StageSlots":
        """Compute each distinct strategy's tasks and count each distinct stage's layers."""
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
        """Sum up the seconds of passes over each candidate's layers, where passes may overlap with
        ``sends``.
        """
        sums = pass_sums(self.seconds, self.kinds, self.summed, sends=sends, kept=kept)
        leaving, queued, of_stages = None, None, (self.seconds, self.strategies, self.stages)
        sums, pace, held_s = self.at_pace(sums)
        if kept == "own":
            leaving = leaving_s(*of_stages) if leave_passes(self.seconds).any() else None
            if leaving is not None:
                leaving = _leaving_at_pace(leaving, held_s, sums.values[BETWEEN - 2 : BETWEEN])
        first = first_pass_s(*of_stages, kept)
        if self.tasks.template.depth == 1 and keep_all(self.seconds).any():
            queued = queued_collectives(*of_stages, kept, pace)
        return replace(sums, queued=queued, first=first, leaving=leaving)

    def at_pace(self, sums: PassSums) -> tuple[PassSums, Floats, Floats]:
        """The sums where no layer computes faster than a host that is never ahead issues it; by how
        much longer layers then compute than alone, at least (C); and for how long the host issues a
        forward and a backward pass (2, C), zero where it holds up none.

        A host cannot run a pass ahead if the ranks of a block wait for the slowest of their hosts,
        as on a cluster with a profile, or if hosts wait for each message of a pipeline. Its time is
        divided among layers in proportion to their computation; a layer's collectives go on
        meanwhile.
        """
        pace = np.ones(len(self.strategies.index))
        host, cluster = self.tasks.host, self.tasks.cluster
        if host is None or sums.slots is None:
            return sums, pace, np.zeros((2, len(pace)))
        rows = np.flatnonzero(is_never_ahead(host, self.batch, cluster))
        inside = self.kinds[:, HERE] != NOTHING
        both = [self.seconds.alone(kind, "") for kind in ("F", "B")] + np.stack(
            [self.seconds.tensor_s[phase] for phase in STEADY]
        )
        computed = both[:, self.kinds[inside, HERE]]
        computed_s = self.summed([(computed, inside)])
        both_s = computed_s.sum(axis=0)[rows]
        issuing_s = issued_s(host, self.batch.chosen(rows), cluster)
        pace[rows] = np.maximum(issuing_s / np.where(both_s > 0, both_s, np.inf), 1.0)
        values, rows = sums.values.copy(), np.flatnonzero(pace > 1)
        held = np.ix_(np.arange(BETWEEN, BETWEEN + len(sums.slots)), rows)
        values[held] = 0.0
        strategy, stage = self.strategies.index[rows], self.stages.index[rows]
        for kind, count in enumerate(self.counts[inside]):
            of_kind = sums.slots[:, kind, strategy], computed[:, kind, strategy]
            values[held] += count[stage] * _at_pace(*of_kind, pace[rows])
        return replace(sums, values=values), pace, pace * (pace > 1) * computed_s

    def longest_beside_sends(self) -> Mapping[Pass, Floats]:
        """Upper bounds of the seconds of passes beside a send, for this and lesser work."""
        return longest_beside_sends(self.seconds, self.kinds, self.summed)

    def outside_passes(self) -> OutsidePasses:
        """What each candidate does outside its passes: sends, tied tables, averaging weights."""
        batch, seconds, of_strategy = self.batch, self.seconds, self.strategies.index
        ways = seconds.receive_s[of_strategy], seconds.send_s[of_strategy]
        # Both stages exchange a tied embedding table; the time is added to the first stage, which
        # ends last.
        ties = batch.has_embedding * (1 - batch.shares_table) > batch.has_head
        averaged_s = seconds.averaging_s(self.tasks.types.counts(batch.columns), of_strategy)
        left_reduced_s, left_copied_s = left_by_last(seconds, self.kinds, self.summed)
        return OutsidePasses(
            received_s=np.where(batch.has_embedding, 0.0, sent_over(batch.comes_from, *ways)),
            sent_s=np.where(batch.has_head, 0.0, sent_over(batch.goes_to, *ways)),
            **{name: each[of_strategy] for name, each in slowed_by_sends(seconds).items()},
            embedded_s=(seconds.alone("F", "") + seconds.tensor_s["forward"])[0, of_strategy],
            after_s=np.where(ties, seconds.tied_s[of_strategy], 0.0) + averaged_s,
            left_reduced_s=left_reduced_s,
            left_copied_s=left_copied_s,
            in_place=stay_reduced(seconds)[of_strategy],
        )

    def every(self) -> tuple["StageSlots", Rows]:
        """Combine every strategy with every set of layers, and find each candidate among the
        combinations; if there are fewer candidates than combinations, keep only the candidates.
        """
        rows, strategies, stages = len(self.batch), self.strategies, self.stages
        table = len(strategies.columns[0]), len(stages.columns[0])
        if prod(table) > rows:
            return self, np.arange(rows)
        strategy, stage = np.indices(table).reshape(2, -1)
        code, any_row = strategies.index * table[1] + stages.index, np.zeros(prod(table), np.intp)
        any_row[code] = np.arange(rows)
        every = replace(
            self,
            batch=self.batch if self.tasks.host is None else self.batch.chosen(any_row),
            strategies=replace(strategies, index=strategy),
            stages=replace(stages, index=stage),
        )
        return every, code

    def summed(self, lengths: Sequence[Lengths]) -> Floats:
        """Sum up seconds over the layers of each candidate."""
        return summed_slots(lengths, self.counts, self.strategies, self.stages)


def _at_pace(slots: Floats, computed: Floats, pace: Floats) -> Floats:
    """The terms of ``PassSums.slots`` of a layer (..., C) if it computes for at least ``pace`` (C)
    times the seconds ``computed`` (2, C) that a forward and a backward pass would take alone.
    """
    held, of_passes = slots.copy(), 2 + len(PHASES)
    # The sums are of two backward passes, of two forward passes, and of two backward passes again.
    held[:6] = np.maximum(slots[:6], (pace * computed)[[1, 1, 0, 0, 1, 1]])
    for way, row in enumerate((3, 4)):
        beside = slice(of_passes + way * SUMS, of_passes + (way + 1) * SUMS)
        if len(slots) > of_passes:
            least = computed[way], pace * computed[way]
            held[beside] = beside_send_at_pace(slots[beside], slots[row], *least)
    return held


def _leaving_at_pace(leaving: Floats, held_s: Floats, turns_s: Floats) -> Floats:
    """The seconds of ``leaving_s`` (9, C), if a host issues passes for ``held_s`` (2, C): at least
    these, and the ``turns_s`` (2, C) before a forward and before a backward pass of another kind.
    """
    forward_s, back_s = held_s
    least_s = [forward_s, *[back_s] * 3, 0 * back_s, *held_s + turns_s * (held_s > 0), *held_s]
    return np.where(leaving > 0, np.maximum(leaving, least_s), leaving)


def _recomputing(batch: StageBatch, other: StageBatch, rows: Rows) -> StageBatch:
    """Select candidates, and give them as many recomputed blocks as ``other`` has."""
    return batch.chosen(rows).with_columns(**{RECOMPUTED: other.value(RECOMPUTED)[rows]})


def _times(
    passes: PassSeconds,
    received: Floats,
    sent: Floats,
    meeting: float,
    in_place: Bools,
    batch: StageBatch,
) -> Mapping[str, Floats]:
    """The times of each candidate's steady-state passes, and of its first and last pass.

    While a stage waits for a transfer, it fetches its next layers. A transfer counts at its
    receiver, whose micro-batch can pass through when the transfer is done. If the transfer occupies
    both stages (``meeting`` is 1), it also delays the sender's next pass.
    """
    inside = passes.inside
    before_forward = np.maximum(passes.turn_at_first_layer, received)
    before_backward = np.maximum(passes.turn_at_last_layer, sent)
    # While the last block's optimizer states are offloaded, the next pass fetches its first layers.
    fetched_s = np.where(batch.in_flight > 1, before_forward, before_backward)
    leaves = batch.offload_weights > 0
    held_s = passes.again[0] - passes.through["forward"] - passes.again[4]
    steps = left_by_steps(passes.first.after, fetched_s, held_s, np.where(leaves, batch.layers, 0))
    after_s = steps["stepped_s"]
    # The seconds for which both stages of a send wait: after a forward pass, and after a backward
    # pass.
    kept, kept_back = meeting * sent, meeting * received
    last_s = np.where(in_place, passes.last_computed, inside["last_backward"]) - inside["backward"]
    times = {
        "forward_s": inside["forward"] + before_forward + kept,
        "backward_s": inside["backward"] + before_backward + kept_back,
        "through_forward_s": passes.through["forward"] + received,
        "through_backward_s": passes.through["backward"] + sent,
        "delta_forward_s": inside["first_forward"]
        - inside["forward"]
        + np.maximum(passes.first_opening, received)
        - before_forward
        - kept
        + after_s,
        "delta_backward_s": inside["last_backward"]
        + passes.last_closing
        - inside["backward"]
        + inside["step"],
        "within_forward_s": passes.first.within_s(
            inside["first_forward"],
            passes.through["forward"],
            batch.layers,
            leaves,
        ),
        "within_backward_s": np.maximum(last_s, 0.0),
        "after_first_s": after_s,
        "turned_s": before_forward - np.maximum(passes.opening, received),
    }
    return {**times, **longer_again(times, passes.again), **steps}


def least_passes(ends: Sequence[PassSeconds], longest_s: Mapping[Pass, Floats]) -> PassSeconds:
    """Lower bounds of the pass times of all candidates with choices in given ranges.

    They are made from two ``ends`` of the ranges, with the smallest offload ratios; ``longest_s``
    is from ``longest_beside_sends``.

    The number of each kind of slot is linear in the number of recomputed blocks. So each sum of
    slots rises or falls all the way between the two ends, and is least at one of them.
    """

    def least(sums: Sequence[Mapping[Phase, Floats]]) -> Mapping[Phase, Floats]:
        return {phase: np.minimum(*(own[phase] for own in sums)) for phase in sums[0]}

    inside = least([end.inside for end in ends])
    passes = PassSeconds(
        inside=inside,
        first=FirstPass.least([end.first for end in ends]),
        through=least([end.through for end in ends]),
        **{name: np.minimum(*(getattr(end, name) for end in ends)) for name in ONCE},
        beside_sends={
            phase: BesideSend.of_box(
                [end.beside_sends[phase] for end in ends],
                longest_s.get(phase, 0.0),
            )
            for phase in ends[0].beside_sends
        },
        **{name: getattr(ends[0], name) for name in ALONE},
        windows=np.minimum(*(end.windows for end in ends)),
        again=np.zeros_like(ends[0].again),
    )
    return passes.with_least_leaving()
