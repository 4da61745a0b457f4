"""Faults that are planted in the runtime are found on a device without memory, at their places."""

import re

import pytest

torch = pytest.importorskip("torch")

from mistlab.plan.plan import Plan  # noqa: E402
from runtime.checks.fake.fake_device import device_findings  # noqa: E402
from runtime.checks.fake.watch import WaitFinding  # noqa: E402
from runtime.engine.storage.arena import HostPool  # noqa: E402
from runtime.engine.storage.boundary import Boundary  # noqa: E402
from runtime.engine.storage.stepped import Split  # noqa: E402
from runtime.engine.streams.device_streams import CudaStreams  # noqa: E402
from runtime.engine.training import Training  # noqa: E402
from runtime.engine.work.layer_passes import Passes  # noqa: E402
from runtime.engine.work.optimizer import Stepper  # noqa: E402
from runtime.engine.work.parameters import Squares  # noqa: E402
from runtime.engine.work.scaling import Scaling  # noqa: E402
from runtime.models.parallel import TokenLosses  # noqa: E402
from tests.runtime.planted import Fault, plant  # noqa: E402
from tests.runtime.worlds import MIXED, stage, workload  # noqa: E402

SCALED = Training(clip_norm=1.0, loss_scale=2.0**10)
ON_HOST = Training(clip_norm=1.0, steps_on_host=True)

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
        function=TokenLosses.backward,
        right="of_logits: Tensor = logits.detach()",
        wrong="of_logits = logits.detach() * gradient[0].item()",
        kind="value read",
        operator="aten._local_scalar_dense.default",
        task="1B.4m0 (backward)",
        lane="compute",
    ),
    "a copy from memory that is not pinned": Fault(
        function=HostPool._made,
        right='Arena(size_bytes, torch.device("cpu"), pins_for=self._pins_for)',
        wrong='Arena(size_bytes, torch.device("cpu"))',
        kind="unpinned copy",
        operator="aten._foreach_copy_.default",
        task="1A<.3m0 (backward)",
        lane="host_to_device",
        at=(Passes.come_back, "torch._foreach_copy_(storages, copies, non_blocking=True)"),
    ),
    "a scalar assigned to an element": Fault(
        function=Squares._note,
        right="total = self._sums[self._rows[layer]].zero_()",
        wrong="total = self._sums; total[self._rows[layer]] = 0.0",
        kind="scalar copied",
        operator="Tensor.__setitem__",
        task="1R.4m1 (last backward)",
        lane="reduce_scatter",
    ),
    "memory pinned anew": Fault(
        function=Passes.leave,
        right="kept.away = (numbers, buffers)",
        wrong="self.host._pins_for.pin(storages[0]); kept.away = (numbers, buffers)",
        kind="memory pinned",
        operator="pin",
        task="1A>.2m0 (first forward)",
        lane="device_to_host",
    ),
    "a wait of the host": Fault(
        function=CudaStreams._launch,
        right="stream.wait_event(event.end)",
        wrong="event.end.synchronize()",
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


def findings_of(training: Training) -> tuple[WaitFinding, ...]:
    """Of a rank of the last stage."""
    work = workload("gpt", layers=3, hidden=16, heads=2, ffn=32, sequence_length=8)
    return device_findings(work, PIPELINE, 1, training)


@pytest.fixture(scope="module")
def planted() -> tuple[WaitFinding, ...]:
    with pytest.MonkeyPatch.context() as patch:
        for fault in FAULTS.values():
            fault.plant(patch)
        return findings_of(SCALED)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found_at_its_place(
    fault: Fault, planted: tuple[WaitFinding, ...]
) -> None:
    assert fault.found_in(planted)


TAKING = "total.add_(norms.square_().sum())"
ENDING = {
    "a tensor on another device": Fault(
        function=Squares._note,
        right=TAKING,
        wrong="total.add_(norms.dot(torch.ones(norms.shape)))",
        kind="wrong device",
        operator="aten.dot.default",
        task="1R.4m1 (last backward)",
        lane="reduce_scatter",
    ),
    "a size that values decide": Fault(
        function=Squares._note,
        right=TAKING,
        wrong="total.add_(norms[norms > 0].sum())",
        kind="size from values",
        operator="aten.index.Tensor",
        task="1R.4m1 (last backward)",
        lane="reduce_scatter",
    ),
    "a shape that does not fit": Fault(
        function=Squares._note,
        right=TAKING,
        wrong="total.add_(norms.view(-1, 7).sum())",
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
    found = findings_of(SCALED)
    assert fault.found_in(found)
    assert len(found) == 1


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
    plant(monkeypatch, Squares._note, TAKING, "; ".join((*WAITING, *RUNNING)))
    found = findings_of(SCALED)
    assert {(one.kind, one.operator) for one in found} == set(WAITING.values())


def test_the_host_lane_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        monkeypatch,
        Stepper._step_on_host,
        "layer_state.exchanged_weights.copy_(master)",
        "layer_state.step.item(); layer_state.exchanged_weights.copy_(master)",
    )
    assert findings_of(ON_HOST) == ()


def test_a_finding_says_what_to_do_where(planted: tuple[WaitFinding, ...]) -> None:
    (one,) = (str(one) for one in planted if one.kind == "scalar copied")
    assert re.fullmatch(
        r"runtime/engine/work/parameters\.py:\d+ \(Squares\._note\): Tensor\.__setitem__ in "
        r"1R\.4m1 \(last backward\), lane reduce_scatter, \d+ times: scalar copied: the host waits "
        r"until one number is copied: use zero_ or fill_",
        one,
    )
