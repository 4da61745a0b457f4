"""Computes how much a pipeline stage's sends and the pass that runs at the same time slow each
other down.

A send is on the link between GPUs. It slows arithmetic and copies as any work there does. Beside a
collective of its own stage both run at half of their speed, so together they take as long as one
after the other: a pass that waits for its collectives also waits for the send.

Axes: C candidates, S distinct strategies, N slots; the four streams first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.core.columns import ColumnSet
from mistlab.cost.side_by_side import BESIDE, LINK, SlowedBy, endless
from mistlab.cost.slot_work import in_slots
from mistlab.cost.tasks import Kept, TaskSeconds
from mistlab.machine.slowdowns import COMPUTE, STREAMS
from mistlab.schedule import placement
from mistlab.schedule.slots import SHARDED_WEIGHTS, Phase
from mistlab.schedule.stage_passes import PassKey, StagePass

# The part of a stage's work that a send overlaps with: a steady-state pass, or the time slot
# between two passes ("turn" before a forward pass, "turn back" before a backward pass), in which
# the send starts.
Pass = Phase | Literal["turn", "turn back"]
TURN: Pass = "turn"
TURN_BACK: Pass = "turn back"
TURNS = TURN, TURN_BACK
# The phases of a stage's work that are steady-state passes.
STEADY: tuple[Phase, ...] = ("forward", "backward")

# The number of sums over a pass's per-layer time slots from which a ``BesideSend`` is made, in
# addition to the pass's time without a send.
SUMS = 6

_BOTH = (1 << COMPUTE) + (1 << LINK)
_OTHERS = [place for place in range(len(STREAMS)) if place != COMPUTE]


@dataclass(frozen=True, slots=True, eq=False)
class BesideSend:
    """How a steady-state pass and a send that lasts throughout the pass slow each other down, for
    each candidate (C); without the send the pass takes ``usual_s``.

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
        """The passes and sends of the candidates with these indices."""
        assert self.most_sent_s is None, "rows of boxes are chosen before their ends are joined"
        return type(self)(*(getattr(self, entry.name)[rows] for entry in fields(self)[:-1]))

    def lost_s(self, send_s: Floats) -> Floats:
        """The seconds by which a send that takes ``send_s`` lengthens the pass of each candidate
        (C).
        """
        computing_s = self.computing_longer_s * _share(send_s, self.computing_sent_s)
        lost_s = self.longer_s * _share(send_s, self.sent_s)
        if self.most_sent_s is not None:
            # Of all passes that the lower bound covers, the shortest or the longest is slowed
            # least: a send slows a longer pass for longer, but overlaps with a smaller part of it.
            longest_s = self.longer_s + self.most_sent_s - self.sent_s
            lost_s = np.minimum(lost_s, longest_s * _share(send_s, self.most_sent_s))
        return np.asarray(np.maximum(computing_s, lost_s))

    def left_s(self, send_s: Floats) -> Floats:
        """The seconds of a send of ``send_s`` that remain when the pass has ended, for each
        candidate (C).
        """
        most_s = self.sent_s if self.most_sent_s is None else self.most_sent_s
        return np.asarray(np.maximum(send_s - most_s, 0.0))

    def later_s(self, send_s: Floats) -> Floats:
        """The seconds by which the pass lengthens a send of ``send_s`` that runs at the same time,
        for each candidate (C).
        """
        most_s = self.sent_s if self.most_sent_s is None else self.most_sent_s
        return self.late_s * _share(send_s, most_s)

    def late_alone_s(self, send_s: Floats) -> Floats:
        """The seconds by which this pass alone lengthens a send of ``send_s``, for each candidate
        (C).
        """
        return np.asarray(np.minimum(self.late_s, send_s))

    def first_late_s(self, send_s: Floats, slowed: Floats, passes: Ints, apart_s: Floats) -> Floats:
        """The seconds by which passes lengthen the first micro-batch's send, for each candidate
        (C). The send overlaps with those of the next ``passes`` that begin before it ends, one
        every ``apart_s`` as their inputs arrive; arithmetic alone lengthens a send by the factor
        ``slowed``.
        """
        begun = np.clip(send_s / np.where(apart_s > 0, apart_s, np.inf), 1.0, passes)
        begun = np.where(apart_s > 0, begun, passes)
        beside_s = (slowed - 1) * np.minimum(send_s, begun * self.computing_sent_s)
        most_s = self.sent_s if self.most_sent_s is None else self.most_sent_s
        beside = np.minimum(send_s / np.where(most_s > 0, most_s, np.inf), begun)
        return np.maximum(beside_s, self.late_s * beside)

    @property
    def is_of_box(self) -> bool:
        """Whether the times are lower bounds over a box, that is, over all candidates with offload
        ratios in given ranges.
        """
        return self.most_sent_s is not None

    def if_usually_longer(self, longer_s: Floats) -> Self:
        """The same lower bounds for a pass that takes ``longer_s`` more without the send."""
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
        """Make the interference of passes and sends for candidates (C) from sums over per-layer
        time slots, of which ``busy`` have host copies or collectives. If none has, a send
        interferes with arithmetic only, since the stage often stalls meanwhile.
        """
        beside = (np.where(busy > 0, one_s, 0.0) for one_s in copying)
        return cls(usual_s, computing_longer_s, computing_sent_s, *beside)

    @classmethod
    def of_box(cls, ends: Sequence[Self], longest_s: Floats | float) -> Self:
        """Lower bounds of the interference over a box: all candidates with offload ratios and
        numbers of recomputed blocks in given ranges. ``ends`` are the passes with the smallest
        ratios, with the fewest and with the most recomputed blocks. No pass with host copies in
        these ranges takes more than ``longest_s`` while a send lasts throughout it.
        """
        computing_longer_s, computing_sent_s, late_s = (
            np.minimum(*(getattr(end, name) for end in ends))
            for name in ("computing_longer_s", "computing_sent_s", "late_s")
        )
        least_s = np.minimum(*(end.usual_s for end in ends))
        first_s, second_s = (end.usual_s + end.longer_s for end in ends)
        elapsed_s = np.minimum(first_s, second_s)
        sent_s = elapsed_s - late_s
        # Without host copies no offload ratio lengthens a pass.
        most_s = np.maximum(np.maximum(first_s, second_s), longest_s)
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
    """The seconds by which passes lengthen a forward and a backward send of ``send_s`` together,
    for each candidate (C). With a single micro-batch, only the time slots between its passes
    ("turns") can lengthen its sends.
    """
    turns = [beside[name] for name in TURNS if name in beside]
    alone_s = sum((one.late_alone_s(send_s) for one in turns), np.zeros_like(send_s))
    later_s = sum((beside[phase].later_s(send_s) for phase in STEADY), np.zeros_like(send_s))
    return np.where(are_single, np.minimum(alone_s, later_s), later_s)


