"""How much longer steady passes take while their stage sends the outcome of the pass before.

A send is on the link between GPUs. It slows arithmetic and copies as any work there does. Beside a
collective of its own stage both run at half of their speed, so together they take as long as one
after the other: a pass that waits for its collectives also waits for the send.

Axes: C candidates, S distinct strategies, N slots; the four streams first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, Self

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.core.columns import ColumnSet
from mistlab.cost.side_by_side import BESIDE, LINK, SlowedBy, endless
from mistlab.cost.slot_work import in_slots
from mistlab.cost.tasks import Kept, TaskSeconds
from mistlab.machine.slowdowns import COMPUTE, STREAMS
from mistlab.schedule import placement
from mistlab.schedule.slots import Phase

# What runs beside sends: steady passes, and turns before a forward pass and before a backward pass,
# in which a send begins.
Pass = Phase | Literal["turn", "turn back"]
TURN: Pass = "turn"
TURN_BACK: Pass = "turn back"
TURNS = TURN, TURN_BACK
# Phases of steady passes.
STEADY: tuple[Phase, ...] = ("forward", "backward")

# What a pass beside sends is summed up of, beside its usual time.
SUMS = 6

_BOTH = (1 << COMPUTE) + (1 << LINK)
_OTHERS = [place for place in range(len(STREAMS)) if place != COMPUTE]


@dataclass(frozen=True, slots=True, eq=False)
class BesideSend:
    """A steady pass (C) beside a send that goes on all through it; it usually takes ``usual_s``.

    If the pass did nothing but compute, it would take ``computing_longer_s`` more, and
    ``computing_sent_s`` of the send would be over at its end. With its copies and collectives it
    takes ``longer_s`` more, and ``sent_s`` are over, which is ``late_s`` less than of a send alone.

    For a box of ratios these are the least times, and ``sent_s`` are over in a pass that is no
    longer. In no pass of the box more than ``most_sent_s`` are over; None for a single candidate.
    """

    usual_s: Floats
    computing_longer_s: Floats
    computing_sent_s: Floats
    longer_s: Floats
    sent_s: Floats
    late_s: Floats
    most_sent_s: Floats | None = None

    def chosen(self, rows: Rows | slice) -> Self:
        """The passes of the candidates in these rows."""
        assert self.most_sent_s is None, "rows of boxes are chosen before their ends are joined"
        return type(self)(*(getattr(self, entry.name)[rows] for entry in fields(self)[:-1]))

    def lost_s(self, send_s: Floats) -> Floats:
        """Seconds (C) by which sends of ``send_s`` make passes longer."""
        computing_s = self.computing_longer_s * _share(send_s, self.computing_sent_s)
        lost_s = self.longer_s * _share(send_s, self.sent_s)
        if self.most_sent_s is not None:
            # A longer pass loses more, but a smaller share of it is beside the send. What it loses
            # then is least in the shortest pass or in the longest.
            longest_s = self.longer_s + self.most_sent_s - self.sent_s
            lost_s = np.minimum(lost_s, longest_s * _share(send_s, self.most_sent_s))
        return np.asarray(np.maximum(computing_s, lost_s))

    def left_s(self, send_s: Floats) -> Floats:
        """Seconds (C) of sends of ``send_s`` that are left when the pass is over."""
        most_s = self.sent_s if self.most_sent_s is None else self.most_sent_s
        return np.asarray(np.maximum(send_s - most_s, 0.0))

    def later_s(self, send_s: Floats) -> Floats:
        """Seconds (C) by which sends of ``send_s`` take longer beside passes."""
        most_s = self.sent_s if self.most_sent_s is None else self.most_sent_s
        return self.late_s * _share(send_s, most_s)

    def late_alone_s(self, send_s: Floats) -> Floats:
        """Seconds (C) by which sends of ``send_s`` take longer that go on beside nothing else."""
        return np.asarray(np.minimum(self.late_s, send_s))

    def first_late_s(self, send_s: Floats, slowed: Floats, passes: Ints, apart_s: Floats) -> Floats:
        """Seconds (C) by which the first send takes longer, which surely runs beside the next
        ``passes`` (C), whose inputs come ``apart_s`` (C) one after another; arithmetic alone makes
        sends take ``slowed`` (C) times as long."""
        begun = np.clip(send_s / np.where(apart_s > 0, apart_s, np.inf), 1.0, passes)
        begun = np.where(apart_s > 0, begun, passes)
        beside_s = (slowed - 1) * np.minimum(send_s, begun * self.computing_sent_s)
        most_s = self.sent_s if self.most_sent_s is None else self.most_sent_s
        beside = np.minimum(send_s / np.where(most_s > 0, most_s, np.inf), begun)
        return np.maximum(beside_s, self.late_s * beside)

    @property
    def is_of_box(self) -> bool:
        """Whether these are the least times of a box of ratios."""
        return self.most_sent_s is not None

    def if_usually_longer(self, longer_s: Floats) -> Self:
        """The least times if passes usually take so much longer."""
        assert self.most_sent_s is not None, "only of boxes"
        hidden_s = np.minimum(longer_s, self.longer_s)
        sent_s = self.sent_s + longer_s - hidden_s
        return replace(
            self,
            usual_s=self.usual_s + longer_s,
            longer_s=self.longer_s - hidden_s,
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
        """A pass of slots (C) of which ``busy`` have copies or collectives. If none has, all that
        is known is what the send does to arithmetic: often a stage waits meanwhile."""
        beside = (np.where(busy > 0, one_s, 0.0) for one_s in copying)
        return cls(usual_s, computing_longer_s, computing_sent_s, *beside)

    @classmethod
    def of_box(cls, ends: Sequence[Self], longest_s: Floats | float) -> Self:
        """Lower bounds over a box, from the passes at both ends of its recomputed blocks with the
        least ratios. No pass of the box with copies takes more than ``longest_s``
        beside a send that goes on all through it."""
        computing_longer_s, computing_sent_s, late_s = (
            np.minimum(*(getattr(end, name) for end in ends))
            for name in ("computing_longer_s", "computing_sent_s", "late_s")
        )
        least_s = np.minimum(*(end.usual_s for end in ends))
        own, other = (end.usual_s + end.longer_s for end in ends)
        elapsed_s = np.minimum(own, other)
        sent_s = elapsed_s - late_s
        # Without copies no ratio makes a pass longer.
        most_s = np.maximum(np.maximum(own, other), longest_s)
        return cls(
            usual_s=least_s,
            computing_longer_s=computing_longer_s,
            computing_sent_s=computing_sent_s,
            longer_s=elapsed_s - least_s,
            sent_s=sent_s,
            late_s=late_s,
            most_sent_s=most_s - late_s,
        )


def sends_later_s(beside: Mapping[Pass, BesideSend], send_s: Floats, are_single: Bools) -> Floats:
    """Seconds (C) by which sends of ``send_s`` there and back take longer beside passes, or beside
    turns of stages with a single micro-batch."""
    turns = [beside[name] for name in TURNS if name in beside]
    alone_s = sum((one.late_alone_s(send_s) for one in turns), np.zeros_like(send_s))
    later_s = sum((beside[phase].later_s(send_s) for phase in STEADY), np.zeros_like(send_s))
    return np.where(are_single, np.minimum(alone_s, later_s), later_s)


def further_later_s(beside: Mapping[Pass, BesideSend], send_s: Floats) -> Floats:
    """Seconds (C) by which sends of ``send_s`` there and back take longer that go on when the pass
    beside them is over: then they are beside the next pass, of the other way."""
    forward, backward = (beside[phase] for phase in STEADY)
    there_s = forward.later_s(backward.left_s(send_s))
    return np.asarray(there_s + backward.later_s(forward.left_s(send_s)))


def queued_late_s(
    beside: Mapping[Pass, BesideSend], send_s: Floats, passed_s: tuple[Floats, Floats]
) -> Floats:
    """Seconds (C) by which a micro-batch's passes take longer whose send of ``send_s`` waited for
    that of the micro-batch before it, for stages alike.

    It comes a send later, when the next stage has passed the other one on (``passed_s``, forward
    and back) and sends its gradient. So both of its passes run beside what is left of that send,
    and so do its passes after them, until it is late enough.
    """
    forward, backward = (beside[phase] for phase in STEADY)
    left_s = np.minimum(passed_s[0] + passed_s[1], send_s)
    late_s = np.zeros_like(send_s)
    if forward.is_of_box:
        # What a pass loses may be hidden in another that usually takes longer.
        return late_s
    for first, second in ((forward, backward), (backward, forward)):
        both_s = first.lost_s(left_s) + second.lost_s(first.left_s(left_s))
        late_s, left_s = late_s + both_s, np.maximum(left_s - both_s, 0.0)
    return late_s + forward.lost_s(left_s)


def _share(send_s: Floats, sent_s: Floats) -> Floats:
    """How much of a pass (C) a send goes on for, at most all of it."""
    return np.asarray(np.minimum(send_s / np.where(sent_s > 0, sent_s, np.inf), 1.0))


def slots_beside_sends(
    seconds: TaskSeconds,
    alone: Floats,
    usual_s: Floats,
    kept: Kept,
) -> Floats:
    """What ``BesideSend.of_sums`` is made of beside usual times (6, N, S), for slots (N, S) that
    usually take ``usual_s``; ``alone`` (4, N, S) are their tasks."""
    computing, sending = _beside_arithmetic(seconds)
    computed_s = alone[COMPUTE] * computing
    found = np.zeros((SUMS, *usual_s.shape))
    found[0], found[1] = computed_s - alone[COMPUTE], computed_s / sending
    found[2] = (alone[_OTHERS] > 0).any(axis=0)
    if found[2].any():
        elapsed_s, over_s = _beside_endless(seconds, alone, kept)
        longest_s = np.maximum(elapsed_s, usual_s)
        # For a bound, a pass that usually takes longer is not known to make the send later.
        until_s = longest_s if kept == "own" else elapsed_s
        late_s = np.maximum(until_s - over_s, 0.0)
        found[3], found[4], found[5] = longest_s - usual_s, over_s, late_s
    return found


def sends_beside_arithmetic(seconds: TaskSeconds) -> tuple[Floats, Floats]:
    """How many times as long (S) sends take while their stage computes; and what share (S) of a
    send that is left when a pass begins both together lose, at most all of it."""
    computing, sending = _beside_arithmetic(seconds)
    lost = sending * (1 - 1 / computing) + sending - 1
    return sending, np.minimum(lost, 1.0)


def longest_slots(seconds: TaskSeconds, alone: Floats) -> Floats:
    """Seconds of slots (..., S) beside an endless send, which no lesser work of ``alone`` (4, ...,
    S) exceeds."""
    return _beside_endless(seconds, alone, "most")[0]


def _beside_endless(seconds: TaskSeconds, alone: Floats, kept: Kept) -> tuple[Floats, Floats]:
    """Seconds (..., S) of slots beside an endless send, and those of the send that are over."""
    collective_s = alone[LINK]
    if seconds.model.template.depth == 0:
        # If tasks run one after another, no factor depends on other copies.
        computing, sending = _beside_arithmetic(seconds)
        computed_s = alone[COMPUTE] * computing
        copied_s = alone.sum(axis=0) - alone[COMPUTE] - collective_s
        elapsed_s = computed_s + copied_s + 2 * collective_s
        return elapsed_s, computed_s / sending + copied_s + collective_s
    slowed = in_slots(_slowed_by(seconds, kept), alone)
    flat = endless(alone.reshape(len(STREAMS), -1), slowed)
    elapsed_s, done_s = (one.reshape(collective_s.shape) for one in flat)
    # Until collectives are over, half of what the link does is theirs.
    elapsed_s = elapsed_s + np.maximum(2 * collective_s - done_s, 0.0)
    return elapsed_s, np.maximum(done_s, 2 * collective_s) - collective_s


def _beside_arithmetic(seconds: TaskSeconds) -> tuple[Floats, Floats]:
    """The factors (S) of arithmetic and of the link where nothing else runs."""
    slowed = _slowed_by(seconds)
    computing, sending = slowed.table[[COMPUTE, LINK]][:, slowed.first + _BOTH]
    return computing, sending


def _slowed_by(seconds: TaskSeconds, kept: Kept = "own") -> SlowedBy:
    """The streams' factors of each strategy."""
    if seconds.model.cluster.hardware.interference is None:
        return SlowedBy.of_all(np.ones((len(BESIDE), len(STREAMS))), len(seconds.zero))
    return seconds.slowed_by(kept)


