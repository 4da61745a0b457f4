"""Reads an export back: what a framework's file says, and beside it what no such file says."""

from typing import Any

from mistlab.export.given import Given
from mistlab.export.target import Target
from mistlab.job.job import Job


def read_back(target: Target, text: str, job: Job) -> Job:
    """The job that a target's text says; what the text does not hold is that of ``job``."""
    values: dict[str, Any] = {
        "model": job.workload.model,
        "nodes": job.cluster.nodes,
        "gpus_per_node": job.cluster.gpus_per_node,
        "sequence_length": job.workload.sequence_length,
        "global_batch": job.workload.global_batch,
        "micro_batch": job.plan.stages[0].micro_batch,
        "attention": job.workload.attention,
    }
    beside = {name: values[name] for name in target.beside}
    return target.read(text, Given(hardware=job.cluster.hardware, **beside)).job
