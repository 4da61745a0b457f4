"""The parts into which a plan's model is cut: with S stages of v chunks each, there are S v parts.

Where they lie, and how many blocks each has, is said in ``mistlab.schedule.placement``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mistlab.schedule.placement import Placement
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


def parts_of_plan(plan: Plan, placement: Placement) -> list[StagePart]:
    """The parts of a plan's model, in order."""
    shares = [
        placement.shares_of_blocks(stage.layers, number) for number, stage in enumerate(plan.stages)
    ]
    ways = [_ways(stage) for stage in plan.stages]
    parts: list[StagePart] = []
    begin = 1
    for stage, chunk in placement.places:
        count = shares[stage][chunk]
        own, ways[stage] = ways[stage][:count], ways[stage][count:]
        parts.append(
            StagePart(
                stage=stage,
                chunk=chunk,
                blocks=range(begin, begin + count),
                treated={name: own.count(name) for name in counts_of_blocks()},
                has_embedding=not parts,
                has_head=len(parts) == len(placement.stages) - 1,
            )
        )
        begin += count
    return parts


def _ways(stage: StagePlan) -> list[str]:
    """For each block of a stage, in order, the dimension that counts it; empty for plain blocks."""
    treated = [name for name in counts_of_blocks() for _ in range(stage.degree(name))]
    return [""] * (stage.layers - len(treated)) + treated
