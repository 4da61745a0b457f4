"""How long ranks with different experts take to exchange copies of tokens.

Axes: S strategies.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.groups_on_nodes import Whole
from mistlab.cost.links import LinkTimes
from mistlab.engines.expert_exchange import ExpertExchange
from mistlab.values.model_parts import Experts

Values = NDArray[np.float64]


def exchanged_s(
    links: LinkTimes,
    exchange: ExpertExchange,
    experts: Experts | None,
    shape: tuple[Whole, Whole],
) -> Callable[[Values, Values], Values]:
    """Seconds (S) of exchanges, for their bytes in all and their number (S each).

    ``shape`` says how many ranks of each group are in a node, and how many nodes it has.
    """
    copies = experts.active if experts is not None and exchange.once_a_node else 0

    def seconds_of(size_bytes: Values, messages: Values) -> Values:
        seconds = np.zeros_like(size_bytes)
        in_node, nodes = shape
        for gpus, spanned in {*zip(in_node.tolist(), nodes.tolist(), strict=True)}:
            if gpus * spanned > 1:
                rows = (in_node == gpus) & (nodes == spanned)
                link = links.to_all(gpus_in_node=gpus, nodes=spanned, copies=copies)
                own = experts.count / (gpus * spanned) if experts is not None else 0.0
                waits_s = messages[rows] * exchange.waits_s(own)
                sent_s = link(size_bytes[rows], messages[rows]) * (1 - exchange.hidden)
                seconds[rows] = sent_s + waits_s
        return seconds

    return seconds_of
