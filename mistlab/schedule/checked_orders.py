"""Checks that a pipeline order can run: it has every pass once, after the passes that it needs, and
no stages wait for one another for ever.

An error names the line of the order's text and the pass that is wrong there.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import NoReturn

from mistlab.schedule.order_text import (
    OrderedPass,
    PassKind,
    PipelineOrder,
    StageOrder,
    order_from_text,
    refuse_word,
    splits_backward,
)
from mistlab.schedule.orders import ORDERS
from mistlab.schedule.stage_passes import PassKey, StagePass, in_turn, passes_of
from mistlab.values.errors import InputError, refuse

# Orders that are kept: each as long as its text.
_MOST_KEPT = 64
# Micro-batches of all stages for which an order is written out, a pass after another: a thousand
# stages with as many micro-batches each.
MOST_OF_ORDER = 1_000_000
# Passes of a circle that a message names.
_NAMED = 8
# In a stage, a pass of the first kind needs a pass of the second, of the same chunk and
# micro-batch.
_AFTER: tuple[tuple[PassKind, PassKind, str], ...] = (
    ("B", "F", "its forward pass"),
    ("W", "B", "the gradient of its input"),
)


def named_order(name: str, num_stages: int, micro_batches: int) -> PipelineOrder:
    """A named order of a pipeline; refuses numbers that the order is not for.

    What the package makes itself is not checked each time: that takes longer than making it.
    """
    if num_stages * micro_batches > MOST_OF_ORDER:
        problem = (
            f"{micro_batches} on each of {num_stages} stages are more than the {MOST_OF_ORDER:,} "
            "that an order of passes is written out for: give fewer, or leave out the order and "
            "predict in closed form"
        )
        refuse("plan.micro_batches", problem)
    return _made(ORDERS[name], num_stages, micro_batches)


@lru_cache(maxsize=_MOST_KEPT)
def order_of_text(text: str, num_stages: int, micro_batches: int) -> PipelineOrder:
    """The order in a text, checked."""
    order = order_from_text(text, num_stages=num_stages, micro_batches=micro_batches)
    for number, stage in enumerate(order.stages):
        _check_stage(order, number, stage)
    _check_no_circle(order)
    return order


@lru_cache(maxsize=_MOST_KEPT)
def _made(text_of: Callable[[int, int], str], num_stages: int, micro_batches: int) -> PipelineOrder:
    text = text_of(num_stages, micro_batches)
    return order_from_text(text, num_stages=num_stages, micro_batches=micro_batches)


def _check_stage(order: PipelineOrder, number: int, stage: StageOrder) -> None:
    """Refuse a stage whose passes are not all there once, or not in a possible order."""
    places: dict[OrderedPass, int] = {}
    for place, one in enumerate(stage):
        if one.micro_batch >= order.micro_batches:
            have = f"the plan's micro-batches are 0 to {order.micro_batches - 1}"
            remedy = "leave it out, or give the order of a plan with more"
            refuse_word(order.line(number), order.word(one), f"is of none: {have}: {remedy}")
        if one in places:
            problem = "is there twice: leave one of the two out"
            refuse_word(order.line(number), order.word(one), problem)
        places[one] = place
    for one in _needed(order, stage):
        if one not in places:
            either = ", or leave every W of the line out" if one.kind == "W" else ""
            problem = f"is missing: put it where it is to run{either}"
            refuse_word(order.line(number), order.word(one), problem)
    for kind, before, noun in _AFTER:
        for one, place in places.items():
            needed = OrderedPass(before, one.chunk, one.micro_batch)
            if one.kind == kind and places[needed] > place:
                problem = f"comes before {order.word(needed)}, {noun}: put it after that one"
                refuse_word(order.line(number), order.word(one), problem)


def _needed(order: PipelineOrder, stage: StageOrder) -> Iterator[OrderedPass]:
    kinds: tuple[PassKind, ...] = ("F", "B", "W") if splits_backward(stage) else ("F", "B")
    for kind in kinds:
        for chunk in range(order.chunks):
            for micro_batch in range(order.micro_batches):
                yield OrderedPass(kind, chunk, micro_batch)


def _check_no_circle(order: PipelineOrder) -> None:
    """Play all stages as far as inputs come; refuse an order in which some stage cannot end."""
    passes = passes_of(order)
    done = [0] * order.num_stages
    for one in in_turn(passes):
        done[one.stage] += 1
    # Of each stage that stopped short, the pass that waits.
    stopped = {
        stage: of_stage.passes[place]
        for stage, (of_stage, place) in enumerate(zip(passes, done, strict=True))
        if place < len(of_stage)
    }
    if stopped:
        _refuse_circle(order, stopped)


def _refuse_circle(order: PipelineOrder, stopped: Mapping[int, StagePass]) -> NoReturn:
    """Refuse passes that wait for one another: each waits for its input, which the next blocks."""
    seen = []
    one = next(iter(stopped.values()))
    while one not in seen:
        seen.append(one)
        assert one.needs is not None, "only an input keeps a stage waiting"
        one = stopped[one.needs[0]]
    circle = seen[seen.index(one) :]
    waits = []
    for one in circle[:_NAMED]:
        assert one.needs is not None
        first = stopped[one.needs[0]]
        after = "" if first.key == one.needs else f", which is after {_words(order, first.key)}"
        waits.append(f"{_words(order, one.key)} waits for {_words(order, one.needs)}{after}")
    more = "; and so on" if len(circle) > _NAMED else ""
    message = (
        f"passes wait for one another in a circle: {'; '.join(waits)}{more}: put one of them "
        "after what it waits for"
    )
    raise InputError(message)


def _words(order: PipelineOrder, key: PassKey) -> str:
    stage, kind, chunk, micro_batch = key
    return f"{order.word(OrderedPass(kind, chunk, micro_batch))} of line {order.line(stage)}"
