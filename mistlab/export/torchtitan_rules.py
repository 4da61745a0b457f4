"""Rules for torchtitan: they bring a job closer to what its configurations can say."""

from dataclasses import replace

from mistlab.core.values import refuse
from mistlab.export.fsdp import STATES, fewest_replicas, sharded, states_offloaded
from mistlab.export.rules import among_orders, dropped, none_or_all_blocks
from mistlab.export.target import Row
from mistlab.export.torchtitan_models import BROUGHT, Brought, check_brought, has_to_shard
from mistlab.export.torchtitan_pipeline import SCHEDULES
from mistlab.export.with_parts import with_stages, with_values, with_workload
from mistlab.job.job import Job
from mistlab.plan.dimensions import ranks_of


def sayable_workload(job: Job, brought: Brought = BROUGHT) -> Job:
    """The job in bf16 or fp32 with fused attention; refused if torchtitan does not bring its
    model."""
    model = job.workload.model
    if model.graph_file is not None:
        problem = "is traced from code of its own: export a plan of a model of the catalogue"
        refuse("workload.model", problem)
    check_brought(model, brought)
    precision = "bf16" if job.workload.precision == "fp16" else job.workload.precision
    return with_workload(job, precision=precision, attention="flash")


def recomputed(job: Job) -> Job:
    """All blocks, none, or every n-th: the rarest that recomputes as many as every stage wants. Or
    every second product of all blocks, if a stage recomputes products."""
    stages = job.plan.stages
    if recomputes_products(job):
        return with_stages(
            job,
            [
                replace(stage, checkpointed_layers=0, products_recomputed_layers=stage.layers)
                for stage in stages
            ],
        )
    every = blocks_apart(job)
    if not every:
        return job
    return with_stages(
        job,
        [stage.with_values({"checkpointed_layers": stage.layers // every}) for stage in stages],
    )


def recomputed_today(job: Job) -> Job:
    """All blocks, none, or every second product of all: from 0.3 on."""
    if recomputes_products(job):
        return recomputed(job)
    return none_or_all_blocks("checkpointed_layers")(job)


def recomputes_products(job: Job) -> bool:
    """Whether blocks recompute every second product."""
    return any(stage.products_recomputed_layers for stage in job.plan.stages)


def blocks_apart(job: Job) -> int:
    """How many blocks apart recomputed blocks are; none for 0."""
    pairs = [(stage.layers, stage.checkpointed_layers) for stage in job.plan.stages]
    if not any(count for _, count in pairs):
        return 0
    most = max(layers for layers, _ in pairs)
    return max(
        every
        for every in range(1, most + 1)
        if all(layers // every >= count for layers, count in pairs)
    )


def with_sequences_split(job: Job) -> Job:
    """Sequence parallelism comes with tensor parallelism."""
    shares = job.plan.stages[0].tensor_parallel > 1
    return with_values(job, {"sequence_parallel": int(shares)})


def sharded_states(job: Job) -> Job:
    """FSDP2 also shards along the ranks that share sequences, whether replicas shard or not."""
    job = sharded(job)
    first = job.plan.stages[0]
    has_to = first.context_parallel > 1 or has_to_shard(first)
    return with_values(job, {"zero": 2}) if has_to and not first.zero else job


def offloaded_states(job: Job) -> Job:
    """FSDP2 offloads where it shards: with several ranks."""
    alone = ranks_of("gather", job.plan.stages[0].degree) == 1
    return dropped(*STATES)(job) if alone else states_offloaded(job)


# Rows of both kinds of files.
ORDERED = Row(
    choices=("order",),
    nearest=among_orders(SCHEDULES),
    because="runs 1F1B, GPipe, ZBVZeroBubble and DualPipeV",
)
SHARDED = (
    Row(
        choices=("zero",),
        nearest=sharded_states,
        because="shards by FSDP2, ZeRO-2 or 3, alike on all stages, and always along sequences or "
        "where experts lie on several replicas",
    ),
    Row(
        choices=("state_replicas",),
        nearest=fewest_replicas,
        because="cuts all stages into as many replicas, where it shards",
    ),
)
OFFLOADED = (
    Row(
        choices=STATES,
        nearest=offloaded_states,
        because="offloads all states where FSDP2 shards them, or none",
    ),
    Row(
        choices=("offload_activations",),
        nearest=dropped("offload_activations"),
        because="keeps activations on the GPU",
    ),
)
