"""Computes how much a pipeline stage's sends to other stages and the forward and backward passes
that run at the same time slow each other down.

A send occupies the link between GPUs. It slows arithmetic and host copies down as any other use of
the link does. If a collective of the same stage runs too, both get half of the link, so together
they take as long as one after the other: a pass that waits for its collectives also waits for the
send.

Axes: C candidates, S distinct strategies, N slots; the four streams first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, Self

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.core.columns import ColumnSet
from mistlab.core.distinct import NOTHING, Sums
from mistlab.cost.kernels import within_round_s
from mistlab.cost.side_by_side import BESIDE, LINK, SlowedBy
from mistlab.cost.slot_work import HERE, UPPER, SlotWork, endless, in_slots, shared_turns
from mistlab.cost.tasks import Kept, TaskSeconds
from mistlab.machine.slowdowns import COMPUTE, STREAMS
from mistlab.schedule import placement
from mistlab.schedule.slots import SHARDED_WEIGHTS, Phase

# The part of a stage's work that a send runs at the same time as: a forward or backward pass, or
# the time between two passes (a "turn" before a forward pass, a "turn back" before a backward
# pass).
Pass = Phase | Literal["turn", "turn back"]
TURN: Pass = "turn"
TURN_BACK: Pass = "turn back"
TURNS = TURN, TURN_BACK
# The passes that a stage repeats for each micro-batch in the steady state.
STEADY: tuple[Phase, ...] = ("forward", "backward")

# The number of sums over a pass's layers that ``BesideSend.of_sums`` takes, besides the pass's time
# without a send.
SUMS = 6

_BOTH = (1 << COMPUTE) + (1 << LINK)
_TO_HOST = STREAMS.index("device_to_host")
_WITH_COPY = (1 << _TO_HOST) + (1 << LINK)
_OTHERS = [place for place in range(len(STREAMS)) if place != COMPUTE]


@dataclass(frozen=True, slots=True, eq=False)
class BesideSend:
    """How much a pass and a send that overlaps with the whole pass slow each other down, for each
    candidate.

    If the pass only computed, it would take ``computing_longer_s`` longer, and ``computing_sent_s``
    seconds of the send would be finished when it ends. With its host copies and collectives it
    takes ``longer_s`` longer, and ``sent_s`` seconds of the send are finished; without the pass it
    would be ``late_s`` more. No send makes the pass more than ``most_longer_s`` longer: copies that
    take longer than the arithmetic hide the rest.

    For a box (all candidates with offload ratios between given values) these are the least times,
    and ``sent_s`` holds for the shortest pass. No pass of the box finishes more than
    ``most_sent_s`` of a send; None for a single candidate.
    """

    usual_s: Floats
    computing_longer_s: Floats
    computing_sent_s: Floats
    longer_s: Floats
    sent_s: Floats
    late_s: Floats
    most_longer_s: Floats
    most_sent_s: Floats | None = None

    def chosen(self, rows: Rows | slice) -> Self:
        """Select the candidates with these indices."""
        assert self.most_sent_s is None, "rows of boxes are chosen before their ends are joined"
        return type(self)(*(getattr(self, entry.name)[rows] for entry in fields(self)[:-1]))

    def lost_s(self, send_s: Floats) -> Floats:
        """The seconds by which a send of ``send_s`` seconds lengthens the pass, for each
        candidate.
        """
        computing_s = self.computing_longer_s * _share(send_s, self.computing_sent_s)
        lost_s = self.longer_s * _share(send_s, self.sent_s)
        if self.most_sent_s is not None:
            # The slowest and the fastest pass that the lower bound covers are both tried: a send
            # slows a longer pass for longer, but overlaps with a smaller share of it.
            longest_s = self.longer_s + self.most_sent_s - self.sent_s
            lost_s = np.minimum(lost_s, longest_s * _share(send_s, self.most_sent_s))
        return np.asarray(np.minimum(np.maximum(computing_s, lost_s), self.most_longer_s))

    def left_s(self, send_s: Floats) -> Floats:
        """The seconds of a send that remain when the pass has ended, for each candidate; the whole
        send takes ``send_s`` seconds.
        """
        most_s = self.sent_s if self.most_sent_s is None else self.most_sent_s
        return np.asarray(np.maximum(send_s - most_s, 0.0))

    def later_s(self, send_s: Floats) -> Floats:
        """The seconds by which the pass lengthens a send that starts with it, for each candidate;
        alone the send takes ``send_s`` seconds.
        """
        most_s = self.sent_s if self.most_sent_s is None else self.most_sent_s
        return self.late_s * _share(send_s, most_s)

    def late_alone_s(self, send_s: Floats) -> Floats:
        """The seconds by which this pass lengthens a send that overlaps with no other pass, for
        each candidate; alone the send takes ``send_s`` seconds.
        """
        return np.asarray(np.minimum(self.late_s, send_s))

    def first_late_s(self, send_s: Floats, slowed: Floats, passes: Ints, apart_s: Floats) -> Floats:
        """The seconds by which later forward passes lengthen the send of a stage's first
        micro-batch, for each candidate.

        The send overlaps with the forward passes of the next ``passes`` micro-batches that begin
        before it ends; one begins every ``apart_s``, when its input arrives. Arithmetic alone
        lengthens a send by the factor ``slowed``.
        """
        begun = np.clip(send_s / np.where(apart_s > 0, apart_s, np.inf), 1.0, passes)
        begun = np.where(apart_s > 0, begun, passes)
        beside_s = (slowed - 1) * np.minimum(send_s, begun * self.computing_sent_s)
        most_s = self.sent_s if self.most_sent_s is None else self.most_sent_s
        beside = np.minimum(send_s / np.where(most_s > 0, most_s, np.inf), begun)
        return np.maximum(beside_s, self.late_s * beside)

    @property
    def is_of_box(self) -> bool:
        """Whether the times are lower bounds for all candidates whose offload ratios lie in given
        ranges.
        """
        return self.most_sent_s is not None

    def instead_of(self, usual_s: Floats, where: Bools, *, is_back: bool) -> Self:
        """How much passes and sends slow each other down if the passes alone take other times.

        For the candidates in ``where``, a pass takes ``usual_s`` without a send. Beside a send it
        still takes at least as long as before. In a lower bound no send lengthens a backward pass
        that gradients leave, since one with more of them may hide it after its gradient is sent.
        """
        longer = {
            name: np.where(where, np.maximum(self.usual_s + longer_s - usual_s, 0.0), longer_s)
            for name, longer_s in (
                ("longer_s", self.longer_s),
                ("most_longer_s", self.most_longer_s),
            )
        }
        if self.is_of_box and is_back:
            longer["most_longer_s"] = np.where(where, 0.0, longer["most_longer_s"])
        return replace(self, usual_s=np.where(where, usual_s, self.usual_s), **longer)

    def hiding_nothing(self, where: Bools) -> Self:
        """How much sends slow passes whose copies hide none of it, for the candidates in
        ``where``.
        """
        return replace(self, most_longer_s=np.where(where, np.inf, self.most_longer_s))

    def without_copies(self, where: Bools) -> Self:
        """How much sends slow the arithmetic of passes, for the candidates in ``where``."""
        return replace(self, longer_s=np.where(where, 0.0, self.longer_s))

    def held_for(self, held_s: Floats) -> Self:
        """The lower bounds for passes that may idle for ``held_s``, while a send runs by itself."""
        assert self.most_sent_s is not None, "only of boxes"
        return replace(self, most_sent_s=self.most_sent_s + held_s)

    def if_usually_longer(self, longer_s: Floats) -> Self:
        """The lower bounds for a pass that takes ``longer_s`` seconds more, even without a send,
        than the one that these bounds are for.
        """
        assert self.most_sent_s is not None, "only of boxes"
        hidden_s = np.minimum(longer_s, self.longer_s)
        sent_s = self.sent_s + longer_s - hidden_s
        return replace(
            self,
            usual_s=self.usual_s + longer_s,
            longer_s=self.longer_s - hidden_s,
            most_longer_s=np.maximum(self.most_longer_s - longer_s, 0.0),
            sent_s=sent_s,
            most_sent_s=np.maximum(self.most_sent_s, sent_s),
        )

    @classmethod
    def of_sums(
        cls,
        usual_s: Floats,
        computing_longer_s: Floats,
        computing_sent_s: Floats,
        busy: Floats,
        *copying: Floats,
    ) -> Self:
        """Compute how much passes and sends slow each other down, from sums over the layers of each
        candidate's pass.

        ``busy`` is the number of the layers' time slots in which host copies or collectives run. If
        it is zero, a send slows only arithmetic, since the stage often stalls meanwhile.
        """
        longer_s, sent_s, late_s = (np.where(busy > 0, of_all_s, 0.0) for of_all_s in copying)
        most_longer_s = np.where(busy > 0, longer_s, np.inf)
        return cls(
            usual_s, computing_longer_s, computing_sent_s, longer_s, sent_s, late_s, most_longer_s
        )

    @classmethod
    def of_box(cls, ends: Sequence[Self], longest_s: Floats | float) -> Self:
        """Lower bounds of how much passes and sends slow each other down, for all candidates whose
        offload ratios and numbers of recomputed blocks lie in given ranges.

        ``ends`` are the passes with the smallest offload ratios, with the fewest and with the most
        recomputed blocks. ``longest_s`` is the longest time of a pass with host copies in these
        ranges, if a send runs during all of it.
        """
        computing_longer_s, computing_sent_s, late_s = (
            np.minimum(*(getattr(end, name) for end in ends))
            for name in ("computing_longer_s", "computing_sent_s", "late_s")
        )
        least_s = np.minimum(*(end.usual_s for end in ends))
        first_s, second_s = (end.usual_s + end.longer_s for end in ends)
        elapsed_s = np.minimum(first_s, second_s)
        most_elapsed_s = np.minimum(*(end.usual_s + end.most_longer_s for end in ends))
        sent_s = elapsed_s - late_s
        # The slowest pass may also be one with host copies, which takes at most ``longest_s``.
        most_s = np.maximum(np.maximum(first_s, second_s), longest_s)
        return cls(
            usual_s=least_s,
            computing_longer_s=computing_longer_s,
            computing_sent_s=computing_sent_s,
            longer_s=elapsed_s - least_s,
            sent_s=sent_s,
            late_s=late_s,
            most_longer_s=most_elapsed_s - least_s,
            most_sent_s=most_s - late_s,
        )


def sends_later_s(beside: Mapping[Pass, BesideSend], send_s: Floats, are_single: Bools) -> Floats:
    """The seconds by which passes lengthen a stage's send of an activation and its send of a
    gradient together, for each candidate; each send alone takes ``send_s`` seconds.

    A single micro-batch's activation is sent beside the time between its two passes (a "turn"), its
    gradient beside no pass. This counts as if both were as late.
    """
    later_s = sum((beside[phase].later_s(send_s) for phase in STEADY), np.zeros_like(send_s))
    if TURN_BACK not in beside:
        return np.where(are_single, 0.0, later_s)
    of_turn_s = beside[TURN_BACK].late_alone_s(send_s)
    return np.where(are_single, 2 * np.minimum(of_turn_s, later_s), later_s)


def further_later_s(beside: Mapping[Pass, BesideSend], send_s: Floats, apart_s: Floats) -> Floats:
    """The seconds by which sends get longer in the second pass that they overlap with, summed over
    a stage's send of an activation and its send of a gradient, for each candidate.

    A send of ``send_s`` seconds may outlast the pass that starts with it. It then overlaps with a
    second pass, which is of the other direction (backward after forward, or the reverse). The
    forward pass beside a gradient's send begins ``apart_s`` after it, as the stage in front waits
    as long between its passes.
    """
    forward, backward = (beside[phase] for phase in STEADY)
    there_s = forward.later_s(backward.left_s(send_s))
    if forward.is_of_box:
        return there_s
    left_s = np.maximum(forward.left_s(send_s) - np.maximum(apart_s, 0.0), 0.0)
    return np.asarray(there_s + backward.later_s(left_s))


def queued_late_s(
    beside: Mapping[Pass, BesideSend], send_s: Floats, passed_s: tuple[Floats, Floats]
) -> Floats:
    """The seconds by which other sends lengthen a micro-batch's passes if the micro-batch's own
    send had to wait for the send of the micro-batch before it; all stages of the pipeline are
    equal.

    The micro-batch arrives one send later. By then the next stage has passed the micro-batch before
    it on (``passed_s``, forward and back) and sends its gradient. So both passes of the later
    micro-batch overlap with the rest of that send, and so do its passes after them, until it is
    late enough.
    """
    forward, backward = (beside[phase] for phase in STEADY)
    left_s = np.minimum(passed_s[0] + passed_s[1], send_s)
    late_s = np.zeros_like(send_s)
    if forward.is_of_box:
        # In a lower bound over many candidates no slowdown may be counted here: another candidate
        # may have a longer pass that hides it.
        return late_s
    for first, second in ((forward, backward), (backward, forward)):
        both_s = first.lost_s(left_s) + second.lost_s(first.left_s(left_s))
        late_s, left_s = late_s + both_s, np.maximum(left_s - both_s, 0.0)
    return late_s + forward.lost_s(left_s)


def _share(send_s: Floats, sent_s: Floats) -> Floats:
    """The share of a pass during which a send runs, at most 1.

    The send would take ``send_s`` alone; in the whole pass, which slows sends, ``sent_s`` seconds
    of sends alone would be done.
    """
    return np.asarray(np.minimum(send_s / np.where(sent_s > 0, sent_s, np.inf), 1.0))


def slots_beside_sends(
    seconds: TaskSeconds,
    alone: Floats,
    usual_s: Floats,
    kept: Kept,
) -> Floats:
    """The numbers for each layer of a pass whose sums over the pass ``BesideSend.of_sums`` takes,
    for each strategy.

    Shapes: the result is (6, N, S). Without a send, a layer's time slot takes ``usual_s`` (N, S);
    its tasks on the four streams would take ``alone`` (4, N, S) if they ran one by one.
    """
    computing, sending = beside_arithmetic(seconds)
    computed_s = alone[COMPUTE] * computing
    sums = np.zeros((SUMS, *usual_s.shape))
    sums[0], sums[1] = computed_s - alone[COMPUTE], computed_s / sending
    sums[2] = (alone[_OTHERS] > 0).any(axis=0)
    if sums[2].any():
        elapsed_s, over_s = _beside_endless(seconds, alone, kept)
        longest_s = np.maximum(elapsed_s, usual_s)
        # A lower bound must not assume that a pass lengthens the send if the pass takes long even
        # without a send.
        until_s = longest_s if kept == "own" else elapsed_s
        late_s = np.maximum(until_s - over_s, 0.0)
        sums[3], sums[4], sums[5] = longest_s - usual_s, over_s, late_s
    return sums


def beside_send_at_pace(
    slots: Floats, usual_s: Floats, computed_s: Floats, least_s: Floats
) -> Floats:
    """The numbers of ``slots_beside_sends`` of a layer (6, C) that computes for ``computed_s``, but
    not for less than its host's ``least_s``. In what the host adds, the send runs by itself.
    """
    longer_s, sent_s, busy, elapsed_longer_s, over_s, late_s = slots
    slowed_s, elapsed_s = computed_s + longer_s, usual_s + elapsed_longer_s
    return np.stack(
        [
            np.maximum(slowed_s - least_s, 0.0),
            sent_s + np.maximum(least_s - slowed_s, 0.0),
            busy,
            np.maximum(elapsed_s, least_s) - np.maximum(usual_s, least_s),
            over_s + busy * np.maximum(least_s - elapsed_s, 0.0),
            late_s,
        ]
    )


def longest_slots(seconds: TaskSeconds, alone: Floats) -> Floats:
    """Upper bounds of a layer's seconds in a pass if a send runs all the time, for each strategy.

    The bounds hold for any tasks of the streams of which none takes more than ``alone`` (4, ..., S)
    by itself.
    """
    return _beside_endless(seconds, alone, "most")[0]


def longest_beside_sends(seconds: TaskSeconds, kinds: Ints, summed: Sums) -> Mapping[Pass, Floats]:
    """Upper bounds of the seconds of steady passes and of the time between passes if a send runs
    all the time, for each candidate.

    The bounds hold for this work and any smaller work on the same streams.
    """
    is_inside = kinds[:, HERE] != NOTHING
    is_below = ~is_inside & (kinds[:, UPPER] != NOTHING)
    alone = SlotWork(seconds, kinds).alone(STEADY)
    turns = alone.sum(axis=1)
    shared = shared_turns(seconds, kinds[is_below], turns[:, is_below])
    if shared is not None:
        turns[:, np.flatnonzero(is_below)[:, None], shared.rows] = shared.alone
    longest = [(longest_slots(seconds, alone[:, :, is_inside]), is_inside)]
    for where in (is_below, ~is_inside & ~is_below):
        longest_s = longest_slots(seconds, turns[:, where])
        longest.append(((beside_sends(seconds, turns[:, where]) * longest_s)[None], where))
    return dict(zip((*STEADY, *TURNS), summed(longest), strict=True))


def _beside_endless(seconds: TaskSeconds, alone: Floats, kept: Kept) -> tuple[Floats, Floats]:
    """A layer's seconds in a pass if a send runs all the time, and the seconds of that send that
    are done meanwhile, for each strategy.
    """
    collective_s = alone[LINK]
    if seconds.model.template.depth == 0:
        # In an engine that runs a layer's tasks one after another, copies never overlap with
        # arithmetic.
        computing, sending = beside_arithmetic(seconds)
        computed_s = alone[COMPUTE] * computing
        copied_s = alone.sum(axis=0) - alone[COMPUTE] - collective_s
        elapsed_s = computed_s + copied_s + 2 * collective_s
        return elapsed_s, computed_s / sending + copied_s + collective_s
    slowed = in_slots(_slowed_by(seconds, kept), alone)
    flat = endless(alone.reshape(len(STREAMS), -1), slowed)
    elapsed_s, done_s = (one.reshape(collective_s.shape) for one in flat)
    # While the send and the layer's collectives share the link, the collectives get half of its
    # bandwidth.
    elapsed_s = elapsed_s + np.maximum(2 * collective_s - done_s, 0.0)
    return elapsed_s, np.maximum(done_s, 2 * collective_s) - collective_s


def beside_arithmetic(seconds: TaskSeconds) -> tuple[Floats, Floats]:
    """The factors by which arithmetic and a send slow each other down when nothing else runs, for
    each strategy.
    """
    slowed = _slowed_by(seconds)
    computing, sending = slowed.table[[COMPUTE, LINK]][:, slowed.first + _BOTH]
    return computing, sending


def _slowed_by(seconds: TaskSeconds, kept: Kept = "own") -> SlowedBy:
    """The slowdown factors of concurrent streams for each strategy; all are 1 for hardware on which
    slowdowns were never measured.
    """
    if seconds.model.cluster.hardware.interference is None:
        return SlowedBy.of_all(np.ones((len(BESIDE), len(STREAMS))), len(seconds.zero))
    return seconds.slowed_by(kept)


# Computes the times of stages whose sends run at the same time as passes.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutsidePasses(ColumnSet):
    """What each candidate stage does outside its passes: it sends and receives, reduces a tied
    embedding table, and averages weights at the end. Its embedding's forward pass takes
    ``embedded_s``.

    The factors from ``slowed_by_sends`` say how much sends slow arithmetic and copies to the host,
    and these the sends. After its last backward pass a stage still reduces gradients for
    ``left_reduced_s`` and copies them to its host for ``left_copied_s``; ``in_place`` is a mask of
    the stages of which reductions of several layers may be left.
    """

    received_s: Floats
    sent_s: Floats
    computing_slowed: Floats
    send_slowed: Floats
    together_slowed: Floats
    copying_slowed: Floats
    copied_slowed: Floats
    embedded_s: Floats
    after_s: Floats
    left_reduced_s: Floats
    left_copied_s: Floats
    in_place: Bools

    def last_late_s(self, rest_s: Floats, step_s: Floats) -> tuple[Floats, Floats]:
        """The seconds by which a stage's last gradient arrives later, and its iteration ends later,
        because the gradient is sent beside reductions (``rest_s``), copies and optimizer steps.
        """
        # A send and a reduction get half of the link each.
        late_s = np.clip(rest_s, 0.0, self.received_s)
        ends_s, left_s = late_s.copy(), self.received_s - late_s
        for beside_s, slowed, sending in (
            (self.left_copied_s, self.copying_slowed, self.copied_slowed),
            (step_s, self.computing_slowed, self.send_slowed),
        ):
            both_s = np.minimum(beside_s * slowed, left_s * sending)
            late_s = late_s + both_s * (1 - 1 / sending)
            ends_s = ends_s + both_s * (1 - 1 / slowed)
            left_s = left_s - both_s / sending
        return late_s, ends_s


def left_by_last(seconds: TaskSeconds, kinds: Ints, summed: Sums) -> Floats:
    """The seconds for which each candidate reduces gradients, and copies them to its host, after
    its last backward pass: each by itself.
    """
    is_below = (kinds[:, HERE] == NOTHING) & (kinds[:, UPPER] != NOTHING)
    (left_s,) = SlotWork(seconds, kinds[is_below]).alone(("last_backward",)).swapaxes(0, 1)
    return summed([(left_s[[LINK, _TO_HOST]], is_below)])


def slowed_by_sends(seconds: TaskSeconds) -> Mapping[str, Floats]:
    """The factors by which sends lengthen arithmetic and copies to the host, and these a send, for
    each strategy; and the share of the time of their overlap by which a send and arithmetic are
    both delayed. Their names are fields of ``OutsidePasses``.
    """
    slowed = _slowed_by(seconds)
    copying, copied = slowed.table[[_TO_HOST, LINK]][:, slowed.first + _WITH_COPY]
    computing, sending = beside_arithmetic(seconds)
    lost = sending * (1 - 1 / computing) + sending - 1
    return {
        "computing_slowed": computing,
        "send_slowed": sending,
        "together_slowed": np.minimum(lost, 1.0),
        "copying_slowed": copying,
        "copied_slowed": copied,
    }


def sent_over(steps: Ints, previous_s: Floats, next_s: Floats) -> Floats:
    """The seconds of each stage's send, which goes to the previous stage, to the next stage or, in
    no time, to the stage itself.
    """
    beside_s = np.where(steps == placement.PREVIOUS, previous_s, next_s)
    return np.where(steps == placement.HERE, 0.0, beside_s)


def times_beside_sends(
    times: Mapping[str, Floats],
    beside_sends: Mapping[Pass, BesideSend],
    outside: OutsidePasses,
    in_flight: Ints,
    rest_s: Floats,
    step_s: Floats,
) -> Mapping[str, Floats]:
    """The pass times of stages, lengthened where a stage's sends run at the same time as its next
    pass.

    A pass is slowed by the send of the pass before it; no gradient is sent before the first forward
    pass. The passes that overlap with a stage's sends to the next stage and back are assumed to be
    equal on both stages. The last micro-batch's gradient is sent while the last gradient reductions
    still run, for ``rest_s`` (C), or optimizer steps, for ``step_s``: these end later too.
    """
    sent, received = outside.sent_s, outside.received_s
    forward, backward = (beside_sends[phase] for phase in STEADY)
    turned_s, turned_back_s = np.zeros_like(received), np.zeros_like(sent)
    left_s, left_back_s, more_s = received, sent, np.zeros_like(received)
    late_s, late_back_s = forward.late_s, backward.late_s
    late_turned_s = np.zeros_like(sent)
    if TURNS[0] in beside_sends:
        # A send starts in the time between two passes (the "turn"); the rest of it overlaps with
        # the next pass.
        turn, back = (beside_sends[name] for name in TURNS)
        turned_s, left_s = turn.lost_s(received), turn.left_s(received)
        turned_back_s, left_back_s = back.lost_s(sent), back.left_s(sent)
        late_back_s = late_back_s + back.late_s
        late_turned_s = turn.late_s * _share(times["turned_s"], turn.usual_s)
        late_s = late_s + turn.late_s - late_turned_s
    lost_s, lost_back_s = forward.lost_s(left_s), backward.lost_s(left_back_s)
    if TURNS[0] in beside_sends:
        more_s = turned_s + lost_s - forward.lost_s(received)
    within_s, ends_s = times["within_backward_s"], times["delta_backward_s"]
    if backward.is_of_box:
        within_s, ends_s = (
            more_s
            + backward.if_usually_longer(np.maximum(more_s, 0.0)).lost_s(left_back_s)
            - lost_back_s
            for more_s in (within_s, ends_s)
        )
    later_s = sends_later_s(beside_sends, sent, in_flight == 1)
    ahead = np.maximum(in_flight - 1, 1)
    # With a single micro-batch in flight, no other forward pass follows the first one.
    first_late_s = forward.first_late_s(sent, outside.send_slowed, ahead, received) - later_s / 2
    first_late_s = np.where(in_flight > 1, first_late_s, 0.0)
    passed_s = times["through_forward_s"], times["through_backward_s"]
    late_in_queue_s = np.zeros_like(sent)
    if (sent > np.minimum(*passed_s)).any():
        late_in_queue_s = queued_late_s(beside_sends, sent, passed_s)
    apart_s = times["forward_s"] - times["through_forward_s"] + times["left_backward_s"]
    round_late_s = further_later_s(beside_sends, sent, apart_s)
    in_round_s = within_round_s(sent, outside.together_slowed, in_flight)
    # A lower bound must not assume that a send overlaps with anything after the last pass.
    last_s = (0.0, 0.0) if backward.is_of_box else outside.last_late_s(rest_s, step_s)
    sends = sent + received > 0
    return {
        **times,
        "forward_s": times["forward_s"] + turned_s + lost_s,
        "turned_s": times["turned_s"] + more_s,
        "again_forward_s": times["again_forward_s"] - more_s,
        "again_backward_s": times["again_backward_s"] + more_s,
        "backward_s": times["backward_s"] + turned_back_s + lost_back_s,
        "lost_forward_s": forward.lost_s(received),
        "lost_backward_s": turned_back_s + lost_back_s,
        "late_forward_s": sends * late_s,
        "late_backward_s": sends * late_back_s,
        "late_turned_s": sends * late_turned_s,
        "delta_forward_s": times["delta_forward_s"] - turned_s - lost_s,
        "delta_backward_s": ends_s + last_s[1],
        "within_backward_s": within_s + last_s[0],
        "point_to_point_s": times["point_to_point_s"] + later_s,
        "first_send_late_s": np.maximum(first_late_s, 0.0),
        "end_send_late_s": np.minimum(first_late_s, 0.0),
        "end_return_late_s": -later_s / 2,
        # The first stage receives no activations, so it is never the second stage of a round trip
        # (a micro-batch's way to the last stage and back).
        "within_round_s": np.where(received > 0, in_round_s, 0.0),
        "queued_late_s": late_in_queue_s,
        "round_late_s": np.where(in_flight > 1, round_late_s, 0.0),
    }


def beside_sends(seconds: TaskSeconds, alone: Floats) -> Bools:
    """Whether a send starts in the time between two passes, and not with the next pass, for each
    strategy.

    True if a layer computes in the time between two passes, or waits there for a collective that
    shares the link with the send. The tasks of that time would take ``alone`` (4, ..., S) one by
    one.
    """
    waits = (alone[LINK] > 0) & (seconds.zero >= SHARDED_WEIGHTS)
    return np.asarray(waits | (alone[COMPUTE] > 0))
