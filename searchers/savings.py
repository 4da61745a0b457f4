"""How a stage may save memory: every combination of what a space lets it choose, by dimension.

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
    """What a stage may choose of each of ``names_of("savings")``."""
    return tuple(
        space.choices(name, layers=1, degree=mesh.value, in_pipeline=in_pipeline)
        for name in names_of("savings")
    )


def counts_choices(space: SearchSpace, layers: int, thinner: Thinner = tuple) -> list[CountsRow]:
    """How many of a stage's blocks may be treated in each way (B), together no more than there are;
    ``thinner`` picks some of the choices of one way."""
    choices = (thinner(_counts_of(space, name, layers)) for name in counts_of_blocks())
    every = (tuple(map(int, counts)) for counts in product(*choices))
    return [counts for counts in every if sum(counts) <= layers]


def ways_to_save(
    space: SearchSpace, mesh: Mesh, layers: int, *, in_pipeline: bool
) -> Iterator[StagePlan]:
    """Every stage of so many blocks on a mesh (W)."""
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
    """How many stages of so many blocks there are on a mesh."""
    ways = len({*counts_choices(space, layers)})
    for choices in savings_choices(space, mesh, in_pipeline=in_pipeline):
        ways *= len(choices)
    return ways


def saving_names() -> tuple[str, ...]:
    """The dimensions that save memory, in the table's order."""
    return tuple(name for name in DIMENSIONS if name in (*names_of("savings"), *counts_of_blocks()))


def stage_of(mesh: Mesh, layers: int, saving: Mapping[str, float]) -> StagePlan:
    """A stage of so many blocks on a mesh that saves memory so; without a word by the default."""
    return StagePlan.of_values({"layers": layers, **mesh.values(), **saving})


def bare_stage(mesh: Mesh, layers: int, space: SearchSpace) -> StagePlan:
    """A stage that saves as little memory as the space allows."""
    return stage_of(
        mesh, layers, {name: min(space.listed(name) or (0,)) for name in names_of("savings")}
    )


def alike(first: StagePlan, layers: int) -> StagePlan:
    """A stage of so many blocks that saves memory as the first one does, which has the most."""
    return first.with_values({"layers": layers, **counts_within(first, layers)})


def counts_within(stage: StagePlan, layers: int) -> dict[str, int]:
    """How many of so many blocks are treated in each way: as many as a stage's, if they last."""
    counts, left = {}, layers
    for name in counts_of_blocks():
        counts[name] = min(stage.degree(name), left)
        left -= counts[name]
    return counts


def _counts_of(space: SearchSpace, name: str, layers: int) -> tuple[float, ...]:
    return space.choices(name, layers=layers, degree=_one, in_pipeline=False)


def _one(_: str) -> int:
    return 1
