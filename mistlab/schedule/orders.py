"""Named pipeline orders: functions that write the text which an order file would hold.

In 1F1B (Narayanan et al. 2019) each stage first takes as many forwards as there are stages after
it, then alternates between forwards and backwards.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import chain

from mistlab.schedule.order_checks import check_order
from mistlab.schedule.order_text import PipelineOrder, order_from_text

DEFAULT_ORDER = "1f1b"
# The most orders that are kept in memory; each is as long as its text.
_MOST_KEPT = 64


def in_flight(stage: int, num_stages: int, micro_batches: int) -> int:
    """Micro-batches whose activations a stage of a 1F1B pipeline holds at once."""
    return min(micro_batches, num_stages - stage)


def one_forward_one_backward(num_stages: int, micro_batches: int) -> str:
    """The text of 1F1B.

    >>> print(one_forward_one_backward(2, 3), end="")
    Fm0 Fm1 Bm0 Fm2 Bm1 Bm2
    Fm0 Bm0 Fm1 Bm1 Fm2 Bm2
    """
    lines = []
    for stage in range(num_stages):
        ahead = in_flight(stage, num_stages, micro_batches)
        forwards = [f"Fm{m}" for m in range(micro_batches)]
        backwards = [f"Bm{m}" for m in range(micro_batches)]
        # After the forwards that run ahead, one forward and one backward in turn, then the
        # backwards left.
        pairs = zip(backwards, forwards[ahead:], strict=False)
        remaining = backwards[micro_batches - ahead :]
        lines.append(" ".join((*forwards[:ahead], *chain.from_iterable(pairs), *remaining)))
    return "\n".join(lines) + "\n"


# By name: the function that writes an order's text for numbers of stages and micro-batches.
ORDERS: dict[str, Callable[[int, int], str]] = {
    DEFAULT_ORDER: one_forward_one_backward,
}


def named_order(name: str, num_stages: int, micro_batches: int) -> PipelineOrder:
    """The order of a name for a pipeline, checked."""
    return _made(ORDERS[name], num_stages, micro_batches)


@lru_cache(maxsize=_MOST_KEPT)
def order_of_text(text: str, num_stages: int, micro_batches: int) -> PipelineOrder:
    """The order in a text, checked."""
    order = order_from_text(text, num_stages=num_stages, micro_batches=micro_batches)
    check_order(order)
    return order


@lru_cache(maxsize=_MOST_KEPT)
def _made(text_of: Callable[[int, int], str], num_stages: int, micro_batches: int) -> PipelineOrder:
    return order_of_text(text_of(num_stages, micro_batches), num_stages, micro_batches)
