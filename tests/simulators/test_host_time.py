"""Engines whose host issues kernels one by one: the closed form and the event simulator agree."""

from dataclasses import replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.distinct import FEW_ROWS
from mistlab.engines.engine import ENGINES, HostTime
from mistlab.engines.nanotron import NANOTRON
from mistlab.machine.cluster import Cluster, Profile
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.stages.stage_batch import StageBatch
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

MODEL = ModelSpec.of(family="llama", hidden=2048, layers=8, heads=16, ffn=8192, vocab=32000)
WORKLOAD = Workload(
    model=MODEL, sequence_length=2048, global_batch=64, attention="flash", precision="bf16"
)
CLUSTER = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=2, gpus_per_node=8)


def plan(tensor: int, blocks: tuple[int, ...], micro_batch: int = 1) -> Plan:
    data = 16 // tensor // len(blocks)
    stages = (
        StagePlan(layers=count, data_parallel=data, tensor_parallel=tensor, micro_batch=micro_batch)
        for count in blocks
    )
    return Plan(engine="nanotron", micro_batches=64 // data // micro_batch, stages=tuple(stages))


def closed_s(one: Plan, host_s: float, cluster: Cluster = CLUSTER) -> float:
    host = HostTime(forward_s=host_s / 3, backward_s=2 * host_s / 3)
    predictor = SymbolicPredictor(workload=WORKLOAD, cluster=cluster)
    micro_batches = StageBatch.of_plan(one).layers[:1] * 0 + one.micro_batches
    engine = replace(NANOTRON, name="nanotron", host=host)
    return float(predictor.iterations(StageBatch.of_plan(one), micro_batches, engine=engine)[0])


def test_a_slow_host_is_what_a_step_takes() -> None:
    one = plan(1, (8,))
    fast, slow = closed_s(one, 1e-6), closed_s(one, 30e-3)
    # Eight blocks of four micro-batches on a rank.
    assert slow == pytest.approx(one.micro_batches * 8 * 30e-3, rel=0.15)
    assert fast < slow / 4


def test_a_slow_host_issues_first_and_last_passes_too() -> None:
    """With a single micro-batch the first forward and the last backward are all passes."""
    one = replace(plan(1, (8,), micro_batch=4), micro_batches=1)
    assert closed_s(one, 30e-3) == pytest.approx(8 * 30e-3, rel=0.15)


def test_blocks_are_late_in_pipelines_alone() -> None:
    late = Profile(name="late", block_ms=50.0, block_ranks=2, source="made up")
    alone, both = (
        [closed_s(one, 1e-6, on) for on in (CLUSTER, replace(CLUSTER, profile=late))]
        for one in (plan(2, (8,)), plan(2, (4, 4)))
    )
    assert alone[1] == alone[0]
    # Two ranks share a block, and each of two stages has four blocks.
    passes = plan(2, (4, 4)).micro_batches + 1
    assert both[1] == pytest.approx(passes * 4 * 2 * 0.050, rel=0.05)


def test_a_host_that_is_ahead_costs_at_most_its_first_block() -> None:
    """Before the first block's forward pass is issued, its stage computes the embedding alone."""
    one = plan(1, (8,))
    held_s = closed_s(one, 1e-4) - closed_s(one, 1e-6)
    assert 0 < held_s < 1e-4 / 3


@pytest.mark.parametrize(
    "one",
    [plan(1, (8,)), plan(2, (4, 4)), plan(4, (3, 3, 2, 0)), plan(2, (2, 2, 2, 2))],
    ids=["one stage", "two stages", "head alone", "four stages"],
)
@pytest.mark.parametrize("profile", ["none", "ultrascale"])
def test_closed_form_and_events_agree(one: Plan, profile: str) -> None:
    named = None if profile == "none" else catalog.profile(profile)
    cluster = replace(CLUSTER, profile=named)
    closed = SymbolicPredictor(workload=WORKLOAD, cluster=cluster).predict(one).iteration_s
    played = EventSimulator(workload=WORKLOAD, cluster=cluster).simulate(one).iteration_s
    assert closed == pytest.approx(played, rel=0.05)


@pytest.mark.parametrize("order", ["interleaved-2", "interleaved-4"])
def test_a_host_gets_ahead_while_its_stage_waits(order: str) -> None:
    """The host of an eager engine issues passes that the GPU is not ready for."""
    small = replace(WORKLOAD, sequence_length=512)
    stages = (StagePlan(layers=2, data_parallel=4, tensor_parallel=1, micro_batch=2),) * 4
    one = Plan(engine="megatron-core", micro_batches=8, order=order, stages=stages)
    if order == "interleaved-4":
        one = replace(one, stages=(replace(stages[0], layers=4),) * 2)
        one = replace(one, stages=tuple(replace(s, data_parallel=8) for s in one.stages))
        one = replace(one, micro_batches=4)
    closed = SymbolicPredictor(workload=small, cluster=CLUSTER).predict(one).iteration_s
    played = EventSimulator(workload=small, cluster=CLUSTER).simulate(one).iteration_s
    assert closed == pytest.approx(played, rel=0.03)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("recomputed", [0, 2])
def test_a_host_that_waits_for_sends_is_no_pass_ahead(stages: int, recomputed: int) -> None:
    """A pipeline fills and drains as slowly as its hosts issue passes, in the default order."""
    small, blocks = replace(WORKLOAD, sequence_length=128), 8 // stages
    stage = StagePlan(
        layers=blocks,
        data_parallel=16 // stages,
        tensor_parallel=1,
        micro_batch=1,
        checkpointed_layers=min(recomputed, blocks),
    )
    one = Plan(engine="megatron-core", micro_batches=4 * stages, stages=(stage,) * stages)
    host = ENGINES["megatron-core"].host
    assert host is not None
    both_s = host.forward_s + host.backward_s
    of_stage_s = blocks * both_s + stage.checkpointed_layers * host.forward_s
    closed = SymbolicPredictor(workload=small, cluster=CLUSTER).predict(one).iteration_s
    played = EventSimulator(workload=small, cluster=CLUSTER).simulate(one).iteration_s
    # The first stage has the embedding, the last the head.
    of_end_s = of_stage_s + 2 * host.end_s
    passes_s = (4 * stages - 1) * of_end_s + (stages - 2) * of_stage_s + 2 * of_end_s
    # Reductions and the step come after the passes, in less time than one more of them.
    assert passes_s <= closed < passes_s + of_end_s
    assert closed == pytest.approx(played, rel=0.05)


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("engine", ["megatron-core", "megatron-fsdp"])
def test_an_embedding_hides_none_of_the_collectives_beside_it(
    engine: str, micro_batches: int
) -> None:
    """The first block is gathered, and its gradients reduced, for longer than an embedding takes
    that is launched as slowly as the blocks, which hide their neighbours' collectives.
    """
    few = replace(WORKLOAD, sequence_length=256, global_batch=8 * micro_batches)
    stage = StagePlan(layers=4, data_parallel=8, tensor_parallel=1, micro_batch=1, zero=1)
    one = Plan(engine=engine, micro_batches=micro_batches, stages=(stage, stage))
    closed = SymbolicPredictor(workload=few, cluster=CLUSTER).predict(one).iteration_s
    played = EventSimulator(workload=few, cluster=CLUSTER).simulate(one).iteration_s
    assert closed == pytest.approx(played, rel=0.0005)


@pytest.mark.parametrize(
    ("engine", "zero", "micro_batches", "stages"),
    [
        ("fsdp", 1, 8, 1),
        ("fsdp-eager", 3, 4, 1),
        ("megatron-fsdp", 2, 16, 1),
        ("nanotron", 0, 16, 1),
        ("nanotron", 0, 8, 4),
        ("nanotron", 1, 8, 4),
    ],
)
def test_a_host_gets_ahead_in_a_formula(
    engine: str, zero: int, micro_batches: int, stages: int
) -> None:
    """It issues passes while the first one waits for weights, and while other stages compute. In
    the last pass, gradients are reduced while blocks wait for it."""
    data = 16 // stages
    one = StagePlan(
        layers=8 // stages,
        data_parallel=data,
        tensor_parallel=1,
        micro_batch=1,
        zero=zero,
    )
    small = replace(
        WORKLOAD,
        model=ModelSpec.of(family="llama", hidden=4096, layers=8, heads=32, ffn=16384, vocab=32000),
        sequence_length=512,
        global_batch=micro_batches * data,
    )
    made = Plan(engine=engine, micro_batches=micro_batches, stages=(one,) * stages)
    closed = SymbolicPredictor(workload=small, cluster=CLUSTER).predict(made).iteration_s
    played = EventSimulator(workload=small, cluster=CLUSTER).simulate(made).iteration_s
    assert closed == pytest.approx(played, rel=0.01)


def test_hosts_that_are_never_ahead_hold_up_no_other_plan() -> None:
    """Ranks that share a block wait for the latest of their hosts; hosts of single ranks do not."""
    late = Profile(name="late", block_ms=5.0, block_ranks=2, source="made up")
    alone, shared = (
        Plan(
            engine="megatron-core",
            micro_batches=4,
            order="interleaved-2",
            stages=(
                StagePlan(layers=4, data_parallel=data, tensor_parallel=ranks, micro_batch=ranks),
            )
            * 2,
        )
        for data, ranks in ((8, 1), (4, 2))
    )
    small = replace(WORKLOAD, sequence_length=512, global_batch=32)
    on = [replace(CLUSTER, profile=profile) for profile in (None, late)]
    usual, held = (SymbolicPredictor(workload=small, cluster=own) for own in on)
    both = held.predict_many([alone, shared])
    singly = held.predict(alone), held.predict(shared)
    assert [one.iteration_s for one in both] == [one.iteration_s for one in singly]
    assert both[0].iteration_s == usual.predict(alone).iteration_s
    assert both[1].iteration_s > usual.predict(shared).iteration_s


LATE = Profile(name="late", send_gpus=1, send_ms=1000.0, source="made up")


@pytest.mark.parametrize(("blocks", "sends"), [((4, 4), 2), ((2, 2, 2, 2), 4)])
def test_a_late_send_keeps_both_of_its_stages(blocks: tuple[int, ...], sends: int) -> None:
    """A stage sends and receives in both directions for each micro-batch, one after another."""
    late = replace(CLUSTER, profile=LATE)
    fewer, more = (plan(1, blocks, micro_batch) for micro_batch in (2, 1))
    passed = more.micro_batches - fewer.micro_batches
    for predicted in (
        lambda one, on: SymbolicPredictor(workload=WORKLOAD, cluster=on).predict(one).iteration_s,
        lambda one, on: EventSimulator(workload=WORKLOAD, cluster=on).simulate(one).iteration_s,
    ):
        longer, shorter = (predicted(one, late) - predicted(one, CLUSTER) for one in (more, fewer))
        assert (longer - shorter) / passed == pytest.approx(sends, rel=0.05)


def test_a_first_micro_batch_waits_once_for_each_late_send() -> None:
    """There and back between two stages, not twice for sender and receiver."""
    one = replace(plan(1, (4, 4), 8), micro_batches=1)
    late = replace(CLUSTER, profile=LATE)
    for made in (SymbolicPredictor, EventSimulator):
        plain, slow = (
            made(workload=replace(WORKLOAD, global_batch=64), cluster=on).predict(one).iteration_s
            for on in (CLUSTER, late)
        )
        assert slow - plain == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("made", [SymbolicPredictor, EventSimulator])
def test_sends_are_late_beside_many_whole_gradients(
    made: type[SymbolicPredictor] | type[EventSimulator],
) -> None:
    """Two late sends for each of eight micro-batches, if eight ranks reduce whole gradients."""
    beside = Profile(
        name="late",
        send_ms=1000.0,
        send_gpus=512,
        whole_micro_batches=8,
        whole_ranks=8,
        whole_gpus=64,
        source="made up",
    )

    def longer_s(one: Plan, nodes: int = 2) -> float:
        on = replace(CLUSTER, nodes=nodes)
        late_s, usual_s = (
            made(workload=WORKLOAD, cluster=cluster).predict(one).iteration_s
            for cluster in (replace(on, profile=beside), on)
        )
        return late_s - usual_s

    whole = plan(1, (4, 4))
    sharded = replace(whole, stages=tuple(replace(stage, zero=1) for stage in whole.stages))
    fewer_ranks = plan(2, (4, 4))
    assert longer_s(whole) == pytest.approx(16.0, rel=0.05)
    assert longer_s(sharded) == 0
    assert longer_s(plan(1, (4, 4), 2)) == 0
    assert longer_s(fewer_ranks) == 0
    beside = replace(beside, whole_gpus=16)
    assert longer_s(fewer_ranks) == pytest.approx(32.0, rel=0.05)
    beside = replace(beside, whole_ranks=4)
    inside = tuple(replace(stage, data_parallel=4) for stage in whole.stages)
    assert longer_s(replace(whole, micro_batches=16, stages=inside), nodes=1) == 0


def test_stepped_weights_are_gathered_after_the_step() -> None:
    stages = tuple(replace(stage, zero=1) for stage in plan(1, (8,), 4).stages)
    one = replace(plan(1, (8,), 4), stages=stages)
    closed = SymbolicPredictor(workload=WORKLOAD, cluster=CLUSTER).predict(one).iteration_s
    played = EventSimulator(workload=WORKLOAD, cluster=CLUSTER).simulate(one).iteration_s
    assert closed == pytest.approx(played, rel=0.02)


def test_without_a_profile_the_upper_bound_is_that_of_the_slowest_cluster() -> None:
    named = replace(CLUSTER, profile=catalog.profile("ultrascale"))
    one = plan(4, (2, 2, 2, 2))
    here, there = (
        SymbolicPredictor(workload=WORKLOAD, cluster=on).predict(one) for on in (CLUSTER, named)
    )
    assert here.iteration_s < there.iteration_s
    assert here.iteration_s_high == pytest.approx(there.iteration_s_high)
    width = here.iteration_s_low / here.iteration_s
    assert width == pytest.approx(there.iteration_s_low / there.iteration_s)
    alone = SymbolicPredictor(workload=WORKLOAD, cluster=CLUSTER).predict(plan(4, (8,)))
    assert alone.iteration_s_high / alone.iteration_s == pytest.approx(2 - width)


def test_only_the_last_stages_of_nanotron_may_lack_blocks() -> None:
    assert plan(4, (4, 4, 0, 0)).num_stages == 4
    with pytest.raises(ValueError, match=r"stages\[1\].layers: 0 is too small"):
        plan(4, (4, 0, 4, 0))
    with pytest.raises(ValueError, match=r"stages\[3\].layers: 0 is too small"):
        replace(plan(4, (4, 4, 0, 0)), engine="megatron", stages=plan(4, (3, 3, 2, 0)).stages)


@pytest.mark.parametrize("engine", ["megatron-core", "fsdp-eager", "mistlab"])
def test_many_candidates_take_as_long_as_each_alone(engine: str) -> None:
    """Times of many stages are from a table of strategies and sets of layers."""
    draw, rows = np.random.default_rng(0), 2 * FEW_ROWS
    stages = StageBatch(
        layers=draw.integers(2, 5, rows),
        data_parallel=2 ** draw.integers(0, 3, rows),
        tensor_parallel=2 ** draw.integers(0, 2, rows),
        micro_batch=draw.integers(1, 3, rows),
        zero=draw.integers(0, 4, rows),
        has_embedding=draw.integers(0, 2, rows),
        offload_activations=draw.integers(0, 2, rows) / 2 * (engine == "mistlab"),
    )
    late = Profile(name="late", block_ms=0.5, source="made up")
    predictor = SymbolicPredictor(workload=WORKLOAD, cluster=replace(CLUSTER, profile=late))
    many_s = predictor.stage_costs(stages, engine=engine).seconds.stable_s
    for row in range(0, rows, 100):
        alone = predictor.stage_costs(stages.chosen(np.array([row])), engine=engine)
        assert many_s[row] == pytest.approx(alone.seconds.stable_s[0], rel=1e-14)


@pytest.mark.parametrize("micro_batches", [2, 8])
def test_passes_that_activations_leave_wait_for_their_host(micro_batches: int) -> None:
    """Four stages, whose ranks wait for the slowest of their hosts."""
    late = Profile(name="late", block_ms=2.0, source="made up")
    cluster = replace(CLUSTER, nodes=4, gpus_per_node=2, profile=late)
    work = workload_of("gpt3-1.3b", 256, micro_batches, "bf16", layers=16)
    stage = StagePlan(
        layers=4,
        data_parallel=1,
        tensor_parallel=2,
        micro_batch=1,
        offload=Offload(activations=1.0),
    )
    one = Plan(engine="fsdp-eager", micro_batches=micro_batches, stages=(stage,) * 4)
    closed = SymbolicPredictor(workload=work, cluster=cluster).predict(one).iteration_s
    played = EventSimulator(workload=work, cluster=cluster).simulate(one).iteration_s
    assert closed == pytest.approx(played, rel=0.02)


def test_a_stage_that_sends_nothing_has_no_late_sends_beside_others_that_do() -> None:
    """Passes that activations leave may take longer in an idle stage than one after another."""
    late = Profile(name="late", block_ms=0.5, source="made up")
    is_whole = np.array([1, 0])
    stages = StageBatch(
        layers=5,
        checkpointed_layers=2,
        data_parallel=2,
        tensor_parallel=2,
        micro_batch=2,
        zero=3,
        in_flight=3,
        has_embedding=is_whole,
        has_head=is_whole,
        offload_activations=1.0,
    )
    cluster = replace(CLUSTER, profile=late, inter_node_gbytes_per_s=1.0)
    work = workload_of("gpt3-1.3b", 512, 64, "bf16")
    predictor = SymbolicPredictor(workload=work, cluster=cluster)
    seconds = predictor.stage_costs(stages, engine="trainer-loop").seconds
    assert seconds.round_late_s[0] == 0
