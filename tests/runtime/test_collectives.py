"""Collectives that would hang are found without running them, and there are none."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from mistlab.schedule.stage_passes import LANES  # noqa: E402
from mistlab.stages.stage_program import iterations  # noqa: E402
from mistlab.stages.stage_shape import StageShape  # noqa: E402
from runtime.checks.collectives.calls import calls_of  # noqa: E402
from runtime.checks.collectives.deadlock import deadlock  # noqa: E402
from runtime.checks.collectives.findings import (  # noqa: E402
    collective_findings,
    few_batches,
    findings_of,
)
from runtime.checks.collectives.world_calls import (  # noqa: E402
    Call,
    RankCalls,
    Step,
    WorldCalls,
)
from runtime.comm import topology  # noqa: E402
from runtime.comm.topology import Topology  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    MIXED,
    random_plan,
    stage,
    workload,
)

# How many random plans are looked at, and how many make test-all looks at.
RANDOM, ALL_RANDOM = 90, 300
MOST_RANKS = 8
Plans = Mapping[int, tuple[Workload, Plan]]


@pytest.fixture(scope="module", params=[RANDOM, pytest.param(ALL_RANDOM, marks=pytest.mark.slow)])
def plans(request: pytest.FixtureRequest) -> Plans:
    return {seed: random_plan(seed, most_ranks=MOST_RANKS) for seed in range(request.param)}


def troubled(plans: Plans) -> dict[str, set[int]]:
    """The plans that have each kind of finding."""
    found: dict[str, set[int]] = defaultdict(set)
    for seed, (work, plan) in plans.items():
        for one in collective_findings(plan, work, clips=seed % 2 > 0, steps_on_host=seed % 3 > 0):
            found[one.trouble].add(seed)
    return found


def idle(plan: Plan) -> bool:
    """Whether a rank has nobody to exchange messages with in a group of neighbouring stages."""
    of = Topology(plan=plan)
    return any(of.traffic(rank, link) == ([], []) for link, ranks in of.links() for rank in ranks)


def test_no_random_plan_has_a_rank_missing_or_waiting_for_ever(plans: Plans) -> None:
    assert troubled(plans) == {}


def test_without_a_first_call_by_all_ranks_some_never_enter_it(
    plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology, "enter", lambda *_: None)
    expected = {seed for seed, (_, plan) in plans.items() if idle(plan)}
    assert len(expected) > len(plans) / 3
    assert troubled({seed: plans[seed] for seed in expected}) == {"first call": expected}


def test_without_a_first_message_a_receipt_posted_ahead_waits_for_what_its_pass_sends(
    plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a single micro-batch a stage waits for gradients before it has sent activations."""
    monkeypatch.setattr(topology, "greet", lambda *_: None)
    pipelines = {seed: one for seed, one in plans.items() if one[1].num_stages > 1}
    expected = {seed for seed, (_, plan) in pipelines.items() if plan.micro_batches == 1}
    assert len(expected) > len(plans) / 7.5
    assert troubled(pipelines) == {"deadlock": expected}


def hanging(plans: Plans, queues: int) -> int:
    found = (collective_findings(plan, work, queues=queues) for work, plan in plans.values())
    return sum(map(bool, found))


