"""Iterations captured as a graph: what may be, that replays train alike, and faults that show."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mistlab.core.values import InputError  # noqa: E402
from mistlab.job.job import Job  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from runtime.checks.fake.fake_device import device_findings  # noqa: E402
from runtime.checks.recorded_graph import RecordedLanes  # noqa: E402
from runtime.comm.topology import connected  # noqa: E402
from runtime.devices.cuda import DRIVERS  # noqa: E402
from runtime.engine.captured_steps import CapturedSteps, check_captures  # noqa: E402
from runtime.engine.executor import Executor  # noqa: E402
from runtime.engine.streams.device_streams import CudaStreams, SimulatedStreams  # noqa: E402
from runtime.engine.training import Training  # noqa: E402
from tests.runtime.lone_rank import lone  # noqa: E402
from tests.runtime.worlds import MIXED, ratios, stage, workload  # noqa: E402

CPU = torch.device("cpu")
STEPS = 6
SMALL = {"hidden": 16, "heads": 2, "ffn": 32, "sequence_length": 8, "vocab": 32, "batch": 4}
# Rates that 32 bits hold, as those on the device are.
WARM = Training(learning_rate=2.0**-5, epsilon=2.0**-5, warmup_steps=4, clip_norm=0.5)
SCALED = replace(WARM, loss_scale=2.0**8, growth_interval=2)


def work_of(family: str, **fields: Any) -> Workload:
    return workload(family, layers=2, **{**SMALL, **fields})


def plan_of(**fields: Any) -> Plan:
    return Plan(micro_batches=2, stages=(stage(2, micro_batch=2, **fields),))


def losses(
    work: Workload, plan: Plan, training: Training, *, captures: bool, seed: int = 0
) -> list[tuple[float | None, float | None]]:
    """Losses and norms of some steps, with new tokens in each; a checkpoint's flush after four."""
    streams = SimulatedStreams(progress="random", seed=seed)
    connections = connected(plan, 0, lone(0), tied=work.model.head_has_table)
    executor = Executor(work, plan, connections, streams, training, device=CPU, seed=0)
    lanes = RecordedLanes(streams)
    iterate = CapturedSteps(executor, lanes).iterate if captures else executor.iterate
    draw, found = torch.Generator().manual_seed(1), []
    for step in range(STEPS):
        shape = (2, 2, 2, work.sequence_length)
        tokens = torch.randint(work.model.vocab, shape, generator=draw)
        iterate([(one[0], one[1]) for one in tokens])
        report = executor.report()
        found.append((report.loss, report.gradient_norm))
        if step == 3:
            executor.flush()
    assert len(lanes.graphs) == captures
    return found


PLANS: dict[str, tuple[Workload, Plan, Training]] = {
    "gpt": (work_of("gpt", biases=True, tied_embeddings=True), plan_of(), WARM),
    "llama, offloaded": (
        work_of("llama", kv_heads=1),
        plan_of(offload=ratios(1.0, 1.0, 1.0, 1.0)),
        WARM,
    ),
    "falcon in fp16, in part, again": (
        work_of("falcon", precision="fp16"),
        plan_of(offload=MIXED, checkpointed_layers=1),
        SCALED,
    ),
    "bf16, lean": (work_of("gpt", precision="bf16"), plan_of(lean_layers=1), SCALED),
}


@pytest.mark.parametrize("name", PLANS)
def test_replays_train_to_the_bit_as_iterations_that_are_issued(name: str) -> None:
    """Rates rise, tokens change, and memory was handed on before: nothing of it stays behind."""
    work, plan, training = PLANS[name]
    issued, replayed = (losses(work, plan, training, captures=one) for one in (False, True))
    assert replayed == issued
    assert len({loss for loss, _ in issued}) == STEPS


def test_a_rate_that_python_holds_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    work, plan, training = PLANS["gpt"]
    learn_at: Callable[..., Any] = Executor.learn_at
    at = Training.learning_rate_at

    def held(self: Executor, rate: Any) -> None:
        learn_at(self, at(self.training, self.steps - 1))

    monkeypatch.setattr(Executor, "learn_at", held)
    issued, replayed = (losses(work, plan, training, captures=one) for one in (False, True))
    assert replayed[:3] == issued[:3]
    assert replayed[-1] != issued[-1]


def test_masks_of_a_step_would_be_repeated() -> None:
    """So dropout is refused."""
    work, plan = work_of("gpt", dropout=0.5, attention_dropout=0.0), plan_of()
    issued, replayed = (losses(work, plan, WARM, captures=one) for one in (False, True))
    assert replayed[:3] == issued[:3]
    assert replayed[3] != issued[3]


def test_a_number_that_the_host_reads_ends_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    work, plan, training = PLANS["gpt"]
    square: Callable[..., Any] = Executor._square

    def reads(self: Executor, op: Any) -> None:
        square(self, op)
        self._losses.item()

    monkeypatch.setattr(Executor, "_square", reads)
    with pytest.raises(RuntimeError, match="the host reads what a graph has not computed"):
        losses(work, plan, training, captures=True)


