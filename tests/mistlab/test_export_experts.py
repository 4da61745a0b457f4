"""Experts' states on a single replica: shared by the ranks that divide layers, or by none."""

import pytest

from mistlab.export.given import Given, changes
from mistlab.export.nearest import canonical, nearest
from mistlab.export.rules import with_values
from mistlab.export.targets import TARGETS
from mistlab.job.job import Job
from simulators.symbolic import SymbolicPredictor
from tests.mistlab.plans_of_today import job_of

MEGATRON = TARGETS["megatron"]
STAGE = {"data_parallel": 1, "tensor_parallel": 8, "sequence_parallel": 1, "zero": 1}


def peak_bytes(job: Job) -> int:
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    return predictor.predict(job.plan).peak_reserved_bytes


def test_a_single_replica_shards_experts_over_the_ranks_that_divide_layers() -> None:
    job = job_of("mixtral-8x7b", STAGE)
    found = nearest(job, MEGATRON)
    assert "--use-distributed-optimizer" in MEGATRON.write(found.job)
    back = MEGATRON.read(MEGATRON.write(found.job), Given(hardware=job.cluster.hardware)).job
    assert back == found.job
    assert back.plan == job.plan
    assert peak_bytes(back) == peak_bytes(job) < peak_bytes(with_values(job, {"zero": 0}))


def test_a_single_replica_of_a_dense_model_shards_nothing() -> None:
    job = job_of("llama3-8b", STAGE)
    assert [stage.zero for stage in canonical(job).plan.stages] == [0]
    assert "--use-distributed-optimizer" not in MEGATRON.write(nearest(job, MEGATRON).job)
    assert peak_bytes(canonical(job)) == peak_bytes(job)


def test_experts_alone_on_their_ranks_share_with_nobody() -> None:
    job = job_of("mixtral-8x7b", {**STAGE, "expert_parallel": 8})
    assert [stage.zero for stage in canonical(job).plan.stages] == [0]
    assert peak_bytes(canonical(job)) == peak_bytes(job)


@pytest.mark.parametrize("name", ["deepspeed", "accelerate"])
def test_frameworks_that_share_with_replicas_alone_say_so(name: str) -> None:
    found = nearest(job_of("mixtral-8x7b", STAGE), TARGETS[name])
    assert [stage.zero for stage in found.job.plan.stages] == [0]
    assert "zero" in {remark.choice for remark in found.remarks if remark.kind == "lost"}


def test_a_choice_without_an_amount_is_on_or_off() -> None:
    job = job_of("llama3-8b", {**STAGE, "zero": 0})
    (told,) = changes(job, with_values(job, {"sequence_parallel": 0}), "no row")
    assert str(told) == "lost: sequence_parallel: on -> off: no row"
