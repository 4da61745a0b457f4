"""Workloads that train adapters, and losses in chunks: time and memory, in both predictors."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import FieldError
from mistlab.cost.memory import CACHED_SHARE
from mistlab.engines.adapters import BASE_BYTES
from mistlab.job.prediction import Prediction
from mistlab.machine.cluster import Cluster
from mistlab.plan.adapter_sizes import adapter_parameters
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

CLUSTER = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=1, gpus_per_node=4)
WORK = workload_of("llama-7b", 4096, 32, "bf16")
ADAPTERS = replace(WORK, train="adapters")
FROZEN = replace(ADAPTERS, precision="fp16")
STAGE = StagePlan(layers=16, data_parallel=2, tensor_parallel=1, micro_batch=1, zero=1)
# Parameters of products of a stage's blocks, and of its embedding.
OF_BLOCKS = 16 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
OF_TABLE = 32000 * 4096


def plan(engine: str) -> Plan:
    return Plan(engine=engine, micro_batches=16, stages=(STAGE, STAGE))


def predicted(work: Workload, engine: str = "megatron-core") -> Prediction:
    return SymbolicPredictor(workload=work, cluster=CLUSTER).predict(plan(engine))


@pytest.mark.parametrize("engine", ["megatron-core", "megatron-bridge", "fsdp", "deepspeed"])
def test_adapters_spare_a_third_of_the_products(engine: str) -> None:
    precision = "fp16" if engine == "deepspeed" else "bf16"
    works = (replace(work, precision=precision) for work in (WORK, ADAPTERS))
    stages = (replace(STAGE, zero=0 if engine == "deepspeed" else 1),) * 2
    own = replace(plan(engine), stages=stages)
    whole, adapters = (
        SymbolicPredictor(workload=work, cluster=CLUSTER).predict(own).iteration_s for work in works
    )
    # Attention and what only moves bytes stay.
    assert 2 / 3 < adapters / whole < 0.86


def test_adapters_need_frozen_weights_and_their_own_states() -> None:
    whole, adapters = (predicted(work).stages[0].peak_allocated_bytes for work in (WORK, ADAPTERS))
    own = 16 * adapter_parameters(WORK.model, 16, "all")
    # 4 bytes of a gradient, and half of 12 of the optimizer's state.
    spared = (OF_BLOCKS + OF_TABLE) * 10 - own * (2 + 4 + 6)
    assert whole - adapters == pytest.approx(spared, rel=0.05)


def test_the_allocator_needs_no_bytes_for_a_step_of_frozen_layers() -> None:
    """The hardware's bytes for each parameter of the largest layer are of its optimizer's step."""
    whole, adapters = (
        predicted(work, "mist").stages[1] for work in (replace(WORK, precision="fp16"), FROZEN)
    )
    beyond = [stage.peak_reserved_bytes - stage.peak_allocated_bytes for stage in (whole, adapters)]
    assert beyond[0] > 18 * OF_TABLE / 2
    held = adapters.memory.weights + adapters.memory.gradients + adapters.memory.optimizer
    assert 0 < beyond[1] <= CACHED_SHARE * (adapters.peak_allocated_bytes - held) + 1


def test_the_model_s_arithmetic_has_no_gradients_of_frozen_weights() -> None:
    whole, frozen = (one.mfu * one.iteration_s for one in (predicted(WORK), predicted(ADAPTERS)))
    # Attention's own products make gradients of both operands all the same.
    assert 2 / 3 < frozen / whole < 0.72
    four_bits = predicted(replace(ADAPTERS, base="4bit"))
    assert four_bits.mfu < predicted(ADAPTERS).mfu < predicted(WORK).mfu + 0.02


def test_rank_and_targets_say_how_many_parameters_are_trained() -> None:
    peaks = [
        predicted(replace(ADAPTERS, adapter_rank=rank, adapter_targets=targets)).stages[0].memory
        for rank, targets in ((8, "all"), (64, "all"), (64, "attention"))
    ]
    more = 16 * adapter_parameters(WORK.model, 64 - 8, "all")
    assert peaks[1].weights - peaks[0].weights == pytest.approx(2 * more, abs=64)
    assert peaks[1].gradients - peaks[0].gradients == pytest.approx(4 * more, abs=64)
    assert peaks[1].optimizer - peaks[0].optimizer == pytest.approx(12 * more / 2, abs=64)
    assert peaks[2].optimizer < peaks[1].optimizer


@pytest.mark.parametrize("base", ["8bit", "4bit"])
def test_a_base_of_few_bits_saves_bytes_and_takes_time(base: str) -> None:
    wide, narrow = (predicted(replace(ADAPTERS, base=bits)) for bits in ("16bit", base))
    saved = OF_BLOCKS * (2 - BASE_BYTES[base])  # type: ignore[index]
    apart = wide.stages[0].memory.weights - narrow.stages[0].memory.weights
    assert apart == pytest.approx(saved, rel=0.01)
    # Before each product its weights are read in few bits and written in 16, as slowly as products
    # are slower than their rates.
    moved = OF_BLOCKS * (BASE_BYTES[base] + 2)  # type: ignore[index]
    seconds = 2 * moved / CLUSTER.hardware.gpu.memory_bytes_per_s
    longer = narrow.stages[0].stable_s - wide.stages[0].stable_s
    assert 1 < longer / seconds < 1.2


def test_a_loss_in_chunks_holds_the_logits_of_a_chunk() -> None:
    long = replace(WORK, sequence_length=65536, global_batch=32)
    whole, chunked = (predicted(replace(long, loss=loss)) for loss in ("whole", "chunked"))
    held = [one.stages[1].memory.logits for one in (whole, chunked)]
    assert held[1] == pytest.approx(held[0] * 4096 / 65536, rel=1e-6)
    fullest = [one.stages[1].peak_allocated_bytes for one in (whole, chunked)]
    assert fullest[0] - fullest[1] > 4 * GIB_BYTES
    assert whole.iteration_s == chunked.iteration_s
    short = [predicted(replace(WORK, loss=loss)).stages[1].memory for loss in ("whole", "chunked")]
    assert short[0] == short[1]


@pytest.mark.parametrize(("optimizer", "moments"), [("adamw", 4), ("adamw-8bit", 2.03125)])
def test_states_of_16_bits_take_eight_bytes_a_parameter(optimizer: str, moments: float) -> None:
    work = replace(WORK, states="16bit", optimizer=optimizer)  # type: ignore[arg-type]
    held = predicted(work, "fsdp").stages[0].memory
    parameters = OF_BLOCKS + OF_TABLE
    assert held.weights == held.gradients == pytest.approx(2 * parameters, rel=0.03)
    assert held.optimizer == pytest.approx(moments / 4 * held.weights, rel=1e-3)


@pytest.mark.parametrize(
    "changes", [{}, {"base": "4bit"}, {"loss": "chunked"}, {"states": "16bit"}]
)
def test_a_played_plan_of_adapters_takes_as_long_as_predicted(changes: dict[str, str]) -> None:
    work = replace(ADAPTERS, **changes)  # type: ignore[arg-type]
    closed = predicted(work)
    played = EventSimulator(workload=work, cluster=CLUSTER).predict(plan("megatron-core"))
    assert closed.iteration_s == pytest.approx(played.iteration_s, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": "adapters", "adapter_rank": 8192}, "adapter_rank: 8192 is above"),
        ({"base": "4bit"}, "base: 4bit weights cannot be trained, but train is all"),
        ({"adapter_rank": 16}, "adapter_rank: 16, but train is all"),
        ({"adapter_targets": "attention"}, "adapter_targets: attention, but train is all"),
        ({"train": "some"}, "train"),
        ({"train": "adapters", "base": "2bit"}, "base"),
        ({"train": "adapters", "adapter_rank": 0}, "adapter_rank"),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_remedy(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(FieldError, match=words):
        replace(WORK, **changes)  # type: ignore[arg-type]
