"""Groups of NCCL are counted by plan, and their memory is no room of torch's."""

from dataclasses import replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.units import MIB_BYTES
from mistlab.cost.memory import communicators, room_at, room_bytes, room_of_plan
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch
from simulators.symbolic import SymbolicPredictor

OF_ONE_MIB = 250.0


def plan_of(stages: int, micro_batches: int = 4, **values: int) -> Plan:
    stage = StagePlan.of_values(
        {"layers": 8, "data_parallel": 1, "tensor_parallel": 1, "micro_batch": 1, **values}
    )
    return Plan(micro_batches=micro_batches, stages=(stage,) * stages)


def cluster_of(communicator_mib: float | None) -> Cluster:
    hardware = catalog.hardware("h100-80gb")
    assert hardware.allocator is not None
    allocator = replace(hardware.allocator, communicator_mib=communicator_mib)
    return Cluster(hardware=replace(hardware, allocator=allocator), nodes=1, gpus_per_node=8)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (plan_of(1), [0]),
        # All ranks, and those that reduce gradients; then those that gather weights too.
        (plan_of(1, data_parallel=4), [2]),
        (plan_of(1, data_parallel=4, zero=1), [3]),
        (plan_of(1, data_parallel=4, tensor_parallel=2, zero=2), [4]),
        # All ranks, both ends, and a group for each way to each neighbour.
        (plan_of(4), [4, 5, 5, 4]),
        (plan_of(2, data_parallel=2, tensor_parallel=2, zero=1), [7, 7]),
    ],
)
def test_groups_are_counted_stage_by_stage(plan: Plan, expected: list[int]) -> None:
    assert communicators(StageBatch.of_plan(plan)).tolist() == expected


def test_what_communicators_take_is_no_room() -> None:
    plan = plan_of(2, data_parallel=2, tensor_parallel=2, zero=1)
    without, with_them = cluster_of(None), cluster_of(OF_ONE_MIB)
    whole = room_bytes(without)
    assert room_of_plan(without, plan).tolist() == [whole, whole]
    left = [whole - 7 * OF_ONE_MIB * MIB_BYTES] * 2
    assert room_of_plan(with_them, plan).tolist() == left
    assert np.all(room_at(with_them, StageBatch.of_plan(plan)) == left)


def test_a_plan_that_fits_without_its_communicators_does_not_fit_with_them() -> None:
    workload = Workload(
        model=catalog.model("gpt3-1.3b"),
        sequence_length=2048,
        global_batch=16,
        attention="flash",
        precision="bf16",
    )
    plan = plan_of(1, layers=24, data_parallel=4, zero=1)

    def fits(communicator_mib: float | None, memory_gib: float) -> bool:
        cluster = replace(cluster_of(communicator_mib), memory_gib=memory_gib)
        return SymbolicPredictor(workload=workload, cluster=cluster).predict(plan).fits

    found = SymbolicPredictor(workload=workload, cluster=cluster_of(None)).predict(plan)
    allocator = cluster_of(None).hardware.allocator
    assert allocator is not None
    just_enough = (found.peak_reserved_bytes + allocator.outside_bytes) / 2**30 + 0.01
    assert fits(None, just_enough)
    assert not fits(OF_ONE_MIB, just_enough)
    assert fits(OF_ONE_MIB, just_enough + 3 * OF_ONE_MIB / 1024)
