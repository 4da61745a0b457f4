"""If no plan fits, finds the plan that needs the least memory, and changes with which a plan would
fit.

First come plans of equal stages that recompute all blocks and use the smallest micro-batches: for
every mesh that all stages can have, each ZeRO level, and offloading of nothing, of one kind of
tensor, or of everything that the space allows. Then the best of these plans is improved: blocks
move between stages and one offload ratio changes, as long as this helps. Every change that is
proposed to the user has been tried.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from math import floor
from typing import Any

import numpy as np

from experiments.bench.adapter_words import adapters_called, bytes_of_adapters
from experiments.bench.bench import Bench
from experiments.bench.logit_words import logits_called
from experiments.bench.problem import largest
from experiments.tuning.leaner import IN_CHUNKS, LEANEST, leaner, leaner_adapters
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError
from mistlab.cost.memory import allocator_of, host_bytes_of
from mistlab.engines.engine import ENGINES
from mistlab.job.prediction import Prediction
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import NO_OFFLOAD, Offload, Plan, StagePlan
from mistlab.plan.plan_words import plan_words
from mistlab.plan.space import SearchSpace
from mistlab.plan.workload import unsupported
from searchers.meshes import (
    Mesh,
    Pipeline,
    equal_pipelines,
    even_layers,
    layer_counts,
    pipelines,
)
from searchers.savings import stage_of, why_empty

# The number of pipelines to try whose stages have different parallel degrees.
SOME = 100
# The largest number of times that the number of GPUs or the host memory is doubled, or the batch
# halved.
DOUBLINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """The plan that comes nearest to fitting in memory, and how much memory it needs.

    ``memory_class`` is the kind of tensor that takes most of the fullest GPU's peak. Host bytes are
    those of the fullest node. ``remedies`` are changes with which a plan fits, ``limits`` the ways
    to save memory that the search space does not allow. ``adapters`` and ``logits`` say what
    low-rank adapters and the logits of all tokens take, if that is much.
    """

    plan: Plan
    prediction: Prediction
    memory_bytes: int
    limit_bytes: int
    memory_class: str
    class_bytes: int
    host_bytes: int
    host_limit_bytes: int
    remedies: tuple[str, ...]
    limits: tuple[str, ...] = ()
    adapters: str = ""
    logits: str = ""


def smallest(bench: Bench, space: SearchSpace) -> Smallest:
    """The plan of a search space that comes nearest to fitting in memory, and changes with which a
    plan would fit.
    """
    nearest_plan = nearest(bench, space)
    if nearest_plan.prediction.fits:
        return nearest_plan
    return replace(
        nearest_plan,
        remedies=tuple(_remedies(bench.problem, space)),
        limits=tuple(limits(bench.problem, space)),
    )


def nearest(bench: Bench, space: SearchSpace) -> Smallest:
    """The plan of a search space that comes nearest to fitting in memory; no changes are tried."""
    plan, prediction = _nearest(bench, space)
    stage = int(np.argmax(_shares(plan, prediction, bench)))
    fullest = prediction.stages[stage]
    group, cluster = _group_of(plan, stage, bench.problem.cluster), bench.problem.cluster
    memory_class, class_bytes = largest(fullest.memory)
    work = bench.problem.workload
    return Smallest(
        plan=plan,
        prediction=prediction,
        memory_bytes=round(fullest.peak_reserved_bytes + allocator_of(group).outside_bytes),
        limit_bytes=group.memory_bytes,
        memory_class=memory_class,
        class_bytes=class_bytes,
        host_bytes=round(host_bytes_of(plan, prediction, cluster)),
        host_limit_bytes=group.host_memory_bytes,
        remedies=(),
        adapters=adapters_called(work, bytes_of_adapters(work, plan, stage)),
        logits=logits_called(bench.job(plan), prediction),
    )


def _nearest(bench: Bench, space: SearchSpace) -> tuple[Plan, Prediction]:
    with_plans = [own for own in space.of_engines if not why_empty(bench.problem, own)]
    candidates = [_nearest_of_one(bench, own) for own in with_plans]
    return min(candidates, key=lambda candidate: _fullness(candidate, bench))


def _nearest_of_one(bench: Bench, space: SearchSpace) -> tuple[Plan, Prediction]:
    candidates = [
        plan
        for pipeline in _smallest_pipelines(bench.problem, space)
        for plan in _saving(pipeline, bench.problem.workload.model.layers, space)
    ]
    best = _best(candidates, bench)
    while not best[1].fits:
        better = _best([best[0], *_moved(*best, space), *_offloading(best[0], space)], bench)
        if better[0] == best[0]:
            break
        best = better
    return best


def _smallest_pipelines(problem: Problem, space: SearchSpace) -> list[Pipeline]:
    """For each mesh (with choices such as expert parallelism), the pipeline of equal stages with
    the most micro-batches, whose micro-batches are the smallest. If no pipeline has equal stages, a
    few pipelines of unequal ones.
    """
    smallest: dict[Mesh, Pipeline] = {}
    for pipeline in equal_pipelines(problem, space):
        mesh = pipeline.meshes[0]._replace(micro_batch=0)
        known = smallest.setdefault(mesh, pipeline)
        if pipeline.micro_batches > known.micro_batches:
            smallest[mesh] = pipeline
    return [*smallest.values()] or [*islice(pipelines(problem, space), SOME)]


def _best(plans: Sequence[Plan], bench: Bench) -> tuple[Plan, Prediction]:
    """The plan that exceeds the memory of its fullest GPU or host by the least; of equally large
    ones the first.
    """
    candidates = zip(plans, bench.predictor.predict_many(plans), strict=True)
    return min(candidates, key=lambda candidate: _fullness(candidate, bench))


def _fullness(candidate: tuple[Plan, Prediction], bench: Bench) -> tuple[bool, float]:
    """The shares of GPU and host memory that a plan uses, as a sort key in which plans that fit
    come first.
    """
    plan, prediction = candidate
    host = (
        host_bytes_of(plan, prediction, bench.problem.cluster)
        / bench.problem.cluster.host_memory_bytes
    )
    return not prediction.fits, max(*_shares(plan, prediction, bench), host)


def _shares(plan: Plan, prediction: Prediction, bench: Bench) -> list[float]:
    """For each stage, the share of its GPUs' memory that it uses."""
    room = bench.room_bytes(plan).tolist()
    both = zip(prediction.stages, room, strict=True)
    return [stage.peak_reserved_bytes / own for stage, own in both]


