"""On a device without memory whole iterations run, and nothing keeps the host waiting."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mistlab.plan.plan import Offload, Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from runtime.checks.fake.fake_device import device_findings, fake_device  # noqa: E402
from runtime.checks.fake.watch import WaitFinding  # noqa: E402
from runtime.devices.cuda import DRIVERS  # noqa: E402
from runtime.engine.training import Training  # noqa: E402
from tests.runtime.worlds import MIXED, random_plan, ratios, stage, workload  # noqa: E402
from tests.sweep import sweep  # noqa: E402

ROOT = Path(__file__).parents[2]
PLAIN = Training()
SCALED = Training(clip_norm=1.0, loss_scale=2.0**10)
ON_HOST = Training(clip_norm=1.0, steps_on_host=True)
SMALL = {"hidden": 16, "heads": 2, "ffn": 32, "sequence_length": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One rank of a plan."""

    work: Workload
    plan: Plan
    rank: int = 0
    training: Training = PLAIN
    serialises: bool = False

    @property
    def findings(self) -> tuple[WaitFinding, ...]:
        return device_findings(
            self.work, self.plan, self.rank, self.training, serialises=self.serialises
        )


def one_stage(work: Workload, training: Training, **fields: Any) -> Case:
    data = fields.get("data_parallel", 1)
    whole = Plan(micro_batches=2, stages=(stage(2, micro_batch=4 // data, **fields),))
    return Case(work=work, plan=whole, training=training)


def small(family: str, **fields: Any) -> Workload:
    return workload(family, **{"layers": 2, **SMALL, **fields})


def tied_pipeline(rank: int, training: Training, *, serialises: bool = False) -> Case:
    """Tied tables at both ends, of unlike degrees."""
    stages = (
        stage(1, data_parallel=2, micro_batch=1, zero=3, offload=MIXED),
        stage(1, tensor_parallel=2, zero=1, checkpointed_layers=1),
    )
    return Case(
        work=small("falcon", tied_embeddings=True, biases=True, vocab=97, batch=4),
        plan=Plan(micro_batches=2, stages=stages),
        rank=rank,
        training=training,
        serialises=serialises,
    )


CASES = {
    "gpt in full precision, one table": one_stage(small("gpt", tied_embeddings=True), PLAIN),
    "llama in fp16, ZeRO-3, everything offloaded in part, loss scaling": one_stage(
        small("llama", precision="fp16", kv_heads=1),
        SCALED,
        data_parallel=2,
        zero=3,
        checkpointed_layers=1,
        offload=MIXED,
    ),
    "falcon in bf16, ZeRO-2, stepped on the host": one_stage(
        small("falcon", precision="bf16"), ON_HOST, data_parallel=2, zero=2, offload=MIXED
    ),
    "gpt in fp16, ZeRO-1, everything offloaded, tensor parallel": one_stage(
        small("gpt", precision="fp16"),
        SCALED,
        data_parallel=2,
        tensor_parallel=2,
        zero=1,
        offload=ratios(1.0, 1.0, 1.0, 1.0),
    ),
    "the first stage of a tied pipeline": tied_pipeline(0, SCALED),
    "the last stage of a tied pipeline, serialised": tied_pipeline(3, SCALED, serialises=True),
}


@pytest.mark.parametrize("name", sweep(reversed(CASES), first=3))
def test_nothing_keeps_the_host_waiting(name: str) -> None:
    assert CASES[name].findings == ()


@pytest.mark.parametrize("name", sweep(list(CASES)[2:], first=2))
def test_an_iteration_has_no_call_that_the_capture_of_a_graph_forbids(name: str) -> None:
    """But where the host steps: its lane waits for gradients, which no graph can hold."""
    case = CASES[name]
    found = device_findings(
        case.work,
        case.plan,
        case.rank,
        case.training,
        serialises=case.serialises,
        captures=True,
    )
    assert {one.lane for one in found} == ({"host"} if case.training.steps_on_host else set())
    assert {one.kind for one in found} <= {"wait", "blocking copy"}


OFFLOADS = (
    ratios(0, 0, 0, 0),
    *(ratios(*(float(k == i) for i in range(4))) for k in range(4)),
    MIXED,
)
GRID = [
    # Any two of these meet, with each kind of training.
    (family, precision, zero, offload, (PLAIN, SCALED, ON_HOST)[(a + b + c + d) % 3])
    for a, family in enumerate(("gpt", "llama", "falcon"))
    for b, precision in enumerate(("fp32", "fp16", "bf16"))
    for c, zero in enumerate(range(4))
    for d, offload in enumerate(OFFLOADS)
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "precision", "zero", "offload", "training"), GRID)
def test_nothing_keeps_the_host_waiting_in_the_whole_grid(
    family: str, precision: str, zero: int, offload: Offload, training: Training
) -> None:
    work = small(family, precision=precision)
    case = one_stage(
        work, training, data_parallel=2, zero=zero, checkpointed_layers=1, offload=offload
    )
    assert case.findings == ()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_nothing_keeps_the_host_waiting_in_random_plans(seed: int) -> None:
    work, plan = random_plan(seed, most_ranks=8)
    training = (PLAIN, SCALED, ON_HOST)[seed % 3]
    rank = seed % plan.num_gpus
    assert device_findings(work, plan, rank, training, serialises=seed % 2 == 1) == ()


def test_what_looks_for_an_accelerator_does_not_come_upon_it() -> None:
    with fake_device():
        assert torch.zeros(1, device="sham").device.type == "sham"
    assert not torch.accelerator.is_available()
    assert DRIVERS.keys() == {"cuda"}


def test_backward_passes_run_in_a_thread_of_the_device(warm_python: str) -> None:
    """In a process of its own: autograd starts its threads once, for the devices known by then."""
    words = """
import os
import threading
import torch
from runtime.checks.fake.fake_device import fake_device
threads = []
class Told(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, gradient):
        threads.append(threading.get_ident())
        return gradient
with fake_device():
    Told.apply(torch.zeros((), device="sham", requires_grad=True)).backward()
assert threads != [threading.get_ident()]
# As the command does: the device's thread may not meet the end of the interpreter.
os._exit(0)
"""
    subprocess.run([warm_python, "-c", words], cwd=ROOT, check=True)
