"""The ways in which a stage may save memory: all combinations of a space's choices, by dimension.

Axes: W ways to save memory, B ways to treat blocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from mistlab.values.dimensions import DIMENSIONS, counts_of_blocks, names_of
from mistlab.values.plan import StagePlan
from mistlab.values.space import SearchSpace
from searchers.meshes import Mesh

# One value for each of ``names_of("savings")``, and for each of ``counts_of_blocks``.
SavingsRow = tuple[float, ...]
CountsRow = tuple[int, ...]
# Some of a dimension's choices.
Thinner = Callable[[Sequence[float]], Sequence[float]]


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
    return stage_of(
        mesh, layers, {name: min(space.listed(name) or (0,)) for name in names_of("savings")}
    )


def alike(first: StagePlan, layers: int) -> StagePlan:
    """A stage of ``layers`` blocks that saves memory like the first stage, which has the most
    blocks."""
    return first.with_values({"layers": layers, **counts_within(first, layers)})


def counts_within(stage: StagePlan, layers: int) -> dict[str, int]:
    """The numbers of treated blocks in a stage of ``layers`` blocks: those of another stage, if it
    has enough blocks."""
    counts, left = {}, layers
    for name in counts_of_blocks():
        counts[name] = min(stage.degree(name), left)
        left -= counts[name]
    return counts


def _counts_of(space: SearchSpace, name: str, layers: int) -> tuple[float, ...]:
    return space.choices(name, layers=layers, degree=_one, in_pipeline=False)


def _one(_: str) -> int:
    return 1