def _group_of(plan: Plan, stage: int, cluster: Cluster) -> Cluster:
    """The group of equal nodes on which a stage runs, as a cluster by itself."""
    first_rank = sum(before.num_gpus for before in plan.stages[:stage])
    return cluster.of_groups[cluster.group_of(first_rank)]


def _saving(pipeline: Pipeline, layers: int, space: SearchSpace) -> Iterator[Plan]:
    """The combinations of ways to save memory that need the least memory."""
    in_pipeline = pipeline.num_stages > 1
    shares = even_layers(layers, pipeline.num_stages)
    largest = max(pipeline.meshes, key=lambda mesh: mesh.data_parallel)
    levels = space.choices("zero", layers=1, degree=largest.value, in_pipeline=in_pipeline)
    for level in levels:
        for offload in _offloads(space):
            stages = tuple(
                replace(
                    stage_of(mesh, share, {"checkpointed_layers": share}),
                    zero=int(level) if mesh.data_parallel > 1 else int(levels[0]),
                    offload=offload,
                )
                for mesh, share in zip(pipeline.meshes, shares, strict=True)
            )
            yield Plan(engine=space.engine, micro_batches=pipeline.micro_batches, stages=stages)


def _offloads(space: SearchSpace) -> list[Offload]:
    most = {entry.name: max(getattr(space.offload, entry.name)) for entry in fields(Offload)}
    single = [Offload(**{name: ratio}) for name, ratio in most.items()]
    return list(dict.fromkeys([NO_OFFLOAD, *single, Offload(**most)]))