def further_later_s(beside: Mapping[Pass, BesideSend], send_s: Floats) -> Floats:
    """For each candidate (C): a forward or backward send of ``send_s`` may outlast the pass that
    runs at the same time; the seconds by which the next pass, of the other direction, lengthens the
    rest of both sends.
    """
    forward, backward = (beside[phase] for phase in STEADY)
    there_s = forward.later_s(backward.left_s(send_s))
    return np.asarray(there_s + backward.later_s(forward.left_s(send_s)))


def queued_late_s(
    beside: Mapping[Pass, BesideSend], send_s: Floats, passed_s: tuple[Floats, Floats]
) -> Floats:
    """The seconds by which sends lengthen the passes of a micro-batch whose own send of ``send_s``
    waits for the previous micro-batch's send to end, in a pipeline of equal stages (C).

    It comes a send later, when the next stage has passed the other one on (``passed_s``, forward
    and back) and sends its gradient. So both of its passes run beside what is left of that send,
    and so do its passes after them, until it is late enough.
    """
    forward, backward = (beside[phase] for phase in STEADY)
    left_s = np.minimum(passed_s[0] + passed_s[1], send_s)
    late_s = np.zeros_like(send_s)
    if forward.is_of_box:
        # This is a lower bound over many candidates: the slowdown may be hidden in a pass that
        # takes longer without the send.
        return late_s
    for first, second in ((forward, backward), (backward, forward)):
        both_s = first.lost_s(left_s) + second.lost_s(first.left_s(left_s))
        late_s, left_s = late_s + both_s, np.maximum(left_s - both_s, 0.0)
    return late_s + forward.lost_s(left_s)


def _share(send_s: Floats, sent_s: Floats) -> Floats:
    """The share of each candidate's pass (C) during which a send of ``send_s`` runs, at most 1;
    ``sent_s`` of a send are over at the end of the pass.
    """
    return np.asarray(np.minimum(send_s / np.where(sent_s > 0, sent_s, np.inf), 1.0))


