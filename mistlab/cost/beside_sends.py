"""How much longer steady passes take while their stage sends the outcome of the pass before.

A send is on the link between GPUs. It slows arithmetic and copies as any work there does. Beside a
collective of its own stage both run at half of their speed, so together they take as long as one
after the other: a pass that waits for its collectives also waits for the send.

Axes: C candidates, S distinct strategies, K kinds of slots; the four streams last.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.side_by_side import LINK, Factors, beside_endless
from mistlab.cost.tasks import TaskSeconds
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
    """

    computing_longer_s: Values
    computing_sent_s: Values
    longer_s: Values
    sent_s: Values
    late_s: Values

    def lost_s(self, send_s: Values) -> Values:
        """Seconds (C) by which sends of ``send_s`` make passes longer."""
        computing_s = self.computing_longer_s * _share(send_s, self.computing_sent_s)
        return np.asarray(np.maximum(computing_s, self.longer_s * _share(send_s, self.sent_s)))

    def later_s(self, send_s: Values) -> Values:
        """Seconds (C) by which sends of ``send_s`` take longer beside passes."""
        return self.late_s * _share(send_s, self.sent_s)


def _share(send_s: Values, sent_s: Values) -> Values:
    """How much of a pass (C) a send goes on for, at most all of it."""
    return np.asarray(np.minimum(send_s / np.where(sent_s > 0, sent_s, np.inf), 1.0))


def slots_beside_sends(
    seconds: TaskSeconds, alone: Values, usual_s: Values, *, is_least: bool
) -> tuple[Values, ...]:
    """What ``BesideSend`` sums up, for slots (K, S) that usually take ``usual_s``; ``alone``
    (K, S, 4) are their tasks.

    Sends that only arithmetic runs beside count as no later: often a stage waits meanwhile. With
    ``is_least`` only arithmetic counts, since a slot with longer copies may lose less.
    """
    is_busy = (alone[..., _OTHERS] > 0).any(axis=(0, 2))
    computing_longer_s, computing_sent_s, longer_s, sent_s, late_s = (
        np.zeros_like(usual_s) for _ in range(5)
    )
    for rows, factors in _factors(seconds):
        computing, sending = factors[_BOTH, [COMPUTE, LINK]]
        computed_s = alone[:, rows, COMPUTE] * computing
        computing_longer_s[:, rows] = computed_s - alone[:, rows, COMPUTE]
        computing_sent_s[:, rows] = computed_s / sending
        busy = rows & is_busy
        if is_least or not busy.any():
            continue
        elapsed_s, over_s = _beside_endless(alone[:, busy], factors, seconds.model.template.depth)
        elapsed_s = np.maximum(elapsed_s, usual_s[:, busy])
        longer_s[:, busy] = elapsed_s - usual_s[:, busy]
        sent_s[:, busy] = over_s
        late_s[:, busy] = np.maximum(elapsed_s - over_s, 0.0)
    return computing_longer_s, computing_sent_s, longer_s, sent_s, late_s


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


def _factors(seconds: TaskSeconds) -> Iterator[tuple[NDArray[np.bool_], Factors]]:
    """The strategies (S) of each shape of group, and the streams' factors."""
    if seconds.model.cluster.hardware.interference is None:
        yield np.full(len(seconds.zero), True), np.ones((1 << len(STREAMS), len(STREAMS)))
    else:
        yield from seconds.factors()
