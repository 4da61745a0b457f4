"""On a device without memory iterations run without a hidden wait, and planted ones are found."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mistlab.plan import Plan  # noqa: E402
from mistlab.workload import Workload  # noqa: E402
from runtime.checks.fake_device import device_findings  # noqa: E402
from runtime.checks.watch import Finding, Kind  # noqa: E402
from runtime.engine.boundary import Boundary  # noqa: E402
from runtime.engine.cuda import CudaStreams  # noqa: E402
from runtime.engine.host_pool import HostPool  # noqa: E402
from runtime.engine.norm import Squares  # noqa: E402
from runtime.engine.optimizer import Scaling, Stepper  # noqa: E402
from runtime.engine.passes import Passes  # noqa: E402
from runtime.engine.state import Split  # noqa: E402
from runtime.engine.training import Training  # noqa: E402
from runtime.models.parallel import VocabularyCrossEntropy  # noqa: E402
from tests.runtime.worlds import MIXED, random_plan, ratios, stage, workload  # noqa: E402

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
    def findings(self) -> tuple[Finding, ...]:
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
    "the last stage of a tied pipeline, serialised": tied_pipeline(3, PLAIN, serialises=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nothing_keeps_the_host_waiting(case: Case) -> None:
    assert case.findings == ()


OFFLOADS = (
    ratios(0, 0, 0, 0),
    *(ratios(*(float(k == i) for i in range(4))) for k in range(4)),
    MIXED,
)
GRID = list(product(("gpt", "llama", "falcon"), ("fp32", "fp16", "bf16"), range(4), OFFLOADS))


@pytest.mark.slow
@pytest.mark.parametrize("training", [PLAIN, SCALED, ON_HOST], ids=["plain", "scaled", "host"])
@pytest.mark.parametrize(("family", "precision", "zero", "offload"), GRID)
def test_nothing_keeps_the_host_waiting_in_the_whole_grid(
    family: str, precision: str, zero: int, offload: Any, training: Training
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A line of a function that is another instead, and the finding that it is to give.

    ``at`` is what the line looks like where it is found, if that is another.
    """

    function: Callable[..., Any]
    right: str
    wrong: str
    kind: Kind
    operator: str
    task: str
    lane: str
    at: tuple[Callable[..., Any], str] | None = None

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        path = Path(self.function.__code__.co_filename)
        text = path.read_text(encoding="utf-8")
        assert text.count(self.right) == 1
        module = compile(text.replace(self.right, self.wrong), str(path), "exec")
        patch.setattr(self.function, "__code__", code_of(module, self.function.__qualname__))

    @property
    def place(self) -> str:
        function, line = self.at or (self.function, self.right)
        path = Path(function.__code__.co_filename)
        before, found, _ = path.read_text(encoding="utf-8").partition(line)
        assert found
        return f"{path.relative_to(ROOT).as_posix()}:{before.count(chr(10)) + 1}"

    def found_in(self, findings: tuple[Finding, ...]) -> bool:
        wanted = (self.kind, self.operator, self.task, self.lane, self.place)
        return wanted in [
            (one.kind, one.operator, one.task, one.lane, one.place.partition(" ")[0])
            for one in findings
        ]


