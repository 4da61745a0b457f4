"""Jobs with some of their parts changed."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from mistlab.job.job import Job
from mistlab.plan.plan import StagePlan


def with_stages(job: Job, stages: Iterable[StagePlan]) -> Job:
    """The job with other stages."""
    return replace(job, plan=replace(job.plan, stages=tuple(stages)))


def with_values(job: Job, values: Mapping[str, Any]) -> Job:
    """The job with some dimensions changed on all stages."""
    return with_stages(job, [stage.with_values(values) for stage in job.plan.stages])


def with_plan(job: Job, **values: Any) -> Job:
    """The job with some fields of its plan changed."""
    plan = replace(job.plan, **values)
    return replace(job, plan=plan)


def with_workload(job: Job, **values: Any) -> Job:
    """The job with some fields of its workload changed."""
    workload = replace(job.workload, **values)
    return replace(job, workload=workload)