def slots_beside_sends(
    seconds: TaskSeconds,
    alone: Floats,
    usual_s: Floats,
    kept: Kept,
) -> Floats:
    """The sums from which ``BesideSend.of_sums`` is made, for each per-layer time slot and strategy
    (6, N, S): a time slot takes ``usual_s`` without a send, and its tasks on the four streams would
    take ``alone`` (4, N, S) one by one.
    """
    computing, sending = _beside_arithmetic(seconds)
    computed_s = alone[COMPUTE] * computing
    sums = np.zeros((SUMS, *usual_s.shape))
    sums[0], sums[1] = computed_s - alone[COMPUTE], computed_s / sending
    sums[2] = (alone[_OTHERS] > 0).any(axis=0)
    if sums[2].any():
        elapsed_s, over_s = _beside_endless(seconds, alone, kept)
        longest_s = np.maximum(elapsed_s, usual_s)
        # In a lower bound, a pass that is long even without the send is not taken to lengthen the
        # send.
        until_s = longest_s if kept == "own" else elapsed_s
        late_s = np.maximum(until_s - over_s, 0.0)
        sums[3], sums[4], sums[5] = longest_s - usual_s, over_s, late_s
    return sums


def sends_beside_arithmetic(seconds: TaskSeconds) -> tuple[Floats, Floats]:
    """For each strategy (S): the factor by which arithmetic lengthens a send; and the seconds that
    a pass and the rest of a send lose by their overlap, per second of that rest (at most 1).
    """
    computing, sending = _beside_arithmetic(seconds)
    lost = sending * (1 - 1 / computing) + sending - 1
    return sending, np.minimum(lost, 1.0)


def longest_slots(seconds: TaskSeconds, alone: Floats) -> Floats:
    """For each strategy (..., S), upper bounds of the seconds of per-layer time slots throughout
    which a send lasts, whatever the tasks of their streams, of which none takes more than ``alone``
    (4, ..., S) by itself.
    """
    return _beside_endless(seconds, alone, "most")[0]


def _beside_endless(seconds: TaskSeconds, alone: Floats, kept: Kept) -> tuple[Floats, Floats]:
    """The seconds of per-layer time slots (..., S) throughout which a send lasts, and the seconds
    of that send that are done meanwhile.
    """
    collective_s = alone[LINK]
    if seconds.model.template.depth == 0:
        # Where the tasks of a per-layer time slot run one after another, copies never run at the
        # same time as arithmetic.
        computing, sending = _beside_arithmetic(seconds)
        computed_s = alone[COMPUTE] * computing
        copied_s = alone.sum(axis=0) - alone[COMPUTE] - collective_s
        elapsed_s = computed_s + copied_s + 2 * collective_s
        return elapsed_s, computed_s / sending + copied_s + collective_s
    slowed = in_slots(_slowed_by(seconds, kept), alone)
    flat = endless(alone.reshape(len(STREAMS), -1), slowed)
    elapsed_s, done_s = (one.reshape(collective_s.shape) for one in flat)
    # While the send and the slot's collectives share the link, the collectives use half of it.
    elapsed_s = elapsed_s + np.maximum(2 * collective_s - done_s, 0.0)
    return elapsed_s, np.maximum(done_s, 2 * collective_s) - collective_s


def _beside_arithmetic(seconds: TaskSeconds) -> tuple[Floats, Floats]:
    """For each strategy (S), the factors by which arithmetic and a send slow each other down when
    nothing else runs.
    """
    slowed = _slowed_by(seconds)
    computing, sending = slowed.table[[COMPUTE, LINK]][:, slowed.first + _BOTH]
    return computing, sending


def _slowed_by(seconds: TaskSeconds, kept: Kept = "own") -> SlowedBy:
    """The slowdown factors of the four streams, for each strategy; all 1 for hardware whose
    interference was never measured.
    """
    if seconds.model.cluster.hardware.interference is None:
        return SlowedBy.of_all(np.ones((len(BESIDE), len(STREAMS))), len(seconds.zero))
    return seconds.slowed_by(kept)


# Computes the times of stages whose sends run at the same time as passes.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutsidePasses(ColumnSet):
    """What the stages of candidates (C) do outside their passes: receive and send, reduce a tied
    embedding table, and average weights at the end; and the factors by which sends and arithmetic
    slow each other down. ``in_place`` is a mask of the stages whose gradients are still being
    reduced when the last backward pass has computed.
    """

    received_s: Floats
    sent_s: Floats
    send_slowed: Floats
    together_slowed: Floats
    after_s: Floats
    in_place: Bools


def sent_over(steps: Ints, previous_s: Floats, next_s: Floats) -> Floats:
    """The seconds in which each stage (C) sends to the stage that ``steps`` names: the previous
    one, the next one, or the sending stage itself, which takes no time.
    """
    beside_s = np.where(steps == placement.PREVIOUS, previous_s, next_s)
    return np.where(steps == placement.HERE, 0.0, beside_s)


