"""Gradients summed in 32 or 16 bits: what engines keep, reduce and step, and which refuse."""

from dataclasses import replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.cost.tasks import TaskModel
from mistlab.engines.engine import ENGINES, Precision, Sums
from mistlab.job.job import Job
from mistlab.machine.cluster import Cluster
from mistlab.network.link_times import GroupSpread
from mistlab.plan.plan import Plan, StagePlan
from mistlab.stages.stage_batch import StageBatch
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

WORK = workload_of("gpt3-1.3b", 2048, 16, "bf16")
CLUSTER = Cluster(hardware=catalog.hardware("a100-80gb"), nodes=1, gpus_per_node=4)


def plan_of(engine: str) -> Plan:
    stage = StagePlan(layers=24, data_parallel=4, tensor_parallel=1, micro_batch=1, zero=1)
    return Plan(engine=engine, micro_batches=4, stages=(stage,))


SUMMING = [
    ("mistlab", "bf16", "16bit", 4, 2, 4, 2),
    ("mistlab", "fp16", "32bit", 2, 4, 2, 4),
    ("megatron", "fp16", "32bit", 2, 4, 2, 4),
    ("megatron-core", "bf16", "16bit", 4, 2, 4, 2),
    ("megatron-bridge", "bf16", "32bit", 2, 4, 2, 4),
    ("deepspeed", "bf16", "32bit", 2, 4, 2, 4),
    # Shards are kept in 32 bits, whatever is reduced.
    ("fsdp", "bf16", "16bit", 4, 4, 4, 2),
]


@pytest.mark.parametrize(
    ("engine", "precision", "sums", "kept", "then_kept", "reduced", "then_reduced"), SUMMING
)
def test_gradients_are_kept_and_reduced_in_the_bits_that_are_asked_for(
    engine: str,
    precision: Precision,
    sums: Sums,
    kept: int,
    then_kept: int,
    reduced: int,
    then_reduced: int,
) -> None:
    work, cluster, plan = replace(WORK, precision=precision), CLUSTER, plan_of(engine)
    usual, other = (
        SymbolicPredictor(workload=one, cluster=cluster).predict(plan)
        for one in (work, replace(work, gradients=sums))
    )
    before, after = (one.stages[0].memory.gradients for one in (usual, other))
    assert after / before == pytest.approx(then_kept / kept)
    reduces = []
    for one in (work, replace(work, gradients=sums)):
        model = TaskModel.of(one, cluster, ENGINES[engine])
        assert model.memory.reduced_gradient == (then_reduced if reduces else reduced)
        seconds = model.seconds(StageBatch.of_plans([plan]).columns)
        block = model.types.names.index("block")
        link = model.collective("reduce_scatter", GroupSpread(4, 1))
        each = seconds.parameters[block] * model.memory.reduced_gradient
        assert seconds.alone("R", "")[block] == pytest.approx(link(each), rel=1e-12)
        reduces.append(float(seconds.alone("R", "")[block][0]))
    assert np.sign(reduces[1] - reduces[0]) == np.sign(then_reduced - reduced)


def test_engines_refuse_bits_in_which_they_do_not_sum() -> None:
    refused = []
    for name, engine in ENGINES.items():
        for precision, memory in engine.memory.items():
            for sums in ("32bit", "16bit"):
                problem = engine.sums_problem(precision, sums)  # type: ignore[arg-type]
                has = memory.sums == sums or precision in engine.other_sums
                assert (problem == "") == has
                if problem:
                    refused.append((name, precision, sums))
    assert ("nanotron", "bf16", "16bit") in refused
    assert ("megatron", "bf16", "16bit") in refused
    assert ("mistlab", "fp32", "16bit") in refused


def test_a_job_with_sums_that_its_engine_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match=r"workload.gradients.*nanotron sums .* in 32bit: leave"):
        Job(workload=replace(WORK, gradients="16bit"), cluster=CLUSTER, plan=plan_of("nanotron"))
    with pytest.raises(InputError, match=r"gradients.*states is 16bit"):
        replace(WORK, gradients="32bit", states="16bit")


@pytest.mark.parametrize("sums", ["32bit", "16bit"])
def test_a_played_plan_reduces_what_is_predicted(sums: Sums) -> None:
    work = replace(WORK, gradients=sums)
    closed, played = (
        kind(workload=work, cluster=CLUSTER).predict(plan_of("mistlab"))
        for kind in (SymbolicPredictor, EventSimulator)
    )
    assert played.iteration_s == pytest.approx(closed.iteration_s, rel=0.02)
    for one, other in zip(closed.stages, played.stages, strict=True):
        assert one.memory.gradients == other.memory.gradients


def test_fp16_costs_what_it_did() -> None:
    """Published tables are of fp16: sums of 16 bits, and kernels for these alone."""
    row, work = ENGINES["mistlab"], replace(WORK, precision="fp16")
    assert row.memory_in("fp16").gradient == row.memory_in("fp16").reduced_gradient == 2
    assert row.rules_in("fp16") == row.kernels
    assert row.step_moved_in("fp16") == 44
    assert row.rules_in("bf16") != row.kernels
    usual, same = (
        SymbolicPredictor(workload=one, cluster=CLUSTER).predict(plan_of("mistlab"))
        for one in (work, replace(work, gradients="16bit"))
    )
    assert usual == same
