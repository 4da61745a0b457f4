"""The parts into which a model is cut: with S stages of v chunks each, there are S v parts.

Part c S + s is chunk c of stage s. A stage's blocks are divided over its chunks as evenly as
possible. The first chunks take the rest, but on the first stage the last chunks do: the first part
has the embedding too, the last part the head. Where blocks are few, these two parts may have no
block at all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mistlab.values.dimensions import counts_of_blocks
from mistlab.values.plan import Plan, StagePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """A part: consecutive layers on one stage, numbered through the whole model.

    ``treated`` has the number of its blocks with each treatment, by the dimension that counts them.
    """

    stage: int
    chunk: int
    blocks: range
    treated: Mapping[str, int]
    has_embedding: bool
    has_head: bool

    @property
    def first_layer(self) -> int:
        """The first of its layers, the embedding being layer 0."""
        return self.blocks.start - self.has_embedding


def blocks_of_chunks(blocks: int, chunks: int, *, is_first: bool = False) -> tuple[int, ...]:
    """How many of a stage's blocks each of its chunks has.

    >>> blocks_of_chunks(8, 3)
    (3, 3, 2)
    >>> blocks_of_chunks(8, 3, is_first=True)
    (2, 3, 3)
    """
    each, rest = divmod(blocks, chunks)
    shares = tuple(each + (chunk < rest) for chunk in range(chunks))
    return shares[::-1] if is_first else shares


def most_chunks(blocks: Sequence[int]) -> int:
    """The most chunks of a pipeline whose stages have so many blocks.

    Each part has a block, but for the part with the embedding and the part with the head.

    >>> most_chunks((2, 3, 2)), most_chunks((2,))
    (3, 2)
    """
    ends = (0, len(blocks) - 1) if len(blocks) > 1 else ()
    return min(count + (stage in ends) for stage, count in enumerate(blocks))


def parts_of_plan(plan: Plan, chunks: int) -> list[StagePart]:
    """The parts of a plan's model, in order."""
    shares = [
        blocks_of_chunks(stage.layers, chunks, is_first=number == 0)
        for number, stage in enumerate(plan.stages)
    ]
    ways = [_ways(stage) for stage in plan.stages]
    parts: list[StagePart] = []
    begin = 1
    for chunk in range(chunks):
        for stage, share in enumerate(shares):
            end = begin + share[chunk]
            own, ways[stage] = ways[stage][: share[chunk]], ways[stage][share[chunk] :]
            parts.append(
                StagePart(
                    stage=stage,
                    chunk=chunk,
                    blocks=range(begin, end),
                    treated={name: own.count(name) for name in counts_of_blocks()},
                    has_embedding=not parts,
                    has_head=(chunk, stage) == (chunks - 1, plan.num_stages - 1),
                )
            )
            begin = end
    return parts


def _ways(stage: StagePlan) -> list[str]:
    """For each block of a stage, in order, the dimension that counts it; empty for plain blocks."""
    treated = [name for name in counts_of_blocks() for _ in range(stage.degree(name))]
    return [""] * (stage.layers - len(treated)) + treated
