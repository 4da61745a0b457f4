"""Moments of 16 and 8 bits: in memory, in the step, and refused where an engine has none."""

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.engines.engine import ENGINES, MOMENTS_BYTES, Optimizer
from mistlab.export.nearest import nearest
from mistlab.export.targets import TARGETS
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor

CLUSTER = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=1, gpus_per_node=8)
KINDS = (SymbolicPredictor, EventSimulator)


def job(optimizer: Optimizer, engine: str = "mistlab") -> Job:
    work = Workload(
        model=catalog.model("llama3-8b"),
        sequence_length=4096,
        global_batch=16,
        attention="flash",
        precision="bf16",
        optimizer=optimizer,
    )
    stage = StagePlan(layers=32, data_parallel=8, tensor_parallel=1, micro_batch=1, zero=1)
    return Job(
        workload=work, cluster=CLUSTER, plan=Plan(engine=engine, micro_batches=2, stages=(stage,))
    )


def predicted(one: Job, kind: type) -> Prediction:
    found: Prediction = kind(workload=one.workload, cluster=one.cluster).predict(one.plan)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["mistlab", "megatron-core"])
@pytest.mark.parametrize("optimizer", ["adamw-bf16", "adamw-8bit"])
def test_a_rank_keeps_the_bytes_of_shorter_moments_and_master(
    optimizer: Optimizer, engine: str, kind: type
) -> None:
    """Twelve bytes with moments of 32 bits, of which four are the master's."""
    usual, shorter = (predicted(job(one, engine), kind) for one in ("adamw", optimizer))
    states = [one.stages[0].memory.optimizer for one in (usual, shorter)]
    assert states[1] / states[0] == pytest.approx((4 + MOMENTS_BYTES[optimizer]) / 12)
    peaks = [one.stages[0].peak_allocated_bytes for one in (usual, shorter)]
    assert peaks[0] - peaks[1] == pytest.approx(states[0] - states[1], rel=1e-3)
    assert shorter.iteration_s < usual.iteration_s


def test_a_step_moves_each_moment_once_there_and_once_back() -> None:
    row = ENGINES["fsdp"]
    assert row.step_moved_in("bf16") == 50
    assert row.step_moved_in("bf16", "adamw-8bit") == 50 - 16 + 2 * (2 + 8 / 256)


def test_an_engine_without_such_moments_says_which_has_them() -> None:
    words = "adamw-8bit, but engine deepspeed .* give adamw, or engine: mistlab"
    with pytest.raises(InputError, match=words):
        job("adamw-8bit", "deepspeed")
    with pytest.raises(InputError, match=r"give adamw, or engine: trainer$"):
        job("adamw-8bit", "deepspeed-trainer")
    with pytest.raises(InputError, match="give adamw or adamw-8bit"):
        job("adamw-bf16", "fsdp")


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "megatron"])
def test_an_export_says_that_moments_become_wide(name: str) -> None:
    found = nearest(job("adamw-8bit"), TARGETS[name])
    assert found.job.workload.optimizer == "adamw"
    assert any(one.choice == "optimizer" for one in found.remarks)
