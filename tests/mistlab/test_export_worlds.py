"""Exports on the processes that they are started on: batches and worlds come out."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import pytest

from mistlab.export.nearest import Nearest, nearest
from mistlab.export.targets import TARGETS
from mistlab.job.job import Job, job_from_mapping
from tests.mistlab.drawn_plans import drawn_jobs
from tests.mistlab.plans_of_today import job_of, jobs_of_today

DEEPSPEED = TARGETS["deepspeed"]


@cache
def jobs() -> tuple[Job, ...]:
    return tuple(chain(drawn_jobs(80, seed=99), jobs_of_today(60, seed=3)))


def batch_problem(content: Mapping[str, Any], processes: int) -> str:
    """What DeepSpeed says of a configuration's batch on so many processes; empty if it is right."""
    tensor = content.get("tensor_parallel", {}).get("autotp_size", 1)
    ranks = tensor * content.get("pipeline", {}).get("stages", 1)
    replicas, rest = divmod(processes, ranks)
    if rest:
        return f"{processes} processes are not a multiple of {ranks}"
    batch = content["train_batch_size"]
    micro_batch = content["train_micro_batch_size_per_gpu"]
    steps = content["gradient_accumulation_steps"]
    return "" if batch == micro_batch * steps * replicas else f"{batch} on {replicas} replicas"


def test_deepspeed_s_batch_comes_out_on_all_gpus_of_the_plan() -> None:
    for job in jobs():
        found = nearest(job, DEEPSPEED).job
        content = json.loads(DEEPSPEED.write(found))
        assert batch_problem(content, job.plan.num_gpus) == ""
        assert content["train_batch_size"] == job.workload.global_batch


@pytest.mark.parametrize("name", TARGETS)
def test_a_cluster_is_as_large_as_its_plan_and_idle_gpus_are_told(name: str) -> None:
    for job in jobs():
        if name.startswith("torchtitan") and job.workload.model.experts is not None:
            continue
        found: Nearest = nearest(job, TARGETS[name])
        gpus = found.job.plan.num_gpus
        assert gpus == found.job.cluster.num_gpus
        told = any(remark.text.startswith(f"{job.plan.num_gpus} -> ") for remark in found.remarks)
        assert gpus == job.plan.num_gpus or told


def piped(layers: int, batch: int, tensor: int) -> Job:
    """Two stages of Llama 7B's shape with so many blocks, two replicas, in micro-batches of one."""
    stage = {"layers": layers // 2, "data_parallel": 2, "tensor_parallel": tensor}
    mapping: dict[str, Any] = {
        "workload": {
            "model": {"family": "llama", "hidden": 4096, "heads": 32, "layers": layers},
            "sequence_length": 2048,
            "global_batch": batch,
            "attention": "flash",
            "precision": "bf16",
        },
        "cluster": {"hardware": "a100-80gb", "nodes": 2, "gpus_per_node": 8},
        "plan": {"micro_batches": batch // 2, "stages": [{**stage, "micro_batch": 1}] * 2},
    }
    return job_from_mapping(mapping)


@pytest.mark.parametrize(
    ("layers", "batch", "stages", "data"),
    [
        # Blocks divide over eight stages.
        (32, 16, 8, 2),
        # They do not, but the batch divides over eight replicas.
        (28, 16, 2, 8),
        # Neither: eight stages with unequal blocks.
        (28, 12, 8, 2),
    ],
)
def test_tensor_parallel_ranks_of_a_pipeline_become_stages_or_replicas(
    layers: int, batch: int, stages: int, data: int
) -> None:
    plan = nearest(piped(layers, batch, tensor=4), DEEPSPEED).job.plan
    assert (plan.num_stages, plan.stages[0].data_parallel) == (stages, data)
    assert all(stage.tensor_parallel == 1 for stage in plan.stages)
    assert plan.num_gpus == 16


def test_context_parallel_ranks_become_replicas_where_they_cannot_be_said() -> None:
    stage = {"data_parallel": 2, "context_parallel": 4}
    job = job_of("llama3-8b", stage)
    job = replace(job, workload=replace(job.workload, global_batch=8))
    for name in ("deepspeed", "accelerate"):
        found = nearest(job, TARGETS[name])
        (got,) = found.job.plan.stages
        assert (got.data_parallel, got.context_parallel) == (8, 1)
        assert "context_parallel" in {remark.choice for remark in found.remarks}


def test_stages_are_more_or_fewer_where_only_these_use_all_gpus() -> None:
    """Stages of 8, 4 and 4 GPUs: three alike would use 12 of 16."""
    shapes = zip((4, 2, 2), (12, 10, 10), strict=True)
    job = job_of(
        "llama3-8b",
        *(
            {"data_parallel": 2, "tensor_parallel": tensor, "layers": layers}
            for tensor, layers in shapes
        ),
    )
    found = nearest(job, TARGETS["megatron"])
    assert found.job.plan.num_gpus == 16
    assert found.job.plan.num_stages in (2, 4)
    assert "stages" in {remark.choice for remark in found.remarks}


def test_one_stage_divides_layers_where_replicas_do_not_divide_the_batch() -> None:
    """A batch of 4 on 8 stages: 4 replicas of 2 ranks, not 4 GPUs alone."""
    job = job_of("llama3-8b", *({"data_parallel": 1, "layers": 4} for _ in range(8)))
    plan = nearest(job, TARGETS["accelerate"]).job.plan
    assert job.workload.global_batch == 4
    assert (plan.num_gpus, plan.stages[0].data_parallel) == (8, 4)
