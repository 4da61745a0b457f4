"""How many plans a space has, however many: pipelines are counted, not listed.

Where meshes may differ from stage to stage, a pipeline is a walk over ranks and blocks: each stage
takes some of both. Walks that arrive at the same rank with equally many blocks go on alike, so they
are counted together.
"""

from collections import defaultdict
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from mistlab.job.search import Problem
from mistlab.plan.space import SearchSpace
from searchers.meshes import lies_well, meshes, micro_batch_counts
from searchers.methods.exhaustive import count_plans
from searchers.savings import counts_choices, savings_choices

# Whole numbers of any size, by number of blocks.
Counts = NDArray[np.object_]


def number_of_plans(problem: Problem, space: SearchSpace) -> int:
    """The number of plans in a space."""
    return sum(_of_one_engine(problem, own) for own in space.of_engines)


def _of_one_engine(problem: Problem, space: SearchSpace) -> int:
    if not space.unequal_meshes:
        return count_plans(problem, space)
    assert space.layers_off_balance is None, "an even share depends on the number of stages"
    assert space.pipeline in (None, (1,)), "walks do not know how many stages they have"
    alone = count_plans(problem, replace(space, pipeline=(1,), unequal_meshes=False))
    if space.pipeline == (1,):
        return alone
    counts = micro_batch_counts(problem, space)
    return alone + sum(_of_several_stages(problem, space, count) for count in counts)


def _of_several_stages(problem: Problem, space: SearchSpace, micro_batches: int) -> int:
    """The number of plans of at least two stages."""
    gpus, layers = problem.cluster.num_gpus, problem.workload.model.layers
    by_size = _ways_by_size(problem, space, micro_batches)
    # For each rank and number of blocks: the ways to come there.
    arrived: dict[int, Counts] = {0: _no_counts(layers)}
    arrived[0][0] = 1
    for rank in range(gpus):
        for size, ways in by_size.items():
            is_alone = size == gpus
            fits = rank + size <= gpus and lies_well(rank, size, problem.cluster)
            if is_alone or not fits or rank not in arrived:
                continue
            there = arrived.setdefault(rank + size, _no_counts(layers))
            there += np.convolve(arrived[rank], ways)[: layers + 1]
    return int(arrived[gpus][layers]) if gpus in arrived else 0


def _ways_by_size(problem: Problem, space: SearchSpace, micro_batches: int) -> dict[int, Counts]:
    """For each number of GPUs of a stage, the stages that there are of each number of blocks."""
    layers = problem.workload.model.layers
    of_blocks = _no_counts(layers)
    of_blocks[1:] = [len({*counts_choices(space, own)}) for own in range(1, layers + 1)]
    found: dict[int, Counts] = defaultdict(lambda: _no_counts(layers))
    for mesh in meshes(problem, space, micro_batches):
        choices = savings_choices(space, mesh, in_pipeline=True)
        found[mesh.num_gpus] += of_blocks * prod(len(some) for some in choices)
    return found


def _no_counts(layers: int) -> Counts:
    return np.zeros(layers + 1, dtype=object)
