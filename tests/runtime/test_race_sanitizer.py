"""What streams would do is judged: no plan has a race, and a wait that is left out makes one."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from mistlab.stages import buffers, stage_program
from mistlab.stages.stage_program import Op
from runtime.checks.races import recorded_rank as one_rank
from runtime.checks.races.accesses import (
    HOST,
    ClockedDriver,
    ClockedEvent,
    ClockedStream,
    Memory,
    Trace,
    Wait,
)
from runtime.checks.races.judge import Judge, RaceFinding
from runtime.checks.races.recorded_rank import DEVICE, HostCopies, Recorder, trace_of, trained
from runtime.checks.sanitizer import unlike_ranks
from runtime.engine.executor import Batches, Executor
from runtime.engine.training import Training
from tests.runtime.planted import plant
from tests.runtime.worlds import (
    MIXED,
    ON_HOST,
    OVERFLOWING,
    TRAINING,
    random_plan,
    ratios,
    stage,
    workload,
)
from tests.sweep import sweep

TRAININGS = (
    TRAINING,
    ON_HOST,
    replace(TRAINING, clip_norm=1.0),
    OVERFLOWING,
    replace(ON_HOST, clip_norm=1.0, loss_scale=1024.0),
)
LEAVING = Plan(micro_batches=2, stages=(stage(3, offload=ratios(0.0, 0.0, 0.0, 1.0)),))


class Streams:
    """Two streams of a stand-in, and tensors that operators on them touch."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.memory = Memory(self.trace)
        self.driver = ClockedDriver(self.trace, self.memory)
        self.one, self.other = (ClockedStream(self.driver, name) for name in ("one", "other"))

    def recording(self) -> Recorder:
        return Recorder(self.trace, self.memory, self.driver)

    def findings(self) -> list[RaceFinding]:
        return Judge(self.trace).findings()


def test_two_streams_that_write_the_same_bytes_race_unless_one_waits() -> None:
    for waits in (False, True):
        streams, tensor = Streams(), torch.zeros(8)
        event = streams.driver.event()
        with streams.recording():
            with streams.driver.using(streams.one):
                tensor.fill_(1)
            event.record(streams.one)
            if waits:
                streams.other.wait_event(event)
            with streams.driver.using(streams.other):
                tensor[2:].fill_(2)
        assert [one.kind for one in streams.findings()] == ([] if waits else ["race"])


def test_a_copy_to_the_host_is_waited_for_and_computed_with_there() -> None:
    for copies in (False, True):
        streams, tensor, rooms = Streams(), torch.zeros(8), []
        with HostCopies(streams.memory, streams.driver), streams.recording():
            with streams.driver.using(streams.one):
                tensor.fill_(1)
                if copies:
                    assert tensor[2:].tolist() == [1.0] * 6
                    assert (tensor.cpu() / 2).max() == 0.5
                rooms.append(torch.empty(4))
            with streams.driver.using(streams.other):
                tensor.fill_(2)
                rooms[0].fill_(2)
        told = {one.kind for one in streams.findings()}
        assert told == (set() if copies else {"used before allocated", "race"})


def test_uses_of_different_bytes_and_two_reads_are_no_race() -> None:
    streams, tensor = Streams(), torch.zeros(8)
    with streams.recording():
        for stream, part in ((streams.one, slice(0, 4)), (streams.other, slice(4, 8))):
            with streams.driver.using(stream):
                tensor[part].fill_(1)
    assert streams.findings() == []
    streams, tensor = Streams(), torch.zeros(8)
    with streams.recording():
        for stream in (streams.one, streams.other):
            with streams.driver.using(stream):
                tensor.sum()
    assert streams.findings() == []


def test_work_behind_the_recording_of_an_event_is_not_waited_for() -> None:
    streams, tensor = Streams(), torch.zeros(8)
    event = streams.driver.event()
    with streams.recording():
        with streams.driver.using(streams.one):
            tensor.sum()
            event.record(streams.one)
            tensor.fill_(1)
        streams.other.wait_event(event)
        with streams.driver.using(streams.other):
            tensor.sum()
    (found,) = streams.findings()
    assert (found.first.actor, found.second.actor) == ("one", "other")
    assert "writes bytes 0 to 32 (aten::fill_)" in found.first.does
    assert found.missing == "a wait of other, at start, for start on one"


