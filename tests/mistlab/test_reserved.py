"""What torch's allocator holds beyond tensors, against plain arithmetic."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.core.units import MIB_BYTES
from mistlab.cost.memory import allocator_of, reserved_bytes, room_bytes
from mistlab.engines.baselines import CACHED_SHARE
from mistlab.engines.engine import ENGINES
from mistlab.graph.stage_model import StageModel
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch
from tests.workloads import workload_of

CLUSTER = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=8)
ALLOCATOR = allocator_of(CLUSTER)
STAGE = StagePlan(layers=12, data_parallel=4, tensor_parallel=1, micro_batch=1, zero=1)
PLAN = Plan(micro_batches=8, stages=(STAGE, STAGE))


def work_of(name: str) -> Workload:
    return workload_of(name, 2048, 32, layers=24)


@pytest.mark.parametrize(
    ("name", "is_large"), [("llama-350m", False), ("llama-2.7b", True), ("llama-22b", True)]
)
def test_a_head_takes_in_proportion_up_to_those_that_were_measured(
    name: str, is_large: bool
) -> None:
    figures = StageModel.of(work_of(name)).figures(batch := StageBatch.of_plan(PLAN))
    beyond = reserved_bytes(figures, batch, CLUSTER, ENGINES["mistlab"]) - figures.peak_bytes
    step = ALLOCATOR.step_bytes_a_parameter * figures.largest_parameters / 4
    head = ALLOCATOR.head_bytes_a_parameter * figures.head_parameters[1]
    assert (head > ALLOCATOR.head_mib * MIB_BYTES) == is_large
    of_head = ALLOCATOR.head_mib * MIB_BYTES if is_large else head
    assert (beyond - step).tolist() == pytest.approx([0, of_head], abs=1)


def test_baselines_hold_a_share_of_what_comes_and_goes() -> None:
    figures = StageModel.of(work_of("llama-1.3b"), "megatron").figures(
        batch := StageBatch.of_plan(replace(PLAN, engine="megatron"))
    )
    states = figures.weights_bytes + figures.gradients_bytes + figures.optimizer_bytes
    beyond = reserved_bytes(figures, batch, CLUSTER, ENGINES["megatron"]) - figures.peak_bytes
    assert beyond.tolist() == pytest.approx(CACHED_SHARE * (figures.peak_bytes - states))


def test_what_is_outside_is_no_room() -> None:
    assert room_bytes(CLUSTER) == CLUSTER.memory_bytes - ALLOCATOR.outside_mib * MIB_BYTES