# The times of stages beside their sends.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutsidePasses(ColumnSet):
    """The times of candidates (C) that are no part of their passes: sends there and back, how many
    times as long sends take beside arithmetic, reductions of tied tables and averages of weights
    afterwards. Those of gradients ``in_place`` go on when the last backward pass has computed."""

    received_s: Floats
    sent_s: Floats
    send_slowed: Floats
    together_slowed: Floats
    after_s: Floats
    in_place: Bools


def sent_over(steps: Ints, previous_s: Floats, next_s: Floats) -> Floats:
    """Seconds (C) of sends between each stage and the stage that is so many steps (C) away."""
    beside_s = np.where(steps == placement.PREVIOUS, previous_s, next_s)
    return np.where(steps == placement.HERE, 0.0, beside_s)


def times_beside_sends(
    times: Mapping[str, Floats],
    beside_sends: Mapping[Pass, BesideSend],
    outside: OutsidePasses,
    in_flight: Ints,
    rest_s: Floats,
) -> Mapping[str, Floats]:
    """The times (C) of stages whose sends run beside the next pass.

    A pass is slowed by the send of the pass before it; no gradients are sent before the first
    forward. Sends to the next stage and back run beside the passes of stages that are taken to be
    alike. The last micro-batch's gradient goes back beside what is left of reductions in place, for
    ``rest_s`` (C), so both are done later.
    """
    sent, received, in_place = outside.sent_s, outside.received_s, outside.in_place
    forward, backward = (beside_sends[phase] for phase in STEADY)
    turned_s, turned_back_s = np.zeros_like(received), np.zeros_like(sent)
    left_s, left_back_s, not_turned_s = received, sent, times["turned_s"]
    if TURNS[0] in beside_sends:
        # A send begins in the turn, and what is left of it then goes on beside the pass.
        turn, back = (beside_sends[name] for name in TURNS)
        turned_s, left_s = turn.lost_s(received), turn.left_s(received)
        turned_back_s, left_back_s = back.lost_s(sent), back.left_s(sent)
    lost_s, lost_back_s = forward.lost_s(left_s), backward.lost_s(left_back_s)
    if TURNS[0] in beside_sends:
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
    later_s = sends_later_s(beside_sends, sent, in_flight == 1)
    ahead = np.maximum(in_flight - 1, 1)
    first_late_s = forward.first_late_s(sent, outside.send_slowed, ahead, received)
    first_late_s = np.maximum(first_late_s - later_s / 2, 0.0)
    passed_s = times["through_forward_s"], times["through_backward_s"]
    late_in_queue_s = np.zeros_like(sent)
    if (sent > np.minimum(*passed_s)).any():
        late_in_queue_s = queued_late_s(beside_sends, sent, passed_s)
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
        "queued_late_s": late_in_queue_s,
        "round_late_s": np.where(in_flight > 1, further_later_s(beside_sends, sent), 0.0),
    }


