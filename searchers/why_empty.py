"""Says why a space has no plan for a problem, by trying what would give it one.

Memory is not looked at: a space whose plans do not fit is not empty.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import chain
from typing import Any

from mistlab.values.dimensions import DIMENSIONS, counts_of_blocks
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from searchers.meshes import equal_pipelines, other_names, pipelines
from searchers.savings import counts_choices

# Lists of a space that None opens to all numbers that divide.
OPEN = tuple(entry.name for entry in fields(SearchSpace) if entry.default is None)
# Batches and nodes that are tried instead of a problem's own, as multiples of them.
MULTIPLES = (2, 3, 4, 5, 6, 7, 8)
# Numbers of a list that are shown.
SHOWN = 6


def why_empty(problem: Problem, space: SearchSpace) -> str:
    """Why the space has no plan for the problem, and which changes alone would give it one; empty
    if it has plans.

    >>> from searchers.why_empty import _listed
    >>> _listed((1, 2, 4, 8, 16, 32, 64))
    '1, 2, 4, 8, 16, 32, ...'
    """
    reasons = [_why_empty(problem, own) for own in space.of_engines]
    return reasons[0] if all(reasons) else ""


def _why_empty(problem: Problem, space: SearchSpace) -> str:
    if not _has_pipeline(problem, space):
        begin = (
            f"space {space.name} has no pipeline of {problem.cluster.num_gpus} GPUs for a global "
            f"batch of {problem.workload.global_batch}"
        )
        helps = [
            words
            for words, other_problem, other_space in _changes(problem, space)
            if _has_pipeline(other_problem, other_space)
        ]
        if helps:
            return f"{begin}: there is one {'; or '.join(helps)}"
        return f"{begin}, and no single change that was tried gives one"
    layers = problem.workload.model.layers
    if not any(counts_choices(space, own) for own in range(1, layers + 1)):
        lists = {name: listed for name in counts_of_blocks() if (listed := space.listed(name))}
        name = next(name for name, listed in lists.items() if 0 not in listed)
        return (
            f"space {space.name} lets no stage treat its blocks: recomputation "
            f"{space.recomputation} and {name} {_listed(lists[name])} leave no numbers that add up "
            f"to a stage's blocks: list 0 in {name}, or give recomputation any"
        )
    return ""


def _has_pipeline(problem: Problem, space: SearchSpace) -> bool:
    """Whether the space has any pipeline; one of equal meshes is found soonest."""
    found = chain(equal_pipelines(problem, space), pipelines(problem, space))
    return next(found, None) is not None


def _changes(problem: Problem, space: SearchSpace) -> Iterator[tuple[str, Problem, SearchSpace]]:
    """Single changes of the space and of the problem, each in words."""
    for name in OPEN:
        if (listed := getattr(space, name)) is not None:
            words = f"with another {name} than {_listed(listed)}"
            yield words, problem, _with(space, name, None)
    for name in other_names():
        default = DIMENSIONS[name].default
        listed = space.listed(name) or ()
        if default not in listed:
            words = f"with {name} {default}, which is not among {_listed(listed)}"
            yield words, problem, _with(space, name, (default,))
    if space.tensor_parallel_in_node:
        words = "with tensor_parallel_in_node false"
        yield words, problem, replace(space, tensor_parallel_in_node=False)
    work, cluster = problem.workload, problem.cluster
    for times in MULTIPLES:
        batch = times * work.global_batch
        other = replace(problem, workload=replace(work, global_batch=batch))
        if _has_pipeline(other, space):
            yield f"for a global batch of {batch}", other, space
            break
    for gpus in range(cluster.gpus_per_node - 1, 0, -1):
        other = replace(problem, cluster=replace(cluster, gpus_per_node=gpus))
        if _has_pipeline(other, space):
            yield f"on {gpus} GPUs of each node", other, space
            break


def _with(space: SearchSpace, name: str, listed: tuple[Any, ...] | None) -> SearchSpace:
    other: dict[str, Any] = {name: listed}
    return replace(space, **other)


def _listed(numbers: tuple[float, ...]) -> str:
    shown = ", ".join(f"{number:g}" for number in numbers[:SHOWN])
    return f"{shown}, ..." if len(numbers) > SHOWN else shown
