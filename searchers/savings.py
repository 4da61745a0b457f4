"""The ways in which a stage may save memory: all combinations of a space's choices, by dimension.

Axes: W ways to save memory, B ways to treat blocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from mistlab.values.dimensions import DIMENSIONS, counts_of_blocks, counts_within, names_of
from mistlab.values.plan import Plan, StagePlan
from mistlab.values.space import SearchSpace
from searchers.meshes import Mesh

# One value for each of ``names_of("savings")``, and for each of ``counts_of_blocks``.
SavingsRow = tuple[float, ...]
CountsRow = tuple[int, ...]
# Some of a dimension's choices.
Thinner = Callable[[Sequence[float]], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Way:
    """One way to save memory for all stages of a pipeline: the values of ``names_of("savings")``,
    and how many blocks the largest stage treats in each of ``counts_of_blocks()``."""

    savings: SavingsRow
    counts: CountsRow

    def counts_within(self, layers: int) -> CountsRow:
        """The numbers of treated blocks of a stage with so many blocks."""
        counts = dict(zip(counts_of_blocks(), self.counts, strict=True))
        return tuple(counts_within(counts, layers).values())


def way_of(plan: Plan) -> Way:
    """The way to save memory of a plan whose stages are alike."""
    largest = max(plan.stages, key=lambda stage: stage.layers)
    return Way(
        savings=tuple(largest.value(name) for name in names_of("savings")),
        counts=tuple(largest.counts.values()),
    )


def ways_alike(space: SearchSpace, mesh: Mesh, layers: int, *, in_pipeline: bool) -> Iterator[Way]:
    """Every way for all stages of a pipeline of equal meshes, the largest of so many blocks."""
    for savings in product(*savings_choices(space, mesh, in_pipeline=in_pipeline)):
        for counts in counts_choices(space, layers):
            yield Way(savings=savings, counts=counts)


def savings_choices(
    space: SearchSpace, mesh: Mesh, *, in_pipeline: bool
) -> tuple[tuple[float, ...], ...]:
    """A stage's choices for each of ``names_of("savings")``."""
    return tuple(
        space.choices(name, layers=1, degree=mesh.value, in_pipeline=in_pipeline)
        for name in names_of("savings")
    )


def counts_choices(space: SearchSpace, layers: int, thinner: Thinner = tuple) -> list[CountsRow]:
    """The numbers of a stage's blocks with each treatment (B), together at most all its blocks;
    ``thinner`` picks some of the choices for one treatment."""
    choices = (thinner(_counts_of(space, name, layers)) for name in counts_of_blocks())
    every = (tuple(map(int, counts)) for counts in product(*choices))
    return [counts for counts in every if sum(counts) <= layers]


def ways_to_save(
    space: SearchSpace, mesh: Mesh, layers: int, *, in_pipeline: bool
) -> Iterator[StagePlan]:
    """Every stage with these blocks and this mesh (W)."""
    names = saving_names()
    choices = (
        sorted({*space.choices(name, layers=layers, degree=mesh.value, in_pipeline=in_pipeline)})
        for name in names
    )
    for values in product(*choices):
        stage = dict(zip(names, values, strict=True))
        if sum(stage[name] for name in counts_of_blocks()) <= layers:
            yield stage_of(mesh, layers, stage)


def number_of_ways(space: SearchSpace, mesh: Mesh, layers: int, *, in_pipeline: bool) -> int:
    """The number of stages with these blocks and this mesh."""
    ways = len({*counts_choices(space, layers)})
    for choices in savings_choices(space, mesh, in_pipeline=in_pipeline):
        ways *= len(choices)
    return ways


def saving_names() -> tuple[str, ...]:
    """The dimensions that save memory, in the table's order."""
    return tuple(name for name in DIMENSIONS if name in (*names_of("savings"), *counts_of_blocks()))


def stage_of(mesh: Mesh, layers: int, saving: Mapping[str, float]) -> StagePlan:
    """A stage that saves memory with these values; dimensions without a value have the default."""
    return StagePlan.of_values({"layers": layers, **mesh.values(), **saving})


def bare_stage(mesh: Mesh, layers: int, space: SearchSpace) -> StagePlan:
    """A stage that saves as little memory as the space allows."""
    least = {name: min(space.listed(name) or (0,)) for name in names_of("savings")}
    counts = {name: int(min(_counts_of(space, name, layers))) for name in counts_of_blocks()}
    return stage_of(mesh, layers, {**least, **counts})


def alike(largest: StagePlan, layers: int) -> StagePlan:
    """A stage of ``layers`` blocks that saves memory like another stage, which has the most
    blocks."""
    return largest.with_values({"layers": layers, **counts_within(largest.counts, layers)})


def _counts_of(space: SearchSpace, name: str, layers: int) -> tuple[float, ...]:
    return space.choices(name, layers=layers, degree=_one, in_pipeline=False)


def _one(_: str) -> int:
    return 1
