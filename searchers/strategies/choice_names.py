"""Lists the names of all choices that plans of a space may ask for.

The names are the same for every plan of the space.
"""

from collections.abc import Iterator

from mistlab.values.dimensions import label_of
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from searchers.meshes import equal_pipelines
from searchers.savings import saving_names


def key_names(problem: Problem, space: SearchSpace) -> list[str]:
    """The names of all choices that any plan of the space may ask for."""
    most = _most_stages(problem, space)
    names = ["micro_batches", *(["order"] if len(space.orders) > 1 else [])]
    names += [f"mesh {stage}" for stage in range(most if space.unequal_meshes else 1)]
    if space.layers_off_balance != 0:
        names += [f"layers {stage}" for stage in range(most - 1)]
    for stage in range(most if space.unequal_stages else 1):
        names += [f"{saving} {stage}" for saving in _savings(space)]
    return names


def _savings(space: SearchSpace) -> Iterator[str]:
    for name in saving_names():
        listed = space.listed(name)
        if listed is None or len(listed) > 1:
            yield label_of(name)


def _most_stages(problem: Problem, space: SearchSpace) -> int:
    if not space.unequal_meshes:
        return max(pipeline.num_stages for pipeline in equal_pipelines(problem, space))
    return min(problem.cluster.num_gpus, problem.workload.model.layers)
