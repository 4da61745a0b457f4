"""How much longer rounds of a steady pipeline take, because passes run beside sends.

In a pipeline that waits for its sends, a stage is idle between its passes. After a gradient was
sent back, the foremost stage of a round begins its next forward pass at once, the last stage its
backward pass. In stages between them the gaps differ: with equal stages, each stage's gap before
its forward pass is longer than the gap of the stage in front. A pass whose gap is shorter than the
send before it runs beside the rest of the send, and both slow down.

For K equal stages, with all times in sends, gap u of stage i before its forward pass, and what a
pass and a send lose beside one another (``slowed``, a share of the time that they are together):

    u(0) = 0,  u(K) = 2,  u(i+1) = u(i) + short + slowed (max(1 - u(i), 0) + max(u(i+1) - 1, 0))

where a micro-batch takes ``short`` less than both passes and both sends of a stage one after
another. The foremost stage sends nothing back, and so loses nothing. So a round takes 2 - K short
longer than without losses.

Axes: C candidates.
"""

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Whole = NDArray[np.int64]


def within_round_s(send_s: Values, slowed: Values, stages: Whole) -> Values:
    """Seconds (C) by which a round takes longer because of a stage, which is the foremost of so
    many ``stages`` (C) and sends for ``send_s`` (C) to the next one.

    A round from the stage in front on goes past one stage more than a round from this stage on.
    """
    return send_s * (_lost(slowed, stages + 1) - _lost(slowed, stages))


def _lost(slowed: Values, stages: Whole) -> Values:
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
