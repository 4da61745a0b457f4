"""Named pipeline orders: which passes each stage takes when, as the text that an order file holds.

1F1B (Narayanan et al. 2019): each stage runs ahead by as many forwards as there are stages after
it, then alternates. GPipe (Huang et al. 2019): all forwards, then all backwards.
"""

from collections.abc import Callable
from itertools import chain

DEFAULT_ORDER = "1f1b"


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


def all_forwards_then_backwards(num_stages: int, micro_batches: int) -> str:
    """The text of GPipe.

    >>> print(all_forwards_then_backwards(1, 2), end="")
    Fm0 Fm1 Bm0 Bm1
    """
    line = " ".join(f"{kind}m{m}" for kind in "FB" for m in range(micro_batches))
    return f"{line}\n" * num_stages


# By name: the function that writes an order's text for numbers of stages and micro-batches.
ORDERS: dict[str, Callable[[int, int], str]] = {
    DEFAULT_ORDER: one_forward_one_backward,
    "gpipe": all_forwards_then_backwards,
}


def is_order_path(name: str) -> bool:
    """Whether an order is given by the path of a file, rather than by a name."""
    return "/" in name or name.endswith(".txt")
