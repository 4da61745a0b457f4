"""Rules that several target frameworks share: each changes a job towards one that a framework can
express.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mistlab.core.values import refuse
from mistlab.export.target import Row
from mistlab.job.job import Job
from mistlab.plan.dimension import degree_problem
from mistlab.plan.dimensions import DIMENSIONS, counts_of_blocks, counts_within, dimensions_of_axes
from mistlab.plan.plan import StagePlan
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.schedule.placement import even_shares


def with_stages(job: Job, stages: Iterable[StagePlan]) -> Job:
    """Return the job with other stages."""
    return with_plan(job, stages=tuple(stages))


def with_values(job: Job, values: Mapping[str, Any]) -> Job:
    """Return the job with these values of plan dimensions on all stages."""
    return with_stages(job, [stage.with_values(values) for stage in job.plan.stages])


def with_plan(job: Job, **values: Any) -> Job:
    """Return the job with some fields of its plan replaced."""
    return replace(job, plan=replace(job.plan, **values))


def with_workload(job: Job, **values: Any) -> Job:
    """Return the job with some fields of its workload replaced."""
    return replace(job, workload=replace(job.workload, **values))


# Rules for expert parallelism: each changes a job into one that a framework can express.


def same_experts(job: Job) -> Job:
    """Divide the experts on all stages over as many ranks as on the stage that divides them most.

    Stages have equally many GPUs.
    """
    most = max(job.plan.stages, key=_parts)
    names = ("expert_parallel", "expert_tensor_parallel")
    return with_values(job, {name: most.degree(name) for name in names})


def whole_experts(job: Job) -> Job:
    """Change a job so that ranks which split each expert divide the experts among them instead."""
    experts = job.workload.model.experts
    assert experts is not None
    stages = [
        stage.with_values(
            {"expert_parallel": math.gcd(_parts(stage), experts.count), "expert_tensor_parallel": 1}
        )
        for stage in job.plan.stages
    ]
    return with_stages(job, stages)


def dividing_experts(stage: StagePlan) -> dict[str, int]:
    """Lower the two expert degrees of a stage until their product divides the number of GPUs that
    share one replica of its states.
    """
    ranks = stage.num_gpus // stage.state_replicas
    parts = math.gcd(stage.expert_tensor_parallel, ranks)
    return {
        "expert_parallel": math.gcd(stage.expert_parallel, ranks // parts),
        "expert_tensor_parallel": parts,
    }


def split_sequences(job: Job) -> Job:
    """Enable sequence parallelism on tensor-parallel ranks if the job's blocks have experts."""
    if job.workload.model.experts is None:
        return job
    stages = []
    for index, stage in enumerate(job.plan.stages):
        ranks = stage.context_parallel * stage.tensor_parallel
        if job.workload.sequence_length % ranks:
            refuse(
                f"plan.stages[{index}]",
                f"context_parallel {stage.context_parallel} x tensor_parallel "
                f"{stage.tensor_parallel} ranks of a model with experts split sequences, but "
                f"{ranks} does not divide sequence_length {job.workload.sequence_length}: give "
                "degrees whose product does",
            )
        stages.append(stage.with_values({"sequence_parallel": int(stage.tensor_parallel > 1)}))
    return with_stages(job, stages)


def _parts(stage: StagePlan) -> int:
    return stage.expert_parallel * stage.expert_tensor_parallel


# Rules for ranks that a framework cannot use as a plan does: they become replicas or pipeline
# stages.
#
# No rank stays idle if all ranks together divide the batch. A launcher counts every process:
# DeepSpeed refuses a batch that is not micro-batch size x accumulation steps x replicas over all
# its processes.


def as_replicas(job: Job, name: str) -> Job:
    """Turn the ranks of one parallel dimension into data-parallel replicas, as many as divide the
    batch; the micro-batch size does not grow.
    """
    if all(stage.degree(name) == 1 for stage in job.plan.stages):
        return job
    alike = {
        (stage.data_parallel, stage.degree(name), stage.micro_batch) for stage in job.plan.stages
    }
    return _alike(job, name) if len(alike) == 1 else _unlike(job, name)


