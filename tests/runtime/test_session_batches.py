"""What a session trains on, and with what weights it begins, by its place in the plan."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab import catalog  # noqa: E402
from mistlab.job.job import Job  # noqa: E402
from mistlab.machine.cluster import Cluster  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from runtime import session  # noqa: E402
from runtime.batches_ahead import BatchesAhead  # noqa: E402
from runtime.comm.group import Alone  # noqa: E402
from runtime.comm.processes import World  # noqa: E402
from runtime.comm.replicas import ReplicaRanks  # noqa: E402
from runtime.comm.topology import RankPosition, Topology  # noqa: E402
from runtime.data import Synthetic, batch_of  # noqa: E402
from runtime.engine.training import Training  # noqa: E402
from runtime.session import Session, Settings  # noqa: E402
from tests.runtime.inline_driver import InlineDriver  # noqa: E402
from tests.runtime.worlds import CPU, stage, workload  # noqa: E402

# The last stage cuts a micro-batch of four in two, the first in four.
PLAN = Plan(
    micro_batches=2,
    stages=(
        stage(1, data_parallel=4, micro_batch=1),
        stage(1, data_parallel=1, micro_batch=4),
        stage(2, data_parallel=2, micro_batch=2),
    ),
)
JOB = Job(
    workload=workload(),
    cluster=Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=7),
    plan=PLAN,
)
SETTINGS = Settings(device="cpu", data=None, seed=3, timeout_s=1.0, training=Training())
SEQUENCES = Synthetic(length=16, vocab=96, seed=3)


def at(place: RankPosition) -> Session:
    """A session with its place and its data alone."""
    made = Session.__new__(Session)
    made.job = JOB
    made._sequences, made._packed = SEQUENCES, None
    connections = SimpleNamespace(place=place, peers=Alone())
    made._replicas = ReplicaRanks.of(PLAN, JOB.workload)
    made._executor = SimpleNamespace(connections=connections)  # type: ignore[assignment]
    return made


@pytest.mark.parametrize("rank", [0, 1, 3, 5, 6])
def test_each_replica_has_its_sequences_of_a_step(rank: int) -> None:
    place = Topology(plan=PLAN).place(rank)
    own = PLAN.stages[place.stage].micro_batch
    step, batch = 5, JOB.workload.global_batch
    found = at(place)._own_sequences(step)
    for number, (tokens, targets) in enumerate(found):
        first = step * batch + number * batch // PLAN.micro_batches + place.data * own
        expected = batch_of(SEQUENCES, first, own)
        assert torch.equal(tokens, expected[0])
        assert torch.equal(targets, expected[1])
    assert len(found) == PLAN.micro_batches


def test_a_stage_between_the_ends_needs_no_sequences() -> None:
    assert at(RankPosition(stage=1, data=0, tensor=0))._own_sequences(0) == []


@pytest.mark.parametrize("rank", [0, 3, 6])
def test_weights_drawn_on_a_device_depend_on_the_seed_alone(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    class Drawing:
        def __init__(self, *_: Any, **named: Any) -> None:
            assert named["seed"] is None

        def draw_on_device(self, seed: int) -> None:
            seeds.append(seed)

    monkeypatch.setattr(session, "Executor", Drawing)
    monkeypatch.setattr(session, "_connections", lambda *_: None)
    settings = replace(SETTINGS, draws_on_device=True)
    Session(JOB, settings, World(rank=rank, size=7, local_rank=rank), CPU)
    assert seeds == [SETTINGS.seed]


def pairs_of(step: int) -> list[tuple[Tensor, Tensor]]:
    tokens = torch.arange(6).view(2, 3) + 100 * step
    return [(tokens, tokens + 1), (tokens + 10, tokens + 11)]


@pytest.mark.parametrize("prepared", [None, 4, 7])
def test_batches_are_those_of_the_step_whatever_was_prepared(prepared: int | None) -> None:
    ahead = BatchesAhead(pairs_of, CPU)
    if prepared is not None:
        ahead.prepare(prepared)
    found = ahead.of(7)
    for one, other in zip(found, pairs_of(7), strict=True):
        assert all(map(torch.equal, one, other))


def test_batches_do_not_change_while_the_next_are_made() -> None:
    ahead = BatchesAhead(pairs_of, CPU)
    first = ahead.of(0)
    ahead.prepare(1)
    assert torch.equal(first[0][0], pairs_of(0)[0][0])
    assert torch.equal(ahead.of(1)[1][1], pairs_of(1)[1][1])


def test_one_buffer_is_pinned_for_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = InlineDriver()
    monkeypatch.setitem(session.driver_of.__globals__["DRIVERS"], "cpu", driver)
    ahead = BatchesAhead(pairs_of, CPU)
    for step in range(3):
        ahead.of(step)
        ahead.prepare(step + 1)
    assert len(driver.pinned) == 1
    ahead.release()
    assert driver.unpinned == driver.pinned


def test_a_stage_without_sequences_pins_nothing() -> None:
    assert BatchesAhead(lambda _: [], CPU).of(0) == []
