"""Plans one step away from another that save less memory, inside the same space.

A step lowers one choice of a stage to its next value: the number of recomputed blocks, the ZeRO
level, or an offload ratio. If the space keeps stages alike, it lowers this choice of all stages. A
step may also make micro-batches twice as large and half as many.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mistlab.values.dimensions import change_words, counts_of_blocks, names_of
from mistlab.values.plan import Plan, StagePlan
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from searchers.meshes import mesh_of, meshes, micro_batch_counts

Step = Callable[[StagePlan], StagePlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A plan, and in words what it does otherwise."""

    change: str
    plan: Plan


def neighbours(plan: Plan, problem: Problem, space: SearchSpace) -> list[Neighbour]:
    """All of them."""
    return [*_less_saving(plan, space), *_larger_micro_batches(plan, problem, space)]


def _less_saving(plan: Plan, space: SearchSpace) -> Iterator[Neighbour]:
    # Where stages are alike, the largest one says how many blocks each of them treats.
    layers = [stage.layers for stage in plan.stages]
    places = range(plan.num_stages) if space.unequal_stages else (layers.index(max(layers)),)
    for place in places:
        for what, step in _steps(plan.stages[place], plan.num_stages, space):
            if space.unequal_stages:
                where = f"stage {place}"
                stages = [
                    step(stage) if index == place else stage
                    for index, stage in enumerate(plan.stages)
                ]
            else:
                where = "every stage"
                stages = [step(stage) for stage in plan.stages]
            yield Neighbour(change=f"{what} on {where}", plan=replace(plan, stages=tuple(stages)))


def _steps(stage: StagePlan, num_stages: int, space: SearchSpace) -> Iterator[tuple[str, Step]]:
    # Blocks that are treated otherwise come first.
    for name in (*counts_of_blocks(), *names_of("savings")):
        now = stage.value(name)
        choices = space.choices(
            name, layers=stage.layers, degree=stage.degree, in_pipeline=num_stages > 1
        )
        lower = max((choice for choice in choices if choice < now), default=None)
        if lower is not None:
            yield change_words(name, now, lower), _stepping(name, lower)


def _stepping(name: str, value: float) -> Step:
    def step(stage: StagePlan) -> StagePlan:
        most = stage.layers if name in counts_of_blocks() else value
        return stage.with_values({name: min(value, most)})

    return step


def _larger_micro_batches(plan: Plan, problem: Problem, space: SearchSpace) -> Iterator[Neighbour]:
    half, rest = divmod(plan.micro_batches, 2)
    if rest or half not in micro_batch_counts(problem, space):
        return
    allowed = {*meshes(problem, space, half)}
    stages = [replace(stage, micro_batch=2 * stage.micro_batch) for stage in plan.stages]
    if all(mesh_of(stage) in allowed for stage in stages):
        yield Neighbour(
            change=f"{half} micro-batches twice as large instead of {plan.micro_batches}",
            plan=replace(plan, micro_batches=half, stages=tuple(stages)),
        )