def _alike(job: Job, name: str) -> Job:
    """Turn ranks into replicas where all stages have the same degrees; the number of micro-batches
    per step may fall.
    """
    first, batch = job.plan.stages[0], job.workload.global_batch
    data = _most_dividing(batch, first.data_parallel * first.degree(name))
    micro_batch = _most_dividing(batch // data, first.micro_batch)
    stages = tuple(_on_ranks(stage, name, data, micro_batch) for stage in job.plan.stages)
    return with_plan(job, micro_batches=batch // data // micro_batch, stages=stages)


def _unlike(job: Job, name: str) -> Job:
    """Turn ranks into replicas where stages have different degrees; the number of micro-batches per
    step stays.
    """
    sequences = job.workload.global_batch // job.plan.micro_batches
    stages = []
    for stage in job.plan.stages:
        data = _most_dividing(sequences, stage.data_parallel * stage.degree(name))
        stages.append(_on_ranks(stage, name, data, sequences // data))
    return with_stages(job, stages)


def _on_ranks(stage: StagePlan, name: str, data: int, micro_batch: int) -> StagePlan:
    values: dict[str, Any] = {
        name: 1,
        "data_parallel": data,
        "micro_batch": micro_batch,
        "state_replicas": math.gcd(stage.state_replicas, data),
    }
    changed = stage.with_values(values)
    return changed.with_values(dividing_experts(changed))


def _most_dividing(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``most``."""
    return max(divisor for divisor in range(1, most + 1) if number % divisor == 0)


def without_tensor_parallel(job: Job) -> Job:
    """Remove tensor parallelism from a pipeline whose stages have equal degrees.

    Its tensor-parallel ranks become stages if blocks divide over these: every rank then has as much
    of the model as before. Else they become replicas if the batch divides over them, or stages with
    unequal blocks.
    """
    plan, first = job.plan, job.plan.stages[0]
    stages = plan.num_stages * first.tensor_parallel
    replicas = first.data_parallel * first.tensor_parallel
    divides_batch = job.workload.global_batch % replicas == 0
    if plan.layers % stages == 0 or (plan.layers > stages and not divides_batch):
        return _as_stages(job, stages)
    return as_replicas(job, "tensor_parallel")


def _as_stages(job: Job, num_stages: int) -> Job:
    """Turn the tensor-parallel ranks of a job into pipeline stages."""
    first = job.plan.stages[0]
    highest = {
        name: max(stage.value(name) for stage in job.plan.stages)
        for name, row in DIMENSIONS.items()
        if row.part == "savings" or name in counts_of_blocks()
    }
    stages = []
    for layers in even_shares(job.plan.layers, num_stages):
        counts = {name: min(highest[name], layers) for name in counts_of_blocks()}
        of_stage = {"layers": layers, "tensor_parallel": 1, "sequence_parallel": 0}
        stage = first.with_values({**highest, **counts, **of_stage})
        stages.append(stage.with_values(dividing_experts(stage)))
    return with_stages(job, stages)


# Rules that several target frameworks share: each changes a job into one that a framework can
# express.
#
# A rule takes a job and returns the nearest one that keeps the rule. Where stages save different
# amounts of memory, all stages of the new job save the largest of these, so that a plan that fits
# still fits.


Rule = Callable[[Job], Job]


def highest(job: Job, name: str) -> float:
    """Return the highest value of a plan dimension on any stage of the job."""
    return max(stage.value(name) for stage in job.plan.stages)


def activations_of_recomputed(job: Job) -> Job:
    """Offload the saved inputs of all recomputed blocks or of none."""
    recomputes = highest(job, "checkpointed_layers") > 0
    ratio = float(recomputes and highest(job, "offload_activations") > 0)
    return with_values(job, {"offload_activations": ratio})


def same(*names: str) -> Rule:
    """Make a rule that gives all stages the highest value that any stage has, for each named plan
    dimension.
    """
    return lambda job: with_values(job, {name: highest(job, name) for name in names})


def dropped(*names: str) -> Rule:
    """Make a rule that sets the named plan dimensions to their defaults on all stages."""
    return lambda job: with_values(job, {name: DIMENSIONS[name].default for name in names})


def equal_blocks(name: str) -> Rule:
    """Make a rule by which all stages recompute, or offload, as many blocks as the stage with the
    most (at most all of their own).
    """

    def rule(job: Job) -> Job:
        most = highest(job, name)
        stages = [
            stage.with_values(counts_within({**stage.counts, name: most}, stage.layers))
            for stage in job.plan.stages
        ]
        return with_stages(job, stages)

    return rule


def none_or_all_blocks(name: str) -> Rule:
    """Make a rule by which all blocks of all stages are recomputed or offloaded, or none."""

    def rule(job: Job) -> Job:
        treats = highest(job, name) > 0
        stages = [
            stage.with_values({name: stage.layers if treats else 0}) for stage in job.plan.stages
        ]
        return with_stages(job, stages)

    return rule


def even_layers(job: Job) -> Job:
    """Divide the blocks evenly over the stages, the remainder over the first ones. A stage that
    recomputed all of its blocks still does.
    """
    even = even_shares(job.plan.layers, job.plan.num_stages)
    stages = zip(even, job.plan.stages, strict=True)
    return with_stages(job, [stage.resized(layers) for layers, stage in stages])


def equal_meshes(job: Job) -> Job:
    """Give all stages of a job the same degrees and micro-batch size: one stage's, or the nearest
    that use equally many GPUs per stage. The number of stages changes only if otherwise GPUs stay
    idle.
    """
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
    # Prefer the choice with the fewest idle GPUs, then the one with the smallest change in the
    # number of stages.
    _, number, values = min(
        ((job.plan.num_gpus - used, away), number, values)
        for (used, values), away, number in ways
        if values
    )
    return _of_stages(job, number, dict(values))


def _equal_mesh(job: Job, num_stages: int) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Return the degrees and micro-batch size nearest to the plan's that give this many stages
    equally many GPUs, and how many GPUs they use; 0 GPUs if no degrees do.
    """
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
    """Return why the stages of a job cannot have this tensor-parallel degree, or an empty text if
    they can.
    """
    if job.workload.model.experts is not None and job.workload.sequence_length % degree:
        return "blocks with experts divide sequences"
    return degree_problem(job.workload.model, degree)


def _on_mesh(job: Job, values: Mapping[str, Any]) -> Job:
    """Return the job with the same parallel degrees on all stages."""
    return with_stages(job, [_with_degrees(stage, values) for stage in job.plan.stages])


def _with_degrees(stage: StagePlan, values: Mapping[str, Any]) -> StagePlan:
    """Return the stage with other parallel degrees; its expert degrees and replicas of states are
    lowered to divisors that fit.
    """
    data = values.get("data_parallel", stage.data_parallel)
    replicas = math.gcd(stage.state_replicas, data)
    changed = stage.with_values({**values, "state_replicas": replicas})
    return changed.with_values(dividing_experts(changed))


def equal_nodes(job: Job) -> Job:
    """Return the job on nodes that run equally many processes each, as few nodes as its ranks need.
    Replicas or stages are removed if ranks do not divide over nodes.
    """
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
        f"the {in_stage} ranks that share layers do not divide over {cluster.nodes} nodes of "
        f"{cluster.gpus_per_node} GPUs: give other parallel degrees",
    )


def _nodes_for(ranks: int, job: Job) -> int:
    """Return the fewest nodes of a job's cluster that can share this number of ranks evenly, or 0
    if none can.
    """
    for nodes in range(1, job.cluster.nodes + 1):
        in_node, rest = divmod(ranks, nodes)
        if not rest and in_node <= job.cluster.gpus_per_node:
            return nodes
    return 0


def _of_stages(job: Job, num_stages: int, degrees: Mapping[str, Any]) -> Job:
    """Return the job with another number of stages: blocks are divided evenly, and each other
    choice takes the highest value of any old stage.
    """
    if num_stages == job.plan.num_stages:
        return _on_mesh(job, degrees)
    values = {name: highest(job, name) for name in DIMENSIONS}
    first, layers = job.plan.stages[0], even_shares(job.plan.layers, num_stages)
    stages = [
        first.with_values({**values, "layers": own, **counts_within(values, own)}) for own in layers
    ]
    return with_stages(job, [_with_degrees(stage, degrees) for stage in stages])


def _distance(
    mesh: tuple[int, int], gpus: int, stages: Sequence[StagePlan]
) -> tuple[int, float, float]:
    """Measure how far new degrees are from those of a plan's stages: first by idle GPUs, then by
    how often degrees double or halve; the first stage breaks ties.
    """
    data, tensor = mesh
    far = [
        abs(math.log2(data / stage.data_parallel)) + abs(math.log2(tensor / stage.tensor_parallel))
        for stage in stages
    ]
    return gpus - data * tensor, sum(far), far[0]


def one_stage(job: Job) -> Job:
    """Turn a job's pipeline into a single stage: all GPUs share all blocks, and the micro-batch
    size does not grow.
    """
    plan, first = job.plan, job.plan.stages[0]
    if plan.num_stages == 1:
        return job
    data, tensor = _whole_mesh(job)
    sequences = job.workload.global_batch // data
    micro_batch = _most_dividing(sequences, max(stage.micro_batch for stage in plan.stages))
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
    """Return data- and tensor-parallel degrees that leave the fewest GPUs idle, given that replicas
    divide the batch; of these, the tensor-parallel degree nearest to the plan's.
    """
    first, batch = job.plan.stages[0], job.workload.global_batch
    others = first.num_gpus // (first.data_parallel * first.tensor_parallel)
    gpus = job.plan.num_gpus // others
    ways = []
    for tensor in range(1, gpus + 1):
        if tensor == first.tensor_parallel or not _tensor_problem(job, tensor):
            data = _most_dividing(batch, gpus // tensor)
            far = abs(math.log2(tensor / first.tensor_parallel))
            ways.append((gpus - data * tensor, far, data, tensor))
    _, _, data, tensor = min(ways)
    return data, tensor


def among_orders(known: Collection[str]) -> Rule:
    """Make a rule that falls back to the 1F1B schedule if a framework lacks the plan's pipeline
    schedule, or if there is no pipeline.
    """

    def rule(job: Job) -> Job:
        is_known = job.plan.num_stages > 1 and job.plan.order in known
        return job if is_known else with_plan(job, order=DEFAULT_ORDER)

    return rule


# Rules that several target frameworks share, each with the choices that it is for and the reason.
EQUAL_MESHES = Row(
    choices=("data_parallel", "tensor_parallel", "micro_batch", "context_parallel"),
    nearest=equal_meshes,
    because="gives all stages the same degrees",
)
EQUAL_NODES = Row(
    choices=(), nearest=equal_nodes, because="needs equally many processes on every node"
)
RECOMPUTED = Row(
    choices=("checkpointed_layers",),
    nearest=none_or_all_blocks("checkpointed_layers"),
    because="recomputes all blocks or none",
)
INPUTS_OFFLOADED = Row(
    choices=("offload_activations",),
    nearest=activations_of_recomputed,
    because="offloads the inputs of all recomputed blocks, or none",
)
