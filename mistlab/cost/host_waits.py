"""How long passes take where the GPU may wait for the host that issues its kernels.

The host issues passes one after another, and the GPU runs them in the same order. So several passes
together take about as long as the slower of the two: the host's time for all of them, or the GPU's.
A model on one stage issues forward and backward passes without a stop. A stage that waits for each
micro-batch's arrival issues each pass by itself: the GPU begins when the first block is issued, and
ends no sooner than the last block after it is issued.

Axes: C candidates, S strategies, T types of layers.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.pass_seconds import PassSeconds
from mistlab.cost.tasks import TaskSeconds
from mistlab.engines.host_time import HostTime
from mistlab.symbolic.treatments import TREATMENTS
from mistlab.values.stages import StageBatch

Values = NDArray[np.float64]
_EMBEDDING, _BLOCK, _HEAD = 0, 1, -1


def with_host(
    passes: PassSeconds,
    host: HostTime,
    batch: StageBatch,
    seconds: TaskSeconds,
    strategies: NDArray[np.int64],
) -> PassSeconds:
    """The times of passes under a host; ``strategies`` has the place of each candidate's."""
    inside = dict(passes.inside)
    waits = _waits(inside, host, batch, seconds, strategies)
    for name, wait in waits.items():
        inside[name] = inside[name] + wait
    inside["first_forward"] = np.maximum(inside["first_forward"], inside["forward"])
    inside["last_backward"] = np.maximum(inside["last_backward"], inside["backward"])
    return replace(
        passes,
        inside=inside,
        last_computed=np.maximum(passes.last_computed, inside["backward"]),
    )


def _waits(
    inside: Mapping[str, Values],
    host: HostTime,
    batch: StageBatch,
    seconds: TaskSeconds,
    strategies: NDArray[np.int64],
) -> dict[str, Values]:
    """Seconds (C) for which the GPU waits in a steady forward and a steady backward pass."""
    forward, backward = inside["forward"], inside["backward"]
    again = np.sum([batch.value(row.dimension) for row in TREATMENTS.values()], axis=0)
    issued = host.forward_s * batch.layers, host.backward_s * batch.layers + host.forward_s * again
    # Without a stop both passes share the wait by their lengths.
    both = forward + backward
    longer = np.maximum(both, issued[0] + issued[1]) / np.where(both > 0, both, 1.0)
    stops = host.waits_for_arrivals & (batch.has_embedding + batch.has_head < 2)
    ends = (_HEAD, batch.has_head), (_EMBEDDING, batch.has_embedding)
    waits: dict[str, Values] = {}
    for place, (name, computed, kind) in enumerate(
        (("forward", forward, "F"), ("backward", backward, "B"))
    ):
        of_types = (seconds.alone(kind, "") + seconds.tensor_s[name])[:, strategies]  # type: ignore[index]
        layer, has_layer = ends[place]
        rest = of_types[_BLOCK] + of_types[layer] * has_layer
        # Before its first block a backward pass has the head's work, if any, to be ahead with.
        first_s = issued[place] / np.maximum(batch.layers, 1)
        begun = computed + np.where((place == 0) | (batch.has_head == 0), first_s, 0.0)
        by_itself = np.where(batch.layers > 0, np.maximum(begun, issued[place] + rest), computed)
        waits[name] = np.where(stops, by_itself, computed * longer) - computed
    return waits
