"""Says which stage of a pipeline holds each part of a model, and divides blocks evenly."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from mistlab.core.values import reject

# Divides a number of equal items, such as blocks, into parts as even as possible.


def even_shares(count: int, parts: int) -> tuple[int, ...]:
    """Divide ``count`` items into parts as evenly as possible; the first parts get the remainder.

    >>> even_shares(32, 5)
    (7, 7, 6, 6, 6)
    """
    each, rest = divmod(count, parts)
    return (each + 1,) * rest + (each,) * (parts - rest)


def spread_shares(count: int, parts: int) -> list[int]:
    """Divide ``count`` items into parts as evenly as possible; the remainder is spread over them.

    >>> spread_shares(32, 5)
    [6, 6, 7, 6, 7]
    """
    return [count * (part + 1) // parts - count * part // parts for part in range(parts)]


# Says which stage holds each part of the model; a stage may hold several parts, its chunks.


# The difference in stage number to the stage that a part's input comes from, or its output goes to.
PREVIOUS, HERE, NEXT = -1, 0, 1


class StageChunk(NamedTuple):
    """A chunk of a pipeline stage: the stage's number, and the chunk's number in the stage."""

    stage: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Which stage holds each part of a model: a stage number for each part, in the model's order.

    A stage's chunks are the parts that it holds, in the order of the model. In a *loop* the parts
    go round the stages: with S stages, part c S + s is chunk c of stage s. In a *V* they turn back
    at the last stage: with two chunks per stage, part s is the first chunk of stage s, and part 2 S
    - 1 - s the second. A stage's blocks are divided over its chunks as evenly as possible. If there
    are few blocks, the parts with the embedding and the head may have no block.
    """

    stages: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_stages(self.stages)
        if not self.is_loop:
            _check_neighbours(self.stages)

    @property
    def num_stages(self) -> int:
        """The number of stages of the pipeline."""
        return max(self.stages) + 1

    @property
    def chunks(self) -> int:
        """The number of chunks (parts of the model) on each stage."""
        return len(self.stages) // self.num_stages

    @property
    def is_loop(self) -> bool:
        """Whether the parts go round the stages, such as 0, 1, 2, 0, 1, 2 for two parts on each of
        three stages.
        """
        return self.stages == tuple(range(self.num_stages)) * self.chunks

    @property
    def first_stage(self) -> int:
        """The stage that has the first part of the model, with the embedding."""
        return self.stages[0]

    @property
    def last_stage(self) -> int:
        """The stage that has the last part of the model, with the head."""
        return self.stages[-1]

    @property
    def ends_meet(self) -> bool:
        """Whether one stage of several has both the embedding and the head, as in a V."""
        return self.first_stage == self.last_stage and self.num_stages > 1

    @property
    def places(self) -> tuple[StageChunk, ...]:
        """The stage of each part of the model, and which of the stage's chunks it is."""
        before = [0] * self.num_stages
        places = []
        for stage in self.stages:
            places.append(StageChunk(stage, before[stage]))
            before[stage] += 1
        return tuple(places)

    @property
    def parts(self) -> Mapping[StageChunk, int]:
        """The number of the part of the model that each chunk of each stage holds."""
        return {place: part for part, place in enumerate(self.places)}

    def of_stage(self, stage: int) -> tuple[int, ...]:
        """The numbers of the parts of the model that a stage holds, in the order of its chunks."""
        return tuple(part for part, own in enumerate(self.stages) if own == stage)

    def comes_from(self, part: int) -> int:
        """Whether a part's input comes from the previous, the same or the next stage; ``PREVIOUS``
        for the first part.
        """
        return PREVIOUS if part == 0 else -self.goes_to(part - 1)

    def goes_to(self, part: int) -> int:
        """Whether a part's output goes to the previous, the same or the next stage; ``NEXT`` for
        the last part.

        In a loop the stage after the last one is the first.
        """
        if self.is_loop or part == len(self.stages) - 1:
            return NEXT
        step = self.stages[part + 1] - self.stages[part]
        return step if step in (PREVIOUS, HERE) else NEXT

    def sends_away(self, part: int) -> bool:
        """Whether a part's output is sent to another stage."""
        following = self.stages[part + 1 : part + 2]
        return bool(following) and following[0] != self.stages[part]

    def blocks_needed(self, stage: int) -> int:
        """The fewest blocks with which no part of a stage is empty; embedding and head count as
        layers.
        """
        parts = self.of_stage(stage)
        ends = (0, len(self.stages) - 1) if self.num_stages > 1 else ()
        return next(
            blocks
            for blocks in range(len(parts) + 1)
            if all(
                share or part in ends
                for share, part in zip(self.shares_of_blocks(blocks, stage), parts, strict=True)
            )
        )

    def shares_of_blocks(self, blocks: int, stage: int) -> tuple[int, ...]:
        """The number of blocks of each chunk of a stage that has this many ``blocks``.

        Remaining blocks go to the first chunks. On the first stage of a loop they go to the last
        chunks, since its first chunk has the embedding too.
        """
        return blocks_of_chunks(blocks, self.chunks, is_first=self.is_loop and stage == 0)