def times_beside_sends(
    times: Mapping[str, Floats],
    beside_sends: Mapping[Pass, BesideSend],
    outside: OutsidePasses,
    in_flight: Ints,
    rest_s: Floats,
) -> Mapping[str, Floats]:
    """The times (C) of stages whose sends run at the same time as the next pass.

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
        # A send starts in the time slot before the next pass (the "turn"), and the rest of it
        # overlaps with that pass.
        turn, back = (beside_sends[name] for name in TURNS)
        turned_s, left_s = turn.lost_s(received), turn.left_s(received)
        turned_back_s, left_back_s = back.lost_s(sent), back.left_s(sent)
    lost_s, lost_back_s = forward.lost_s(left_s), backward.lost_s(left_back_s)
    if TURNS[0] in beside_sends:
        not_turned_s = not_turned_s + turned_s + lost_s - forward.lost_s(received)
    within_s, ends_s = times["within_backward_s"], times["delta_backward_s"]
    if backward.is_of_box:
        # A lower bound over many candidates must not assume that the send and the reductions
        # coincide. Among backward passes, one that takes as long as the last one without a send is
        # slowed less than the shortest one.
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
        # With a single micro-batch in flight, the first forward pass is not followed by another
        # one.
        "first_send_late_s": np.where(in_flight > 1, first_late_s, 0.0),
        # The first stage receives no activations, so no round (a micro-batch to later stages and
        # back) begins before it and goes through it.
        "within_round_s": np.where(received > 0, in_round_s, 0.0),
        "queued_late_s": late_in_queue_s,
        "round_late_s": np.where(in_flight > 1, further_later_s(beside_sends, sent), 0.0),
    }


# Computes by how much sends and passes that slow one another down lengthen the rounds of a
# steady-state pipeline. In a *round*, a micro-batch goes from a stage to the last one, its gradient
# comes back, and the stage's next forward pass waits for it.
#
# In a pipeline bound by its sends, a stage idles between passes. After a gradient has been sent
# back, the first stage of a round starts its next forward pass at once, and the last stage its
# backward pass. In between, the gaps differ: with equal stages, each stage's gap before its forward
# pass is longer than the gap of the stage in front. A pass whose gap is shorter than the send
# before it overlaps with the rest of the send, and both slow down.
#
# For K equal stages, in units of one send, with u(i) the gap of stage i before its forward pass,
# and ``slowed`` the share of their overlap that a pass and a send lose:
#
# u(0) = 0, u(K) = 2, u(i+1) = u(i) + short + slowed (max(1 - u(i), 0) + max(u(i+1) - 1, 0))
#
# where a micro-batch takes ``short`` less than both passes and both sends of a stage in sequence.
# The first stage sends nothing back, and so loses nothing. A round is therefore 2 - K short longer
# than without interference.
#
# Axes: C candidates.


def within_round_s(send_s: Floats, slowed: Floats, stages: Ints) -> Floats:
    """For each candidate (C), the seconds that sends and passes lose to one another in the first of
    ``stages`` equal stages, and by which this stage lengthens a round (a micro-batch to the last
    stage and back) that begins in the stage in front; a send to the next stage takes ``send_s``.

    A round from the stage in front on goes past one stage more than a round from this stage on.
    """
    return send_s * (_lost(slowed, stages + 1) - _lost(slowed, stages))


def _lost(slowed: Floats, stages: Ints) -> Floats:
    """For each candidate (C), the time by which interference lengthens a round through this many
    equal stages, as a multiple of a send's seconds; zero for one or two stages.
    """
    kept = 1 - slowed
    # Half of the stages lose time before their forward passes, half before their backward passes;
    # the middle one of an odd number loses before both.
    rest = kept ** np.maximum(stages // 2 - 1, 0)
    both = np.where(stages % 2 == 1, 2 * kept, 1.0)
    below = both + np.where(stages % 2 == 1, slowed, 0.0) - both * kept * rest
    loses = (stages > 2) & (slowed > 0)
    short = slowed * rest * both / np.where(loses, below, 1.0)
    return np.where(loses, np.maximum(2 - stages * short, 0.0), 0.0)


def beside_sends(seconds: TaskSeconds, alone: Floats) -> Bools:
    """Whether sends overlap with the time slots between two passes ("turns"), which have tasks
    ``alone`` (4, ..., S): true for slots in which a layer computes, or waits for a collective that
    shares the link with the send. Otherwise the whole send counts as overlapping with the pass that
    follows.
    """
    waits = (alone[LINK] > 0) & (seconds.zero >= SHARDED_WEIGHTS)
    return np.asarray(waits | (alone[COMPUTE] > 0))


# Computes when the sends of several stages arrive that share the network of a node.
#
# A stage sends one output after another. Sends of different stages that leave or enter the same
# node share its network while they overlap: if two each need all of it, each is delayed by the
# overlap. Passes are processed in order of time, so a send finds those that started before it;
# these are delayed, too.
#
# Axes: C candidates.

# The route of a send: the indices of the sending and the receiving stage.
Way = tuple[int, int]
# How many of the last sends on each other route a new send may overlap with.
_MET = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedNetworks:
    """Which sends share the network of a node. For each route (sending and receiving stage),
    ``weights`` has for each other route the seconds by which a send is delayed per second in which
    sends on both routes run (C).
    """

    weights: Mapping[Way, Mapping[Way, Floats | float]]

    @classmethod
    def of(cls, levels: Sequence[tuple[Ints, Mapping[Way, Floats]]]) -> Self:
        """Derive which sends share a network from ``levels``: nodes, then the units (racks, ...) of
        each network tier. Each level has the node or unit that each stage is on (C, stages), and
        the share (C) of its links that a send on each route needs, zero inside a node or unit. Two
        sends delay each other by the level whose links they overload most.
        """
        weights: dict[Way, dict[Way, Floats | float]] = {}
        for way in levels[0][1]:
            for other in levels[0][1]:
                weight = np.max([_together(*level, way, other) for level in levels], axis=0)
                if weight.any():
                    used = weight if len(weight) > 1 else weight.item()
                    weights.setdefault(way, {})[other] = used
        return cls(weights=weights)


def _together(units: Ints, shares: Mapping[Way, Floats], way: Way, other: Way) -> Floats:
    """For each candidate (C), by how much sends on two routes together overload the link of the
    node or unit that both leave or enter, as a share of the link; zero if they do not overload it
    or share none.
    """
    share, other_share = shares[way], shares[other]
    meets = (units[:, way[0]] == units[:, other[0]]) | (units[:, way[1]] == units[:, other[1]])
    uses = (share > 0) & (other_share > 0) & meets & (way[0] != other[0])
    return np.where(uses, np.maximum(share + other_share - 1, 0.0), 0.0)


@dataclass(slots=True, eq=False)
class _Send:
    """A send that starts and ends at these times, and would take ``seconds`` if no other send
    slowed it (C each).
    """

    begins: Any
    ends: Any
    seconds: Any

    def left_s(self, since: Any) -> Any:
        """The seconds that the send still needs at a time, if it ran alone from then on; zero once
        it has ended.
        """
        # A send of zero seconds has nothing left at any time; the smallest float avoids a division
        # by zero.
        lasts_s = np.maximum(self.ends - self.begins, np.finfo(np.float64).tiny)
        return np.maximum(self.ends - since, 0.0) * self.seconds / lasts_s


class Sends:
    """The sends between the stages of pipelines: each stage sends one output after another, and
    sends that share a network slow one another down.
    """

    def __init__(self, networks: SharedNetworks | None) -> None:
        self.weights = {} if networks is None else networks.weights
        # The send of each pass's output, the last send of each stage, and the last sends on each
        # route.
        self.of_pass: dict[PassKey, _Send] = {}
        self.last: dict[int, _Send] = {}
        self.recent: dict[Way, list[_Send]] = {}

    def add(self, stage_pass: StagePass, end: Any, seconds: Any, *, queue: bool) -> None:
        """Add the send of a pass's output. It begins when the pass ends; with ``queue`` it waits
        until the stage's previous send has ended.
        """
        goal, begins = stage_pass.goes_to, end
        assert goal is not None, "it sends nothing"
        if queue and stage_pass.stage in self.last:
            begins = np.maximum(end, self.last[stage_pass.stage].ends)
        send = _Send(begins, begins + seconds, seconds)
        self.of_pass[stage_pass.key] = self.last[stage_pass.stage] = send
        way = stage_pass.stage, goal.stage
        if way not in self.weights:
            return
        for other, weight in self.weights[way].items():
            for met in self.recent.get(other, ()):
                both = np.maximum(send.begins, met.begins)
                later = weight * np.minimum(send.left_s(both), met.left_s(both))
                send.ends, met.ends = send.ends + later, met.ends + later
        self.recent[way] = [*self.recent.get(way, ()), send][-_MET:]

    def come_s(self, stage_pass: StagePass, end: Any) -> Any:
        """The time at which a pass's input arrives, given the end of the pass that computed the
        input.
        """
        send = None if stage_pass.needs is None else self.of_pass.get(stage_pass.needs)
        return end if send is None else send.ends
