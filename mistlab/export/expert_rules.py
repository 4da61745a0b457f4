"""Rules for the ranks that divide experts: jobs come closer to what a framework can say."""

from math import gcd

from mistlab.core.values import refuse
from mistlab.export.with_parts import with_stages, with_values
from mistlab.job.job import Job
from mistlab.plan.plan import StagePlan


def same_experts(job: Job) -> Job:
    """All stages divide experts as the stage does that divides them most.

    Stages have equally many GPUs.
    """
    most = max(job.plan.stages, key=_parts)
    names = ("expert_parallel", "expert_tensor_parallel")
    return with_values(job, {name: most.degree(name) for name in names})


def whole_experts(job: Job) -> Job:
    """Every rank has its experts whole: what ranks had in parts is divided among as many ranks."""
    experts = job.workload.model.experts
    assert experts is not None
    stages = [
        stage.with_values(
            {
                "expert_parallel": gcd(_parts(stage), experts.count),
                "expert_tensor_parallel": 1,
            }
        )
        for stage in job.plan.stages
    ]
    return with_stages(job, stages)


def dividing_experts(stage: StagePlan) -> dict[str, int]:
    """The stage's degrees of experts, lowered so that their product divides its GPUs, or those of
    each replica of its states."""
    ranks = stage.num_gpus // stage.state_replicas
    parts = gcd(stage.expert_tensor_parallel, ranks)
    return {
        "expert_parallel": gcd(stage.expert_parallel, ranks // parts),
        "expert_tensor_parallel": parts,
    }


def split_sequences(job: Job) -> Job:
    """Tensor-parallel ranks split sequences too, if blocks have experts."""
    if job.workload.model.experts is None:
        return job
    stages = []
    for index, stage in enumerate(job.plan.stages):
        ranks = stage.context_parallel * stage.tensor_parallel
        if job.workload.sequence_length % ranks:
            problem = (
                f"context_parallel {stage.context_parallel} x tensor_parallel "
                f"{stage.tensor_parallel} ranks with experts split sequences, but {ranks} does not "
                f"divide sequence_length {job.workload.sequence_length}: give degrees that do"
            )
            refuse(f"plan.stages[{index}]", problem)
        stages.append(stage.with_values({"sequence_parallel": int(stage.tensor_parallel > 1)}))
    return with_stages(job, stages)


def _parts(stage: StagePlan) -> int:
    return stage.expert_parallel * stage.expert_tensor_parallel
