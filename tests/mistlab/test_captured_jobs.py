"""Iterations that are captured as CUDA graphs are predicted without launches."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.cost.kernels import captured
from mistlab.job.job import Job
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of


def job_of(engine: str = "mistlab") -> Job:
    """Blocks so small that launches take longer than kernels."""
    stage = StagePlan(layers=24, data_parallel=1, tensor_parallel=1, micro_batch=1)
    return Job(
        workload=workload_of("gpt3-350m", 128, 4),
        cluster=Cluster(hardware=catalog.hardware("a100-40gb"), nodes=1, gpus_per_node=1),
        plan=Plan(stages=(stage,), micro_batches=4, engine=engine),
    )


def seconds(job: Job) -> float:
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    return predictor.predict(job.plan).iteration_s


def test_a_captured_iteration_takes_what_its_kernels_take() -> None:
    job = job_of()
    compute = job.cluster.hardware.compute
    assert compute is not None
    assert compute.launch_us > 0
    slow = replace(compute, launch_us=40 * compute.launch_us)
    hardware = replace(job.cluster.hardware, compute=slow)
    bound = replace(job, cluster=replace(job.cluster, hardware=hardware))
    assert seconds(captured(job)) < seconds(job) < 0.5 * seconds(bound)
    # However slow the host is: it launches nothing.
    assert seconds(captured(bound)) == pytest.approx(seconds(captured(job)))


def test_other_engines_are_not_captured_here() -> None:
    with pytest.raises(InputError, match=r"plan.engine: megatron, but --cuda-graphs works"):
        captured(job_of("megatron"))