def test_what_the_host_has_waited_for_orders_what_it_issues_later() -> None:
    streams, tensor = Streams(), torch.zeros(8)
    with streams.recording():
        with streams.driver.using(streams.one):
            tensor.fill_(1)
        streams.driver.synchronize(DEVICE)
        with streams.driver.using(streams.other):
            tensor.fill_(2)
    assert streams.findings() == []


def test_memory_that_another_stream_uses_is_freed_behind_its_last_use() -> None:
    for waits in (False, True):
        streams = Streams()
        event = streams.driver.event()
        with streams.recording():
            with streams.driver.using(streams.one):
                tensor = torch.zeros(8)
            event.record(streams.one)
            streams.other.wait_event(event)
            with streams.driver.using(streams.other):
                tensor.sum()
            if waits:
                event = streams.driver.event()
                event.record(streams.other)
                streams.one.wait_event(event)
            del tensor
        kinds = [one.kind for one in streams.findings()]
        assert kinds == ([] if waits else ["freed while used"])


def test_memory_is_used_behind_the_point_at_which_it_was_allocated() -> None:
    streams = Streams()
    with streams.recording():
        with streams.driver.using(streams.one):
            torch.zeros(8).sum()
            tensor = torch.empty(8)
        with streams.driver.using(streams.other):
            tensor.fill_(1)
    assert [one.kind for one in streams.findings()] == ["used before allocated"]


def test_the_hosts_lane_is_an_actor_of_its_own() -> None:
    for asks in (False, True):
        streams, tensor = Streams(), torch.zeros(8)
        with streams.recording():
            future = streams.driver.threads("lane").submit(tensor.fill_, 1)
            if asks:
                future.result()
            with streams.driver.using(streams.one):
                tensor.fill_(2)
        assert [one.kind for one in streams.findings()] == ([] if asks else ["race"])


def drawn(seed: int) -> tuple[Workload, Plan, int, Training]:
    """A random plan, one of its ranks, and how it is trained."""
    work, plan = random_plan(seed, most_ranks=8)
    rank = np.random.default_rng(seed).choice([one.rank for one in unlike_ranks(plan)])
    return work, plan, int(rank), TRAININGS[seed % len(TRAININGS)]


@pytest.mark.parametrize("seed", sweep(range(40), first=6))
def test_random_plans_have_no_race_and_need_their_waits(seed: int) -> None:
    judge = Judge(trace_of(*drawn(seed), serialises=False))
    assert judge.findings() == []
    needed = 0
    for wait in judge.waits:
        if judge.is_needed(wait):
            needed += 1
        else:
            assert all(judge.detours(wait))
    assert needed > len(judge.waits) / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_no_rank_of_a_random_plan_has_a_race(seed: int) -> None:
    work, plan, _, training = drawn(seed)
    for one in unlike_ranks(plan):
        trace = trace_of(work, plan, one.rank, training, serialises=seed % 2 == 1)
        assert Judge(trace).findings() == []