def _moved(plan: Plan, prediction: Prediction, space: SearchSpace) -> Iterator[Plan]:
    """The plan after one block is moved from its fullest stage to another one."""
    if space.layers_off_balance == 0:
        return
    allowed = layer_counts(plan.layers, plan.num_stages, space)
    peaks = [stage.peak_reserved_bytes for stage in prediction.stages]
    source = peaks.index(max(peaks))
    for target, stage in enumerate(plan.stages):
        if target != source and {plan.stages[source].layers - 1, stage.layers + 1} <= {*allowed}:
            stages = list(plan.stages)
            stages[source], stages[target] = _sized(stages[source], -1), _sized(stage, 1)
            yield replace(plan, stages=tuple(stages))


def _offloading(plan: Plan, space: SearchSpace) -> Iterator[Plan]:
    """The plan with another offload ratio for one kind of tensor, on every stage."""
    for kind in (entry.name for entry in fields(Offload)):
        for ratio in getattr(space.offload, kind):
            stages = tuple(
                replace(stage, offload=replace(stage.offload, **{kind: ratio}))
                for stage in plan.stages
            )
            yield replace(plan, stages=stages)


def _sized(stage: StagePlan, change: int) -> StagePlan:
    layers = stage.layers + change
    return replace(stage, layers=layers, checkpointed_layers=layers)


def _remedies(problem: Problem, space: SearchSpace) -> Iterator[str]:
    """Changes with which a plan would fit: of each kind of change, the smallest that was tried."""
    keeping = [_less_kept_free] if problem.cluster.keep_free_gib else []
    for change in (*keeping, _more_gpus, _more_host_memory, _smaller_batch, _shorter_sequences):
        for doubling in range(1, DOUBLINGS + 1):
            remedy, other = change(problem, 2**doubling)
            if not why_empty(other, space):
                _, prediction = _nearest(Bench.of(other), space)
                if prediction.fits:
                    yield remedy
                    break
    yield from trained_otherwise(problem, space)
    yield from _in_another_space(problem, space)


# Search spaces whose plans can offload: in the first one activations, in the second also other
# states.
OFFLOADING = ("fsdp", "mist")


def trained_otherwise(problem: Problem, space: SearchSpace) -> Iterator[str]:
    """The first way to train with less memory with which a plan fits; if the job trains all
    weights, also the first way that trains adapters, otherwise every way to have smaller ones.
    """
    is_told = False
    for changes, remedy in (*leaner(problem.workload), LEANEST):
        if is_told and "train" not in changes:
            continue
        if _fits_with(problem, space, changes):
            yield remedy
            is_told = True
            if "train" in changes or problem.workload.train == "adapters":
                break
    enough: list[Mapping[str, Any]] = []
    for changes, remedy in leaner_adapters(problem.workload):
        is_more = any(known.items() <= changes.items() for known in enough)
        if not is_more and _fits_with(problem, space, changes):
            enough.append(changes)
            yield remedy


def _fits_with(problem: Problem, space: SearchSpace, changes: Mapping[str, Any]) -> bool:
    """Whether a space has a plan that fits if fields of the workload are changed; no, if nothing
    changes, or the workload or the space is then invalid.
    """
    try:
        workload = replace(problem.workload, **changes)
        space = space.holding(workload.base)
    except InputError:
        return False
    other = replace(problem, workload=workload)
    engines = [workload.trained_by(ENGINES[own.engine]) for own in space.of_engines]
    lacks = any(unsupported(workload, engine) for engine in engines)
    if workload == problem.workload or lacks or why_empty(other, space):
        return False
    return _nearest(Bench.of(other), space)[1].fits


