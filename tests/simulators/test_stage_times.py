"""Times of stages as they were played: of hand-made tasks, and in predictions."""

from dataclasses import replace

import pytest

from mistlab.plan.plan import Offload, Plan
from mistlab.schedule.slots import Action
from simulators.events import EventSimulator
from simulators.graph import TaskGraph
from simulators.play import PassTimes, Times, pass_times
from simulators.symbolic import SymbolicPredictor
from tests.simulators.test_events import EVERYTHING, EXACT, HALF, PLAIN, WORK, cluster_of, plan_of

# Nobody sends, so whatever a stage waits for is its own.
ALONE = {
    **{name: plan for name, plan in EXACT.items() if plan.num_stages == 1},
    "sharded weights, everything offloaded": plan_of(
        replace(PLAIN, data_parallel=4, zero=3, offload=EVERYTHING, checkpointed_layers=12),
        micro_batches=8,
    ),
    "optimizer state sharded": plan_of(replace(PLAIN, data_parallel=4, zero=1), micro_batches=8),
}


def graph_of(*tasks: tuple[str, str, float, float]) -> tuple[TaskGraph, Times]:
    """Tasks by action, stream, start and end."""
    graph = TaskGraph(stages=2)
    for action, stream, start_s, end_s in tasks:
        graph.add(Action.parse(action), stream, end_s - start_s)
    times = Times(starts_s=[task[2] for task in tasks], ends_s=[task[3] for task in tasks])
    return graph, times


def test_a_pass_begins_when_the_stage_is_free_and_its_micro_batch_has_come() -> None:
    graph, times = graph_of(
        ("0S.1m0", "compute", 1.0, 2.0),  # After a fetch of a second.
        ("0F.1m0", "compute", 2.0, 5.0),
        ("0Xm0", "gpu_to_gpu", 5.0, 6.0),
        ("0F.1m1", "compute", 5.5, 8.5),  # Half a second waited for, by itself.
        ("0Xm1", "gpu_to_gpu", 8.5, 9.5),
        ("1S.2m0", "compute", 0.5, 1.5),
        ("1F.2m0", "compute", 6.25, 8.0),  # There at 6.
        ("1B.2m0", "compute", 8.0, 10.0),
        ("1F.2m1", "compute", 10.0, 11.5),
        ("1B.2m1", "compute", 11.5, 14.5),
        ("1R.2m1", "gpu_to_gpu", 14.5, 16.0),
        ("0B.1m0", "compute", 11.0, 15.0),  # There when stage 1 is done: no send.
        ("0B.1m1", "compute", 16.0, 21.0),
    )
    graph.sends += [(2, 6), (4, 8)]
    assert pass_times(graph, times) == [
        PassTimes(forwards_s=(5.0, 3.5), backwards_s=(5.0, 6.0)),
        PassTimes(forwards_s=(1.5 + 2.0, 1.5), backwards_s=(2.0, 3.0 + 1.5)),
    ]
    assert pass_times(graph, times)[0].steady_s == (3.5, 5.0)


def test_a_single_micro_batch_has_no_steady_pass() -> None:
    graph, times = graph_of(("0F.1m0", "compute", 0.0, 1.0), ("0B.1m0", "compute", 1.0, 3.0))
    graph.stages = 1
    (stage,) = pass_times(graph, times)
    assert stage == PassTimes(forwards_s=(1.0,), backwards_s=(2.0,))
    assert stage.steady_s is None


@pytest.mark.parametrize("name", ALONE)
def test_the_passes_of_one_stage_fill_its_iteration(name: str) -> None:
    plan, cluster = ALONE[name], cluster_of()
    played = EventSimulator(workload=WORK, cluster=cluster).predict(plan)
    (stage,) = played.stages
    passes_s = plan.micro_batches * stage.stable_s + stage.delta_forward_s + stage.delta_backward_s
    assert passes_s == pytest.approx(played.iteration_s, rel=2e-3)


@pytest.mark.parametrize("name", EXACT)
def test_where_nothing_overlaps_stages_take_what_the_closed_form_says(name: str) -> None:
    plan, cluster = EXACT[name], cluster_of()
    played = EventSimulator(workload=WORK, cluster=cluster).predict(plan)
    closed = SymbolicPredictor(workload=WORK, cluster=cluster).predict(plan)
    for one, other in zip(played.stages, closed.stages, strict=True):
        assert one.stable_s == pytest.approx(other.stable_s)
        assert one.exposed_communication_s == pytest.approx(other.exposed_communication_s)
        # What a layer leaves to its neighbour may be the last pass's or the next one's.
        deltas, expected = (s.delta_forward_s + s.delta_backward_s for s in (one, other))
        if plan.micro_batches == 1 and plan.num_stages > 1:
            # Steady passes would be slowed by the sends beside them.
            assert -1e-9 < expected - deltas < 0.01 * other.stable_s
        else:
            assert deltas == pytest.approx(expected)
        assert one.memory == other.memory


def test_what_streams_do_to_one_another_shows_in_the_stage_that_they_are_of() -> None:
    """Swapped activations slow the first stage down; the second only waits for it."""
    offloading = replace(HALF, offload=Offload(activations=1.0))
    plan = Plan(micro_batches=16, stages=(offloading, HALF))
    fast, slow = (
        EventSimulator(workload=WORK, cluster=cluster_of(contention=contention)).predict(plan)
        for contention in (False, True)
    )
    assert slow.stages[0].stable_s > 1.01 * fast.stages[0].stable_s
    assert slow.stages[1].stable_s == pytest.approx(fast.stages[1].stable_s, rel=1e-3)
