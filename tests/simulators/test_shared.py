"""What stages share: a node's network, and a table that embedding and head have in common."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.values import FieldError, from_mapping
from mistlab.cost.pipeline import iteration_s
from mistlab.machine.cluster import Cluster
from mistlab.machine.slowdowns import GroupSlowdowns, Interference
from mistlab.network.tiers import Network
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.stages import played_pipeline
from mistlab.stages.stage_batch import StageBatch, StageTimes
from simulators.events import EventSimulator, Simulation
from simulators.symbolic import SymbolicPredictor
from tests.workloads import with_long_head, workload_of

WORK = workload_of("gpt3-1.3b", 2048, 32)
TIED = replace(WORK, model=replace(WORK.model, name="", tied_embeddings=True))
# Of four stages the first two are in one node, the others in the next; its network is slow.
PLAN = Plan(
    micro_batches=16,
    stages=(StagePlan(layers=6, data_parallel=2, tensor_parallel=1, micro_batch=1),) * 4,
)
TWO_NODES = Cluster(
    hardware=catalog.hardware("l4-24gb"), nodes=2, gpus_per_node=4, inter_node_gbytes_per_s=0.5
)
ONE_NODE = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=8)
SIX = Plan(
    micro_batches=8,
    stages=(StagePlan(layers=4, data_parallel=4, tensor_parallel=1, micro_batch=1),) * 6,
)


def apart(cluster: Cluster) -> Cluster:
    """The cluster with streams that do not slow one another down."""
    group = GroupSlowdowns(gpus_in_node=2, nodes=1, slowdowns=())
    return replace(
        cluster, hardware=replace(cluster.hardware, interference=Interference(groups=(group,)))
    )


def played(plan: Plan, cluster: Cluster, work: Workload = WORK) -> Simulation:
    return EventSimulator(workload=work, cluster=cluster).simulate(plan)


def stretches(simulation: Simulation) -> list[float]:
    """How many times as long as alone each send across nodes took."""
    times, seconds = simulation.times, simulation.graph.seconds
    return [
        (times.ends_s[task] - times.starts_s[task]) / seconds[task]
        for task in simulation.graph.networks
    ]


@pytest.mark.parametrize("engine", ["mistlab", "megatron"])
def test_sends_of_neighbours_at_one_time_share_their_nodes_network(engine: str) -> None:
    """The middle one of three nodes sends forward from one stage, and back from the other."""
    plan = replace(SIX, engine=engine)
    cluster = apart(replace(TWO_NODES, nodes=3, gpus_per_node=8))
    shares = stretches(played(plan, cluster))
    assert min(shares) == pytest.approx(1)
    assert 1.3 < max(shares) <= 2 * (1 + 1e-9)


LEAVES = {"name": "leaf", "gpus": 16}


def on_leaves(nodes: int) -> Cluster:
    """The cluster on leaves of two nodes each, whose links into the spine are slow."""
    spine = {"name": "spine", "gpus": 8 * nodes, "gbytes_per_s": 0.25}
    net = from_mapping(Network, {"tiers": [{"name": "node", "gpus": 8}, LEAVES, spine]})
    fast = replace(TWO_NODES, inter_node_gbytes_per_s=10.0)
    return apart(replace(fast, nodes=nodes, gpus_per_node=8, network=net))


@pytest.mark.parametrize("engine", ["mistlab", "megatron"])
def test_sends_of_neighbours_at_one_time_share_their_leafs_link(engine: str) -> None:
    """Of six nodes, a stage each, the middle leaf's first one sends back through the link into the
    spine while its second one sends forward. No link passes on more than it can."""
    whole = replace(SIX.stages[0], data_parallel=8)
    plan = replace(SIX, engine=engine, stages=(whole,) * 6)
    simulation = played(plan, on_leaves(6), replace(WORK, global_batch=64))
    graph, times = simulation.graph, simulation.times
    of_links: dict[int, list[tuple[float, float, float]]] = {}
    for task, uses in graph.networks.items():
        for link, share in uses:
            stretch = times.starts_s[task], times.ends_s[task], share * graph.seconds[task]
            of_links.setdefault(link, []).append(stretch)
    met = set()
    for link, stretches_of in of_links.items():
        end, busy_s = 0.0, 0.0
        for start_s, end_s, _ in sorted(stretches_of):
            if start_s < end:
                met.add(link)
            busy_s += max(0.0, end_s - max(start_s, end))
            end = max(end, end_s)
        assert sum(sent_s for *_, sent_s in stretches_of) <= busy_s * (1 + 1e-9)
    # Behind the links of six nodes: that of the middle one of three leaves, out and in.
    assert {2 * (6 + 1), 2 * (6 + 1) + 1} <= met


def test_paths_of_orders_share_the_leafs_link_too() -> None:
    """They take nearly what the event simulator plays; with sends alone, three quarters of it."""
    plan = replace(SIX, order="zb-h1", stages=(replace(SIX.stages[0], data_parallel=8),) * 6)
    work, cluster = replace(WORK, global_batch=64), on_leaves(6)
    path, simulator = (
        one(workload=work, cluster=cluster).predict(plan).iteration_s
        for one in (SymbolicPredictor, EventSimulator)
    )
    assert path == pytest.approx(simulator, rel=0.05)


@pytest.mark.parametrize("engine", ["mistlab", "megatron"])
@pytest.mark.parametrize("micro_batches", [8, 32])
def test_the_closed_form_counts_what_sends_take_from_one_another(
    micro_batches: int, engine: str
) -> None:
    """Each send by itself, an iteration on three nodes would be a tenth to a sixth too short."""
    plan = replace(SIX, engine=engine, micro_batches=micro_batches)
    work = replace(WORK, global_batch=4 * micro_batches)
    cluster = replace(TWO_NODES, nodes=3, gpus_per_node=8)
    closed, simulator = closed_and_played(plan, cluster, work)
    assert closed == pytest.approx(simulator, rel=0.005)


@pytest.mark.parametrize("engine", ["mistlab", "megatron"])
@pytest.mark.parametrize(("nodes", "micro_batches"), [(8, 8), (4, 8), (4, 16)])
def test_the_closed_form_counts_what_a_node_receives_from_both_sides(
    nodes: int, micro_batches: int, engine: str
) -> None:
    """Each send by itself, an iteration of a stage a node would be a seventh too short, and a
    quarter if its sends also queue.
    """
    stage = replace(SIX.stages[0], layers=24 // nodes, data_parallel=8)
    stages = (stage,) * nodes
    plan = replace(SIX, engine=engine, micro_batches=micro_batches, stages=stages)
    cluster = replace(TWO_NODES, nodes=nodes, gpus_per_node=8, inter_node_gbytes_per_s=0.25)
    work = replace(WORK, global_batch=8 * micro_batches)
    closed, simulator = closed_and_played(plan, cluster, work)
    assert closed == pytest.approx(simulator, rel=0.005)


def test_fast_networks_delay_no_send() -> None:
    """Their sends do not meet, and an iteration takes as long as on nodes that share nothing."""
    cluster = replace(TWO_NODES, nodes=3, gpus_per_node=8, inter_node_gbytes_per_s=100.0)
    plan, predictor = SIX, SymbolicPredictor(workload=WORK, cluster=cluster)
    count = np.array([plan.micro_batches])
    costs = predictor.stage_costs(StageBatch.of_plan(plan))
    alone_s = iteration_s(StageTimes.of(costs.seconds, 1, -1), count)
    assert predictor.predict(plan).iteration_s == pytest.approx(float(alone_s[0]), rel=1e-12)


@pytest.mark.parametrize("micro_batches", [40, 96])
def test_times_of_many_micro_batches_follow_from_those_of_fewer(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    uneven = [*SIX.stages]
    uneven[0], uneven[3] = replace(uneven[0], layers=2), replace(uneven[3], layers=6)
    plan = replace(SIX, micro_batches=micro_batches, stages=tuple(uneven))
    work = replace(WORK, global_batch=4 * micro_batches)
    cluster = replace(TWO_NODES, nodes=3, gpus_per_node=8)
    few_s = SymbolicPredictor(workload=work, cluster=cluster).predict(plan).iteration_s
    monkeypatch.setattr(played_pipeline, "_PASSES_PLAYED", 10**9)
    all_s = SymbolicPredictor(workload=work, cluster=cluster).predict(plan).iteration_s
    assert few_s == pytest.approx(all_s, rel=1e-3)


def closed_and_played(plan: Plan, cluster: Cluster, work: Workload) -> tuple[float, float]:
    """The iteration time of a plan in closed form and as played."""
    symbolic = SymbolicPredictor(workload=work, cluster=cluster).predict(plan)
    return symbolic.iteration_s, played(plan, cluster, work).iteration_s


def test_a_plan_takes_as_long_among_others_as_by_itself() -> None:
    """Sends of each plan meet at times of their own."""
    cluster = replace(TWO_NODES, nodes=3, gpus_per_node=8)
    uneven = [*SIX.stages]
    uneven[0], uneven[3] = replace(uneven[0], layers=2), replace(uneven[3], layers=6)
    plans = [SIX, replace(SIX, stages=tuple(uneven))]
    predictor = SymbolicPredictor(workload=WORK, cluster=cluster)
    alone = [predictor.predict(plan).iteration_s for plan in plans]
    together = [one.iteration_s for one in predictor.predict_many(plans[::-1])][::-1]
    assert together == pytest.approx(alone, rel=1e-12)


def test_without_neighbours_sends_take_what_they_take_alone() -> None:
    """One goes out of a node while another comes in; the last one goes beside a reduction."""
    *shares, last = stretches(played(PLAN, apart(TWO_NODES), with_long_head(WORK)))
    assert shares == pytest.approx([1] * 31, rel=1e-9)
    assert last == pytest.approx(2)
    assert not played(PLAN, ONE_NODE).graph.networks


@pytest.mark.parametrize("engine", ["mistlab", "megatron"])
def test_a_tied_table_is_reduced_between_the_ends_when_both_are_done(engine: str) -> None:
    plan = replace(PLAN, engine=engine)  # type: ignore[arg-type]
    simulation = played(plan, TWO_NODES, TIED)
    tied = [
        task for task in simulation.tasks() if task.action.kind == "R" and not task.action.layer
    ]
    tied = [task for task in tied if task.action.layer is None]
    assert [task.action.stage for task in tied] == [0, 3]
    backwards = [task.end_s for task in simulation.tasks() if task.action.kind == "B"]
    assert min(task.start_s for task in tied) >= max(backwards)
    closed, without = (
        SymbolicPredictor(workload=work, cluster=TWO_NODES).predict(plan).iteration_s
        for work in (TIED, WORK)
    )
    # 50,304 x 2,048 gradients of two bytes over half a gigabyte a second.
    assert tied[0].end_s - tied[0].start_s > 0.2
    assert closed - without == pytest.approx(tied[0].end_s - tied[0].start_s, rel=0.02)
    plain = played(plan, TWO_NODES)
    assert simulation.iteration_s - plain.iteration_s == pytest.approx(closed - without, rel=0.05)


def test_a_single_stage_has_its_table_once() -> None:
    plan = Plan(micro_batches=4, stages=(replace(PLAN.stages[0], layers=24, data_parallel=8),))
    times = [played(plan, ONE_NODE, work).iteration_s for work in (WORK, TIED)]
    assert times[1] <= times[0]


def with_work(work: Sequence[float]) -> float:
    simulator = EventSimulator(workload=WORK, cluster=ONE_NODE)
    offloading = replace(PLAN.stages[0], offload=Offload(activations=0.5))
    plan = replace(PLAN, stages=(offloading,) * 4)
    return simulator.simulate(plan, work=work).iteration_s


def test_micro_batches_may_differ() -> None:
    usual = with_work([1.0] * 16)
    assert (
        usual
        == played(
            replace(PLAN, stages=(replace(PLAN.stages[0], offload=Offload(activations=0.5)),) * 4),
            ONE_NODE,
        ).iteration_s
    )
    # As much work in all, unevenly: a pipeline waits for its longest micro-batches.
    uneven = with_work([0.5, 1.5] * 8)
    assert usual < uneven < 1.5 * usual
    assert with_work([2.0] + [1.0] * 15) > usual


@pytest.mark.parametrize("work", [[1.0] * 15, [1.0] * 15 + [0.0], [float("nan")] * 16])
def test_work_that_means_nothing_is_refused(work: list[float]) -> None:
    with pytest.raises(FieldError, match="work"):
        with_work(work)


@pytest.mark.parametrize(("beside", "late_s"), [(None, 0.0), ((1.0, 5.0), 0.5), ((-1.0, 9.0), 1.0)])
def test_a_send_is_slowed_by_its_stages_next_pass_only_while_that_runs(
    beside: tuple[float, float] | None, late_s: float
) -> None:
    sending = played_pipeline.Sending(alone_s=2.0, late_s=1.0, uses=((0, 1.0),))
    send = played_pipeline.Send(0, (0.0, sending, 1, 0, 1), now=0.0)
    assert send.late_s(beside) == pytest.approx(late_s)
