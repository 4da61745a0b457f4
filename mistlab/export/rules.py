"""Rules that several targets share: they bring a job closer to what a framework can say.

A rule takes a job and returns the nearest one. Where memory is saved more on one stage than on
another, the nearest job saves the most on all, so that whatever fitted still fits.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mistlab.export.expert_rules import dividing_experts
from mistlab.export.with_parts import with_plan, with_stages, with_values
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.values.dimension_checks import degree_problem
from mistlab.values.dimensions import DIMENSIONS, counts_of_blocks
from mistlab.values.errors import refuse
from mistlab.values.job import Job
from mistlab.values.mesh import dimensions_of_axes
from mistlab.values.plan import StagePlan
from mistlab.values.shares import even_shares

Rule = Callable[[Job], Job]


def highest(job: Job, name: str) -> float:
    """The highest value of a dimension on any stage."""
    return max(stage.value(name) for stage in job.plan.stages)


def activations_of_recomputed(job: Job) -> Job:
    """Blocks' inputs are all offloaded or none, and only where blocks are recomputed."""
    recomputes = highest(job, "checkpointed_layers") > 0
    ratio = float(recomputes and highest(job, "offload_activations") > 0)
    return with_values(job, {"offload_activations": ratio})


def same(*names: str) -> Rule:
    """All stages take the highest value of any stage."""
    return lambda job: with_values(job, {name: highest(job, name) for name in names})


def dropped(*names: str) -> Rule:
    """Dimensions go back to their defaults."""
    return lambda job: with_values(job, {name: DIMENSIONS[name].default for name in names})


def equal_blocks(name: str) -> Rule:
    """All stages treat the highest number of blocks of any stage, or all blocks if they have
    fewer."""

    def rule(job: Job) -> Job:
        most = highest(job, name)
        stages = [
            stage.with_values(_within({**_counts(stage), name: most}, stage.layers))
            for stage in job.plan.stages
        ]
        return with_stages(job, stages)

    return rule


def none_or_all_blocks(name: str) -> Rule:
    """All blocks of all stages are treated, or none."""

    def rule(job: Job) -> Job:
        treats = highest(job, name) > 0
        stages = [
            stage.with_values({name: stage.layers if treats else 0}) for stage in job.plan.stages
        ]
        return with_stages(job, stages)

    return rule


def even_layers(job: Job) -> Job:
    """Stages have equal numbers of blocks; the first stages take the rest. A stage that treated all
    of its blocks in one way treats all of them again."""
    stages = []
    even = even_shares(job.plan.layers, job.plan.num_stages)
    for layers, stage in zip(even, job.plan.stages, strict=True):
        wanted = {
            name: layers if count == stage.layers else count
            for name, count in _counts(stage).items()
        }
        stages.append(stage.with_values({"layers": layers, **_within(wanted, layers)}))
    return with_stages(job, stages)


def _counts(stage: StagePlan) -> dict[str, float]:
    """The stage's number of blocks with each treatment, by dimension."""
    return {name: stage.degree(name) for name in counts_of_blocks()}


def _within(counts: Mapping[str, float], layers: int) -> dict[str, int]:
    """Numbers of treated blocks, made so small that ``layers`` blocks suffice: the last ones
    first."""
    left, found = layers, {}
    for name in counts_of_blocks():
        found[name] = min(int(counts[name]), left)
        left -= found[name]
    return found


def equal_meshes(job: Job) -> Job:
    """All stages have the degrees and the micro-batch of one of them, or the nearest degrees of
    equally many GPUs; there are more or fewer stages where only these would use all GPUs."""
    stages = job.plan.stages
    axes = dimensions_of_axes()
    if len({tuple(stage.value(name) for name in (*axes, "micro_batch")) for stage in stages}) == 1:
        return job
    wanted = job.plan.num_stages
    ways = [
        (_equal_mesh(job, number), abs(number - wanted), number)
        for number in range(1, job.plan.layers + 1)
        if number == wanted or job.plan.num_gpus % number == 0
    ]
    # GPUs left idle count first, then stages more or fewer.
    _, number, values = min(
        ((job.plan.num_gpus - used, away), number, values)
        for (used, values), away, number in ways
        if values
    )
    return _of_stages(job, number, dict(values))


