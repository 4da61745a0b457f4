"""Named pipeline orders: which passes each stage takes when, as the text that an order file holds.

1F1B (Narayanan et al. 2019): each stage runs ahead by as many forwards as there are stages after
it, then alternates. GPipe (Huang et al. 2019): all forwards, then all backwards. Interleaved 1F1B
(Narayanan et al. 2021): each stage has several chunks of the model. ZB-H1, ZB-H2 and ZB-2p (Qi et
al. 2023): 1F1B in which gradients of weights fill the waits; the last two hold twice as much.
Orders whose chunks lie in a V are in ``mistlab.schedule.turning`` and
``mistlab.schedule.controlled``.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from math import lcm

from mistlab.schedule.controlled import CONTROLLED
from mistlab.schedule.interleaved import interleaved_text
from mistlab.schedule.turning import dualpipe_v_text, zb_v_text
from mistlab.values.errors import refuse

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


def interleaved(num_stages: int, micro_batches: int, chunks: int) -> str:
    """The text of interleaved 1F1B; refuses a number of micro-batches that stages do not divide.

    >>> print(interleaved(1, 2, 2), end="")
    F0m0 F1m0 B1m0 F0m1 B0m0 F1m1 B1m1 B0m1
    """
    if micro_batches % num_stages:
        problem = (
            f"{order_of_chunks(chunks)} takes as many micro-batches in turn as there are stages, "
            f"{num_stages}, but there are {micro_batches}: give a multiple of {num_stages}"
        )
        refuse("plan.order", problem)
    return interleaved_text(num_stages, micro_batches, chunks)


def zero_bubble(num_stages: int, micro_batches: int, *, ahead: int = 1, put_off: int = 1) -> str:
    """The text of a pipeline in which gradients of weights fill waits; ZB-H1 by default.

    A stage runs ``ahead`` forwards ahead for each stage after it, and puts ``put_off`` gradients of
    weights off for each stage before it. ZB-H1 holds as much as the first stage of 1F1B, ZB-H2 (2
    and 2) twice as much. With equal stages of F, B and W seconds, every stage of ZB-H2 waits (S -
    1)(F + B - 2 W). With B freeing half of what a micro-batch holds, stages may put off more: none
    waits long if ``put_off`` W are as long as F + B.

    >>> print(zero_bubble(2, 2), end="")
    Fm0 Fm1 Bm0 Wm0 Bm1 Wm1
    Fm0 Bm0 Fm1 Bm1 Wm0 Wm1
    """
    lines = []
    for stage in range(num_stages):
        first = min(micro_batches, ahead * (num_stages - stage - 1) + 1)
        waiting = put_off * stage
        line = [f"Fm{m}" for m in range(first)]
        for m in range(micro_batches):
            line.append(f"Bm{m}")
            line += [f"Wm{m - waiting}"] * (m >= waiting)
            line += [f"Fm{m + first}"] * (m + first < micro_batches)
        done = max(0, micro_batches - waiting)
        lines.append(" ".join((*line, *(f"Wm{m}" for m in range(done, micro_batches)))))
    return "\n".join(lines) + "\n"


def dualpipe_v(num_stages: int, micro_batches: int) -> str:
    """The text of DualPipeV; refuses fewer micro-batches than the model has parts."""
    if problem := _too_few(num_stages, micro_batches):
        refuse("plan.order", f"dualpipe-v, but {problem}")
    return dualpipe_v_text(num_stages, micro_batches)


def _too_few(num_stages: int, micro_batches: int) -> str:
    if micro_batches >= 2 * num_stages:
        return ""
    return (
        f"there are {micro_batches} micro-batches for {2 * num_stages} parts of the model: give "
        "as many at least, or zb-v"
    )


def order_of_chunks(chunks: int) -> str:
    """The name of the interleaved order with so many chunks a stage; not every number has one."""
    return f"interleaved-{chunks}"


# The numbers of chunks of interleaved orders, by name.
INTERLEAVED: Mapping[str, int] = {order_of_chunks(chunks): chunks for chunks in (2, 3, 4, 5, 6, 8)}

# By name: the function that writes an order's text for numbers of stages and micro-batches.
ORDERS: dict[str, Callable[[int, int], str]] = {
    DEFAULT_ORDER: one_forward_one_backward,
    "gpipe": all_forwards_then_backwards,
    **{name: partial(interleaved, chunks=chunks) for name, chunks in INTERLEAVED.items()},
    "zb-h1": zero_bubble,
    "zb-h2": partial(zero_bubble, ahead=2, put_off=2),
    "zb-2p": partial(zero_bubble, ahead=2, put_off=3),
    "zb-v": zb_v_text,
    "dualpipe-v": dualpipe_v,
    **CONTROLLED,
}
# Orders whose parts turn round at the last stage: two chunks a stage.
TURNING = ("zb-v", "dualpipe-v", *CONTROLLED)
# Orders whose gradients of weights have passes of their own.
SPLIT = ("zb-h1", "zb-h2", "zb-2p", *TURNING)
# Orders whose stages repeat themselves with as many micro-batches as there are stages, between a
# beginning and an end of a few such groups.
REPEATING = frozenset((*INTERLEAVED, *SPLIT))
# Groups of an order that repeats itself which stand for any number of groups.
GROUPS_PLAYED = 4


def fewer_micro_batches(order: str, num_stages: int, micro_batches: int) -> int:
    """The fewest micro-batches with which an order has the same beginning, end and repetition; all
    of them if it does not repeat itself."""
    beyond = micro_batches - GROUPS_PLAYED * num_stages
    if order not in REPEATING or beyond < num_stages:
        return micro_batches
    return micro_batches - beyond // num_stages * num_stages


def repeat_of(order: str, num_stages: int) -> int:
    """After how many micro-batches an order has the same passes with the same rings of two
    buffers.

    >>> repeat_of("1f1b", 3), repeat_of("interleaved-2", 3)
    (2, 6)
    """
    return lcm(2, num_stages) if order in REPEATING else 2


def chunks_of(order: str) -> int:
    """Number of chunks of each stage in a named order.

    >>> chunks_of("zb-h1"), chunks_of("zb-v"), chunks_of("interleaved-4")
    (1, 2, 4)
    """
    return 2 if order in TURNING else INTERLEAVED.get(order, 1)


def order_problem(order: str, num_stages: int, micro_batches: int, most_chunks: int) -> str:
    """Why a named order cannot run stages of at most so many chunks; empty if it can."""
    chunks = chunks_of(order)
    if order == "dualpipe-v" and (problem := _too_few(num_stages, micro_batches)):
        return problem
    if order in INTERLEAVED and micro_batches % num_stages:
        return (
            f"there are {micro_batches} micro-batches for {num_stages} stages: give a multiple of "
            f"{num_stages} micro-batches"
        )
    if chunks > most_chunks:
        return f"stages have blocks for {most_chunks} chunks, not {chunks}: give an order of fewer"
    return ""


def is_order_path(name: str) -> bool:
    """Whether an order is given by the path of a file, rather than by a name."""
    return "/" in name or name.endswith(".txt")