def _in_another_space(problem: Problem, space: SearchSpace) -> Iterator[str]:
    """The first other search space that allows more offloading and has a plan that fits, possibly
    with a loss computed in chunks; and that plan as text.
    """
    changes, in_chunks = IN_CHUNKS
    chunked = replace(problem, workload=replace(problem.workload, **changes))
    asked = [(problem, ""), (chunked, f" and {in_chunks}")]
    for name in OFFLOADING:
        other = space_of(name).holding(problem.workload.base)
        engine = ENGINES[other.engine]
        if engine.precision_problem(problem.workload.precision):
            continue
        for variant, more in asked[: 1 + (chunked != problem)]:
            if not offloaded(other) - offloaded(space) or why_empty(variant, other):
                continue
            if engine.offloads and variant.workload.model.experts is not None:
                continue
            plan, prediction = _nearest(Bench.of(variant), other)
            if prediction.fits:
                gib = prediction.peak_reserved_bytes / GIB_BYTES
                where = f"space {name}, whose engine {plan.engine} offloads (--space {name})"
                if name == space.name:
                    where = f"engine {plan.engine}, which offloads (--engine {plan.engine})"
                yield (f"{where}{more}: {'; '.join(plan_words(plan))}, at {gib:.1f} GiB of a GPU")
                return


def limits(problem: Problem, space: SearchSpace) -> list[str]:
    """The ways to save memory that a search space lacks, as text; empty if it has all."""
    kinds = offloaded(space)
    lacking = [words for names, words in _LIMITS if not any(name in kinds for name in names)]
    lacks = [f"is modelled without offloading {' or '.join(lacking)}"] if lacking else []
    if problem.workload.loss == "whole":
        lacks.append("has the logits of all tokens at once (--loss whole)")
    return lacks


_LIMITS = (
    (("activations",), "what blocks keep"),
    (("weights", "gradients", "optimizer"), "states"),
)


def offloaded(space: SearchSpace) -> frozenset[str]:
    """What plans of a search space may offload (activations, weights, ...)."""
    kinds = frozenset(
        entry.name for entry in fields(Offload) if max(getattr(space.offload, entry.name)) > 0
    )
    engine = ENGINES[space.engine]
    if engine.offloads:
        return kinds
    return kinds & {"activations"} if engine.offloads_activations else frozenset()


def _less_kept_free(problem: Problem, times: int) -> tuple[str, Problem]:
    free_gib = floor(100 * (problem.cluster.keep_free_gib or 0.0) / times) / 100
    cluster = replace(problem.cluster, keep_free_gib=free_gib)
    remedy = f"{free_gib:g} GiB of every GPU kept free (--keep-free-gib {free_gib:g})"
    return remedy, replace(problem, cluster=cluster)


def _more_gpus(problem: Problem, times: int) -> tuple[str, Problem]:
    """The problem on ``times`` as many GPUs, where ``times`` is a power of two: first each node
    gets more GPUs, as far as it has room for them, then there are more nodes.
    """
    cluster = problem.cluster
    most = cluster.gpus_per_node if cluster.others else cluster.hardware.node.gpus
    more = {"gpus_per_node": cluster.gpus_per_node, "nodes": cluster.nodes}
    while times > 1:
        more["gpus_per_node" if 2 * more["gpus_per_node"] <= most else "nodes"] *= 2
        times //= 2
    changed = {name: count for name, count in more.items() if count != getattr(cluster, name)}
    options = " ".join(f"--{name.replace('_', '-')} {count}" for name, count in changed.items())
    cluster = replace(cluster, nodes=more["nodes"], gpus_per_node=more["gpus_per_node"])
    return f"{cluster.num_gpus} GPUs ({options})", replace(problem, cluster=cluster)


def _more_host_memory(problem: Problem, times: int) -> tuple[str, Problem]:
    memory_gib = times * problem.cluster.host_memory_bytes / GIB_BYTES
    cluster = replace(problem.cluster, host_memory_gib=memory_gib)
    return f"{memory_gib:,.0f} GiB of host memory a node", replace(problem, cluster=cluster)


def _smaller_batch(problem: Problem, times: int) -> tuple[str, Problem]:
    batch = max(1, problem.workload.global_batch // times)
    workload = replace(problem.workload, global_batch=batch)
    return f"a global batch of {batch} (--global-batch {batch})", replace(
        problem, workload=workload
    )


def _shorter_sequences(problem: Problem, times: int) -> tuple[str, Problem]:
    length = max(1, problem.workload.sequence_length // times)
    workload = replace(problem.workload, sequence_length=length)
    return f"sequences of {length:,} tokens (--sequence-length {length})", replace(
        problem, workload=workload
    )
