"""Where a stage turns from a backward pass to the next forward pass.

The last gradients of a backward pass are reduced, or leave for the host, while nothing of it
computes any more. At most two layers are under way (``mistlab.schedule.pace``), so this keeps only
the second layer of the forward pass waiting: the first one computes meanwhile. A send of the
backward pass goes on beside both, and half of the link is the reduction's.

Some strategies have a slot of its own for the turn, before the first layer computes: it waits for
weights that are fetched, and a gradient that leaves waits until it is reduced.

Axes: S distinct strategies, K kinds of slots; the four streams first.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.side_by_side import LINK, Streams
from mistlab.cost.slot_lengths import UPPER, Kinds, Values, of_layers
from mistlab.cost.slot_work import COMPUTE
from mistlab.cost.tasks import TaskSeconds
from mistlab.schedule.slot_table import SHARDED_GRADIENTS, SHARDED_WEIGHTS


@dataclass(frozen=True, slots=True, eq=False)
class SharedTurns:
    """Slots that the turn shares with the first layer of the forward pass, of some strategies
    ``rows`` (S') among S ``strategies``: all of their tasks ``alone`` (4, K, S'), and how long the
    layer takes by itself (K, S')."""

    rows: NDArray[np.intp]
    strategies: int
    alone: Streams
    layer_s: Values

    def of_all(self, values: Values) -> Values:
        """Values (..., K, S) of all strategies from those of shared turns (..., K, S'); zero where
        turns are not shared."""
        found = np.zeros((*values.shape[:-1], self.strategies))
        found[..., self.rows] = values
        return found


def shared_turns(seconds: TaskSeconds, kinds: Kinds, alone: Streams) -> SharedTurns | None:
    """The turns of strategies that share them, if there are any; ``alone`` (4, K, S) are the tasks
    of slots for turns."""
    rows = np.flatnonzero(are_shared(seconds))
    if len(rows):
        rows = rows[(alone[:, :, rows] > 0).any(axis=(0, 1))]
    if not len(rows):
        return None
    layer_s = of_layers(seconds.alone("F", "") + seconds.tensor_s["forward"], kinds[:, UPPER])
    layer_s, together = layer_s[:, rows], alone[:, :, rows]
    together[COMPUTE] += layer_s
    return SharedTurns(rows, alone.shape[-1], together, layer_s)


def beside_sends(seconds: TaskSeconds, alone: Streams) -> NDArray[np.bool_]:
    """Whether turns (..., S) with tasks ``alone`` (4, ..., S) run beside sends: those in which a
    layer computes, or waits for a collective that shares the link with the send. Elsewhere sends
    count as beside the pass after the turn."""
    waits = (alone[LINK] > 0) & (seconds.zero >= SHARDED_WEIGHTS)
    return np.asarray(waits | (alone[COMPUTE] > 0))


def are_shared(seconds: TaskSeconds) -> NDArray[np.bool_]:
    """Strategies (S) that fetch no weights, and reduce gradients in each pass or take them away in
    each pass, but not both."""
    columns = seconds.columns
    fetches = (seconds.zero >= SHARDED_WEIGHTS) | (columns["offload_weights"] > 0)
    reduces, leave = seconds.zero >= SHARDED_GRADIENTS, columns["offload_gradients"] > 0
    # Where layers are fetched further ahead, or nothing runs side by side, turns are played apart.
    return np.asarray((reduces != leave) & ~fetches & (seconds.model.template.depth == 1))
