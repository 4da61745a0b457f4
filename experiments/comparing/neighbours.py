"""Plans one step away from another that save less memory, inside the same space.

A step is the next lower number of recomputed blocks, ZeRO level or offload ratio of a stage (of all
stages at once where the space keeps them alike), or micro-batches twice as large and half as many.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from mistlab.values.plan import Offload, Plan, StagePlan
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from searchers.meshes import checkpoint_counts, meshes, micro_batch_counts, zero_levels

Number = TypeVar("Number", int, float)
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
    # Where stages are alike, the first one has the most blocks.
    places = range(plan.num_stages) if space.unequal_stages else (0,)
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
    count = _below(stage.checkpointed_layers, checkpoint_counts(space, stage.layers))
    if count is not None:
        yield (
            f"{count} instead of {stage.checkpointed_layers} blocks recomputed",
            _recomputing(count),
        )
    level = _below(stage.zero, zero_levels(space, stage.data_parallel, in_pipeline=num_stages > 1))
    if level is not None:
        yield f"ZeRO-{level} instead of ZeRO-{stage.zero}", lambda one: replace(one, zero=level)
    for kind in (entry.name for entry in fields(Offload)):
        now = getattr(stage.offload, kind)
        ratio = _below(now, getattr(space.offload, kind))
        if ratio is not None:
            yield f"{ratio:.1%} instead of {now:.1%} of {kind} offloaded", _offloading(kind, ratio)


def _recomputing(count: int) -> Step:
    return lambda stage: replace(stage, checkpointed_layers=min(count, stage.layers))


def _offloading(kind: str, ratio: float) -> Step:
    return lambda stage: replace(stage, offload=replace(stage.offload, **{kind: ratio}))


def _below(value: Number, choices: Iterable[Number]) -> Number | None:
    return max((choice for choice in choices if choice < value), default=None)


def _larger_micro_batches(plan: Plan, problem: Problem, space: SearchSpace) -> Iterator[Neighbour]:
    half, rest = divmod(plan.micro_batches, 2)
    if rest or half not in micro_batch_counts(problem, space):
        return
    allowed = {
        (mesh.data_parallel, mesh.tensor_parallel, mesh.micro_batch)
        for mesh in meshes(problem, space, half)
    }
    stages = [replace(stage, micro_batch=2 * stage.micro_batch) for stage in plan.stages]
    if all((s.data_parallel, s.tensor_parallel, s.micro_batch) in allowed for s in stages):
        yield Neighbour(
            change=f"{half} micro-batches twice as large instead of {plan.micro_batches}",
            plan=replace(plan, micro_batches=half, stages=tuple(stages)),
        )