def test_lanes_that_share_hardware_queues_may_wait_in_a_circle(plans: Plans) -> None:
    some = {seed: plans[seed] for seed in range(len(plans) // 5)}
    assert hanging(some, 1) > hanging(some, 8) > hanging(some, len(LANES)) == 0


@pytest.mark.parametrize("plans", [pytest.param(ALL_RANDOM, marks=pytest.mark.slow)], indirect=True)
def test_as_many_hang_as_the_page_of_the_decision_says(plans: Plans) -> None:
    pipelines = {seed: one for seed, one in plans.items() if one[1].num_stages > 1}
    found = {queues: hanging(pipelines, queues) for queues in (1, 8, len(LANES))}
    assert (len(pipelines), found) == (208, {1: 208, 8: 64, len(LANES): 0})


@pytest.mark.parametrize("beside", [False, True])
def test_a_reduction_beside_its_task_waits_in_the_queue_of_its_own_lane(beside: bool) -> None:
    """Of three queues its lane and that of receipts have one: there it is behind a receipt of what
    the other rank sends when the reduction has ended."""
    reduces = Call(group="tensor", kind="all_reduce", what="gradients", beside=beside)
    exchanges = (Call(group="forward 0", kind="exchange", what="activations"),)
    receives, sends = (
        Step(task="Y", lane="receive_forward", calls=exchanges),
        Step(task="X", lane="send_forward", calls=exchanges, waits=(1,)),
    )
    backward = Step(task="B", calls=(reduces,))
    messages = {"forward 0": {1: 1}}, {"forward 0": {0: 1}}
    ranks = (
        RankCalls(rank=0, steps=(receives, backward), sends={}, receives=messages[0]),
        RankCalls(rank=1, steps=(backward, sends), sends=messages[1], receives={}),
    )
    groups = (("tensor", (0, 1)), ("forward 0", (0, 1)))
    assert deadlock(ranks, groups, ranks) == []
    assert bool(deadlock(ranks, groups, ranks, queues=3)) == beside


WORK = workload("gpt", tied_embeddings=True)
PLAN = Plan(
    micro_batches=3,
    stages=(
        stage(2, data_parallel=2, tensor_parallel=2, micro_batch=2, zero=3),
        stage(2, tensor_parallel=2, micro_batch=4, zero=2, offload=MIXED),
    ),
)


def changed(
    world: WorldCalls, rank: int, change: Callable[[RankCalls], RankCalls], phase: str = "training"
) -> WorldCalls:
    """The calls with those of one rank changed."""
    ranks = list(getattr(world, phase))
    ranks[rank] = change(ranks[rank])
    return replace(world, **{phase: tuple(ranks)})


def steps_changed(
    world: WorldCalls, rank: int, change: Callable[[list[Step]], list[Step]]
) -> WorldCalls:
    return changed(world, rank, lambda one: replace(one, steps=tuple(change(list(one.steps)))))


def with_calls(steps: Sequence[Step], group: str) -> list[int]:
    return [n for n, step in enumerate(steps) if any(c.group == group for c in step.calls)]


def one_finding(world: WorldCalls, trouble: str) -> Any:
    found = [one for one in findings_of(world) if one.trouble == trouble]
    assert len(found) == 1
    return found[0]


def exchanged(group: str, first: int, second: int) -> Callable[[list[Step]], list[Step]]:
    """Two tasks of a group make each other's calls."""

    def change(steps: list[Step]) -> list[Step]:
        one, other = (with_calls(steps, group)[number] for number in (first, second))
        calls = steps[one].calls, steps[other].calls
        steps[one] = replace(steps[one], calls=calls[1])
        steps[other] = replace(steps[other], calls=calls[0])
        return steps

    return change


def test_the_plan_of_planted_faults_has_none() -> None:
    assert findings_of(calls_of(PLAN, WORK)) == ()


@pytest.mark.parametrize("group", ["gather", "reduce"])
def test_an_order_exchanged_on_one_rank_is_found(group: str) -> None:
    world = steps_changed(calls_of(PLAN, WORK), 2, exchanged(group, 0, 1))
    found = one_finding(world, "order")
    assert (found.group, found.ranks) == (group, (0, 2))
    assert len(set(found.calls)) == 2
    assert "in one order" in str(found)


def test_a_call_that_one_rank_leaves_out_is_found() -> None:
    def change(steps: list[Step]) -> list[Step]:
        last = with_calls(steps, "world")[-1]
        steps[last] = replace(steps[last], calls=())
        return steps

    world = steps_changed(calls_of(PLAN, WORK), 3, change)
    found = one_finding(world, "order")
    assert (found.group, found.ranks) == ("world", (0, 3))
    assert "nothing more by rank 3" in str(found)
    assert one_finding(world, "deadlock").ranks


def test_a_size_changed_on_one_rank_is_found() -> None:
    def change(steps: list[Step]) -> list[Step]:
        at = with_calls(steps, "tensor")[5]
        call, *others = steps[at].calls
        steps[at] = replace(steps[at], calls=(replace(call, what="half of it"), *others))
        return steps

    found = one_finding(steps_changed(calls_of(PLAN, WORK), 1, change), "order")
    assert (found.group, found.ranks) == ("tensor", (0, 1))
    assert any("half of it" in call for call in found.calls)


def test_a_message_of_another_size_is_found() -> None:
    def change(one: RankCalls) -> RankCalls:
        receives = {link: dict(of) for link, of in one.receives.items()}
        receives["forward 0"][0] += 1
        return replace(one, receives=receives)

    found = one_finding(changed(calls_of(PLAN, WORK), 4, change), "messages")
    assert (found.group, found.ranks, found.calls) == ("forward 0", (0, 4), ("2", "3"))


def test_a_message_that_nobody_expects_is_found() -> None:
    def change(one: RankCalls) -> RankCalls:
        return replace(one, receives={**one.receives, "forward 0": {}})

    world = changed(calls_of(PLAN, WORK), 4, change)
    found = [one for one in findings_of(world) if one.trouble == "messages"]
    assert {one.ranks for one in found} == {(0, 4), (2, 4)}
    assert "which expects nothing" in str(found[0])


def test_messages_in_another_order_are_found() -> None:
    world = steps_changed(calls_of(PLAN, WORK), 4, exchanged("forward 0", 0, 1))
    found = [one for one in findings_of(world) if one.trouble == "messages"]
    assert {one.ranks for one in found} == {(0, 4), (2, 4)}
    assert "activations of micro-batch 1" in str(found[0])


def test_a_rank_that_leaves_a_group_out_while_it_connects_is_found() -> None:
    """The second tensor-parallel rank sends nothing: the one rank of the next stage has the first's
    activations."""

    def change(one: RankCalls) -> RankCalls:
        kept = (step for step in one.steps if step.calls[0].group != "forward 0")
        return replace(one, steps=tuple(kept))

    plan = Plan(micro_batches=2, stages=(stage(2, tensor_parallel=2), stage(2)))
    found = one_finding(changed(calls_of(plan, WORK), 1, change, "connecting"), "first call")
    assert (found.group, found.ranks) == ("forward 0", (1,))
    assert "while they connect" in str(found)


def test_ranks_that_wait_in_a_circle_are_found() -> None:
    """Each sends what the other waits for only after what it waits for itself."""

    def change(steps: list[Step]) -> list[Step]:
        (sends, *_), (receives, *_) = (
            with_calls(steps, f"{way} 0") for way in ("forward", "backward")
        )
        assert sends > receives
        steps[sends] = replace(steps[sends], waits=(*steps[sends].waits, sends - receives))
        return steps

    plan = Plan(micro_batches=1, stages=(stage(2), stage(2)))
    world = calls_of(plan, WORK)
    assert findings_of(world) == ()
    found = one_finding(steps_changed(world, 0, change), "deadlock")
    assert set(found.ranks) == {0, 1}
    assert any("backward 0" in call for call in found.calls)
    assert any("forward 0" in call for call in found.calls)


@pytest.mark.parametrize("seed", range(6))
def test_fewer_micro_batches_have_the_same_tasks_and_waits(seed: int) -> None:
    _, plan = random_plan(seed, most_ranks=MOST_RANKS)
    assert_few_are_enough(replace(plan, micro_batches=25))


def assert_few_are_enough(long: Plan) -> None:
    short = few_batches(long)
    assert short.micro_batches < 20 + len(long.stages)
    for number in range(long.num_stages):
        seen = []
        for one in (short, long):
            programs = iterations(StageShape.of(one, number, clips=True, tied=True), 2)
            ops = [op for program in programs for op in program]
            seen.append({(op.name, op.lane, op.phase, op.waits) for op in ops})
        assert seen[0] == seen[1]


@pytest.mark.parametrize("order", ["interleaved-2", "interleaved-3"])
def test_fewer_micro_batches_of_chunks_have_the_same_tasks_and_waits(order: str) -> None:
    stages = tuple(stage(3, data_parallel=2, zero=3, offload=MIXED) for _ in range(3))
    assert_few_are_enough(Plan(micro_batches=33, stages=stages, order=order))
