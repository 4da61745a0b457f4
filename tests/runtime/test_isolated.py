"""A stage by itself does what it does among the others: the same tasks in the same memory."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from mistlab.values.plan import Plan  # noqa: E402
from mistlab.values.workload import Workload  # noqa: E402
from runtime.comm.topology import STD, Connections, Topology, connected, isolated  # noqa: E402  # noqa: E402
from runtime.engine.executor import Executor  # noqa: E402
from runtime.engine.streams.device_streams import Progress, SimulatedStreams  # noqa: E402
from tests.runtime.thread_ranks import Meeting, run_threads  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    CPU,
    MIXED,
    TRAINING,
    begun,
    ratios,
    run_step,
    stage,
    thread_groups,
    workload,
)

# Unlike stages, of which the middle one lies between several ranks and a single one.
PLAN = Plan(
    micro_batches=4,
    stages=(
        stage(1, offload=ratios(0, 0, 1, 1)),
        stage(3, checkpointed_layers=1, offload=MIXED),
        stage(2, checkpointed_layers=2, offload=ratios(0.5, 0, 0, 0)),
    ),
)
WORK = workload(layers=6)
TIED = workload(layers=6, tied_embeddings=True)
NUMBERS = range(PLAN.num_stages)


def run(
    work: Workload, plan: Plan, connections: Connections, progress: Progress = "eager"
) -> tuple[Executor, list[float]]:
    """Two steps of a rank, and their losses."""
    streams = SimulatedStreams(progress=progress)
    executor = begun(work, plan, connections, streams, TRAINING)
    losses = [run_step(executor, work, connections, step).loss for step in range(2)]
    return executor, [loss for loss in losses if loss is not None]


def by_itself(
    work: Workload, plan: Plan, number: int, progress: Progress = "eager", seed: int = 0
) -> tuple[Executor, list[float]]:
    return run(work, plan, isolated(plan, number, CPU, seed), progress)


@pytest.fixture(scope="module", params=[WORK, TIED], ids=["untied", "tied"])
def work(request: pytest.FixtureRequest) -> Workload:
    found: Workload = request.param
    return found


@pytest.fixture(scope="module")
def together(work: Workload) -> list[Executor]:
    def rank_of(rank: int, meeting: Meeting) -> Executor:
        return run(work, PLAN, connected(PLAN, rank, thread_groups(meeting, rank)))[0]

    return run_threads(PLAN.num_gpus, rank_of)


@pytest.mark.parametrize("number", NUMBERS)
def test_its_tasks_and_its_memory_are_those_it_has_among_the_others(
    number: int, work: Workload, together: list[Executor]
) -> None:
    alone, among = by_itself(work, PLAN, number)[0], together[number]
    assert alone.programs == among.programs
    assert alone.peak_bytes == among.peak_bytes
    assert alone.host_bytes == among.host_bytes
    assert alone.held_bytes() == among.held_bytes()


def test_it_holds_as_many_micro_batches_as_are_in_flight_there() -> None:
    plan = replace(PLAN, stages=(stage(1), stage(2), stage(2), stage(1)))
    three, two = (by_itself(WORK, plan, number)[0].passes.peak_bytes for number in (1, 2))
    assert three * 2 == two * 3


@pytest.mark.parametrize("progress", ["lazy", "random"])
def test_what_comes_in_depends_on_the_seed_alone(progress: Progress) -> None:
    last = PLAN.num_stages - 1
    plain = replace(PLAN, stages=(*PLAN.stages[:last], stage(2)))
    losses = by_itself(WORK, PLAN, last, progress)[1]
    assert losses == by_itself(WORK, plain, last)[1]
    assert losses != by_itself(WORK, PLAN, last, seed=1)[1]


def test_neighbours_of_other_degrees_fill_all_that_is_received() -> None:
    split = stage(1, data_parallel=2, tensor_parallel=2, micro_batch=1)
    plan = replace(PLAN, stages=(split, *PLAN.stages[1:]))
    connections = isolated(plan, 1, CPU, seed=0)
    group, ranks = connections.links["forward 0"]
    transfers = Topology(plan=plan).transfers(connections.rank, to_stage=0, receives=True)
    received = torch.zeros(2, 16, 32)
    group.exchange([], [(received[t.begin : t.end], ranks.index(t.peer)) for t in transfers])
    assert len(transfers) == 2
    assert received.std(dim=(1, 2)).tolist() == pytest.approx([STD, STD], rel=0.1)
    executor, losses = run(WORK, plan, connections)
    assert executor.steps == 2
    assert losses == [0.0, 0.0]
