"""How long an iteration of a pipeline takes, from what its stages take.

G micro-batches, stages i with tf and tb the steady forward and backward of one micro-batch, df and
db what the first forward and the last backward take beyond them:

    (G - 1) max_i t_i + sum_i t_i + sum p2p + Ef + Eb,   t_i = tf_i + tb_i
    Ef = max_i max(0, df_i - sum_{j<i} tf_j),   Eb = max_i max(0, db_i - sum_{j<i} tb_j)

After Mist (EuroSys 2025), whose form pools both slacks and leaves out p2p: a stage waits for the
forwards before it once, and its last backward is followed by theirs. Exact for equal stages; for
uneven ones a little long, since a slow stage may hide the passage through those after it: within a
tenth where stages are within a tenth of one another (tests/mistlab/test_pipeline.py).

Axes: C candidates, S stages.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Seconds (C, S) of each stage; ``point_to_point_s`` is to the next stage and back."""

    forward_s: Table
    backward_s: Table
    delta_forward_s: Table
    delta_backward_s: Table
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
    stable = times.stable_s
    steady = (micro_batches - 1) * stable.max(axis=1) + stable.sum(axis=1)
    exposed = _exposed(times.delta_forward_s, times.forward_s)
    exposed += _exposed(times.delta_backward_s, times.backward_s)
    # The last stage has no next one.
    return np.asarray(steady + times.point_to_point_s[:, :-1].sum(axis=1) + exposed)


def _exposed(delta: Table, before: Table) -> Table:
    """What no earlier stage's time hides (C)."""
    slack = np.cumsum(before, axis=1) - before
    return np.asarray(np.maximum(delta - slack, 0.0).max(axis=1))
