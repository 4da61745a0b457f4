"""How long ranks with different experts take to exchange copies of tokens.

Axes: S strategies.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.groups_on_nodes import Whole
from mistlab.cost.links import LinkTimes
from mistlab.engines.engine_parts import ExpertExchange
from mistlab.values.model import ModelSpec

Values = NDArray[np.float64]
# A pass sends each copy of a token there and back, and its weight one way. Rows are in 16 bits and
# weights in 32; whether a token chose an expert is a byte.
ROW_BYTES, WEIGHT_BYTES = 2, 4


def exchanged_s(
    links: LinkTimes,
    exchange: ExpertExchange,
    model: ModelSpec,
    shape: tuple[Whole, Whole],
) -> Callable[[Values, Values], Values]:
    """Seconds (S) of a pass's exchanges, for their bytes in all and their number (S each).

    ``shape`` says how many ranks of each group are in a node, and how many nodes it has.
    """
    experts = model.experts
    copies = experts.active if experts is not None and exchange.once_a_node else 0
    width = (experts.hidden if experts is not None else 0) or model.hidden
    of_all = exchange.weights_of_all and experts is not None

    def seconds_of(size_bytes: Values, messages: Values) -> Values:
        seconds = np.zeros_like(size_bytes)
        in_node, nodes = shape
        for gpus, spanned in {*zip(in_node.tolist(), nodes.tolist(), strict=True)}:
            if gpus * spanned > 1:
                rows = (in_node == gpus) & (nodes == spanned)
                link = links.to_all(gpus_in_node=gpus, nodes=spanned, copies=copies)
                own = experts.count / (gpus * spanned) if experts is not None else 0.0
                waits_s = messages[rows] * exchange.waits_s(own)
                moved, told_s = size_bytes[rows], np.zeros(1)
                if of_all and experts is not None:
                    sent = moved / (2 * ROW_BYTES * width + WEIGHT_BYTES)
                    moved = moved + sent * WEIGHT_BYTES * (experts.count / spanned - 1)
                    # The backward pass knows from the forward pass what all tokens chose.
                    gather = links.collective("all_gather", gpus_in_node=gpus, nodes=spanned)
                    choices = sent / experts.active * experts.count * gpus * spanned
                    told_s = gather(choices) / 2
                sent_s = (link(moved, messages[rows]) + told_s) * (1 - exchange.hidden)
                seconds[rows] = sent_s + waits_s
        return seconds

    return seconds_of