# Planted faults, and what the check of a device without memory says of each.


def reads(executor: Executor) -> None:
    executor._losses.item()


def waits(executor: Executor) -> None:
    assert isinstance(executor.streams, CudaStreams)
    executor.streams._made.synchronize()


def times(executor: Executor) -> None:
    assert isinstance(executor.streams, CudaStreams)
    executor.streams._began.elapsed_time(executor.streams._made)


def pins(executor: Executor) -> None:
    DRIVERS[executor.device.type].pin(torch.zeros(8))


def copies(executor: Executor) -> None:
    executor._losses.to("cpu")


def chooses(executor: Executor) -> None:
    executor._losses.view(1).nonzero()


def waits_for_before(executor: Executor) -> None:
    assert isinstance(executor.streams, CudaStreams)
    executor.streams.stream("compute").wait_event(executor.streams._began)


def works_apart(executor: Executor) -> None:
    driver = DRIVERS[executor.device.type]
    with driver.using(driver.stream(executor.device)):
        executor._losses.add_(0)


def leaves_work(executor: Executor) -> None:
    driver = DRIVERS[executor.device.type]
    assert isinstance(executor.streams, CudaStreams)
    begun, lane = driver.event(), driver.stream(executor.device)
    begun.record(executor.streams.stream("compute"))
    lane.wait_event(begun)
    with driver.using(lane):
        executor._losses.add_(0)


FAULTS: dict[str, tuple[Callable[[Executor], None], str]] = {
    "a number is read": (reads, "value read"),
    "an event is waited for": (waits, "wait"),
    "a time is read": (times, "wait"),
    "memory is pinned": (pins, "memory pinned"),
    "a copy to the host blocks": (copies, "blocking copy"),
    "a size follows from values": (chooses, "size from values"),
    "compute waits for what was issued before": (waits_for_before, "outside wait"),
    "a lane takes no part": (works_apart, "outside work"),
    "compute does not wait for a lane": (leaves_work, "never joined"),
}


def test_nothing_that_a_capture_forbids_is_found_without_a_fault() -> None:
    assert device_findings(work_of("llama"), plan_of(), 0, WARM, captures=True) == ()


@pytest.mark.parametrize("name", FAULTS)
def test_each_call_that_a_capture_forbids_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault, kind = FAULTS[name]
    square: Callable[..., Any] = Executor._square

    def planted(self: Executor, op: Any) -> None:
        square(self, op)
        fault(self)

    # Norms are squared once an iteration, however many layers and micro-batches it has.
    work = workload("llama", layers=1, **{**SMALL, "batch": 2})
    plan = Plan(micro_batches=1, stages=(stage(1, micro_batch=2),))
    monkeypatch.setattr(Executor, "_square", planted)
    assert kind in {one.kind for one in device_findings(work, plan, 0, WARM, captures=True)}


def test_lanes_that_do_not_wait_for_compute_first_take_no_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fork at the capture's beginning, and the join at its end, are both needed."""

    @contextmanager
    def unforked(self: CudaStreams) -> Any:
        with self._driver.capture(self._streams["compute"]) as graph:
            yield graph
        self._log.clear()

    monkeypatch.setattr(CudaStreams, "captured", unforked)
    work, plan = work_of("llama"), plan_of(offload=ratios(1.0, 1.0, 1.0, 1.0))
    kinds = {one.kind for one in device_findings(work, plan, 0, WARM, captures=True)}
    assert kinds & {"outside work", "never joined"}


# What is refused, and what the driver asks of CUDA.


def job_of(tiny_job: Job, **fields: Any) -> Job:
    return replace(tiny_job, workload=replace(tiny_job.workload, **fields))


@pytest.mark.parametrize(
    ("model", "training", "device", "problem"),
    [
        ({}, WARM, "cpu", r"--cuda-graphs: --device cpu cannot capture CUDA graphs: give"),
        ({}, replace(WARM, steps_on_host=True), "cuda", "leave out --step-on-cpu or --cuda-graphs"),
        ({"dropout": 0.1}, WARM, "cuda", "workload.model.dropout: masks depend"),
        (
            {"experts": {"count": 4, "active": 2, "ffn": 24}},
            WARM,
            "cuda",
            "workload.model.experts: the host reads",
        ),
    ],
)
def test_a_run_that_cannot_be_captured_is_refused(
    model: dict[str, Any], training: Training, device: str, problem: str
) -> None:
    family = "llama" if "experts" in model else "gpt"

    class Given:
        workload = work_of(family, **model)

    with pytest.raises(InputError, match=problem):
        check_captures(Given(), training, device)  # type: ignore[arg-type]
    check_captures(type("Given", (), {"workload": work_of("gpt")})(), WARM, "cuda")
