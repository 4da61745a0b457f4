"""How long the GPU waits in blocks with experts for the host that issues their operators.

In each of these blocks the host waits until the GPU has told it how many rows come. So it is never
a block ahead, and a pass of the block takes as long as the slower of the two. So it is on a rank
that has all experts, too. Only where experts take as many rows as they have room for does the host
know before.

Axes: S strategies, T types of layers.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.layers import LayerFigures
from mistlab.symbolic.exchanges import EXCHANGES
from mistlab.symbolic.graph import Phase
from mistlab.symbolic.layer_types import LayerTypes
from mistlab.symbolic.library import graph_of
from mistlab.values.workload import Workload

Values = NDArray[np.float64]


def waits_for_hosts_s(
    workload: Workload,
    operator_s: float,
    layers: Sequence[LayerFigures],
    phase: Phase,
    exchanged_s: Values,
) -> Values:
    """Seconds (T, S) of a pass of each type in which the GPU has nothing to do; its host issues an
    operator in ``operator_s``, and its collectives take ``exchanged_s`` (T, S)."""
    waits_s = np.zeros_like(exchanged_s)
    if not operator_s or workload.expert_padding:
        return waits_s
    graph = graph_of(workload)
    kinds = LayerTypes.of(graph.pattern).kinds
    # Between embedding and head are as many types of each kind, one for each treatment.
    ways = (len(layers) - 2) // len(kinds)
    for place, layer in enumerate(layers[1:-1], start=1):
        groups = (EXCHANGES[name].group for name in layer.passes[phase].exchanged)
        if "experts" not in groups:
            continue
        operators = graph.operators_of(kinds[(place - 1) // ways])
        computed_s, issued = layer.passes[phase].compute_s, operators[phase]
        if phase == "backward" and layer.again is not None:
            computed_s, issued = computed_s + layer.again.compute_s, sum(operators.values())
        waits_s[place] = np.maximum(issued * operator_s - computed_s - exchanged_s[place], 0.0)
    return waits_s