def code_of(code: CodeType, name: str) -> CodeType:
    """The code of a function in the code of its module."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    for one in inner:
        if one.co_qualname == name:
            return one
    return next(code_of(one, name) for one in inner if name.startswith(one.co_qualname))


# All at once, in the last stage of two; none of them ends the run.
PIPELINE = Plan(
    micro_batches=2,
    stages=(
        stage(1, micro_batch=4),
        stage(2, data_parallel=2, micro_batch=2, zero=3, offload=MIXED),
    ),
)
FAULTS = {
    "a tensor made on the CPU": Fault(
        function=Boundary.receive,
        right="self.streams.spoil(tensor)",
        wrong="torch.empty(7)",
        kind="work on the CPU",
        operator="aten.empty.memory_format",
        task="1Y.2m0 (first forward)",
        lane="receive_forward",
    ),
    "a blocking copy": Fault(
        function=Split.load,
        right="whole[self.kept :].copy_(self.tail, non_blocking=True)",
        wrong="whole[self.kept :].copy_(self.tail)",
        kind="blocking copy",
        operator="aten.copy_.default",
        task="1G<.2m0 (first forward)",
        lane="host_to_device",
    ),
    "a tensor made from a number": Fault(
        function=Scaling.judge,
        right="self.divisor.copy_(self.scale)",
        wrong="self.divisor.copy_(torch.tensor(1.0, device=self.scale.device))",
        kind="blocking copy",
        operator="tensor(..., device=)",
        task="report (step)",
        lane="reduce_scatter",
    ),
    "an item": Fault(
        function=Squares.total,
        right="return self._sums.sum()",
        wrong="return self._sums.sum() / self._sums[0].item()",
        kind="value read",
        operator="aten._local_scalar_dense.default",
        task="report (step)",
        lane="reduce_scatter",
    ),
    "an item in a thread of autograd": Fault(
        function=VocabularyCrossEntropy.backward,
        right="return of_logits.mul_(gradient[:, None]), None, None",
        wrong="return of_logits.mul_(gradient[0].item()), None, None",
        kind="value read",
        operator="aten._local_scalar_dense.default",
        task="1B.4m0 (backward)",
        lane="compute",
    ),
    "a copy from memory that is not pinned": Fault(
        function=HostPool.take,
        right='Arena(size_bytes, torch.device("cpu"), pins_for=self._pins_for)',
        wrong='Arena(size_bytes, torch.device("cpu"))',
        kind="unpinned copy",
        operator="aten.copy_.default",
        task="1A<.3m0 (backward)",
        lane="host_to_device",
        at=(Passes.come_back, "storage.copy_(copy, non_blocking=True)"),
    ),
    "a scalar assigned to an element": Fault(
        function=Squares.take,
        right="for_layer = self._sums[self._rows[layer]].zero_()",
        wrong="for_layer = self._sums; for_layer[self._rows[layer]] = 0.0",
        kind="scalar copied",
        operator="Tensor.__setitem__",
        task="1R.4m1 (last backward)",
        lane="reduce_scatter",
    ),
    "memory pinned anew": Fault(
        function=Passes.leave,
        right="kept.away.append((number, copy))",
        wrong="self.host._pins_for.pin(storage); kept.away.append((number, copy))",
        kind="memory pinned",
        operator="pin",
        task="1A>.2m0 (first forward)",
        lane="device_to_host",
    ),
    "a wait of the host": Fault(
        function=CudaStreams.submit,
        right="stream.wait_event(event)",
        wrong="event.synchronize()",
        kind="wait",
        operator="Event.synchronize",
        task="1U.2m0 (first forward)",
        lane="all_gather",
    ),
    "a message in pieces": Fault(
        function=Boundary._exchange,
        right="(tensor[t.begin : t.end], ranks.index(t.peer))",
        wrong="(tensor[t.begin : t.end, 1:], ranks.index(t.peer))",
        kind="collective",
        operator="exchange",
        task="1Y.2m0 (first forward)",
        lane="receive_forward",
        at=(Boundary._exchange, "return group.exchange([], messages)"),
    ),
}


@pytest.fixture(scope="module")
def planted() -> tuple[Finding, ...]:
    with pytest.MonkeyPatch.context() as patch:
        for fault in FAULTS.values():
            fault.plant(patch)
        return device_findings(small("gpt", layers=3), PIPELINE, 1, SCALED)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found_at_its_place(fault: Fault, planted: tuple[Finding, ...]) -> None:
    assert fault.found_in(planted)


TAKING = "for_layer.add_(gradients[part].float().square().sum())"
ENDING = {
    "a tensor on another device": Fault(
        function=Squares.take,
        right=TAKING,
        wrong="for_layer.add_(gradients[part].float().dot(torch.ones(gradients[part].shape)))",
        kind="wrong device",
        operator="aten.dot.default",
        task="1R.4m1 (last backward)",
        lane="reduce_scatter",
    ),
    "a size that values decide": Fault(
        function=Squares.take,
        right=TAKING,
        wrong="for_layer.add_(gradients[part][gradients[part] > 0].float().square().sum())",
        kind="size from values",
        operator="aten.index.Tensor",
        task="1R.4m1 (last backward)",
        lane="reduce_scatter",
    ),
    "a shape that does not fit": Fault(
        function=Squares.take,
        right=TAKING,
        wrong="for_layer.add_(gradients[part].view(-1, 7).float().square().sum())",
        kind="failure",
        operator="aten.view.default",
        task="1R.4m1 (last backward)",
        lane="reduce_scatter",
    ),
}


@pytest.mark.parametrize("fault", ENDING.values(), ids=ENDING)
def test_a_fault_that_ends_the_run_is_found_at_its_place(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault.plant(monkeypatch)
    found = device_findings(small("gpt", layers=3), PIPELINE, 1, SCALED)
    assert fault.found_in(found)
    assert len(found) <= 2


# Statements in the place of one that takes gradients' squares, and what is to be found there.
WAITING = {
    "gradients.cpu()": ("blocking copy", "aten._to_copy.default"),
    "gradients.to('cpu', non_blocking=True)": ("memory pinned", "aten._to_copy.default"),
    "bool(gradients[0] > 0)": ("value read", "aten._local_scalar_dense.default"),
    "gradients[[0, 1]]": ("blocking copy", "aten.index.Tensor"),
    "gradients[gradients > 0] = gradients[0]": ("size from values", "aten.index_put_.default"),
    "gradients.new_tensor([1.0])": ("blocking copy", "new_tensor(..., device=)"),
    "torch.as_tensor([1.0], device=gradients.device)": (
        "blocking copy",
        "as_tensor(..., device=)",
    ),
}
RUNNING = (
    "gradients[:2] = 0.0",
    "gradients[gradients > 0] = 0.0",
    "gradients[0].fill_(0.0)",
    "gradients[0] = gradients[1]",
    "torch.where(gradients > 0, gradients, 0.0)",
    "torch.full((2,), 1.0, device=gradients.device)",
    "gradients.half().to(gradients.device)",
)


def test_what_waits_on_cuda_is_told_from_what_runs_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Fault(
        function=Squares.take,
        right=TAKING,
        wrong="; ".join((*WAITING, *RUNNING)),
        kind="failure",
        operator="",
        task="",
        lane="",
    ).plant(monkeypatch)
    found = device_findings(small("gpt", layers=3), PIPELINE, 1, SCALED)
    assert {(one.kind, one.operator) for one in found} == set(WAITING.values())


def test_the_host_lane_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    Fault(
        function=Stepper._step_on_host,
        right="own.exchange.copy_(master)",
        wrong="own.step.item(); own.exchange.copy_(master)",
        kind="value read",
        operator="",
        task="",
        lane="",
    ).plant(monkeypatch)
    assert CASES["falcon in bf16, ZeRO-2, stepped on the host"].findings == ()


def test_backward_passes_run_in_a_thread_of_the_device() -> None:
    """In a process of its own: autograd starts its threads once, for the devices known by then."""
    words = """
import threading
import torch
from runtime.checks.fake_device import fake_device
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
"""
    subprocess.run([sys.executable, "-c", words], cwd=ROOT, check=True)


def test_a_finding_says_what_to_do_where(planted: tuple[Finding, ...]) -> None:
    (one,) = (str(one) for one in planted if one.kind == "scalar copied")
    assert re.fullmatch(
        r"runtime/engine/norm\.py:\d+ \(Squares\.take\): Tensor\.__setitem__ in 1R\.4m1 "
        r"\(last backward\), lane reduce_scatter, \d+ times: scalar copied: the host waits until "
        r"one number is copied: use zero_ or fill_",
        one,
    )
