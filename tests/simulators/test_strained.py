"""Closed form and event simulator agree where pipelines wait: for slow sends, for hosts."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.workload import Workload
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import with_long_head, workload_of

SMALL = Workload(
    model=catalog.model("gpt3-1.3b"),
    sequence_length=512,
    global_batch=64,
    attention="flash",
    precision="bf16",
)
H100 = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=1, gpus_per_node=8)


def difference(workload: Workload, cluster: Cluster, plan: Plan) -> float:
    """The closed form's time over the event simulator's, less one."""
    closed = SymbolicPredictor(workload=workload, cluster=cluster).predict(plan).iteration_s
    played = EventSimulator(workload=workload, cluster=cluster).simulate(plan).iteration_s
    return closed / played - 1


@pytest.mark.parametrize("engine", ["megatron-bridge", "mistlab"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_last_gradient_is_sent_beside_the_reductions_of_each_pass(
    engine: str, nodes: int
) -> None:
    """With ZeRO-2, a stage's last gradient leaves while those of its first block are reduced."""
    cluster = replace(H100, nodes=nodes, gpus_per_node=8 // nodes)
    workload = workload_of("gpt3-2.7b", 2048, 16, "bf16", layers=8)
    stage = StagePlan(layers=2, data_parallel=2, tensor_parallel=1, micro_batch=1, zero=2)
    plan = Plan(engine=engine, micro_batches=8, stages=(stage,) * 4)
    assert abs(difference(workload, cluster, plan)) < 0.0005


@pytest.mark.parametrize("micro_batches", [1, 2, 6])
@pytest.mark.parametrize("gbytes", [2.0, 20.0])
def test_a_stage_that_only_sends_sends_its_last_gradient_beside_reductions(
    gbytes: float, micro_batches: int
) -> None:
    """Over the slow network such an iteration was up to 10 % too short."""
    cluster = replace(H100, gpus_per_node=4, inter_node_gbytes_per_s=gbytes)
    workload = workload_of("gpt3-1.3b", 2048, 16 * micro_batches, "bf16")
    stage = StagePlan(layers=12, data_parallel=4, tensor_parallel=1, micro_batch=4, zero=1)
    plan = Plan(engine="nanotron", micro_batches=micro_batches, stages=(stage, stage))
    assert abs(difference(workload, cluster, plan)) < 1e-9


@pytest.mark.parametrize("engine", ["megatron-core", "mistlab", "megatron", "fsdp"])
@pytest.mark.parametrize("gbytes", [0.5, 1.0, 2.0])
def test_sends_longer_than_passes_wait_for_one_another(engine: str, gbytes: float) -> None:
    """Four stages on two nodes: both directions' sends of a stage are on one lane."""
    cluster = replace(
        H100,
        nodes=2,
        gpus_per_node=2,
        intra_node_gbytes_per_s=32.0,
        inter_node_gbytes_per_s=gbytes,
    )
    stage = StagePlan(layers=6, data_parallel=1, tensor_parallel=1, micro_batch=16)
    plan = Plan(engine=engine, micro_batches=4, stages=(replace(stage, checkpointed_layers=5),) * 4)
    assert abs(difference(SMALL, cluster, plan)) < 0.01


def test_a_micro_batch_that_queues_is_slowed_by_the_send_before_it() -> None:
    """Two stages on two nodes: the second micro-batch computes while a gradient goes back."""
    cluster = replace(
        H100,
        nodes=2,
        gpus_per_node=2,
        intra_node_gbytes_per_s=32.0,
        inter_node_gbytes_per_s=1.0,
    )
    stage = StagePlan(
        layers=12, data_parallel=1, tensor_parallel=2, micro_batch=16, checkpointed_layers=12
    )
    plan = Plan(engine="megatron-core", micro_batches=4, stages=(stage,) * 2)
    assert abs(difference(SMALL, cluster, plan)) < 0.01


@pytest.mark.parametrize("micro_batches", [2, 8])
def test_sends_that_meet_hold_stages_after_each_of_their_passes(micro_batches: int) -> None:
    """Fewer micro-batches than stages, and more: forwards and backwards in turn."""
    cluster = replace(H100, nodes=4, gpus_per_node=1, inter_node_gbytes_per_s=1.0)
    workload = replace(SMALL, global_batch=4 * micro_batches)
    stage = StagePlan(layers=6, data_parallel=1, tensor_parallel=1, micro_batch=4)
    plan = Plan(engine="nanotron", micro_batches=micro_batches, stages=(stage,) * 4)
    assert abs(difference(workload, cluster, plan)) < 0.005


@pytest.mark.parametrize("zero", [0, 1])
def test_what_leaves_begins_before_the_next_slot(zero: int) -> None:
    """Gradients leave by the last backward pass, which waits for copies: two slots in turn."""
    cluster = Cluster(hardware=catalog.hardware("v100-32gb"), nodes=2, gpus_per_node=4)
    workload = replace(
        SMALL,
        model=catalog.model("gpt3-2.7b"),
        sequence_length=1024,
        global_batch=32,
        precision="fp16",
    )
    stage = StagePlan(
        layers=32,
        data_parallel=8,
        tensor_parallel=1,
        micro_batch=4,
        zero=zero,
        checkpointed_layers=7,
        offload=Offload(weights=0.375, gradients=0.875, optimizer=0.375),
    )
    plan = Plan(micro_batches=1, stages=(stage,))
    assert abs(difference(workload, cluster, plan)) < 0.01


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("gbytes", [32.0, None])
def test_reductions_do_not_slow_a_gpu_that_waits_for_its_host(
    micro_batches: int, gbytes: float | None
) -> None:
    """Gradients are reduced while the GPU of a host-bound stage is idle."""
    workload = replace(SMALL, sequence_length=2048, global_batch=8 * micro_batches)
    cluster = replace(H100, intra_node_gbytes_per_s=gbytes)
    stage = StagePlan(layers=12, data_parallel=4, tensor_parallel=1, micro_batch=2, zero=1)
    plan = Plan(engine="megatron-core", micro_batches=micro_batches, stages=(stage,) * 2)
    assert abs(difference(workload, cluster, plan)) < 0.01


def test_both_ends_of_a_tied_table_are_in_one_exchange() -> None:
    """The first stage shards its gradients and the last one does not."""
    workload = replace(SMALL, model=catalog.model("llama3.2-1b"), sequence_length=2048)
    cluster = replace(H100, nodes=2, inter_node_gbytes_per_s=0.5)
    stages = tuple(
        StagePlan(layers=8, data_parallel=8, tensor_parallel=1, micro_batch=2, zero=zero)
        for zero in (2, 1)
    )
    plan = Plan(micro_batches=4, stages=stages)
    assert abs(difference(workload, cluster, plan)) < 0.02


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_reductions_of_unlike_blocks_go_on_beside_the_next_blocks(micro_batches: int) -> None:
    """Experts take longer to reduce than the block in front of them takes to compute."""
    cluster = replace(H100, nodes=4, hardware=catalog.hardware("b200-180gb"))
    model = catalog.model("nemotron-3-nano")
    workload = replace(SMALL, model=model, sequence_length=1024, global_batch=8 * micro_batches)
    layers = (7, 7, 7, 7, 6, 6, 6, 6)
    stages = tuple(
        StagePlan(
            layers=own,
            data_parallel=4,
            tensor_parallel=1,
            micro_batch=2,
            zero=1,
            checkpointed_layers=own,
        )
        for own in layers
    )
    plan = Plan(engine="zero-bubble", micro_batches=micro_batches, stages=stages)
    assert abs(difference(workload, cluster, plan)) < 0.015


def test_reductions_queue_behind_several_equal_blocks_among_unlike_ones() -> None:
    """Three of four blocks are alike."""
    cluster = replace(H100, nodes=4)
    model = catalog.model("qwen3-next-80b-a3b")
    workload = replace(SMALL, model=model, sequence_length=2048, global_batch=32)
    stage = StagePlan(
        layers=6, data_parallel=2, tensor_parallel=2, micro_batch=4, expert_parallel=2, zero=1
    )
    plan = Plan(engine="megatron-core", micro_batches=4, stages=(stage,) * 8)
    assert abs(difference(workload, cluster, plan)) < 0.002


def test_a_tied_table_is_exchanged_when_all_chunks_are_reduced() -> None:
    """Reductions of eight chunks are longer than all passes."""
    workload = replace(SMALL, model=catalog.model("llama3.2-1b"))
    cluster = replace(H100, nodes=2, intra_node_gbytes_per_s=32.0)
    stage = StagePlan(layers=8, data_parallel=8, tensor_parallel=1, micro_batch=4, zero=1)
    plan = Plan(engine="megatron-core", micro_batches=2, order="interleaved-8", stages=(stage,) * 2)
    assert abs(difference(workload, cluster, plan)) < 0.015


@pytest.mark.parametrize("zero", [2, 3])
def test_each_pass_waits_for_its_host_beside_long_reductions(zero: int) -> None:
    """A backward pass that lasts for its reductions lets no host get ahead of the next forward."""
    workload = replace(SMALL, sequence_length=1024, global_batch=8)
    cluster = replace(H100, gpus_per_node=4, intra_node_gbytes_per_s=16.0)
    stage = StagePlan(
        layers=12,
        data_parallel=2,
        tensor_parallel=1,
        micro_batch=2,
        zero=zero,
        checkpointed_layers=10,
    )
    plan = Plan(engine="megatron-fsdp", micro_batches=2, stages=(stage,) * 2)
    assert abs(difference(workload, cluster, plan)) < 0.02


def on_slow_network(stages: int, micro_batches: int, gbytes: float) -> tuple[Cluster, Plan]:
    """Stages that gather weights for each pass, on two nodes."""
    cluster = replace(H100, nodes=2, intra_node_gbytes_per_s=32.0, inter_node_gbytes_per_s=gbytes)
    stage = StagePlan(
        layers=24 // stages,
        data_parallel=16 // stages,
        tensor_parallel=1,
        micro_batch=2,
        zero=3,
    )
    plan = Plan(engine="megatron-fsdp", micro_batches=micro_batches, stages=(stage,) * stages)
    return cluster, plan


def test_sends_beside_passes_that_wait_for_their_host_slow_them_only_beyond_it() -> None:
    cluster = replace(H100, nodes=2, gpus_per_node=2, inter_node_gbytes_per_s=2.0)
    workload = replace(SMALL, sequence_length=1024, global_batch=16)
    stage = StagePlan(layers=12, data_parallel=2, tensor_parallel=1, micro_batch=2, zero=1)
    plan = Plan(engine="megatron-core", micro_batches=4, stages=(stage,) * 2)
    assert abs(difference(workload, cluster, plan)) < 0.001


def test_the_first_send_is_beside_all_passes_that_run_ahead() -> None:
    """The second of four stages gathers weights for two more passes meanwhile."""
    cluster, plan = on_slow_network(stages=4, micro_batches=4, gbytes=2.0)
    workload = replace(SMALL, sequence_length=1024, global_batch=32)
    assert abs(difference(workload, cluster, plan)) < 0.01


@pytest.mark.parametrize("stages", [2, 4])
def test_no_pass_is_beside_the_sends_of_a_single_micro_batch(stages: int) -> None:
    cluster, plan = on_slow_network(stages, micro_batches=1, gbytes=1.0)
    workload = replace(SMALL, sequence_length=2048, global_batch=32 // stages)
    assert abs(difference(workload, cluster, plan)) < 0.02


@pytest.mark.parametrize("gbytes", [1.0, 2.0])
def test_sends_of_rounds_are_beside_passes_of_both_ways(gbytes: float) -> None:
    """While one micro-batch is sent, the other goes back and on."""
    cluster, plan = on_slow_network(stages=2, micro_batches=8, gbytes=gbytes)
    workload = replace(SMALL, sequence_length=2048, global_batch=128)
    assert abs(difference(workload, cluster, plan)) < 0.02


V_PLANS = {
    # Stages of two neighbours send to a node at one time.
    "two stages a node": ("gpt3-2.7b", "a100-40gb", 4, 8, "zb-v", 8, 16, 4, 0),
    "one stage a node": ("gpt3-2.7b", "a100-40gb", 4, 8, "dualpipe-v", 4, 8, 2, 1),
    # Gradients are reduced from the first layer of the last pass for weights on.
    "reductions": ("gpt3-2.7b", "a100-80gb", 4, 8, "v-half", 2, 2, 1, 1),
    # Every pass for weights reduces gradients, beside the send of the pass before it.
    "reductions of every pass": ("gpt3-2.7b", "a100-40gb", 4, 8, "v-half", 4, 8, 2, 2),
}


@pytest.mark.parametrize("case", V_PLANS)
def test_orders_in_a_v_across_nodes(case: str) -> None:
    model, hardware, nodes, gpus, order, stages, micro_batches, tensor, zero = V_PLANS[case]
    cluster = Cluster(hardware=catalog.hardware(hardware), nodes=nodes, gpus_per_node=gpus)
    data = nodes * gpus // stages // tensor
    batch = data * micro_batches
    workload = replace(SMALL, model=catalog.model(model), sequence_length=2048, global_batch=batch)
    # As when the plans were found.
    workload = with_long_head(replace(workload, gradients="16bit"))
    stage = StagePlan(
        layers=workload.model.layers // stages,
        data_parallel=data,
        tensor_parallel=tensor,
        micro_batch=1,
        zero=zero,
    )
    plan = Plan(
        engine="mistlab",
        micro_batches=micro_batches,
        order=order,
        stages=(stage,) * stages,
    )
    assert abs(difference(workload, cluster, plan)) < 0.045


@pytest.mark.parametrize("order", ["zb-v", "interleaved-2"])
def test_a_send_that_others_delay_slows_passes_for_longer(order: str) -> None:
    """Four stages on four nodes: two sends at a time need all of a node's network."""
    cluster = Cluster(hardware=catalog.hardware("a100-40gb"), nodes=4, gpus_per_node=4)
    workload = Workload(
        model=catalog.model("gpt3-13b"),
        sequence_length=2048,
        global_batch=16,
        attention="flash",
        precision="bf16",
    )
    stage = StagePlan(layers=10, data_parallel=1, tensor_parallel=4, micro_batch=1)
    plan = Plan(micro_batches=16, order=order, stages=(stage,) * 4)
    assert abs(difference(workload, cluster, plan)) < 0.015


V_WORK = replace(SMALL, model=catalog.model("gpt3-2.7b"), sequence_length=1024)


def test_sends_of_an_order_with_chunks_wait_for_the_stages_own_collectives() -> None:
    """A single micro-batch in a V: sends run beside gathers of the next chunk's stepped weights and
    beside reductions of the chunk whose last pass is over.
    """
    cluster = Cluster(hardware=catalog.hardware("a100-40gb"), nodes=8, gpus_per_node=8)
    stage = StagePlan(layers=8, data_parallel=16, tensor_parallel=1, micro_batch=4, zero=1)
    plan = Plan(engine="zero-bubble", order="zb-v", micro_batches=1, stages=(stage,) * 4)
    assert abs(difference(V_WORK, cluster, plan)) < 0.015


def test_a_send_that_meets_others_on_both_of_its_links_is_as_late_as_on_the_slower_one() -> None:
    """Two stages a node: a send shares the link out of its node with one, the link into another
    node with a second one.
    """
    cluster = Cluster(hardware=catalog.hardware("a100-40gb"), nodes=4, gpus_per_node=8)
    stages = [
        StagePlan(layers=layers, data_parallel=1, tensor_parallel=4, micro_batch=4, zero=1)
        for layers in (5, 4, 3, 4, 4, 4, 4, 4)
    ]
    plan = Plan(engine="zero-bubble", order="v-min", micro_batches=4, stages=tuple(stages))
    work = replace(V_WORK, global_batch=16)
    assert abs(difference(work, cluster, plan)) < 0.015
