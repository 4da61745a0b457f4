"""Closed form and events where a pass follows another one of its kind, beside reductions."""

from dataclasses import replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.cost import order_times
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from mistlab.schedule.stage_passes import passes_of
from mistlab.stages.part_times import TurnTimes
from mistlab.stages.plan_orders import named_order
from tests.mistlab.test_order_path import equal, order_iteration_s
from tests.simulators.test_strained import difference
from tests.workloads import workload_of


def difference_on(hardware: str, nodes: int, batch: int, plan: Plan, model: str) -> float:
    """The closed form's time over the event simulator's, less one, on nodes of 8 GPUs."""
    cluster = Cluster(hardware=catalog.hardware(hardware), nodes=nodes, gpus_per_node=8)
    return difference(workload_of(model, 2048, batch, "bf16"), cluster, plan)


def of_blocks(order: str) -> tuple[str, int, int, Plan, str]:
    """Experts whose gradients take far longer to be reduced than a forward pass takes."""
    if order == "gpipe":
        stage = StagePlan(
            layers=16,
            data_parallel=32,
            tensor_parallel=1,
            micro_batch=2,
            expert_parallel=2,
            zero=2,
            checkpointed_layers=11,
        )
        plan = Plan(engine="fsdp-te", micro_batches=4, order=order, stages=(stage,) * 2)
        return "h100-80gb", 8, 256, plan, "mixtral-8x7b"
    stage = StagePlan(
        layers=9, data_parallel=32, tensor_parallel=1, micro_batch=4, expert_parallel=2, zero=2
    )
    engine = "fsdp-compiled-blocks-rowwise"
    plan = Plan(engine=engine, micro_batches=4, order=order, stages=(stage,) * 4)
    return "h200-141gb", 16, 512, plan, "gpt-oss-120b"


@pytest.mark.parametrize("order", ["gpipe", "interleaved-8"])
def test_only_passes_after_a_backward_pass_wait_for_reductions(order: str) -> None:
    assert abs(difference_on(*of_blocks(order))) < 0.02


def test_turns_that_are_forgotten_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_times, "_gradient_times", lambda *_, **__: (None, None))
    assert difference_on(*of_blocks("interleaved-8")) < -0.02


def test_each_kind_of_pass_has_its_own_turn() -> None:
    """A stage alone: forward, forward, backward, backward; then backwards and forwards in turn."""
    one = np.ones((1, 1))
    turned = TurnTimes(
        forward_s=0.7 * one,
        left_s=0.9 * one,
        least_s=0.1 * one,
        hidden_backward_s=0.5 * one,
        hidden_weights_s=0.0 * one,
    )
    times = equal(1, 1.0, 2.0)
    gpipe, alternating = (passes_of(named_order(name, 1, 3)) for name in ("gpipe", "1f1b"))
    assert order_iteration_s(times, gpipe, turned=turned) == pytest.approx(9.0 + 2 * 0.4)
    assert order_iteration_s(times, alternating, turned=turned) == pytest.approx(9.0 + 2 * 0.7)
    longer = replace(turned, hidden_backward_s=2.0 * one)
    assert order_iteration_s(times, gpipe, turned=longer) == pytest.approx(9.0 + 2 * 0.1)


# Stages of several nodes each, whose chunks are reduced far longer than they compute. Blocks of one
# chunk are recomputed, those of the other are not.
EIGHT = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=8, gpus_per_node=4)
HALVES = StagePlan(
    layers=8, data_parallel=8, tensor_parallel=1, micro_batch=1, zero=2, checkpointed_layers=4
)


@pytest.mark.parametrize(("order", "micro_batches"), [("zb-v", 4), ("v-half", 2), ("v-min", 4)])
def test_the_first_layer_of_the_next_chunk_hides_reductions(order: str, micro_batches: int) -> None:
    plan = Plan(stages=(HALVES,) * 4, micro_batches=micro_batches, order=order)
    work = workload_of("llama3-8b", 1024, 8 * micro_batches, "bf16")
    assert abs(difference(work, EIGHT, plan)) <= 0.003


def test_a_send_is_late_by_reductions_once() -> None:
    """Reductions of a weight-gradient pass and those of a whole pass would share its link."""
    stage = replace(HALVES, layers=16, data_parallel=32, micro_batch=2, checkpointed_layers=16)
    plan = Plan(stages=(stage,) * 2, micro_batches=1, order="v-half")
    work = workload_of("gpt3-2.7b", 1024, 64, "bf16")
    cluster = Cluster(hardware=catalog.hardware("a100-40gb"), nodes=8, gpus_per_node=8)
    assert abs(difference(work, cluster, plan)) <= 0.006


@pytest.mark.parametrize(
    ("order", "nodes"), [("gpipe", 8), ("zb-v", 4), ("v-min", 8), ("interleaved-2", 4)]
)
def test_passes_are_slowed_by_the_send_before_them(order: str, nodes: int) -> None:
    """A forward pass also follows forward passes, and a pass for weights a backward pass."""
    stage = replace(
        HALVES,
        data_parallel=1,
        tensor_parallel=4,
        micro_batch=4,
        layers=32 // nodes,
        checkpointed_layers=0,
    )
    plan = Plan(stages=(stage,) * nodes, micro_batches=8, order=order)
    work = workload_of("gpt3-2.7b", 2048, 32, "bf16")
    cluster = Cluster(hardware=catalog.hardware("a100-40gb"), nodes=nodes, gpus_per_node=4)
    assert abs(difference(work, cluster, plan)) <= 0.001
