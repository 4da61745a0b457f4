"""Plans whose stages all save memory alike: whole iterations, in columns.

Axes: C candidates, S stages.
"""

from collections.abc import Sequence
from dataclasses import fields
from itertools import product

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.pipeline import StageTimes, iteration_s
from mistlab.pipeline import in_flight
from mistlab.plan import Offload, Plan, StagePlan
from mistlab.search import Problem
from mistlab.space import SearchSpace
from mistlab.stages import StageBatch, StageCosts
from searchers.choices import alike
from searchers.ledger import Ledger
from searchers.meshes import Pipeline, checkpoint_counts, even_layers, zero_levels

# Stage candidates asked for at once.
TOGETHER = 1 << 19

# ZeRO level, ratios of weights, gradients, optimizer state and activations, blocks computed again.
Candidates = NDArray[np.float64]


def every_candidate(
    space: SearchSpace, pipeline: Pipeline, layers: int, *, coarsely: bool
) -> Candidates:
    """Every way to save memory (C, 6) on stages of at most so many blocks; ``coarsely`` those that
    recompute quarters, and offload halves of optimizer state and activations, or all."""
    ratios = space.offload
    levels = zero_levels(
        space, pipeline.meshes[0].data_parallel, in_pipeline=pipeline.num_stages > 1
    )
    kinds = (ratios.weights, ratios.gradients, ratios.optimizer, ratios.activations)
    choices: list[Sequence[float]] = [sorted(set(kind)) for kind in kinds]
    counts: Sequence[float] = checkpoint_counts(space, layers)
    if coarsely:
        choices = [
            *([kind[0], kind[-1]] for kind in choices[:2]),
            *(kind[:: max(1, (len(kind) - 1) // 2)] for kind in choices[2:]),
        ]
        counts = counts[:: max(1, (len(counts) - 1) // 4)]
    return np.array([*product(levels, *choices, counts)], dtype=np.float64)


def show_fastest(
    problem: Problem,
    space: SearchSpace,
    ledger: Ledger,
    pipeline: Pipeline,
    candidates: Candidates,
) -> float:
    """Let a ledger see the fastest of the candidates that fit, if it is faster than its best; its
    seconds, infinite without any."""
    shares = even_layers(problem.workload.model.layers, pipeline.num_stages)
    places = [rank % problem.cluster.gpus_per_node for rank in pipeline.first_ranks()]
    at_once = max(1, TOGETHER // pipeline.num_stages)
    fastest_s = np.inf
    for start in range(0, len(candidates), at_once):
        some = candidates[start : start + at_once]
        costs = ledger.stage_costs(_batch(pipeline, shares, places, some), engine=space.engine)
        seconds = _iterations(costs, pipeline, len(some))
        fastest_s = min(fastest_s, float(seconds.min()))
        for row in np.argsort(seconds, kind="stable"):
            # A node's host memory is shared by its stages, which only a whole plan shows.
            if seconds[row] >= ledger.best_s:
                break
            plan = _plan(space, pipeline, shares, some[row])
            if ledger.predict([plan])[0].fits:
                break
    return fastest_s


def _batch(
    pipeline: Pipeline, shares: Sequence[int], places: Sequence[int], candidates: Candidates
) -> StageBatch:
    """Each candidate's stages, one stage of all candidates after another."""
    stages, rows = pipeline.num_stages, len(candidates)
    zero, weights, gradients, optimizer, activations, recomputed = np.tile(
        candidates, (stages, 1)
    ).T
    layers = np.repeat(shares, rows)
    mesh = pipeline.meshes[0]
    number = np.arange(stages)
    held = [in_flight(stage, stages, pipeline.micro_batches) for stage in range(stages)]
    return StageBatch(
        layers=layers,
        data_parallel=np.full(len(layers), mesh.data_parallel),
        tensor_parallel=np.full(len(layers), mesh.tensor_parallel),
        micro_batch=np.full(len(layers), mesh.micro_batch),
        zero=zero.astype(np.int64),
        checkpointed_layers=np.minimum(recomputed.astype(np.int64), layers),
        offload_weights=weights,
        offload_gradients=gradients,
        offload_optimizer=optimizer,
        offload_activations=activations,
        in_flight=np.repeat(held, rows),
        has_embedding=np.repeat((number == 0).astype(np.int64), rows),
        has_head=np.repeat((number == stages - 1).astype(np.int64), rows),
        first_rank=np.repeat(places, rows),
    )


def _iterations(costs: StageCosts, pipeline: Pipeline, rows: int) -> NDArray[np.float64]:
    """Seconds (C) of an iteration; infinite where a stage does not fit."""
    times = StageTimes(
        **{
            entry.name: getattr(costs.seconds, entry.name).reshape(-1, rows).T
            for entry in fields(StageTimes)
        }
    )
    seconds = iteration_s(times, np.full(rows, pipeline.micro_batches))
    return np.where(costs.fits.reshape(-1, rows).all(axis=0), seconds, np.inf)


def _plan(
    space: SearchSpace, pipeline: Pipeline, shares: Sequence[int], candidate: NDArray[np.float64]
) -> Plan:
    zero, weights, gradients, optimizer, activations, recomputed = candidate.tolist()
    mesh = pipeline.meshes[0]
    first = StagePlan(
        layers=shares[0],
        data_parallel=mesh.data_parallel,
        tensor_parallel=mesh.tensor_parallel,
        micro_batch=mesh.micro_batch,
        zero=int(zero),
        checkpointed_layers=int(recomputed),
        offload=Offload(
            weights=weights, gradients=gradients, optimizer=optimizer, activations=activations
        ),
    )
    return Plan(
        engine=space.engine,
        micro_batches=pipeline.micro_batches,
        stages=tuple(alike(first, own) for own in shares),
    )
