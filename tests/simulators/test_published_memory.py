"""Plans that ran as published are said to fit, and to hold what was measured.

Peaks of reserved MiB and plans of runs on L4: Mist (EuroSys 2025, artifact).
"""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.core.units import MIB_BYTES
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Attention
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

HARDWARE = catalog.hardware("l4-24gb")
STAGE = StagePlan(layers=1, data_parallel=1, tensor_parallel=1, micro_batch=1, zero=1)
# A pipeline of a stage with the embedding and one with the head.
MIST = [
    ("gpt3-1.3b", "math", (13, 11), 1, 1, (20412, 16116)),
    ("gpt3-1.3b", "flash", (13, 11), 1, 2, (20310, 16562)),
    ("llama-1.3b", "flash", (13, 11), 1, 2, (20654, 16806)),
    ("gpt3-2.7b", "flash", (17, 15), 2, 1, (20824, 17540)),
]


def predictor_of(name: str, attention: Attention, gpus: int) -> SymbolicPredictor:
    work = workload_of(name, 2048, 32 * gpus // 2, attention=attention)
    cluster = Cluster(hardware=HARDWARE, nodes=1, gpus_per_node=gpus)
    return SymbolicPredictor(workload=work, cluster=cluster)


@pytest.mark.parametrize(("name", "attention", "layers", "data", "micro_batch", "held_mib"), MIST)
def test_stages_hold_what_was_measured(
    name: str,
    attention: Attention,
    layers: tuple[int, int],
    data: int,
    micro_batch: int,
    held_mib: tuple[int, int],
) -> None:
    stages = tuple(
        replace(STAGE, layers=count, data_parallel=data, micro_batch=micro_batch)
        for count in layers
    )
    plan = Plan(micro_batches=32 // micro_batch, stages=stages)
    found = predictor_of(name, attention, 2 * data).predict(plan)
    assert found.fits
    held = [stage.peak_reserved_bytes / MIB_BYTES for stage in found.stages]
    assert held == pytest.approx(held_mib, rel=0.01)


@pytest.mark.parametrize(
    ("engine", "name", "stages", "data", "micro_batch"),
    [
        ("megatron", "gpt3-1.3b", 1, 2, 8),
        ("megatron", "llama-1.3b", 1, 2, 8),
        ("megatron", "gpt3-2.7b", 1, 4, 1),
        ("megatron", "llama-2.7b", 1, 4, 1),
        ("deepspeed", "gpt3-2.7b", 4, 1, 1),
    ],
)
def test_baselines_that_ran_are_said_to_fit(
    engine: str, name: str, stages: int, data: int, micro_batch: int
) -> None:
    predictor = predictor_of(name, "flash", stages * data)
    layers = predictor.workload.model.layers // stages
    one = replace(
        STAGE,
        layers=layers,
        checkpointed_layers=layers,
        data_parallel=data,
        micro_batch=micro_batch,
    )
    micro_batches = predictor.workload.global_batch // data // micro_batch
    plan = Plan(engine=engine, micro_batches=micro_batches, stages=(one,) * stages)
    assert predictor.predict(plan).fits


def test_gradients_of_32_bits_would_not_have_fitted() -> None:
    """Nor does the plan under bf16, where Megatron has them."""
    predictor = predictor_of("gpt3-2.7b", "flash", 4)
    one = replace(STAGE, layers=32, checkpointed_layers=32, data_parallel=4)
    plan = Plan(engine="megatron", micro_batches=16, stages=(one,))
    assert predictor.predict(plan).fits
    predictor = replace(predictor, workload=replace(predictor.workload, precision="bf16"))
    assert not predictor.predict(plan).fits
