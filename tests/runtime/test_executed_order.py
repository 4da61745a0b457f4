"""Ranks execute the simulators' tasks in the simulators' order, whatever blocks are made of."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from runtime.comm.topology import connected
from runtime.engine.streams.device_streams import SimulatedStreams
from runtime.engine.training import Training
from simulators.events import EventSimulator
from tests.runtime.drawn_today import Case, case
from tests.runtime.thread_ranks import Meeting, run_threads
from tests.runtime.worlds import TRAINING, begun, run_step, stage, thread_groups, workload
from tests.sweep import sweep

# By kind of task: lanes that have another name in played graphs.
LANES = {"U": "all_gather", "R": "reduce_scatter", "X": "send"}
Lanes = Mapping[str, list[str]]


def drawn(seed: int) -> Case:
    """A drawn case whose model has a layer graph, in the precision of graphs; with experts, parts
    of sequences or further heads where the seed's number says so."""
    wanted = seed % 4
    for number in range(1000 * seed, 1000 * seed + 400):
        work, plan, training = case(number, most_ranks=4)
        model = work.model
        has = model.experts, plan.stages[0].token_split.ranks > 1, model.further_tokens
        if wanted == 3 or has[wanted]:
            work = replace(work, precision="bf16")
            try:
                played(work, plan, 0)
            except InputError:
                continue
            return work, plan, training
    raise AssertionError(seed)


def played(work: Workload, plan: Plan, stage: int) -> Lanes:
    """A stage's tasks by lane, as the event simulator plays them, without the sum of a table."""
    cluster = Cluster(hardware=catalog.hardware("a100-80gb"), nodes=1, gpus_per_node=8)
    graph = EventSimulator(workload=work, cluster=cluster).simulate(plan).graph
    found: dict[str, list[str]] = defaultdict(list)
    for task in range(len(graph)):
        action = graph.action(task)
        if graph.stage(task) == stage and (action.kind != "R" or "." in str(action)):
            found[LANES.get(action.kind, graph.lane(task))].append(str(action))
    return found


def executed(work: Workload, plan: Plan, training: Training) -> list[tuple[int, Lanes]]:
    """The tasks of each rank's first iteration by lane, in the order in which they began."""

    def rank_of(rank: int, meeting: Meeting) -> tuple[int, Lanes]:
        connections = connected(
            *(plan, rank, thread_groups(meeting, rank)),
            tied=work.model.head_has_table,
            experts=work.model.experts is not None,
        )
        streams = SimulatedStreams(progress="random", seed=rank)
        executor = begun(work, plan, connections, streams, training)
        run_step(executor, work, connections, 0)
        found: dict[str, list[str]] = defaultdict(list)
        timed = zip(executor.issued, streams.spans(), strict=True)
        for op, _ in sorted(timed, key=lambda one: one[1][0]):
            # Receipts take no time and are no tasks elsewhere.
            if not isinstance(op.task, str) and op.name != "Y":
                found["send" if op.lane.startswith("send") else op.lane].append(str(op.task))
        return connections.place.stage, found

    return run_threads(plan.num_gpus, rank_of)


@pytest.mark.parametrize("seed", sweep(range(40), first=4))
def test_ranks_execute_what_is_played_in_its_order(seed: int) -> None:
    work, plan, _ = drawn(seed)
    for at, lanes in executed(work, plan, TRAINING):
        assert lanes == played(work, plan, at)


def test_the_drawn_plans_have_experts_context_and_further_heads() -> None:
    cases = [drawn(seed) for seed in range(8)]
    has = Counter(
        name
        for work, plan, _ in cases
        for name, there in (
            ("experts", work.model.experts),
            ("context", plan.stages[0].token_split.ranks > 1),
            ("further", work.model.further_tokens),
        )
        if there
    )
    assert all(has[name] >= 2 for name in ("experts", "context", "further"))


def test_another_order_shows() -> None:
    """The same tasks, a later pass of one stage before an earlier one."""
    stages = (stage(1, data_parallel=2, micro_batch=1), stage(1, tensor_parallel=2))
    work = workload("llama", layers=2, batch=8, precision="bf16")
    plan = Plan(micro_batches=4, stages=stages)
    other = replace(plan, order="gpipe")
    alike = [
        lanes == played(work, one, 0)
        for one in (plan, other)
        for at, lanes in executed(work, plan, TRAINING)
        if at == 0
    ]
    assert alike == [True, True, False, False]
    passes = Counter(played(work, plan, 0)["compute"])
    assert passes == Counter(played(work, other, 0)["compute"])
