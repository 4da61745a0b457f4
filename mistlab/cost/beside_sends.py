"""How much longer steady passes take while their stage sends the outcome of the pass before.

A send is on the link between GPUs. It slows arithmetic and copies as any work there does. Beside a
collective of its own stage both run at half of their speed, so together they take as long as one
after the other: a pass that waits for its collectives also waits for the send.

Axes: C candidates, S distinct strategies, K kinds of slots; the four streams last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.side_by_side import LINK, Factors, beside_endless
from mistlab.cost.tasks import Kept, TaskSeconds
from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.slot_table import Phase

Values = NDArray[np.float64]

# Phases of steady passes.
STEADY: tuple[Phase, ...] = ("forward", "backward")

COMPUTE = STREAMS.index("compute")
_BOTH = (1 << COMPUTE) + (1 << LINK)
_OTHERS = [place for place in range(len(STREAMS)) if place != COMPUTE]


@dataclass(frozen=True, slots=True, eq=False)
class BesideSend:
    """A steady pass (C) beside a send that goes on all through it.

    If the pass did nothing but compute, it would take ``computing_longer_s`` more, and
    ``computing_sent_s`` of the send would be over at its end. With its copies and collectives it
    takes ``longer_s`` more, and ``sent_s`` are over, which is ``late_s`` less than of a send alone.

    For a box of ratios these are the least times, and ``sent_s`` are over in a pass that is no
    longer. In no pass of the box more than ``most_sent_s`` are over; None for a single candidate.
    """

    computing_longer_s: Values
    computing_sent_s: Values
    longer_s: Values
    sent_s: Values
    late_s: Values
    most_sent_s: Values | None = None

    def chosen(self, rows: NDArray[np.intp]) -> Self:
        """Those of the candidates in these rows."""
        assert self.most_sent_s is None, "rows of boxes are chosen before their ends are joined"
        return type(self)(*(getattr(self, entry.name)[rows] for entry in fields(self)[:-1]))

    def lost_s(self, send_s: Values) -> Values:
        """Seconds (C) by which sends of ``send_s`` make passes longer."""
        computing_s = self.computing_longer_s * _share(send_s, self.computing_sent_s)
        lost_s = self.longer_s * _share(send_s, self.sent_s)
        if self.most_sent_s is not None:
            # A longer pass loses more, but a smaller share of it is beside the send. What it loses
            # then is least in the shortest pass or in the longest.
            longest_s = self.longer_s + self.most_sent_s - self.sent_s
            lost_s = np.minimum(lost_s, longest_s * _share(send_s, self.most_sent_s))
        return np.asarray(np.maximum(computing_s, lost_s))

    def later_s(self, send_s: Values) -> Values:
        """Seconds (C) by which sends of ``send_s`` take longer beside passes."""
        most_s = self.sent_s if self.most_sent_s is None else self.most_sent_s
        return self.late_s * _share(send_s, most_s)

    @property
    def is_of_box(self) -> bool:
        """Whether these are the least times of a box of ratios."""
        return self.most_sent_s is not None

    def if_usually_longer(self, longer_s: Values) -> Self:
        """The least times if passes usually take so much longer."""
        assert self.most_sent_s is not None, "only of boxes"
        hidden_s = np.minimum(longer_s, self.longer_s)
        sent_s = self.sent_s + longer_s - hidden_s
        return replace(
            self,
            longer_s=self.longer_s - hidden_s,
            sent_s=sent_s,
            most_sent_s=np.maximum(self.most_sent_s, sent_s),
        )

    @classmethod
    def of_box(
        cls, ends: Sequence[Self], usual_s: Sequence[Values], longest_s: Values | float
    ) -> Self:
        """What no candidate of a box undercuts, from the passes at both ends of its recomputed
        blocks, with the least ratios. They usually take ``usual_s``; no pass of the box with
        copies takes more than ``longest_s`` beside a send that goes on all through it."""
        computing_longer_s, computing_sent_s, late_s = (
            np.minimum(*(getattr(end, name) for end in ends))
            for name in ("computing_longer_s", "computing_sent_s", "late_s")
        )
        least_s = np.minimum(*usual_s)
        own, other = (one_s + end.longer_s for one_s, end in zip(usual_s, ends, strict=True))
        elapsed_s = np.minimum(own, other)
        sent_s = elapsed_s - late_s
        # Without copies no ratio makes a pass longer.
        most_s = np.maximum(np.maximum(own, other), longest_s)
        return cls(
            computing_longer_s=computing_longer_s,
            computing_sent_s=computing_sent_s,
            longer_s=elapsed_s - least_s,
            sent_s=sent_s,
            late_s=late_s,
            most_sent_s=most_s - late_s,
        )


def _share(send_s: Values, sent_s: Values) -> Values:
    """How much of a pass (C) a send goes on for, at most all of it."""
    return np.asarray(np.minimum(send_s / np.where(sent_s > 0, sent_s, np.inf), 1.0))


def slots_beside_sends(
    seconds: TaskSeconds, alone: Values, usual_s: Values, kept: Kept
) -> tuple[Values, ...]:
    """What ``BesideSend`` sums up, for slots (K, S) that usually take ``usual_s``; ``alone``
    (K, S, 4) are their tasks.

    Sends that only arithmetic runs beside count as no later: often a stage waits meanwhile.
    """
    is_busy = np.asarray((alone[..., _OTHERS] > 0).any(axis=(0, 2)))
    computing_longer_s, computing_sent_s, longer_s, sent_s, late_s = (
        np.zeros_like(usual_s) for _ in range(5)
    )
    for rows, factors in _factors(seconds):
        computing, sending = factors[_BOTH, [COMPUTE, LINK]]
        computed_s = alone[:, rows, COMPUTE] * computing
        computing_longer_s[:, rows] = computed_s - alone[:, rows, COMPUTE]
        computing_sent_s[:, rows] = computed_s / sending
    for busy, found in _endless(seconds, alone, is_busy, kept):
        elapsed_s, over_s = found
        longest_s = np.maximum(elapsed_s, usual_s[:, busy])
        longer_s[:, busy] = longest_s - usual_s[:, busy]
        sent_s[:, busy] = over_s
        # For a bound, a pass that usually takes longer is not known to make the send later.
        elapsed_s = longest_s if kept == "own" else elapsed_s
        late_s[:, busy] = np.maximum(elapsed_s - over_s, 0.0)
    return computing_longer_s, computing_sent_s, longer_s, sent_s, late_s


def longest_slots(seconds: TaskSeconds, alone: Values) -> Values:
    """Seconds of slots (K, S) beside an endless send, which no lesser work of ``alone`` (K, S, 4)
    exceeds."""
    longest_s = np.zeros(alone.shape[:2])
    every = np.ones(alone.shape[1], dtype=np.bool_)
    for rows, (elapsed_s, _) in _endless(seconds, alone, every, "most"):
        longest_s[:, rows] = elapsed_s
    return longest_s


def _endless(
    seconds: TaskSeconds, alone: Values, chosen: NDArray[np.bool_], kept: Kept
) -> Iterator[tuple[NDArray[np.bool_], tuple[Values, Values]]]:
    """Some of the chosen strategies (S), and their slots beside an endless send."""
    depth = seconds.model.template.depth
    # If tasks run one after another, no factor depends on other copies.
    for rows, factors in _factors(seconds, kept if depth else "own"):
        if (some := np.asarray(rows & chosen)).any():
            yield some, _beside_endless(alone[:, some], factors, depth)


def _beside_endless(alone: Values, factors: Factors, depth: int) -> tuple[Values, Values]:
    """Seconds (K, S) of slots beside an endless send, and those of the send that are over."""
    collective_s = alone[..., LINK]
    if depth == 0:
        computing, sending = factors[_BOTH, [COMPUTE, LINK]]
        computed_s = alone[..., COMPUTE] * computing
        copied_s = alone.sum(axis=-1) - alone[..., COMPUTE] - collective_s
        elapsed_s = computed_s + copied_s + 2 * collective_s
        return elapsed_s, computed_s / sending + copied_s + collective_s
    flat = beside_endless(alone.reshape(-1, len(STREAMS)), factors)
    elapsed_s, done_s = (one.reshape(collective_s.shape) for one in flat)
    # Until collectives are over, half of what the link does is theirs.
    elapsed_s = elapsed_s + np.maximum(2 * collective_s - done_s, 0.0)
    return elapsed_s, np.maximum(done_s, 2 * collective_s) - collective_s


def _factors(
    seconds: TaskSeconds, kept: Kept = "own"
) -> Iterator[tuple[NDArray[np.bool_], Factors]]:
    """The strategies (S) of each shape of group, and the streams' factors."""
    if seconds.model.cluster.hardware.interference is None:
        yield np.full(len(seconds.zero), True), np.ones((1 << len(STREAMS), len(STREAMS)))
    else:
        yield from seconds.factors(kept)
