"""Bottlenecks are found, relieved, and where nothing relieves them the search ends."""

from dataclasses import replace

import numpy as np
import pytest

from mistlab.job.search import Budget
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan
from searchers.methods.aceso import Relief, Resource, bottlenecks, initial_plans, moves
from searchers.savings import Chooser, Members, chosen_plan, contains
from searchers.strategy import Ledger
from tests.searchers.problems import SMALL, TOO_SMALL, predictor_of

FOUR = replace(SMALL, cluster=replace(SMALL.cluster, gpus_per_node=4))
SPACES = ("3d", "+offload", "mist", "wide", "aceso")
RESOURCES: tuple[Resource, ...] = ("compute", "communication", "memory", "host")


def drawn_plans(space: str, number: int) -> list[Plan]:
    draw = np.random.default_rng(0)
    chooser = Chooser(lambda _, options: int(draw.integers(options)))
    plans = [chosen_plan(FOUR, space_of(space), chooser) for _ in range(number)]
    return [plan for plan in plans if plan is not None]


@pytest.mark.parametrize("space", SPACES)
def test_initial_plans_are_inside_one_of_each_depth(space: str) -> None:
    plans = list(initial_plans(FOUR, space_of(space)))
    assert all(contains(FOUR, space_of(space), plan) for plan in plans)
    assert {plan.num_stages for plan in plans} == {1, 2, 4}


def test_initial_plans_run_in_orders_of_the_space() -> None:
    space = replace(space_of("zero-bubble"), orders=("zb-h2", "zb-h1"))
    plans = list(initial_plans(FOUR, space))
    assert all(contains(FOUR, space, plan) for plan in plans)
    assert {"zb-h2", "zb-h1"} & {plan.order for plan in plans}


@pytest.mark.parametrize("space", SPACES)
def test_moves_keep_blocks_gpus_and_batch(space: str) -> None:
    for plan in drawn_plans(space, 30):
        for resource in RESOURCES:
            for stage in range(plan.num_stages):
                for moved in moves(plan, stage, resource, space_of(space)):
                    assert moved != plan
                    assert (moved.layers, moved.num_gpus) == (plan.layers, plan.num_gpus)
                    for own in moved.stages:
                        product = own.micro_batch * own.data_parallel * moved.micro_batches
                        assert product == FOUR.workload.global_batch


def test_moves_reach_every_feature_of_the_space() -> None:
    members = Members(problem=FOUR, space=space_of("wide"))
    reached = {
        resource: sum(
            moved in members
            for plan in drawn_plans("wide", 30)
            for moved in moves(plan, 0, resource, space_of("wide"))
        )
        for resource in RESOURCES
    }
    assert min(reached.values()) > 30


def test_a_plan_that_does_not_fit_is_short_of_memory_where_it_is_fullest() -> None:
    (plan, *_) = [p for p in initial_plans(TOO_SMALL, space_of("mist")) if p.num_stages == 2]
    prediction = predictor_of(TOO_SMALL).predict(plan)
    ((stage, resource),) = bottlenecks(plan, prediction, TOO_SMALL.cluster)
    assert resource == "memory"
    peaks = [one.peak_reserved_bytes for one in prediction.stages]
    assert peaks[stage] == max(peaks)


def test_the_two_slowest_stages_are_short_of_what_takes_most_of_their_time() -> None:
    whole = next(p for p in initial_plans(FOUR, space_of("mist")) if p.num_stages == 4)
    prediction = predictor_of(FOUR).predict(whole)
    plan = replace(whole, micro_batches=10, stages=whole.stages[:3])
    seconds = [
        # Steady and exposed seconds of a micro-batch, then those of the first and the last.
        (1.0, 0.6, 0.0, 0.0),
        # Longer than the one before by its first micro-batch; a last one that is shorter is none.
        (0.9, 0.1, 2.5, -3.0),
        (0.8, 0.8, 0.0, 0.0),
    ]
    names = ("stable_s", "exposed_communication_s", "delta_forward_s", "delta_backward_s")
    stages = tuple(
        replace(stage, **dict(zip(names, own, strict=True)))
        for stage, own in zip(prediction.stages, seconds, strict=False)
    )
    found = bottlenecks(plan, replace(prediction, fits=True, stages=stages), FOUR.cluster)
    assert found == [
        (1, "compute"),
        (1, "communication"),
        (0, "communication"),
        (0, "compute"),
    ]


def test_full_hosts_are_relieved_of_what_they_keep() -> None:
    cluster = replace(SMALL.cluster, memory_gib=8, host_memory_gib=0.01)
    problem = replace(SMALL, cluster=cluster)
    offloaded = next(
        plan
        for plan in drawn_plans("mist", 100)
        if plan.num_stages == 2 and plan.num_gpus == 4 and plan.stages[0].offload.optimizer
    )
    prediction = predictor_of(replace(FOUR, cluster=replace(cluster, gpus_per_node=4))).predict(
        offloaded
    )
    ((_, resource),) = bottlenecks(offloaded, prediction, problem.cluster)
    assert resource == "host"


@pytest.mark.parametrize("space", ["+offload", "mist"])
def test_relief_ends_where_no_move_of_the_bottleneck_helps(space: str) -> None:
    ledger = Ledger(
        predictor=predictor_of(SMALL), budget=Budget(evaluations=9999), clock=lambda: 0.0
    )
    relief = Relief(problem=SMALL, space=space_of(space), ledger=ledger)
    start = max(initial_plans(SMALL, space_of(space)), key=lambda plan: plan.stages[0].num_gpus)
    relief.predict([start])
    end = relief.relieved(start, hops=1)
    assert relief.score(end) < relief.score(start)
    assert relief.score(end).excess == 0
    for stage, resource in bottlenecks(end, relief.known[end], SMALL.cluster):
        for moved in moves(end, stage, resource, space_of(space)):
            if moved in relief.members:
                assert relief.score(moved) >= relief.score(end)
    assert relief.score(relief.relieved(start, hops=3)) <= relief.score(end)
