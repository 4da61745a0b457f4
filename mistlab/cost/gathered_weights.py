"""How long slots take in which weights come from the host and are then gathered.

Each rank swaps its shard of a layer's weights in, and only then gathers the layer. So the link
between GPUs first does its other work, and gathers when both are done. Until then the host's copy
slows the other streams, and from then on the link does.

Axes: C cases; the four streams first.
"""

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.side_by_side import LINK, LINK_BIT, SlowedBy, Streams, ends_of_several, sets_of
from mistlab.machine.slowdowns import STREAMS

Values = NDArray[np.float64]

_COMPUTE, _FROM_HOST = STREAMS.index("compute"), STREAMS.index("host_to_device")


def ends_if_gathered(alone: Streams, slowed: SlowedBy, copied: Values, gathered: Values) -> Streams:
    """Seconds (4, C) until each stream has done its work of ``alone`` (4, C), if the link gathers
    for the last ``gathered`` seconds (C) of its work when the host has copied for the first
    ``copied`` seconds (C) of its own; both are more than zero."""
    left, place = alone.copy(), slowed.place(sets_of(alone > 0))
    left[LINK], left[_FROM_HOST] = np.maximum(alone[LINK] - gathered, 0.0), copied
    ends, elapsed = np.zeros_like(alone), np.zeros(alone.shape[1])
    for _ in STREAMS:
        busy = left > 0
        factors = slowed.table.take(place + sets_of(busy), axis=1)
        ahead = np.where(busy, left * factors, np.inf)
        step = np.where(busy[_FROM_HOST], ahead.min(axis=0), 0.0)
        is_done = busy & (ahead <= step)
        left = np.where(is_done, 0.0, np.maximum(left - step / factors, 0.0))
        elapsed += step
        ends += is_done * elapsed
    left[LINK] += gathered
    left[_FROM_HOST] = np.maximum(alone[_FROM_HOST] - copied, 0.0)
    return np.maximum(ends, np.where(left > 0, ends_of_several(left, slowed) + elapsed, 0.0))


def least_ends_if_gathered(
    alone: Streams, slowed: SlowedBy, copied: Values, gathered: Values
) -> Streams:
    """Ends (4, C) that no ``ends_if_gathered`` of this work or of greater copies undercuts, under
    ``lowered`` factors (docs/decisions/0035-searches-that-prove.md).

    With greater copies the link may gather at any later time. So the copies here are slowed by no
    gathering. Arithmetic is slowed as little as it is while the link gathers, whatever else runs.
    """
    left, place = alone.copy(), slowed.place(sets_of(alone > 0))
    left[LINK] = np.maximum(alone[LINK] - gathered, 0.0)
    copying, gathering = copied.copy(), gathered.copy()
    ends, elapsed = np.zeros_like(alone), np.zeros(alone.shape[1])
    # Each stream ends once, and so do the first copy and the gathering.
    for _ in range(len(STREAMS) + 2):
        busy = left > 0
        factors = slowed.table.take(place + sets_of(busy), axis=1)
        on_link = slowed.table[LINK].take(place + (sets_of(busy) | LINK_BIT))
        gathers = ~busy[LINK] & (copying <= 0) & (gathering > 0)
        ahead = np.where(busy, left * factors, np.inf)
        copied_s = np.where(copying > 0, copying * factors[_FROM_HOST], np.inf)
        gathered_s = np.where(gathers, gathering * on_link, np.inf)
        step = np.minimum(ahead.min(axis=0), np.minimum(copied_s, gathered_s))
        step = np.where(np.isfinite(step), step, 0.0)
        is_done, is_gathered = busy & (ahead <= step), gathers & (gathered_s <= step)
        left = np.where(is_done, 0.0, np.maximum(left - step / factors, 0.0))
        copying = np.where(copied_s <= step, 0.0, copying - step / factors[_FROM_HOST])
        gathering -= np.where(gathers, step / on_link, 0.0)
        gathering[is_gathered] = 0.0
        elapsed += step
        ends += is_done * elapsed
        ends[LINK] = np.where(is_gathered, elapsed, ends[LINK])
    slower = slowed.table[_COMPUTE].take(place + (1 << _COMPUTE) + LINK_BIT)
    slowed_s = alone[_COMPUTE] + gathered * (1 - 1 / slower)
    computes = alone[_COMPUTE] > 0
    ends[_COMPUTE] = np.where(computes, np.maximum(ends[_COMPUTE], slowed_s), 0.0)
    return ends
