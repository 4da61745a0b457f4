"""Checks that a pipeline order can run: every pass is there once, and none waits for ever.

Messages name the line of the order's text, and the wrong pass in it.
"""

from collections.abc import Iterator, Sequence
from typing import NoReturn

from mistlab.schedule.order_text import (
    OrderedPass,
    PassKind,
    PipelineOrder,
    StageOrder,
    refuse_word,
)
from mistlab.values.errors import InputError

# A stage, and a place in the stage's order.
_Position = tuple[int, int]
# The place of each pass of a stage.
_Places = dict[OrderedPass, int]
# Passes of a circle that a message names.
_NAMED = 8
# In a stage, a pass of the first kind needs a pass of the second, of the same chunk and
# micro-batch.
_AFTER: tuple[tuple[PassKind, PassKind, str], ...] = (
    ("B", "F", "its forward pass"),
    ("W", "B", "the gradient of its input"),
)


def check_order(order: PipelineOrder) -> None:
    """Refuse an order that cannot run; the message names the pass."""
    places = [_check_stage(order, number, stage) for number, stage in enumerate(order.stages)]
    _check_no_circle(order, places)


def splits_backward(stage: StageOrder) -> bool:
    """Whether a stage computes the gradients of weights in passes of their own."""
    return any(one.kind == "W" for one in stage)


def _check_stage(order: PipelineOrder, number: int, stage: StageOrder) -> _Places:
    """The place of each pass of a stage, after a check of the stage alone."""
    places: _Places = {}
    for place, one in enumerate(stage):
        if one.micro_batch >= order.micro_batches:
            have = f"the plan's micro-batches are 0 to {order.micro_batches - 1}"
            remedy = "leave it out, or give the order of a plan with more"
            refuse_word(number + 1, order.word(one), f"is of none: {have}: {remedy}")
        if one in places:
            problem = "is there twice: leave one of the two out"
            refuse_word(number + 1, order.word(one), problem)
        places[one] = place
    for one in _needed(order, stage):
        if one not in places:
            refuse_word(number + 1, order.word(one), "is missing: put it where it is to run")
    for kind, before, noun in _AFTER:
        for one, place in places.items():
            needed = one._replace(kind=before)
            if one.kind == kind and places[needed] > place:
                problem = f"comes before {order.word(needed)}, {noun}: put it after that one"
                refuse_word(number + 1, order.word(one), problem)
    return places


def _needed(order: PipelineOrder, stage: StageOrder) -> Iterator[OrderedPass]:
    kinds: tuple[PassKind, ...] = ("F", "B", "W") if splits_backward(stage) else ("F", "B")
    for kind in kinds:
        for chunk in range(order.chunks):
            for micro_batch in range(order.micro_batches):
                yield OrderedPass(kind, chunk, micro_batch)


def _check_no_circle(order: PipelineOrder, places: Sequence[_Places]) -> None:
    """Play all stages as far as inputs come; refuse an order in which some stage cannot end."""
    done = [0] * order.num_stages
    # The stages that wait for a stage to go on.
    waiting: dict[int, set[int]] = {stage: set() for stage in range(order.num_stages)}
    left = list(range(order.num_stages))
    while left:
        stage = left.pop()
        while done[stage] < len(order.stages[stage]):
            needed = _needed_of(order, places, stage, done[stage])
            if needed is not None and needed[1] >= done[needed[0]]:
                waiting[needed[0]].add(stage)
                break
            done[stage] += 1
            left += waiting[stage]
            waiting[stage].clear()
    for stage, place in enumerate(done):
        if place < len(order.stages[stage]):
            _refuse_circle(order, places, (stage, place), done)


def _needed_of(
    order: PipelineOrder, places: Sequence[_Places], stage: int, place: int
) -> _Position | None:
    """The position of the pass that makes the input of the given pass."""
    one = order.stages[stage][place]
    source = order.source(stage, one)
    if source is None:
        return None
    return source.stage, places[source.stage][one._replace(chunk=source.chunk)]


def _refuse_circle(
    order: PipelineOrder, places: Sequence[_Places], at: _Position, done: Sequence[int]
) -> NoReturn:
    """Refuse passes that wait for one another: each waits for its input, which the next blocks."""
    seen: dict[_Position, _Position] = {}
    while at not in seen:
        needed = _needed_of(order, places, *at)
        assert needed is not None, "only an input keeps a stage waiting"
        seen[at] = needed
        at = needed[0], done[needed[0]]
    circle = list(seen)[list(seen).index(at) :]
    waits = []
    for place in circle[:_NAMED]:
        needed = seen[place]
        first = needed[0], done[needed[0]]
        after = "" if first == needed else f", which is after {_words(order, first)}"
        waits.append(f"{_words(order, place)} waits for {_words(order, needed)}{after}")
    more = "; and so on" if len(circle) > _NAMED else ""
    message = (
        f"passes wait for one another in a circle: {'; '.join(waits)}{more}: put one of them "
        "after what it waits for"
    )
    raise InputError(message)


def _words(order: PipelineOrder, place: _Position) -> str:
    return f"{order.word(order.stages[place[0]][place[1]])} of line {place[0] + 1}"
