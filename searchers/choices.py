"""Makes a plan from a sequence of named choices, for strategies that draw plans.

``chosen_plan`` asks for each choice by name, and offers only options that leave a valid plan. A
random generator, an Optuna trial or a policy answers.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from mistlab.values.dimensions import counts_of_blocks, label_of
from mistlab.values.plan import Plan, StagePlan
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from searchers.meshes import (
    Mesh,
    Pipeline,
    divides_groups,
    even_layers,
    layer_counts,
    lies_well,
    meshes,
    micro_batch_counts,
    orders_of,
)
from searchers.savings import alike, saving_names, stage_of

Option = TypeVar("Option")


class Chooser:
    """Answers questions with one of several options: ``place`` maps a name and a number of options
    to the place of the answer."""

    def __init__(self, place: Callable[[str, int], int]) -> None:
        self._place = place

    def __call__(self, name: str, options: Sequence[Option]) -> Option:
        """The chosen option; nothing is asked if there is only one."""
        return options[0] if len(options) == 1 else options[self._place(name, len(options))]


def chosen_plan(problem: Problem, space: SearchSpace, choose: Chooser) -> Plan | None:
    """The plan of a chooser's answers; None where no pipeline of the space has the first
    answers."""
    pipeline = _pipeline(problem, space, choose)
    if pipeline is None:
        return None
    layers = _layers(problem.workload.model.layers, pipeline.num_stages, space, choose)
    count = pipeline.num_stages
    if space.unequal_stages:
        both = enumerate(zip(pipeline.meshes, layers, strict=True))
        stages = [_stage(stage, mesh, own, count, space, choose) for stage, (mesh, own) in both]
    else:
        largest = _stage(0, pipeline.meshes[0], max(layers), count, space, choose)
        stages = [alike(largest, own) for own in layers]
    orders = orders_of(space, count, pipeline.micro_batches, min(layers))
    return Plan(
        engine=space.engine,
        micro_batches=pipeline.micro_batches,
        order=choose("order", orders),
        stages=tuple(stages),
    )


def _pipeline(problem: Problem, space: SearchSpace, choose: Chooser) -> Pipeline | None:
    micro_batches = choose("micro_batches", micro_batch_counts(problem, space))
    options = meshes(problem, space, micro_batches)
    chosen: list[Mesh] = []
    taken, gpus = 0, problem.cluster.num_gpus
    while taken < gpus:
        if chosen and not space.unequal_meshes:
            mesh = chosen[0]
        else:
            left = gpus - taken
            stages_left = problem.workload.model.layers - len(chosen)
            possible = [
                mesh
                for mesh in options
                if _leaves_a_plan(problem, space, mesh, taken, left, stages_left)
            ]
            if not possible:
                return None
            mesh = choose(f"mesh {len(chosen)}", possible)
        chosen.append(mesh)
        taken += mesh.num_gpus
    if space.pipeline is not None and len(chosen) not in space.pipeline:
        return None
    return Pipeline(micro_batches=micro_batches, meshes=tuple(chosen))


def _leaves_a_plan(
    problem: Problem, space: SearchSpace, mesh: Mesh, taken: int, left: int, stages_left: int
) -> bool:
    if not space.unequal_meshes:
        divides = left % mesh.num_gpus == 0 and divides_groups(mesh.num_gpus, problem.cluster)
        return divides and left // mesh.num_gpus <= stages_left
    if mesh.num_gpus > left or not lies_well(taken, mesh.num_gpus, problem.cluster):
        return False
    return mesh.num_gpus == left or stages_left > 1


def _layers(layers: int, num_stages: int, space: SearchSpace, choose: Chooser) -> tuple[int, ...]:
    if space.layers_off_balance == 0:
        return even_layers(layers, num_stages)
    counts = layer_counts(layers, num_stages, space)
    chosen: list[int] = []
    for stage in range(num_stages):
        left, after = layers - sum(chosen), num_stages - stage - 1
        possible = [
            count for count in counts if after * counts[0] <= left - count <= after * counts[-1]
        ]
        chosen.append(choose(f"layers {stage}", possible))
    return tuple(chosen)


def _stage(
    stage: int, mesh: Mesh, layers: int, num_stages: int, space: SearchSpace, choose: Chooser
) -> StagePlan:
    chosen: dict[str, float] = {}
    left, counts = layers, counts_of_blocks()
    for name in saving_names():
        choices = space.choices(name, layers=layers, degree=mesh.value, in_pipeline=num_stages > 1)
        if name in counts:
            choices = tuple(count for count in choices if count <= left)
        chosen[name] = choose(f"{label_of(name)} {stage}", choices)
        left -= int(chosen[name]) if name in counts else 0
    return stage_of(mesh, layers, chosen)