def _equal_mesh(job: Job, num_stages: int) -> tuple[int, tuple[tuple[str, int], ...]]:
    """The nearest degrees and micro-batch that so many stages can have alike, and the GPUs that
    they use; none if there are none."""
    stages = job.plan.stages
    sequences = job.workload.global_batch // job.plan.micro_batches
    axes = dimensions_of_axes()
    others = [name for name in axes if name not in ("data_parallel", "tensor_parallel")]
    fixed = {name: min(stage.degree(name) for stage in stages) for name in others}
    gpus = job.plan.num_gpus // num_stages // math.prod(fixed.values())
    meshes = [
        (data, tensor)
        for tensor in range(1, gpus + 1)
        if not _tensor_problem(job, tensor)
        for data in range(1, gpus // tensor + 1)
        if sequences % data == 0
    ]
    if not meshes:
        return 0, ()
    data, tensor = min(meshes, key=lambda mesh: _distance(mesh, gpus, stages))
    values = {"data_parallel": data, "tensor_parallel": tensor, "micro_batch": sequences // data}
    used = num_stages * data * tensor * math.prod(fixed.values())
    return used, tuple({**fixed, **values}.items())


def _tensor_problem(job: Job, degree: int) -> str:
    """Why a job's stages cannot have this degree of tensor parallelism; empty if they can."""
    if job.workload.model.experts is not None and job.workload.sequence_length % degree:
        return "blocks with experts divide sequences"
    return degree_problem(job.workload.model, degree)


def _on_mesh(job: Job, values: Mapping[str, Any]) -> Job:
    """The job with other degrees on all stages."""
    return with_stages(job, [_with_degrees(stage, values) for stage in job.plan.stages])


def _with_degrees(stage: StagePlan, values: Mapping[str, Any]) -> StagePlan:
    """The stage with other degrees, and as many of its replicas of states, and of its parts of
    experts, as divide them."""
    data = values.get("data_parallel", stage.data_parallel)
    replicas = math.gcd(stage.state_replicas, data)
    changed = stage.with_values({**values, "state_replicas": replicas})
    return changed.with_values(dividing_experts(changed))


def equal_nodes(job: Job) -> Job:
    """A job on nodes with equally many processes each, its cluster no larger than its plan; with
    fewer replicas, or fewer stages, where its ranks do not divide so."""
    cluster, plan = job.cluster, job.plan
    sequences = job.workload.global_batch // plan.micro_batches
    first = plan.stages[0]
    in_stage = first.num_gpus // first.data_parallel
    for stages in range(plan.num_stages, 0, -1):
        for data in range(first.data_parallel, 0, -1):
            nodes = _nodes_for(in_stage * data * stages, job)
            if sequences % data or not nodes:
                continue
            if data != first.data_parallel:
                values = {"data_parallel": data, "micro_batch": sequences // data}
                job = _on_mesh(job, values)
            job = _of_stages(job, stages, {})
            in_node = job.plan.num_gpus // nodes
            return replace(job, cluster=replace(cluster, nodes=nodes, gpus_per_node=in_node))
    return refuse(
        "plan.stages",
        f"{in_stage} ranks that share layers do not divide over {cluster.nodes} nodes of "
        f"{cluster.gpus_per_node} GPUs: give degrees whose product does",
    )


def _nodes_for(ranks: int, job: Job) -> int:
    """The fewest nodes of a job's cluster with equally many of some ranks; none for 0."""
    for nodes in range(1, job.cluster.nodes + 1):
        in_node, rest = divmod(ranks, nodes)
        if not rest and in_node <= job.cluster.gpus_per_node:
            return nodes
    return 0


def _of_stages(job: Job, num_stages: int, degrees: Mapping[str, Any]) -> Job:
    """The job with another number of stages, whose blocks are divided evenly, and of whose choices
    the highest counts; with other degrees on all of them."""
    if num_stages == job.plan.num_stages:
        return _on_mesh(job, degrees)
    values = {name: highest(job, name) for name in DIMENSIONS}
    first, layers = job.plan.stages[0], even_shares(job.plan.layers, num_stages)
    stages = [
        first.with_values({**values, "layers": own, **_within(values, own)}) for own in layers
    ]
    return with_stages(job, [_with_degrees(stage, degrees) for stage in stages])


def _distance(
    mesh: tuple[int, int], gpus: int, stages: Sequence[StagePlan]
) -> tuple[int, float, float]:
    """How far a mesh is from those of stages: GPUs left idle first, then doublings of degrees; of
    equals the one that is closer to the first stage."""
    data, tensor = mesh
    far = [
        abs(math.log2(data / stage.data_parallel)) + abs(math.log2(tensor / stage.tensor_parallel))
        for stage in stages
    ]
    return gpus - data * tensor, sum(far), far[0]


def one_stage(job: Job) -> Job:
    """A job without a pipeline: all GPUs divide all blocks, in micro-batches no larger."""
    plan, first = job.plan, job.plan.stages[0]
    if plan.num_stages == 1:
        return job
    data, tensor = _whole_mesh(job)
    sequences = job.workload.global_batch // data
    most = max(stage.micro_batch for stage in plan.stages)
    micro_batch = max(size for size in range(1, most + 1) if sequences % size == 0)
    values: dict[str, Any] = {
        name: highest(job, name) for name, row in DIMENSIONS.items() if row.part == "savings"
    }
    values |= {
        name: sum(stage.degree(name) for stage in plan.stages)
        for name in ("layers", *counts_of_blocks())
    }
    values |= {"data_parallel": data, "tensor_parallel": tensor, "micro_batch": micro_batch}
    stage = _with_degrees(first, values)
    plan = replace(plan, micro_batches=sequences // micro_batch, stages=(stage,))
    return replace(job, plan=plan)


def _whole_mesh(job: Job) -> tuple[int, int]:
    """The degrees of data and tensor parallelism on all GPUs: the nearest tensor degree with which
    fewest GPUs are left idle, for replicas have to divide the batch."""
    first, batch = job.plan.stages[0], job.workload.global_batch
    others = first.num_gpus // (first.data_parallel * first.tensor_parallel)
    gpus = job.plan.num_gpus // others
    ways = []
    for tensor in range(1, gpus + 1):
        if tensor == first.tensor_parallel or not _tensor_problem(job, tensor):
            most = gpus // tensor
            data = max(degree for degree in range(1, most + 1) if batch % degree == 0)
            far = abs(math.log2(tensor / first.tensor_parallel))
            ways.append((gpus - data * tensor, far, data, tensor))
    _, _, data, tensor = min(ways)
    return data, tensor


def among_orders(known: Collection[str]) -> Rule:
    """The order of passes becomes 1F1B if the framework does not know it, or without a pipeline."""

    def rule(job: Job) -> Job:
        is_known = job.plan.num_stages > 1 and job.plan.order in known
        return job if is_known else with_plan(job, order=DEFAULT_ORDER)

    return rule