@pytest.mark.parametrize("seed", sweep([1, 9], first=1))
def test_a_wait_left_out_of_the_program_does_what_the_trace_says(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, plan, rank, training = drawn(seed)
    told: set[Ends] = set()
    whole = Judge(trace_of(work, plan, rank, training, run=telling_waits(told)))
    draw = np.random.default_rng(seed)
    of_program = [one for one in whole.waits if ends(one) in told]
    for wait in draw.choice(of_program, 4, replace=False):
        alike = [one for one in whole.waits if ends(one) == ends(wait)]
        with monkeypatch.context() as patch:
            patch.setattr(one_rank, "Executor", leaving_out(wait))
            changed = Judge(trace_of(work, plan, rank, training))
        assert len(whole.waits) - len(changed.waits) == len(alike)
        assert bool(changed.findings()) == whole.is_needed(*alike)


@pytest.mark.parametrize("seed", sweep([1, 9], first=1))
def test_a_wait_inside_a_task_that_is_not_made_does_what_the_trace_says(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such waits are not in the program: those of NCCL's streams for work that is given to them,
    of that work's task for NCCL, and of collectives beside products."""
    work, plan, rank, training = drawn(seed)
    told: set[Ends] = set()
    whole = Judge(trace_of(work, plan, rank, training, run=telling_waits(told)))
    inside = [one for one in whole.waits if one.lane != HOST and ends(one) not in told]
    assert all(one.task == one.for_task for one in inside)
    for wait in np.random.default_rng(seed).choice(inside, 4, replace=False):
        alike = [one for one in whole.waits if ends(one) == ends(wait)]
        with monkeypatch.context() as patch:
            patch.setattr(ClockedDriver, "wait", making_all_but(wait))
            changed = Judge(trace_of(work, plan, rank, training))
        assert len(whole.waits) - len(changed.waits) == len(alike)
        assert bool(changed.findings()) == whole.is_needed(*alike)


def making_all_but(wait: Wait) -> Callable[[ClockedDriver, str, ClockedEvent], None]:
    """The driver's ``wait``, without those between the same ends as a wait."""
    left_out, make = ends(wait), ClockedDriver.wait

    def made(driver: ClockedDriver, actor: str, event: ClockedEvent) -> None:
        if (driver.trace.task, actor, event.task, event.lane) != left_out:
            make(driver, actor, event)

    return made


# The task and lane that wait, and the task and lane that they wait for.
Ends = tuple[str, str, str, str]


def ends(wait: Wait) -> Ends:
    return wait.task, wait.lane, wait.for_task, wait.for_lane


def telling_waits(told: set[Ends]) -> Callable[[Executor, Batches], None]:
    """A run that also tells the waits of its programs."""

    def run(executor: Executor, batches: Batches) -> None:
        ops = [*chain(*executor.programs, executor.flushing)]
        told.update(
            (words(op), op.lane, words(ops[number - back]), ops[number - back].lane)
            for number, op in enumerate(ops)
            for back in op.waits
            if back <= number
        )
        trained(executor, batches)

    return run


def inside_a_task(wait: Wait) -> bool:
    """Whether a wait is between a backward pass and the reduction beside its products."""
    return "tensor_parallel" in (wait.lane, wait.for_lane)


@pytest.mark.parametrize(("family", "parts"), [("gpt", 0), ("falcon", 0), ("llama", 1)])
@pytest.mark.parametrize("lacking", ["tensor_parallel", "compute"])
def test_reductions_beside_products_need_both_their_waits(
    family: str, parts: int, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reduction waits for the gradient, and compute for the reduction, of whole sequences or
    of parts."""
    work = workload(family, layers=2, batch=4)
    plan = Plan(micro_batches=2, stages=(stage(2, tensor_parallel=2, sequence_parallel=parts),))
    judge = Judge(trace_of(work, plan, 0, TRAINING))
    assert judge.findings() == []
    inside = [one for one in judge.waits if inside_a_task(one)]
    assert {one.lane for one in inside} == {"tensor_parallel", "compute"}
    assert all(judge.is_needed(one) for one in inside)
    waits = ClockedStream.wait_event

    def wait_event(stream: ClockedStream, event: ClockedEvent) -> None:
        if not (stream.name == lacking and "tensor_parallel" in (lacking, event.lane)):
            waits(stream, event)

    monkeypatch.setattr(ClockedStream, "wait_event", wait_event)
    findings = Judge(trace_of(work, plan, 0, TRAINING)).findings()
    assert {one.kind for one in findings} >= {"race"}
    for one in findings:
        assert {one.first.actor, one.second.actor} == {"compute", "tensor_parallel"}
        assert one.first.task.startswith("0B.")


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_that_is_given_back_under_its_copies_is_found(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def released(executor: Executor, batches: Batches) -> None:
        for _ in range(2):
            executor.iterate(batches)
        executor.release()

    if not waits:
        right = "        self.streams.synchronize()\n        self.state.host.release()"
        plant(monkeypatch, Executor.release, right, right.partition("\n")[2])
    work = workload(layers=2, batch=4)
    plan = Plan(micro_batches=2, stages=(stage(2, offload=MIXED),))
    findings = Judge(trace_of(work, plan, 0, TRAINING, run=released)).findings()
    assert {one.second.does.endswith("(unpin)") for one in findings} == (set() if waits else {True})


def test_without_overlap_reductions_are_in_the_order_of_compute() -> None:
    work = workload("gpt", layers=2, batch=4)
    plan = Plan(micro_batches=2, stages=(stage(2, tensor_parallel=2),))
    trace = trace_of(work, plan, 0, TRAINING, serialises=True)
    assert "tensor_parallel" not in {one.actor for one in trace.stretches}


def leaving_out(wait: Wait) -> type[Executor]:
    """Executors whose programs lack a wait."""

    class Lacking(Executor):
        def __init__(self, *args: object, **named: object) -> None:
            super().__init__(*args, **named)  # type: ignore[arg-type]
            before: list[Op] = []
            programs = []
            for each in (*self.programs, self.flushing):
                before += each
                first = len(before) - len(each)
                programs.append(
                    tuple(self.lacking(op, first + at, before) for at, op in enumerate(each))
                )
            *self.programs, self.flushing = programs

        def lacking(self, op: Op, number: int, before: list[Op]) -> Op:
            def is_it(back: int) -> bool:
                other = before[number - back]
                return (words(op), op.lane, words(other), other.lane) == ends(wait)

            return replace(op, waits=tuple(back for back in op.waits if not is_it(back)))

    return Lacking


def words(op: Op) -> str:
    return f"{op.task} ({op.phase.replace('_', ' ')})"


def test_activations_freed_under_their_copy_are_found(
    monkeypatch: pytest.MonkeyPatch, forget_programs: Callable[[], None]
) -> None:
    """Embedding and head take entries of the ring too: whose forward lets go of what left before
    must wait for its copy, whether it sends anything away itself or not."""
    judge = Judge(trace_of(workload(layers=3, batch=4), LEAVING, 0, TRAINING))
    assert judge.findings() == []
    monkeypatch.setitem(buffers.TOUCHES, "F", forgetful_forward)  # type: ignore[index]
    forget_programs()
    findings = Judge(trace_of(workload(layers=3, batch=4), LEAVING, 0, TRAINING)).findings()
    assert {one.kind for one in findings} == {"freed while used"}
    first = findings[0]
    assert (first.first.actor, first.second.actor) == ("device_to_host", "compute")
    assert first.first.task == "0A>.2m0 (first forward)"
    assert first.second.task == "0F.4m0 (first forward)"
    assert "for 0A>.2m0 (first forward) on device_to_host" in str(first)


def forgetful_forward(touched: buffers.Touched) -> tuple[buffers.Buffers, buffers.Buffers]:
    """What a forward was said to touch before the fault was found."""
    leaves = touched.shape.offload_of(touched.layer).activations > 0
    reads = (touched.weights, *touched.borrowed("weights"))
    return reads, ((("leaving", touched.entry),) if leaves else ())


def test_received_memory_may_not_be_written_before_compute_is_past_its_last_use(
    monkeypatch: pytest.MonkeyPatch, forget_programs: Callable[[], None]
) -> None:
    plan = Plan(micro_batches=4, stages=(stage(2), stage(2)))
    work = workload(layers=4, batch=8)
    assert Judge(trace_of(work, plan, 1, TRAINING)).findings() == []
    monkeypatch.setattr(stage_program, "_AFTER_COMPUTE", ())
    forget_programs()
    kinds = {one.kind for one in Judge(trace_of(work, plan, 1, TRAINING)).findings()}
    assert kinds == {"used before allocated"}
