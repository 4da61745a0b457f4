"""Rules for ranks that a framework cannot use as a plan does: they become replicas, or stages.

No rank is left idle if the batch divides over all of them, for a launcher counts every process:
DeepSpeed refuses a batch that is not micro-batch x steps x replicas of all its processes.
"""

import math
from dataclasses import replace
from typing import Any

from mistlab.export.expert_rules import dividing_experts
from mistlab.export.with_parts import with_stages
from mistlab.job.job import Job
from mistlab.plan.dimensions import DIMENSIONS, counts_of_blocks
from mistlab.plan.plan import StagePlan
from mistlab.schedule.placement import even_shares


def as_replicas(job: Job, name: str) -> Job:
    """The job with the ranks along an axis as replicas: as many as divide the batch, with
    micro-batches no larger."""
    if all(stage.degree(name) == 1 for stage in job.plan.stages):
        return job
    alike = {
        (stage.data_parallel, stage.degree(name), stage.micro_batch) for stage in job.plan.stages
    }
    return _alike(job, name) if len(alike) == 1 else _unlike(job, name)


def _alike(job: Job, name: str) -> Job:
    """Stages with equal degrees: micro-batches may become fewer."""
    first, batch = job.plan.stages[0], job.workload.global_batch
    data = _most_dividing(batch, first.data_parallel * first.degree(name))
    micro_batch = _most_dividing(batch // data, first.micro_batch)
    plan = replace(
        job.plan,
        micro_batches=batch // data // micro_batch,
        stages=tuple(_on_ranks(stage, name, data, micro_batch) for stage in job.plan.stages),
    )
    return replace(job, plan=plan)


def _unlike(job: Job, name: str) -> Job:
    """Stages with unlike degrees: the number of micro-batches stays."""
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
    """The largest divisor of a number that is no larger than another one."""
    return max(divisor for divisor in range(1, most + 1) if number % divisor == 0)


def without_tensor_parallel(job: Job) -> Job:
    """A pipeline of stages with equal degrees in which no ranks share layers.

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
    """The job with more stages, each without tensor parallelism."""
    first = job.plan.stages[0]
    highest = {
        name: max(stage.value(name) for stage in job.plan.stages)
        for name, row in DIMENSIONS.items()
        if row.part == "savings" or name in counts_of_blocks()
    }
    stages = []
    for layers in even_shares(job.plan.layers, num_stages):
        counts = {name: min(highest[name], layers) for name in counts_of_blocks()}
        own = {"layers": layers, "tensor_parallel": 1, "sequence_parallel": 0}
        stage = first.with_values({**highest, **counts, **own})
        stages.append(stage.with_values(dividing_experts(stage)))
    return with_stages(job, stages)
