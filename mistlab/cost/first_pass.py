"""The first forward pass, in which a stage also takes the optimizer's steps of its layers.

Steps need no activations, so they run ahead of a first micro-batch that comes late. With offloaded
weights there is room for two blocks that have stepped; meanwhile the state of a third block comes
in. Where state or weights are offloaded, a layer's step waits until those of the layer two before
it have left. Nobody in the pass waits for those of the last block. The stage's next pass does.

Axes: C candidates, S distinct strategies, K kinds of slots; the four streams first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.side_by_side import LINK, Streams, until
from mistlab.cost.slot_lengths import Kinds, Values, slot_ends, with_nothing
from mistlab.cost.tasks import TaskSeconds
from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.slot_kinds import NOTHING
from mistlab.schedule.slot_table import SHARDED_WEIGHTS

# Kinds of tasks that come with a layer's step.
OF_STEPS = frozenset({"S", "P", "G", "O"})
# Blocks that have stepped and wait for their micro-batch, if weights are offloaded. So of the slots
# that bring in the state of the next block, as many are over.
AHEAD = 2

_AWAY = STREAMS.index("device_to_host")
_NOT_AWAY: Sequence[str] = [stream for stream in STREAMS if stream != STREAMS[_AWAY]]


@dataclass(frozen=True, slots=True, eq=False)
class FirstPass:
    """Seconds (C) of parts of the first forward pass.

    For ``unawaited`` at the ends of its slots no layer waits, for ``after`` the stage's next pass
    waits. ``stepped`` is the time inside the pass if all layers stepped before, for stages that
    offload state or weights. ``block_steps`` and ``end_steps`` are the steps' arithmetic, without
    the first layer's: of blocks with offloaded weights, and of other layers beside them.
    """

    unawaited: Values
    after: Values
    stepped: Values
    block_steps: Values
    end_steps: Values

    def chosen(self, rows: NDArray[np.intp] | slice) -> "FirstPass":
        """The parts of the candidates in these rows."""
        parts = (getattr(self, entry.name) for entry in fields(self))
        # Without offloading a part is one zero for all candidates.
        return FirstPass(*(part if len(part) == 1 else part[rows] for part in parts))

    @classmethod
    def least(cls, ends: Sequence["FirstPass"]) -> "FirstPass":
        """The lesser of each part; a first pass is never longer if a part of it is shorter."""
        names = [entry.name for entry in fields(cls)]
        return cls(*(np.minimum(*(getattr(end, name) for end in ends)) for name in names))

    def within_s(
        self,
        whole_s: Values,
        forward_s: Values,
        blocks: NDArray[np.int64],
        offloads_weights: NDArray[np.bool_],
    ) -> Values:
        """How much longer (C) a first micro-batch takes to pass through its idle stage than a
        steady one; the whole first pass takes ``whole_s``, a steady one ``forward_s``.

        Of a stage with offloaded weights, a few blocks have stepped. For one of the others, state
        is there.
        """
        others = np.maximum(blocks - 1, 1)
        ahead = np.minimum(1.0, AHEAD / others)
        held_s = np.where(blocks > AHEAD, self.block_steps / others + ahead * self.end_steps, 0.0)
        steps_s = np.maximum(whole_s - self.stepped, 0.0) * (1 - ahead) + held_s
        passed_s = self.stepped + np.where(offloads_weights, steps_s, 0.0)
        return np.where(self.stepped > 0, passed_s - forward_s, np.zeros_like(forward_s))


PARTS = len(fields(FirstPass))


def first_slots(
    seconds: TaskSeconds,
    kinds: Kinds,
    whole: tuple[Streams, Streams],
    stepped: Streams,
    usual: Values,
    *,
    is_least: bool,
) -> Values:
    """The parts of ``FirstPass`` (5, K, S) for slots of some kinds; the tasks and ends (4, K, S) of
    the ``whole`` slots, and the tasks without those that come with steps (``stepped``). In a steady
    pass slots take ``usual`` seconds (K, S). As bounds, the next pass does not wait."""
    columns, (below, here, above) = seconds.columns, kinds.T
    found = np.zeros((PARTS, *usual.shape))
    unawaited, after, stepped_s, block_steps, end_steps = found
    weights, state = (with_nothing(seconds.alone(kind, ">")) for kind in ("P", "O"))
    chosen = np.flatnonzero((weights + state).any(axis=0))
    if not len(chosen):
        return found
    weights, state = weights[:, chosen], state[:, chosen]
    swaps, keeps = (columns[f"offload_{kind}"][chosen] > 0 for kind in ("weights", "activations"))

    # Activations that leave queue behind the state of the last block, and the head waits for them.
    is_last = (above == NOTHING)[:, None] | (~keeps & ((weights + state)[above] == 0))
    last = np.flatnonzero(is_last.any(axis=1))
    at_last = np.ix_(last, chosen)
    work, ends = (one[:, last[:, None], chosen] for one in whole)
    without_weights = work.copy()
    without_weights[_AWAY] = np.maximum(work[_AWAY] - weights[here[last]], 0.0)
    # Weights that are not sharded are gathered with their steps.
    kept = stepped[:, :, chosen]
    kept[LINK] *= seconds.zero[chosen] >= SHARDED_WEIGHTS
    both = np.concatenate([kept, without_weights], axis=1)
    both_ends = slot_ends(seconds, both, is_least, chosen)
    kept_ends, left_ends = both_ends[:, : len(kinds)], both_ends[:, len(kinds) :]

    computed = until(_NOT_AWAY, ends, work)
    # A block steps before the block below computes. So the block below and the head compute while
    # the state of the last block leaves.
    forward = with_nothing(seconds.alone("F", ""))[:, chosen]
    hidden = (forward[below] + forward[above])[last]
    left = until(STREAMS, left_ends, without_weights)
    is_last = is_last[last]
    unawaited[at_last] = np.where(is_last, until(STREAMS, ends, work) - computed, 0.0)
    if not is_least:
        after[at_last] = np.where(is_last, np.maximum(left - computed - hidden, 0.0), 0.0)
    stepped_s[:, chosen] = np.where(swaps, until(STREAMS, kept_ends, kept), usual[:, chosen])
    kept_computed = until(_NOT_AWAY, kept_ends[:, last], kept[:, last])
    stepped_s[at_last] = np.where(is_last, kept_computed, stepped_s[at_last])

    stepping, swapped = with_nothing(seconds.alone("S", ""))[above][:, chosen], weights[above] > 0
    block_steps[:, chosen] = np.where(swapped, stepping, 0.0)
    end_steps[:, chosen] = np.where(swapped, 0.0, stepping)
    return found
