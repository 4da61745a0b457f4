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
    """The job with these stages instead of its own."""
    return with_plan(job, stages=tuple(stages))


def with_values(job: Job, values: Mapping[str, Any]) -> Job:
    """The job with these values of plan dimensions on all stages."""
    return with_stages(job, [stage.with_values(values) for stage in job.plan.stages])


def with_plan(job: Job, **values: Any) -> Job:
    """The job with these fields of its plan changed."""
    return replace(job, plan=replace(job.plan, **values))


def with_workload(job: Job, **values: Any) -> Job:
    """The job with these fields of its workload changed."""
    return replace(job, workload=replace(job.workload, **values))


# Rules for expert parallelism: each changes a job towards one that a framework can express.


def same_experts(job: Job) -> Job:
    """The job whose stages all divide experts among as many ranks as the stage that divides them
    most.

    Stages have equally many GPUs.
    """
    most = max(job.plan.stages, key=_parts)
    names = ("expert_parallel", "expert_tensor_parallel")
    return with_values(job, {name: most.degree(name) for name in names})


def whole_experts(job: Job) -> Job:
    """The job in which no expert is split: the ranks that split each expert divide the experts
    among them instead.
    """
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
    """The expert degrees of a stage, lowered so that their product divides its GPUs (those of one
    replica of states).
    """
    ranks = stage.num_gpus // stage.state_replicas
    parts = math.gcd(stage.expert_tensor_parallel, ranks)
    return {
        "expert_parallel": math.gcd(stage.expert_parallel, ranks // parts),
        "expert_tensor_parallel": parts,
    }


def split_sequences(job: Job) -> Job:
    """The job with sequence parallelism on its tensor-parallel ranks, if its blocks have
    experts.
    """
    if job.workload.model.experts is None:
        return job
    stages = []
    for index, stage in enumerate(job.plan.stages):
        ranks = stage.context_parallel * stage.tensor_parallel
        if job.workload.sequence_length % ranks:
            refuse(
                f"plan.stages[{index}]",
                f"context_parallel {stage.context_parallel} x tensor_parallel "
                f"{stage.tensor_parallel} ranks with experts split sequences, but {ranks} does not "
                f"divide sequence_length {job.workload.sequence_length}: give degrees that do",
            )
        stages.append(stage.with_values({"sequence_parallel": int(stage.tensor_parallel > 1)}))
    return with_stages(job, stages)


def _parts(stage: StagePlan) -> int:
    return stage.expert_parallel * stage.expert_tensor_parallel


# Rules for ranks that a framework cannot use as a plan does: they become replicas, or pipeline
# stages.
#
# No rank stays idle if the batch divides over all of them, since a launcher counts every process:
# DeepSpeed refuses a batch that is not micro-batch x steps x replicas of all its processes.


def as_replicas(job: Job, name: str) -> Job:
    """The job with the ranks of a mesh axis turned into data-parallel replicas: as many of them as
    divide the batch, with micro-batches no larger than before.
    """
    if all(stage.degree(name) == 1 for stage in job.plan.stages):
        return job
    alike = {
        (stage.data_parallel, stage.degree(name), stage.micro_batch) for stage in job.plan.stages
    }
    return _alike(job, name) if len(alike) == 1 else _unlike(job, name)


def _alike(job: Job, name: str) -> Job:
    """The job with ranks turned into replicas, for stages of equal degrees: a step may then have
    fewer micro-batches.
    """
    first, batch = job.plan.stages[0], job.workload.global_batch
    data = _most_dividing(batch, first.data_parallel * first.degree(name))
    micro_batch = _most_dividing(batch // data, first.micro_batch)
    stages = tuple(_on_ranks(stage, name, data, micro_batch) for stage in job.plan.stages)
    return with_plan(job, micro_batches=batch // data // micro_batch, stages=stages)


def _unlike(job: Job, name: str) -> Job:
    """The job with ranks turned into replicas, for stages of different degrees: a step then has as
    many micro-batches as before.
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
    """The largest divisor of a number that is not larger than another number."""
    return max(divisor for divisor in range(1, most + 1) if number % divisor == 0)


def without_tensor_parallel(job: Job) -> Job:
    """The job without tensor parallelism, as a pipeline whose stages have equal degrees.

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
    """The job in which tensor-parallel ranks have become pipeline stages."""
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


# Rules that several target frameworks share: each changes a job towards one that a framework can
# express.
#
# A rule takes a job and returns the nearest one that keeps the rule. Where stages save different
# amounts of memory, the nearest job saves the largest amount on all, so that a plan that fitted
# still fits.


Rule = Callable[[Job], Job]


def highest(job: Job, name: str) -> float:
    """The highest value that any stage of the job has of a plan dimension."""
    return max(stage.value(name) for stage in job.plan.stages)


def activations_of_recomputed(job: Job) -> Job:
    """The job that offloads the inputs of all blocks or of none, and of none if its blocks are not
    recomputed.
    """
    recomputes = highest(job, "checkpointed_layers") > 0
    ratio = float(recomputes and highest(job, "offload_activations") > 0)
    return with_values(job, {"offload_activations": ratio})


def same(*names: str) -> Rule:
    """Make a rule: all stages take the highest value that any stage has of these plan
    dimensions.
    """
    return lambda job: with_values(job, {name: highest(job, name) for name in names})


def dropped(*names: str) -> Rule:
    """Make a rule: these plan dimensions have their defaults on all stages."""
    return lambda job: with_values(job, {name: DIMENSIONS[name].default for name in names})


def equal_blocks(name: str) -> Rule:
    """Make a rule: all stages recompute (or otherwise treat) as many blocks as the stage with the
    most, or all of their blocks.
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
    """Make a rule: either all blocks of all stages are recomputed (or otherwise treated), or
    none.
    """

    def rule(job: Job) -> Job:
        treats = highest(job, name) > 0
        stages = [
            stage.with_values({name: stage.layers if treats else 0}) for stage in job.plan.stages
        ]
        return with_stages(job, stages)

    return rule


def even_layers(job: Job) -> Job:
    """The job whose stages all have equally many blocks; the first stages have one more if there is
    a remainder. A stage that recomputed all of its blocks still does.
    """
    even = even_shares(job.plan.layers, job.plan.num_stages)
    stages = zip(even, job.plan.stages, strict=True)
    return with_stages(job, [stage.resized(layers) for layers, stage in stages])


def equal_meshes(job: Job) -> Job:
    """The job whose stages all have one stage's degrees and micro-batch size, or the nearest
    degrees on equally many GPUs; the number of stages changes only if that is needed to use all
    GPUs.
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
    # The choice with the fewest idle GPUs is best, then that with the smallest change in the number
    # of stages.
    _, number, values = min(
        ((job.plan.num_gpus - used, away), number, values)
        for (used, values), away, number in ways
        if values
    )
    return _of_stages(job, number, dict(values))


def _equal_mesh(job: Job, num_stages: int) -> tuple[int, tuple[tuple[str, int], ...]]:
    """The parallel degrees and micro-batch size nearest to the plan's with which all of this many
    stages have equally many GPUs, and the number of GPUs used; 0 if there are no such degrees.
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
    """The reason why the stages of a job cannot have this tensor-parallel degree; empty if they
    can.
    """
    if job.workload.model.experts is not None and job.workload.sequence_length % degree:
        return "blocks with experts divide sequences"
    return degree_problem(job.workload.model, degree)


def _on_mesh(job: Job, values: Mapping[str, Any]) -> Job:
    """The job with these parallel degrees on all of its stages."""
    return with_stages(job, [_with_degrees(stage, values) for stage in job.plan.stages])


def _with_degrees(stage: StagePlan, values: Mapping[str, Any]) -> StagePlan:
    """The stage with other parallel degrees; its replicas of states and expert degrees are lowered
    to divisors of these.
    """
    data = values.get("data_parallel", stage.data_parallel)
    replicas = math.gcd(stage.state_replicas, data)
    changed = stage.with_values({**values, "state_replicas": replicas})
    return changed.with_values(dividing_experts(changed))


def equal_nodes(job: Job) -> Job:
    """The job on nodes with equally many processes each, and on a cluster no larger than its plan;
    with fewer replicas or stages if its ranks cannot be divided evenly.
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
        f"{in_stage} ranks that share layers do not divide over {cluster.nodes} nodes of "
        f"{cluster.gpus_per_node} GPUs: give degrees whose product does",
    )


def _nodes_for(ranks: int, job: Job) -> int:
    """The fewest nodes of a job's cluster over which this number of ranks can be divided evenly; 0
    if there are none.
    """
    for nodes in range(1, job.cluster.nodes + 1):
        in_node, rest = divmod(ranks, nodes)
        if not rest and in_node <= job.cluster.gpus_per_node:
            return nodes
    return 0


def _of_stages(job: Job, num_stages: int, degrees: Mapping[str, Any]) -> Job:
    """The job with another number of stages, with blocks divided evenly, other degrees, and of all
    other choices the highest value that any old stage has.
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
    """How far some parallel degrees are from those of a plan's stages: first by idle GPUs, then by
    doublings of degrees; ties are broken by the first stage.
    """
    data, tensor = mesh
    far = [
        abs(math.log2(data / stage.data_parallel)) + abs(math.log2(tensor / stage.tensor_parallel))
        for stage in stages
    ]
    return gpus - data * tensor, sum(far), far[0]


def one_stage(job: Job) -> Job:
    """The job with a single stage: all GPUs share all blocks, in micro-batches no larger than
    before.
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
    """The data- and tensor-parallel degrees for all GPUs that leave the fewest GPUs idle (replicas
    have to divide the batch), and among these the tensor-parallel degree nearest to the plan's.
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
    """Make a rule: the order of passes becomes 1F1B if the framework does not support it, or if
    there is no pipeline.
    """

    def rule(job: Job) -> Job:
        is_known = job.plan.num_stages > 1 and job.plan.order in known
        return job if is_known else with_plan(job, order=DEFAULT_ORDER)

    return rule


# Rows that the tables of several target frameworks contain.
EQUAL_MESHES = Row(
    choices=("data_parallel", "tensor_parallel", "micro_batch", "context_parallel"),
    nearest=equal_meshes,
    because="gives all stages the same degrees",
)
EQUAL_NODES = Row(
    choices=(), nearest=equal_nodes, because="starts equally many processes on every node"
)
RECOMPUTED = Row(
    choices=("checkpointed_layers",),
    nearest=none_or_all_blocks("checkpointed_layers"),
    because="recomputes all blocks or none",
)
INPUTS_OFFLOADED = Row(
    choices=("offload_activations",),
    nearest=activations_of_recomputed,
    because="offloads the kept inputs of recomputed blocks, all or none",
)