def loop(num_stages: int, chunks: int = 1) -> Placement:
    """Place the model's parts in a loop: they go round the stages ``chunks`` times.

    >>> loop(3, 2).stages
    (0, 1, 2, 0, 1, 2)
    """
    return Placement(tuple(range(num_stages)) * chunks)


def turning(num_stages: int) -> Placement:
    """Place the model's parts in a V, two on each stage: the first stage holds the first and the
    last part.

    >>> turning(3).stages
    (0, 1, 2, 2, 1, 0)
    """
    stages = tuple(range(num_stages))
    return Placement(stages + stages[::-1])


def blocks_of_chunks(blocks: int, chunks: int, *, is_first: bool = False) -> tuple[int, ...]:
    """The number of blocks of each chunk of a stage, divided evenly; with ``is_first`` the last
    chunks have one more.

    >>> blocks_of_chunks(8, 3)
    (3, 3, 2)
    >>> blocks_of_chunks(8, 3, is_first=True)
    (2, 3, 3)
    """
    shares = even_shares(blocks, chunks)
    return shares[::-1] if is_first else shares


def most_chunks(blocks: Sequence[int], *, turns: bool = False) -> int:
    """The largest possible number of chunks per stage, given the number of blocks of each stage.

    Parts go round the stages, or with ``turns`` lie in a V.

    >>> most_chunks((2, 3, 2)), most_chunks((2,)), most_chunks((1, 2), turns=True)
    (3, 2, 2)
    """
    ends = ((0, 0) if turns else (0, len(blocks) - 1)) if len(blocks) > 1 else ()
    return min(count + ends.count(stage) for stage, count in enumerate(blocks))


def _check_stages(stages: Sequence[int]) -> None:
    """Refuse a placement that gives some stages more parts than others."""
    counts = [stages.count(stage) for stage in range(max(stages, default=-1) + 1)]
    if not counts or min(stages) < 0 or len({*counts}) > 1:
        reject(
            f"parts on stages {_shown(stages)} do not give every stage equally many chunks: name "
            "each stage equally often, from stage 0 on without a gap"
        )


def _check_neighbours(stages: Sequence[int]) -> None:
    """Refuse a placement in which consecutive parts of the model are on stages that are not
    neighbours.
    """
    last = max(stages)
    for part, (here, there) in enumerate(pairwise(stages)):
        if abs(there - here) > 1 and (here, there) != (last, 0):
            reject(
                f"part {part} is on stage {here} and part {part + 1} on stage {there}, which do "
                "not send to each other: put each part on the stage of the part before or on one "
                "next to it; after the last stage comes the first"
            )


def _shown(stages: Sequence[int]) -> str:
    return " ".join(map(str, stages[:16])) + (" ..." if len(stages) > 16 else "")
