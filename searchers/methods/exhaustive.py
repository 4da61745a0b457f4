"""Exhaustive search, which predicts every plan of a small search space; and grid search, as users
of other systems do it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise, product
from math import prod

import numpy as np

from mistlab.job.search import Problem
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.space import SearchSpace
from searchers.meshes import Pipeline, even_layers, layer_counts, orders_of, pipelines
from searchers.savings import alike, number_of_ways, ways_to_save
from searchers.strategy import Ending, Ledger, Strategy

# Predicts every plan of a search space that has few enough plans, to check the other searchers.
#
# Each plan is predicted as a whole, so no code is shared with the searchers that combine stages.


# The largest number of plans in a space that is searched exhaustively: about as many as can be
# predicted in a minute.
MOST_PLANS = 200_000
TOGETHER = 4096


def exhaustive(
    problem: Problem, space: SearchSpace, ledger: Ledger, _draw: np.random.Generator
) -> Ending:
    """Predict every plan of the search space; refuse a space with too many plans."""
    left = ledger.evaluations_left
    most = MOST_PLANS if left is None else min(MOST_PLANS, left)
    plans = count_plans(problem, space, most)
    if plans > most:
        count = f"{plans:,}" if plans <= MOST_PLANS else f"more than {MOST_PLANS:,}"
        reason = f"space {space.name} has {count} plans, and at most {most:,} may be predicted"
        return Ending(status="REFUSED", reason=reason)
    every = all_plans(problem, space)
    while together := list(islice(every, TOGETHER)):
        ledger.predict(together)
    if ledger.best is None:
        return Ending(status="INFEASIBLE")
    return Ending(status="OPTIMAL", lower_bound_s=ledger.best_s)


def count_plans(problem: Problem, space: SearchSpace, most: int | None = None) -> int:
    """The number of plans in a search space; counting stops above ``most``. If the space has
    several schedules, it is assumed that all stages have equally many blocks.
    """
    total = 0
    for pipeline in pipelines(problem, space):
        fewest = problem.workload.model.layers // pipeline.num_stages
        orders = orders_of(space, pipeline.num_stages, pipeline.micro_batches, fewest)
        total += len(orders) * _ways(problem, space, pipeline)
        if most is not None and total > most:
            break
    return total


def all_plans(problem: Problem, space: SearchSpace) -> Iterator[Plan]:
    """Every plan of a search space."""
    layers = problem.workload.model.layers
    for pipeline in pipelines(problem, space):
        for stages in _stages(layers, space, pipeline):
            fewest = min(stage.layers for stage in stages)
            for order in orders_of(space, len(stages), pipeline.micro_batches, fewest):
                yield Plan(
                    engine=space.engine,
                    micro_batches=pipeline.micro_batches,
                    order=order,
                    stages=stages,
                )


def _stages(layers: int, space: SearchSpace, pipeline: Pipeline) -> Iterator[tuple[StagePlan, ...]]:
    meshes = pipeline.meshes
    in_pipeline = len(meshes) > 1
    for shares in _divisions(layers, len(meshes), space):
        if not space.unequal_stages:
            for largest in ways_to_save(space, meshes[0], max(shares), in_pipeline=in_pipeline):
                yield tuple(alike(largest, own) for own in shares)
            continue
        menus = (
            list(ways_to_save(space, mesh, share, in_pipeline=in_pipeline))
            for mesh, share in zip(meshes, shares, strict=True)
        )
        yield from product(*menus)


def _divisions(layers: int, stages: int, space: SearchSpace) -> Iterator[tuple[int, ...]]:
    """All divisions of the blocks among stages that the search space allows."""
    if space.layers_off_balance == 0:
        yield even_layers(layers, stages)
    else:
        yield from _splits(layers, stages, layer_counts(layers, stages, space))


def _splits(layers: int, stages: int, counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to divide ``layers`` blocks among stages, each of which may have one of the numbers
    in ``counts``.
    """
    if stages == 0:
        if layers == 0:
            yield ()
        return
    for count in counts:
        if count <= layers:
            for others in _splits(layers - count, stages - 1, counts):
                yield (count, *others)


def _ways(problem: Problem, space: SearchSpace, pipeline: Pipeline) -> int:
    """The number of plans with the meshes of one pipeline, by dynamic programming over its stages
    and the blocks used so far.
    """
    layers, stages = problem.workload.model.layers, pipeline.num_stages
    if space.layers_off_balance == 0:
        each = [
            _ways_of_stage(space, pipeline, stage, share)
            for stage, share in enumerate(even_layers(layers, stages))
        ]
        return prod(each) if space.unequal_stages else each[0]
    counts = layer_counts(layers, stages, space)
    if not space.unequal_stages:
        return _ways_alike(problem, space, pipeline, counts)
    by_layers = {0: 1}
    for stage in range(stages):
        of_stage = {own: _ways_of_stage(space, pipeline, stage, own) for own in counts}
        after: dict[int, int] = {}
        for taken, ways in by_layers.items():
            for share, own_ways in of_stage.items():
                if taken + share <= layers:
                    after[taken + share] = after.get(taken + share, 0) + ways * own_ways
        by_layers = after
    return by_layers.get(layers, 0)


def _ways_alike(
    problem: Problem, space: SearchSpace, pipeline: Pipeline, counts: Sequence[int]
) -> int:
    """The number of plans whose stages all save memory in the same way: the sum, over all divisions
    of the blocks, of the number of choices for the stage with the most blocks.
    """
    layers, stages = problem.workload.model.layers, pipeline.num_stages
    up_to = [_number_of_splits(layers, stages, counts[: k + 1]) for k in range(len(counts))]
    largest = [after - before for before, after in pairwise([0, *up_to])]
    return sum(
        divisions * _ways_of_stage(space, pipeline, 0, count)
        for count, divisions in zip(counts, largest, strict=True)
        if divisions
    )


def _number_of_splits(layers: int, stages: int, counts: Sequence[int]) -> int:
    """The number of ways to divide ``layers`` blocks among stages, each of which may have one of
    the numbers in ``counts``.
    """
    by_layers = Counter({0: 1})
    for _ in range(stages):
        after: Counter[int] = Counter()
        for taken, ways in by_layers.items():
            for count in counts:
                if taken + count <= layers:
                    after[taken + count] += ways
        by_layers = after
    return by_layers[layers]


def _ways_of_stage(space: SearchSpace, pipeline: Pipeline, stage: int, layers: int) -> int:
    mesh, in_pipeline = pipeline.meshes[stage], pipeline.num_stages > 1
    return number_of_ways(space, mesh, layers, in_pipeline=in_pipeline)


# Grid searches as users of Megatron-LM and DeepSpeed do them: every plan of a small space for one
# engine is predicted.


def grid_of(engine: str) -> Strategy:
    """A strategy that predicts every plan of a search space of this engine; it refuses spaces of
    other engines.
    """

    def grid(
        problem: Problem, space: SearchSpace, ledger: Ledger, draw: np.random.Generator
    ) -> Ending:
        if space.engine != engine:
            reason = f"tries plans of engine {engine}, and space {space.name} has {space.engine}'s"
            return Ending(status="REFUSED", reason=reason)
        return exhaustive(problem, space, ledger, draw)

    return grid
