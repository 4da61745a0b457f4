"""Pipelines of stages that save memory alike, of a model whose kinds of blocks take turns.

What a stage costs depends on which blocks it has: on its first block, not on their number alone.
Every range that a stage may have is asked for once, and all divisions of the blocks are sums of
these.

Axes: D divisions of the blocks, S stages, R ranges.
"""

from collections.abc import Sequence
from dataclasses import fields
from math import inf

import numpy as np

from mistlab.core.arrays import Ints
from mistlab.cost.pipeline import iteration_s
from mistlab.graph.library import graph_of
from mistlab.job.search import Problem
from mistlab.plan.dimensions import counts_of_blocks, names_of
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from mistlab.plan.workload import Workload
from mistlab.schedule.orders import DEFAULT_ORDER, in_flight
from mistlab.stages.stage_batch import StageBatch, StageTimes
from searchers.exact.candidates import savings_columns
from searchers.exact.hierarchy import Hierarchy
from searchers.meshes import Pipeline, even_layers, layer_counts
from searchers.savings import Way, stage_of, ways_alike
from searchers.strategy import Ending, Ledger

# More divisions of the blocks than this are not tried: the even one is, and the rest has a bound.
MOST_DIVISIONS = 200_000


def takes_turns(workload: Workload) -> bool:
    """Whether the kinds of a model's blocks take turns."""
    return len(graph_of(workload).pattern) > 1


def takes_ranges(space: SearchSpace) -> bool:
    """Whether stages are alike in a space, in the order that has a formula."""
    alike_stages = not space.unequal_stages and not space.unequal_meshes
    return alike_stages and space.orders == (DEFAULT_ORDER,)


def searched_by_ranges(problem: Problem, space: SearchSpace, ledger: Ledger) -> Ending:
    """The best plan of a space of alike stages; proven where all divisions could be tried, else
    with its gap to a bound by arithmetic."""
    hierarchy = Hierarchy.of(problem, space, ledger)
    in_order = sorted(hierarchy.least_s, key=hierarchy.bound_s)
    for group in in_order:
        for pipeline in group.equal_pipelines(problem):
            if hierarchy.bound_s(group) < ledger.best_s:
                even = np.array([even_layers(problem.workload.model.layers, pipeline.num_stages)])
                _show_divisions(problem, space, ledger, pipeline, even)
    left_s = inf
    for group in in_order:
        if hierarchy.bound_s(group) >= ledger.best_s:
            break
        for pipeline in group.equal_pipelines(problem):
            every = divisions(problem.workload.model.layers, pipeline.num_stages, space)
            if every is None:
                left_s = min(left_s, hierarchy.bound_s(group))
            else:
                _show_divisions(problem, space, ledger, pipeline, every)
    return Ending.of(ledger, min(left_s, ledger.best_s))


def divisions(layers: int, num_stages: int, space: SearchSpace) -> Ints | None:
    """All divisions (D, S) of blocks among stages; None where there are too many."""
    if space.layers_off_balance == 0:
        return np.array([even_layers(layers, num_stages)])
    counts = np.array(layer_counts(layers, num_stages, space))
    every = np.zeros((1, 0), dtype=np.int64)
    for after in reversed(range(num_stages)):
        rows = np.repeat(every, len(counts), axis=0)
        rows = np.column_stack([rows, np.tile(counts, len(every))])
        left = layers - rows.sum(axis=1)
        every = rows[(left >= after * counts[0]) & (left <= after * counts[-1])]
        if len(every) > MOST_DIVISIONS:
            return None
    return every


def _show_divisions(
    problem: Problem, space: SearchSpace, ledger: Ledger, pipeline: Pipeline, every: Ints
) -> None:
    """Show the ledger the best plan among some divisions, if it beats the ledger's best."""
    most = layer_counts(problem.workload.model.layers, pipeline.num_stages, space)[-1]
    most = max(most, int(every.max()))
    for way in ways_alike(space, pipeline.meshes[0], most, in_pipeline=pipeline.num_stages > 1):
        _show_way(problem, space, ledger, pipeline, every, way)


def _show_way(
    problem: Problem,
    space: SearchSpace,
    ledger: Ledger,
    pipeline: Pipeline,
    every: Ints,
    way: Way,
) -> None:
    first = np.cumsum(every, axis=1) - every
    stage = np.broadcast_to(np.arange(pipeline.num_stages), every.shape)
    ranges, of_range = np.unique(
        np.stack([stage, first, every], axis=-1).reshape(-1, 3), axis=0, return_inverse=True
    )
    rows = of_range.reshape(every.shape)
    costs = ledger.stage_costs(_batch(problem, pipeline, ranges, way), engine=space.engine)
    times = StageTimes(
        **{entry.name: getattr(costs.seconds, entry.name)[rows] for entry in fields(StageTimes)}
    )
    seconds = iteration_s(times, np.full(len(every), pipeline.micro_batches))
    seconds = np.where(costs.fits[rows].all(axis=1), seconds, np.inf)
    for row in np.argsort(seconds, kind="stable"):
        # The stages of a node share its host memory, which only a whole plan shows.
        if seconds[row] >= ledger.best_s:
            break
        if ledger.predict([_plan(space, pipeline, every[row].tolist(), way)])[0].fits:
            break


def _batch(problem: Problem, pipeline: Pipeline, ranges: Ints, way: Way) -> StageBatch:
    """Stages by their number, their first block and their number of blocks (R, 3)."""
    count, mesh = pipeline.num_stages, pipeline.meshes[0]
    stage, first_block, layers = ranges.T
    held = np.array([in_flight(one, count, pipeline.micro_batches) for one in range(count)])
    cluster = problem.cluster
    ranks = [cluster.like_rank(rank, mesh.num_gpus) for rank in pipeline.first_ranks()]
    treated = np.array([way.counts_within(one) for one in layers.tolist()])
    return StageBatch(
        layers=layers,
        **mesh.values(),
        **savings_columns(np.array([way.savings], dtype=np.float64).repeat(len(ranges), axis=0)),
        **dict(zip(counts_of_blocks(), treated.T, strict=True)),
        in_flight=held[stage],
        has_embedding=(stage == 0).astype(np.int64),
        has_head=(stage == count - 1).astype(np.int64),
        first_rank=np.array(ranks)[stage],
        first_block=first_block,
        micro_batches=pipeline.micro_batches,
    )


def _plan(space: SearchSpace, pipeline: Pipeline, shares: Sequence[int], way: Way) -> Plan:
    names = names_of("savings")
    stages = []
    for own in shares:
        counts = zip(counts_of_blocks(), way.counts_within(own), strict=True)
        saving = {**dict(zip(names, way.savings, strict=True)), **dict(counts)}
        stages.append(stage_of(pipeline.meshes[0], own, saving))
    return Plan(engine=space.engine, micro_batches=pipeline.micro_batches, stages=tuple(stages))
