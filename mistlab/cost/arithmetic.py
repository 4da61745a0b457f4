"""Counts the arithmetic operations of one training step, which do not depend on the plan."""

from dataclasses import replace
from functools import cache

import numpy as np

from mistlab.schedule.plan_orders import ends_of_plan
from mistlab.symbolic.compiled import Compiled, compile_sums
from mistlab.symbolic.kept import kept
from mistlab.symbolic.layer_types import graphs_of
from mistlab.symbolic.library import graph_of
from mistlab.symbolic.sizes import constants_of
from mistlab.symbolic.stored_graph import StoredGraph
from mistlab.symbolic.sums import Sum
from mistlab.symbolic.symbols import sizes_of_candidates
from mistlab.values.job import Job
from mistlab.values.model import ModelSpec
from mistlab.values.plan import Plan
from mistlab.values.workload import Workload

PRODUCTS = {"matmul", "attention"}


@cache
def model_flop(workload: Workload) -> float:
    """Operations of a step's products, forward and backward, without recomputation."""
    return _step_flop(workload, range(workload.model.layers), 1, 1)


def stage_flop(workload: Workload, plan: Plan, stage: int) -> float:
    """The operations of ``model_flop`` in the layers of one stage of a plan."""
    first = sum(one.layers for one in plan.stages[:stage])
    blocks = range(first, first + plan.stages[stage].layers)
    embedding, head = ends_of_plan(plan)
    return _step_flop(workload, blocks, int(stage == embedding), int(stage == head))


def mfu_of(job: Job, stage: int | None, seconds: float) -> float:
    """The share of peak arithmetic that a step sustains, or one stage's part of the step. The peak
    is that of the hardware which the job names, wherever the step runs."""
    peak = job.cluster.peak_flop_per_s(job.workload.precision)
    if stage is not None:
        return stage_flop(job.workload, job.plan, stage) / (seconds * peak)
    return model_flop(job.workload) / (seconds * job.plan.num_gpus * peak)


def megatron_flop(
    *, batch: int, sequence_length: int, layers: int, hidden: int, vocab: int
) -> float:
    """Operations of a step as Megatron-LM counts them, with everything computed again
    (Narayanan et al., SC 2021)."""
    b, s, l, h = batch, sequence_length, layers, hidden  # noqa: E741 (as in the paper)
    return 96 * b * s * l * h**2 * (1 + s / (6 * h) + vocab / (16 * l * h))


def rough_state_bytes(model: ModelSpec) -> int:
    """About what a model's blocks keep for training: 16 bytes for each of 12 h^2 parameters."""
    return 16 * 12 * model.layers * model.hidden**2


def _step_flop(workload: Workload, blocks: range, embeddings: int, heads: int) -> float:
    """Operations of a step in some of the model's blocks, embeddings and heads."""
    embedding, *kinds, head = _sequence_flop(workload)
    pattern = graph_of(workload).pattern
    places = [[*dict.fromkeys(pattern)].index(kind) for kind in pattern]
    flop = embeddings * embedding
    for place, own in enumerate(kinds):
        count = sum(places[block % len(pattern)] == place for block in blocks)
        flop += count * own
    return (flop + heads * head) * workload.global_batch


@cache
def _sequence_flop(workload: Workload) -> tuple[float, ...]:
    """Operations of a sequence in the embedding, a block of each kind, and the head, if no expert
    takes more tokens than another and none are dropped."""
    workload = replace(workload, expert_imbalance=1.0, expert_capacity=None, expert_padding=False)
    ones = dict.fromkeys(sizes_of_candidates(), 1)
    sizes = {**constants_of(workload), **ones, "V": workload.model.padded_vocab(1)}
    columns = {name: np.array([float(size)]) for name, size in sizes.items()}
    return tuple(float(flop) for (flop,) in _flop(graph_of(workload), tuple(columns))(columns))


@kept
def _flop(graph: StoredGraph, columns: tuple[str, ...]) -> Compiled:
    """Operations of the products of the embedding, a block of each kind, and the head."""
    flop = {
        name: Sum.total(o.flop for o in layer.operators if o.kind in PRODUCTS)
        for name, layer in graphs_of(graph.counts, ()).items()
    }
    return compile_sums(flop, columns=columns)
