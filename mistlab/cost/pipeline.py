"""How long an iteration of a 1F1B pipeline takes, from what its stages take.

G micro-batches, stages i with tf and tb the steady forward and backward of one micro-batch, df and
db what the first forward and the last backward take beyond them, of that vf and vb within the pass,
where the neighbour waits for it, and t_i = tf_i + tb_i:

    max_i (sum_{j<i} t_j + G t_i + W_i) + sum p2p + Ef + Eb
    W_i = max(0, D_i - a_i, D_i - b_i, 2 D_i - a_i - b_i),   D_i = sum_{j>i} t_j
    a_i = (k_i - 1) tf_i,   b_i = (k_i - 1) tb_i,   k_i = min(G, S - i)
    Ef = max(0, max_i (df_i + sum_{j>i} vf_j - sum_{j<i} tf_j)),   Eb likewise

A stage is busy for G t_i. Before that the first micro-batch reaches it, after that the last one
goes back to the first stage. It waits while its first micro-batch is with the stages after it, for
as long as the forwards that it runs ahead (a_i) do not fill; and once more for the last one, which
b_i fills. Each of the sums is a chain of passes that wait for one another, so no pipeline is faster
than the longest; the last term of W_i holds where some passes alternate (G >= S - i).

For equal stages this is the published (G - 1) max t + sum t (Mist, EuroSys 2025), which is longer
for all others: it charges the passage through the stages after a slow one beside that one's time.
A stage's first micro-batch is delayed by the forwards before it once, and its last backward is
followed by theirs, so each direction has a slack of its own. That hides steps that run before the
first micro-batch arrives, and reductions that go on after the last one has left; what makes the
pass itself longer (vf, vb) adds up from stage to stage.

Axes: C candidates, S stages.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Seconds (C, S) of each stage, as in ``StageSeconds``."""

    forward_s: Table
    backward_s: Table
    through_forward_s: Table
    through_backward_s: Table
    delta_forward_s: Table
    delta_backward_s: Table
    within_forward_s: Table
    within_backward_s: Table
    point_to_point_s: Table

    def __post_init__(self) -> None:
        shapes = {getattr(self, entry.name).shape for entry in fields(self)}
        assert len(shapes) == 1, f"tables of unlike shapes: {shapes}"

    @property
    def stable_s(self) -> Table:
        """A steady forward and backward (C, S)."""
        return self.forward_s + self.backward_s


def iteration_s(times: StageTimes, micro_batches: NDArray[np.int64]) -> Table:
    """Seconds (C) of one iteration with ``micro_batches`` (C)."""
    exposed = _exposed(times.delta_forward_s, times.within_forward_s, times.through_forward_s)
    exposed += _exposed(times.delta_backward_s, times.within_backward_s, times.through_backward_s)
    # The last stage has no next one.
    passing = times.point_to_point_s[:, :-1].sum(axis=1)
    return np.asarray(_longest_chain(times, micro_batches[:, None]) + passing + exposed)


def _longest_chain(times: StageTimes, micro_batches: NDArray[np.int64]) -> Table:
    """Seconds (C) of steady passes, by the stage that keeps all others waiting."""
    stable = times.stable_s
    through = times.through_forward_s + times.through_backward_s
    until = np.cumsum(through, axis=1)
    after = until[:, -1:] - until
    stages_left = stable.shape[1] - np.arange(stable.shape[1])
    ahead = np.minimum(micro_batches, stages_left) - 1
    first = after - ahead * times.forward_s
    last = after - ahead * times.backward_s
    both = np.where(micro_batches >= stages_left, first + last, 0.0)
    waits = np.maximum(np.maximum(first, last), np.maximum(both, 0.0))
    return np.asarray((until - through + micro_batches * stable + waits).max(axis=1))


def _exposed(delta: Table, within: Table, before: Table) -> Table:
    """What no earlier stage's time hides (C)."""
    slack = np.cumsum(before, axis=1) - before
    until = np.cumsum(within, axis=1)
    later = until[:, -1:] - until
    return np.asarray(np.maximum(delta + later - slack, 0.0).max(axis=1))