# How much longer rounds of a steady pipeline take, because passes run beside sends.
#
# In a pipeline that waits for its sends, a stage is idle between its passes. After a gradient was
# sent back, the foremost stage of a round begins its next forward pass at once, the last stage its
# backward pass. In stages between them the gaps differ: with equal stages, each stage's gap before
# its forward pass is longer than the gap of the stage in front. A pass whose gap is shorter than
# the send before it runs beside the rest of the send, and both slow down.
#
# For K equal stages, with all times in sends, gap u of stage i before its forward pass, and what a
# pass and a send lose beside one another (``slowed``, a share of the time that they are together):
#
#     u(0) = 0,  u(K) = 2,  u(i+1) = u(i) + short + slowed (max(1 - u(i), 0) + max(u(i+1) - 1, 0))
#
# where a micro-batch takes ``short`` less than both passes and both sends of a stage one after
# another. The foremost stage sends nothing back, and so loses nothing. So a round takes 2 - K
# short longer than without losses.
#
# Axes: C candidates.


def within_round_s(send_s: Floats, slowed: Floats, stages: Ints) -> Floats:
    """Seconds (C) by which a round takes longer because of a stage, which is the foremost of so
    many ``stages`` (C) and sends for ``send_s`` (C) to the next one.

    A round from the stage in front on goes past one stage more than a round from this stage on.
    """
    return send_s * (_lost(slowed, stages + 1) - _lost(slowed, stages))


def _lost(slowed: Floats, stages: Ints) -> Floats:
    """What a round past so many equal stages (C) loses, in sends: none past one or two."""
    kept = 1 - slowed
    # Half of the stages lose before their forward passes, half before their backward passes. A
    # stage in the middle loses before both.
    rest = kept ** np.maximum(stages // 2 - 1, 0)
    both = np.where(stages % 2 == 1, 2 * kept, 1.0)
    below = both + np.where(stages % 2 == 1, slowed, 0.0) - both * kept * rest
    loses = (stages > 2) & (slowed > 0)
    short = slowed * rest * both / np.where(loses, below, 1.0)
    return np.where(loses, np.maximum(2 - stages * short, 0.0), 0.0)
