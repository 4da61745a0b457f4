"""Reads the order of a plan's passes (its pipeline schedule), and checks that it is complete and
free of deadlocks.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mistlab.core.values import InputError, refuse, reject
from mistlab.plan.plan import Plan
from mistlab.schedule.order_text import (
    OrderedPass,
    PassKind,
    PipelineOrder,
    StageOrder,
    order_from_text,
    refuse_word,
    splits_backward,
)
from mistlab.schedule.orders import (
    DEFAULT_ORDER,
    ORDERS,
    TURNING,
    fewer_micro_batches,
    order_problem,
)
from mistlab.schedule.placement import Placement, loop, most_chunks
from mistlab.schedule.stage_passes import PassKey, StagePass, StagePasses, in_turn, passes_of

# NumPy is imported only where it is used, since reading and writing plans needs none of it.
if TYPE_CHECKING:
    from mistlab.core.arrays import Ints

# Checks that stages can run their passes in a given order: every pass occurs once, after those that
# it needs, without a deadlock.


# At most this many pipeline orders are cached; each takes as much memory as its text.
_MOST_KEPT = 64
# An order is written out pass by pass only up to this many micro-batches, added up over stages: a
# thousand stages with a thousand micro-batches each.
MOST_OF_ORDER = 1_000_000
# An error message about a deadlock names at most this many passes.
_NAMED = 8
# Within a stage, a pass of the first kind must come after the pass of the second kind for the same
# chunk and micro-batch; the text is the reason.
_AFTER: tuple[tuple[PassKind, PassKind, str], ...] = (
    ("B", "F", "its forward pass"),
    ("W", "B", "the gradient of its input"),
)


def named_order(name: str, num_stages: int, micro_batches: int) -> PipelineOrder:
    """Write out the pipeline order with this name, pass by pass.

    Refuses numbers of stages and micro-batches for which the order is not defined. A named order is
    not checked each time, since that would take longer than writing it.
    """
    if num_stages * micro_batches > MOST_OF_ORDER:
        refuse(
            "plan.micro_batches",
            f"{micro_batches} on each of {num_stages} stages are more than the {MOST_OF_ORDER:,} "
            "that an order of passes is written out for: give fewer, or leave out the order and "
            "predict in closed form",
        )
    return _made(ORDERS[name], num_stages, micro_batches)


@lru_cache(maxsize=_MOST_KEPT)
def order_of_text(text: str, num_stages: int, micro_batches: int) -> PipelineOrder:
    """Read a pipeline order from the text of an order file, and check that stages can run their
    passes in it.
    """
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
    """Refuse a stage whose passes are incomplete, repeated, or in an impossible order."""
    places: dict[OrderedPass, int] = {}
    for index, ordered_pass in enumerate(stage):
        if ordered_pass.micro_batch >= order.micro_batches:
            have = f"the plan's micro-batches are 0 to {order.micro_batches - 1}"
            remedy = "leave it out, or give the order of a plan with more"
            problem = f"does not exist: {have}: {remedy}"
            refuse_word(order.line(number), _described(order, ordered_pass), problem)
        if ordered_pass in places:
            problem = "is there twice: leave one of the two out"
            refuse_word(order.line(number), _described(order, ordered_pass), problem)
        places[ordered_pass] = index
    for ordered_pass in _needed(order, stage):
        if ordered_pass not in places:
            either = ", or leave every W of the line out" if ordered_pass.kind == "W" else ""
            problem = f"is missing: put it where it is to run{either}"
            refuse_word(order.line(number), _described(order, ordered_pass), problem)
    for kind, before, noun in _AFTER:
        for ordered_pass, index in places.items():
            needed = OrderedPass(before, ordered_pass.chunk, ordered_pass.micro_batch)
            if ordered_pass.kind == kind and places[needed] > index:
                word = order.word(needed)
                problem = f"comes before {word}, {noun}: put it after {word}"
                refuse_word(order.line(number), _described(order, ordered_pass), problem)


_NOUNS: Mapping[PassKind, str] = {
    "F": "forward pass",
    "B": "backward pass",
    "W": "gradients of weights",
}


def _described(order: PipelineOrder, ordered_pass: OrderedPass) -> str:
    """A pass as a word of the order file, with what the word means."""
    of_chunk = f" through chunk {ordered_pass.chunk}" if order.chunks > 1 else ""
    meaning = f"{_NOUNS[ordered_pass.kind]} of micro-batch {ordered_pass.micro_batch}{of_chunk}"
    return f"{order.word(ordered_pass)} ({meaning})"


def _needed(order: PipelineOrder, stage: StageOrder) -> Iterator[OrderedPass]:
    kinds: tuple[PassKind, ...] = ("F", "B", "W") if splits_backward(stage) else ("F", "B")
    for kind in kinds:
        for chunk in range(order.chunks):
            for micro_batch in range(order.micro_batches):
                yield OrderedPass(kind, chunk, micro_batch)


def _check_no_circle(order: PipelineOrder) -> None:
    """Run the passes of all stages as far as their inputs arrive, and refuse the order if a stage
    cannot finish.
    """
    passes = passes_of(order)
    done = [0] * order.num_stages
    for stage_pass in in_turn(passes):
        done[stage_pass.stage] += 1
    # The pass at which each blocked stage waits for its input.
    stopped = {
        stage: of_stage.passes[number]
        for stage, (of_stage, number) in enumerate(zip(passes, done, strict=True))
        if number < len(of_stage)
    }
    if stopped:
        _refuse_circle(order, stopped)


def _refuse_circle(order: PipelineOrder, stopped: Mapping[int, StagePass]) -> NoReturn:
    """Refuse an order with a deadlock, naming its passes.

    Each of these passes waits for an input that the next one delays.
    """
    seen = []
    waiting = next(iter(stopped.values()))
    while waiting not in seen:
        seen.append(waiting)
        assert waiting.needs is not None, "only an input keeps a stage waiting"
        waiting = stopped[waiting.needs[0]]
    circle = seen[seen.index(waiting) :]
    waits = []
    for waiting in circle[:_NAMED]:
        assert waiting.needs is not None
        first = stopped[waiting.needs[0]]
        after = (
            "" if first.key == waiting.needs else f", which is after {_pass_text(order, first.key)}"
        )
        waits.append(
            f"{_pass_text(order, waiting.key)} waits for {_pass_text(order, waiting.needs)}{after}"
        )
    more = "; and so on" if len(circle) > _NAMED else ""
    reject(
        f"passes wait for one another in a cycle: {'; '.join(waits)}{more}: put one of them "
        "after what it waits for"
    )


def _pass_text(order: PipelineOrder, key: PassKey) -> str:
    stage, kind, chunk, micro_batch = key
    return f"{order.word(OrderedPass(kind, chunk, micro_batch))} of line {order.line(stage)}"


# Reads the pipeline order of a plan: a named order, or an order file.


# An order file may be this many times as large as its words need, to allow for extra blanks.
_ROOM = 4
# The number of kinds of passes in an order file: F, B and W.
_KINDS = 3
# Besides its numbers, a word in an order file has this many characters: F, m and a blank.
_MARKS = 3


def check_order(plan: Plan) -> None:
    """Refuse a plan whose stages cannot run their passes in the plan's order.

    Named orders are checked without writing them out.
    """
    if plan.order not in ORDERS:
        order_of_plan(plan)
        return
    most = most_chunks([stage.layers for stage in plan.stages], turns=plan.order in TURNING)
    if problem := order_problem(plan.order, plan.num_stages, plan.micro_batches, most):
        refuse("plan.order", f"{plan.order}, but {problem}")


def order_of_plan(plan: Plan) -> PipelineOrder:
    """The order in which each stage of a plan runs its passes; refuses an order in which the stages
    cannot run their passes.
    """
    if plan.order in ORDERS:
        check_order(plan)
        return named_order(plan.order, plan.num_stages, plan.micro_batches)
    try:
        text = _text(Path(plan.order), _most_bytes(plan))
        order = order_of_text(text, plan.num_stages, plan.micro_batches)
        _check_chunks(plan, order)
    except InputError as error:
        refuse("plan.order", f"{plan.order}: {error}")
    return order


def passes_of_plan(plan: Plan) -> tuple[StagePasses, ...]:
    """The passes of each stage of a plan, with their phases and the stages that they exchange data
    with.
    """
    return passes_of(order_of_plan(plan))


def shortened(plan: Plan) -> Plan:
    """A copy of the plan with fewer micro-batches, if its pipeline order is periodic.

    Warm-up, cool-down and period stay the same, and so do memory peaks.
    """
    fewer = fewer_micro_batches(plan.order, plan.num_stages, plan.micro_batches)
    return plan if fewer == plan.micro_batches else replace(plan, micro_batches=fewer)


def ends_of_plan(plan: Plan) -> tuple[int, int]:
    """The number of the stage with the embedding, and that of the stage with the head."""
    if plan.order == DEFAULT_ORDER:
        return 0, plan.num_stages - 1
    placement = placement_of_plan(plan)
    return placement.first_stage, placement.last_stage


def placement_of_plan(plan: Plan) -> Placement:
    """Which stage of a plan holds each part of the model."""
    if plan.order == DEFAULT_ORDER:
        return loop(plan.num_stages)
    return order_of_plan(shortened(plan)).placement


def _check_chunks(plan: Plan, order: PipelineOrder) -> None:
    placement = order.placement
    for number, stage in enumerate(plan.stages):
        if stage.layers < placement.blocks_needed(number):
            reject(
                f"has {order.chunks} chunks for each stage, but plan.stages[{number}] has "
                f"{stage.layers} layers: give the stage more layers, or the order fewer chunks"
            )


def _text(path: Path, most_bytes: int) -> str:
    if path.is_dir():
        reject("is a directory: give the path of an order file")
    if path.exists() and not path.is_file():
        reject("is not a regular file: give the path of an order file")
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
            size = path.stat().st_size
    except OSError as error:
        reject(f"cannot be read ({error.strerror}): give the path of an order file")
    if len(content) > most_bytes:
        reject(
            f"has {size:,} bytes, but all passes of the plan need {most_bytes // _ROOM:,} at "
            "most: give an order of this plan"
        )
    try:
        return content.removeprefix(BOM_UTF8).decode("ascii")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        reject(f"line {line}: is not text: write passes like F0m3, separated by blanks")


def _most_bytes(plan: Plan) -> int:
    """The largest possible size of an order file of a plan in bytes, if a stage has a chunk for
    each block.
    """
    chunks = min(stage.layers for stage in plan.stages)
    word = _MARKS + len(str(chunks)) + len(str(plan.micro_batches))
    return _ROOM * word * _KINDS * chunks * plan.micro_batches * plan.num_stages


# Finds the points in a pipeline order at which a stage has the most micro-batches in flight.


# The circumstances in which a pass begins: its kind and chunk, whether optimizer steps overlap with
# it, and the chunk whose activations are still being offloaded (if any).
_Begin = tuple[PassKind, int, bool, int | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassMoments:
    """The micro-batches in flight in each chunk of a stage when passes of one kind and chunk begin;
    only the largest numbers are kept.

    ``held`` is a table with a row for each moment and two columns for each of V chunks (K, 2 V):
    first, for all chunks, the micro-batches between forward and backward pass, then those between
    backward and weight-gradient pass. With ``first_forward``, the passes are the chunk's first,
    during which layers also run their optimizer steps. ``leaving`` is the chunk whose activations
    are still being offloaded, if any.
    """

    kind: PassKind
    chunk: int
    first_forward: bool
    leaving: int | None
    held: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldMoments:
    """The largest numbers of micro-batches in flight on stage number ``stage`` at any moment
    between its passes.

    A moment is a row of two numbers for each of V chunks (K, 2 V): first, for all chunks, the
    micro-batches between their forward and their backward pass, then the micro-batches between
    their backward and their weight-gradient pass. Only a Pareto frontier is kept: a moment is left
    out if at another one all numbers are as large or larger.

    ``every`` is the frontier of all moments; ``begins`` are those of the moments at which passes of
    each kind begin.
    """

    stage: int
    placement: Placement
    splits_backward: bool
    every: Ints
    begins: tuple[PassMoments, ...]

    @classmethod
    def of(cls, passes: StagePasses, stage: int) -> HeldMoments:
        """Find the moments with the most micro-batches in flight, if a stage runs these passes."""
        chunks = passes.chunks
        held, reached = [0] * (2 * chunks), set()
        begins: dict[_Begin, set[tuple[int, ...]]] = defaultdict(set)
        leaving: int | None = None
        for ordered_pass in passes:
            begins[
                ordered_pass.kind,
                ordered_pass.chunk,
                ordered_pass.phase == "first_forward",
                leaving,
            ].add(tuple(held))
            if ordered_pass.kind != "W":
                leaving = ordered_pass.chunk if ordered_pass.kind == "F" else None
            if ordered_pass.kind == "F":
                held[ordered_pass.chunk] += 1
            elif ordered_pass.kind == "W":
                held[chunks + ordered_pass.chunk] -= 1
            else:
                held[ordered_pass.chunk] -= 1
                held[chunks + ordered_pass.chunk] += passes.splits_backward
            reached.add(tuple(held))
        return cls(
            stage=stage,
            placement=passes.placement,
            splits_backward=passes.splits_backward,
            every=_fullest([*reached]),
            begins=tuple(
                PassMoments(
                    kind=kind,
                    chunk=chunk,
                    first_forward=first_forward,
                    leaving=leaving,
                    held=_fullest([*moments]),
                )
                for (kind, chunk, first_forward, leaving), moments in begins.items()
            ),
        )

    @property
    def chunks(self) -> int:
        """The number of chunks of the stage."""
        return self.placement.chunks

    @property
    def least_held(self) -> int:
        """The largest number of micro-batches that every chunk has in flight at the same time."""
        return int(self.every[:, : self.chunks].min(axis=1).max())

    def most_held(self, blocks: int) -> float:
        """The largest number of micro-batches in flight on a stage with this many blocks.

        A micro-batch in a chunk counts as that chunk's share of the blocks.
        """
        held = self.every[:, : self.chunks] + self.every[:, self.chunks :]
        if self.chunks == 1:
            return float(held.max())
        import numpy as np  # noqa: PLC0415

        shares = np.array(self.placement.shares_of_blocks(blocks, self.stage))
        return float((held @ shares).max()) / blocks


@lru_cache(maxsize=1024)
def moments_in(order: str, num_stages: int, micro_batches: int) -> tuple[HeldMoments, ...]:
    """The moments with the most micro-batches in flight, for each stage of a pipeline with a named
    order.
    """
    fewer = fewer_micro_batches(order, num_stages, micro_batches)
    passes = passes_of(named_order(order, num_stages, fewer))
    return tuple(HeldMoments.of(own, stage) for stage, own in enumerate(passes))


def in_flight_of_plan(plan: Plan) -> Sequence[float]:
    """The largest number of micro-batches in flight on each stage of a plan.

    A micro-batch in one chunk counts as the chunk's share of the stage's blocks.
    """
    stages, micro_batches = plan.num_stages, plan.micro_batches
    if plan.order == DEFAULT_ORDER:
        return [min(micro_batches, left) for left in range(stages, 0, -1)]
    moments = moments_of_plan(plan)
    return [one.most_held(stage.layers) for one, stage in zip(moments, plan.stages, strict=True)]


def moments_of_plan(plan: Plan) -> tuple[HeldMoments, ...]:
    """The moments with the most micro-batches in flight, for each stage of a plan."""
    if plan.order in ORDERS:
        check_order(plan)
        return moments_in(plan.order, plan.num_stages, plan.micro_batches)
    return tuple(HeldMoments.of(own, stage) for stage, own in enumerate(passes_of_plan(plan)))


def _fullest(moments: Sequence[tuple[int, ...]]) -> Ints:
    """The Pareto frontier of moments of a pipeline order, by micro-batches in flight: a moment is
    left out if at another one as many or more are in flight in every chunk.

    Moments with the most micro-batches in total come first.
    """
    import numpy as np  # noqa: PLC0415

    left = np.array(sorted(moments, key=sum, reverse=True))
    fullest = []
    while len(left):
        fullest.append(left[0])
        left = left[(left > left[0]).any(axis=1)]
    return np.array(fullest)
