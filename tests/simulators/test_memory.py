"""Memory over a played iteration: its peak against the closed form, and when it runs out."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mistlab import catalog
from mistlab.engines.adapters import Loss
from mistlab.graph.stage_model import StageModel
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import Line
from mistlab.plan.plan import Offload, Plan, StagePlan
from simulators.events import EventSimulator
from simulators.memory import MemoryOverTime, memory_of
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

WORK = workload_of("gpt3-1.3b", 2048, 32)
CLUSTER = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=4)
STAGE = StagePlan(layers=12, data_parallel=2, tensor_parallel=1, micro_batch=2, zero=1)
PLAN = Plan(micro_batches=8, stages=(replace(STAGE, layers=13), replace(STAGE, layers=11)))


EVERYTHING = Offload(weights=0.5, gradients=1.0, optimizer=1.0, activations=0.5)


def memory(plan: Plan, room: float = 1e15, cluster: Cluster = CLUSTER) -> list[MemoryOverTime]:
    simulation = EventSimulator(workload=WORK, cluster=cluster).simulate(plan)
    model = StageModel.of(WORK, plan.engine)
    return memory_of(simulation, plan, model, np.full(plan.num_stages, room))


def with_all(**changes: object) -> Plan:
    stages = tuple(replace(stage, **changes) for stage in PLAN.stages)  # type: ignore[arg-type]
    return replace(PLAN, stages=stages)


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        with_all(checkpointed_layers=11),
        with_all(checkpointed_layers=4, zero=3),
        with_all(zero=2, offload=Offload(gradients=0.5)),
        replace(with_all(checkpointed_layers=2), engine="megatron"),
        # The step is the fullest moment.
        replace(
            with_all(checkpointed_layers=11, micro_batch=1), engine="megatron", micro_batches=16
        ),
        replace(PLAN, engine="deepspeed"),
        replace(
            with_all(checkpointed_layers=11, data_parallel=1, micro_batch=4), engine="deepspeed"
        ),
        *(
            Plan(
                engine="deepspeed",
                micro_batches=4,
                stages=(replace(STAGE, layers=24, data_parallel=4, zero=zero),),
            )
            for zero in (0, 1, 2, 3)
        ),
        Plan(micro_batches=4, stages=(replace(STAGE, layers=24, data_parallel=4),)),
        with_all(offload=Offload(activations=0.75)),
        with_all(checkpointed_layers=1, offload=Offload(activations=1.0)),
        with_all(checkpointed_layers=5, offload=Offload(activations=0.875)),
        with_all(offload=Offload(optimizer=1.0)),
        with_all(checkpointed_layers=5, zero=3, offload=EVERYTHING),
        Plan(
            micro_batches=8,
            stages=tuple(
                replace(STAGE, layers=layers, data_parallel=1, offload=EVERYTHING)
                for layers in (1, 21, 1, 1)
            ),
        ),
    ],
)
def test_the_peak_is_the_closed_forms(plan: Plan) -> None:
    stages = SymbolicPredictor(workload=WORK, cluster=CLUSTER).predict(plan).stages
    for found, stage in zip(memory(plan), stages, strict=True):
        assert found.peak_bytes == pytest.approx(stage.peak_allocated_bytes, rel=1e-9)


@pytest.mark.parametrize("offload", [EVERYTHING, Offload(optimizer=0.375, activations=1.0)])
def test_stages_have_room_for_the_blocks_that_they_have(offload: Offload) -> None:
    """A hybrid's blocks of experts are 20 times as large as its others, which some stages have
    alone."""
    work = replace(workload_of("nemotron-3-nano", 1024, 16), precision="bf16", attention="flash")
    cluster = Cluster(hardware=catalog.hardware("b200-180gb"), nodes=1, gpus_per_node=8)
    stage = StagePlan(layers=1, data_parallel=2, tensor_parallel=1, micro_batch=2, zero=1)
    layers = (*(1,) * 6, 5, 41)
    plan = Plan(
        micro_batches=4,
        stages=tuple(replace(stage, layers=own, offload=offload) for own in layers),
    )
    stages = SymbolicPredictor(workload=work, cluster=cluster).predict(plan).stages
    simulation = EventSimulator(workload=work, cluster=cluster).simulate(plan)
    model = StageModel.of(work, plan.engine)
    played = memory_of(simulation, plan, model, np.full(plan.num_stages, 1e15))
    for found, own in zip(played[:6], stages, strict=False):
        assert found.peak_bytes == pytest.approx(own.peak_allocated_bytes, rel=1e-9)


@pytest.mark.parametrize(
    ("engine", "loss"),
    [
        ("fsdp", "whole"),
        ("fsdp-eager-whole-logits", "whole"),
        ("nanotron", "whole"),
        ("nanotron-whole-inputs", "whole"),
        ("fsdp-fused-loss", "chunked"),
        ("trainer", "chunked"),
    ],
)
@pytest.mark.parametrize("checkpointed", [0, 5])
@pytest.mark.parametrize("order", ["1f1b", "gpipe", "zb-h1"])
def test_engines_hold_what_they_keep_beyond_layers_graphs(
    engine: str, loss: Loss, checkpointed: int, order: str
) -> None:
    """Wide logits and whole ones, or those of one chunk of tokens; gates and whole inputs."""
    work = replace(WORK, precision="bf16", loss=loss)
    stage = replace(STAGE, tensor_parallel=2, data_parallel=1, sequence_parallel=1)
    stages = (replace(stage, layers=12, checkpointed_layers=checkpointed),) * 2
    plan = Plan(engine=engine, micro_batches=4, stages=stages, order=order)
    simulation = EventSimulator(workload=work, cluster=CLUSTER).simulate(plan)
    room = np.full(2, 1e15)
    found = memory_of(simulation, plan, StageModel.of(work, engine), room)
    predictor = SymbolicPredictor(workload=work, cluster=CLUSTER)
    for one, stage in zip(found, predictor.predict(plan).stages, strict=True):
        assert one.peak_bytes == pytest.approx(stage.peak_allocated_bytes, rel=1e-9)


@pytest.mark.parametrize("order", ["interleaved-2", "interleaved-3"])
@pytest.mark.parametrize("engine", ["mistlab", "fsdp", "megatron"])
@pytest.mark.parametrize("changes", [{}, {"checkpointed_layers": 5}, {"zero": 2}])
def test_the_peak_of_chunks_is_the_closed_forms(
    order: str, engine: str, changes: dict[str, Any]
) -> None:
    """The chunk with the head, and those that recompute, are not where most is kept."""
    plan = replace(with_all(**changes), order=order, engine=engine)
    work = replace(WORK, precision="bf16")
    stages = SymbolicPredictor(workload=work, cluster=CLUSTER).predict(plan).stages
    simulation = EventSimulator(workload=work, cluster=CLUSTER).simulate(plan)
    played = memory_of(simulation, plan, StageModel.of(work, engine), np.full(2, 1e15))
    for found, stage in zip(played, stages, strict=True):
        assert found.peak_bytes == pytest.approx(stage.peak_allocated_bytes, rel=1e-9)


@pytest.mark.parametrize("link_gbytes_per_s", [1.0, 100.0])
def test_offloading_keeps_to_its_memory_however_slow_copies_are(link_gbytes_per_s: float) -> None:
    """Tasks wait where the memory that was promised would not do."""
    slow = Line(latency_us=0.0, gbytes_per_s=link_gbytes_per_s, smallest_mib=1.0, largest_mib=1.0)
    transfers = CLUSTER.hardware.transfers
    assert transfers is not None
    groups = tuple(replace(g, host_to_device=slow, device_to_host=slow) for g in transfers.groups)
    node = replace(CLUSTER.hardware.node, host_link_gbytes_per_s=link_gbytes_per_s)
    changes = {"node": node, "measured_with": None}
    whole = replace(transfers, groups=groups)
    cluster = replace(CLUSTER, hardware=replace(CLUSTER.hardware, transfers=whole, **changes))
    plan = with_all(checkpointed_layers=5, offload=EVERYTHING)
    stages = SymbolicPredictor(workload=WORK, cluster=cluster).predict(plan).stages
    for found, stage in zip(memory(plan, cluster=cluster), stages, strict=True):
        assert 0.95 < found.peak_bytes / stage.peak_allocated_bytes < 1 + 1e-9


def test_all_that_is_allocated_in_an_iteration_is_freed() -> None:
    offload = Offload(optimizer=0.5, activations=0.25)
    for found in memory(with_all(checkpointed_layers=3, offload=offload)):
        assert (found.by_class >= -1e-3).all()
        states, buffers, *others = found.by_class[-1]
        assert (found.by_class[:, 0] == states).all()
        assert (found.by_class[:, 1] == buffers).all()
        assert others == pytest.approx([0, 0, 0], abs=1e-3)
        assert (np.diff(found.times_s) > 0).all()


def test_offloaded_activations_leave_while_their_micro_batch_waits() -> None:
    kept, gone = (
        max(memory(with_all(offload=Offload(activations=share)))[0].by_class[:, 3])
        for share in (0.0, 1.0)
    )
    assert gone < 0.5 * kept


def test_running_out_names_the_moment_and_the_classes() -> None:
    (first, _) = memory(PLAN)
    short, enough = memory(PLAN, room=0.9 * first.peak_bytes)[0], memory(PLAN)[0]
    assert enough.fits
    assert enough.overflow == ""
    assert not short.fits
    assert short.overflow.startswith("stage 0 is out of memory at ")
    assert "activations" in short.overflow
    moment, classes = first.peak
    assert 0 < moment < first.times_s[-1]
    assert sum(classes.values()) == pytest.approx(first.peak_bytes)


def test_no_larger_share_of_offloaded_states_takes_more_memory() -> None:
    """One of these blocks has nearly all parameters, and there are no two such blocks to step."""
    workload = workload_of("nemotron-3-nano", 1024, 4, "bf16", layers=3)
    cluster = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=1, gpus_per_node=1)
    stage = StagePlan(layers=3, data_parallel=1, tensor_parallel=1, micro_batch=2)
    plans = [
        Plan(micro_batches=2, stages=(replace(stage, offload=Offload(optimizer=ratio)),))
        for ratio in (0.125, 0.25, 0.5, 0.75, 1.0)
    ]
    predictions = SymbolicPredictor(workload=workload, cluster=cluster).predict_many(plans)
    peaks = [one.peak_reserved_bytes for one in predictions]
    assert peaks == sorted(peaks, reverse=True)
