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
from mistlab.cost.side_by_side import BESIDE, LINK, SlowedBy, endless
from mistlab.cost.slot_work import in_slots
from mistlab.cost.tasks import Kept, TaskSeconds
from mistlab.machine.slowdowns import COMPUTE, STREAMS
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
