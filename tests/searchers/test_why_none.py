"""Why a search has no plan: the space is empty, its ways are too many to list, time was short."""

from dataclasses import replace
from typing import Any

import pytest

from mistlab import catalog
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import NodeGroup
from mistlab.plan.named_spaces import SPACES, space_of
from mistlab.plan.space import OffloadRatios
from searchers.meshes import pipelines
from searchers.registry import SEARCHERS
from searchers.savings import WAY_BYTES, free_bytes, too_many_ways, ways_listed, why_empty
from searchers.strategy import StrategySearcher
from tests.searchers.problems import SMALL, predictor_of

THOUSANDTHS = tuple(ratio / 1000 for ratio in range(1001))
FINE = replace(
    space_of("mist"),
    name="fine",
    offload=OffloadRatios(
        weights=THOUSANDTHS, gradients=THOUSANDTHS, optimizer=THOUSANDTHS, activations=THOUSANDTHS
    ),
)


def problem_with(**changes: int) -> Problem:
    workload, cluster = SMALL.workload, SMALL.cluster
    if "batch" in changes:
        workload = replace(workload, global_batch=changes["batch"])
    if "gpus" in changes:
        cluster = replace(cluster, gpus_per_node=changes["gpus"])
    return Problem(workload=workload, cluster=cluster)


@pytest.mark.parametrize(
    ("limits", "problem", "helps"),
    [
        ({"pipeline": (3,)}, {}, "with another pipeline than 3"),
        ({"micro_batches": (5,)}, {"batch": 4}, "with another micro_batches than 5"),
        (
            {"data_parallel": (2,), "tensor_parallel": (1,), "pipeline": (1,)},
            {"batch": 3},
            "for a global batch of 4",
        ),
        ({"data_parallel": (1,), "pipeline": (1,), "tensor_parallel": (1,)}, {}, "on 1 GPUs of"),
        ({"context_parallel": (64,)}, {}, "with context_parallel 1, which is not among 64"),
    ],
    ids=["pipeline", "micro-batches", "batch", "GPUs", "context"],
)
def test_an_empty_space_says_which_change_would_fill_it(
    limits: dict[str, Any], problem: dict[str, int], helps: str
) -> None:
    space = replace(space_of("mist"), **limits)
    reason = why_empty(problem_with(**problem), space)
    assert reason.startswith("space mist has no plan on 2 GPUs for a global batch of")
    assert helps in reason


@pytest.mark.parametrize(("name", "gpus", "batch"), [("fsdp", 3, 9), ("trainer", 2, 8)])
def test_a_space_of_programs_without_pipelines_is_given_none(
    name: str, gpus: int, batch: int
) -> None:
    reason = why_empty(problem_with(batch=7, gpus=gpus), space_of(name))
    assert f"for a global batch of {batch};" in reason
    assert "pipeline" not in reason
    assert "tensor_parallel" not in reason


def test_programs_without_pipelines_run_on_gpus_of_a_single_kind() -> None:
    others = (NodeGroup(hardware=catalog.hardware("h100-80gb"), nodes=1),)
    cluster = replace(SMALL.cluster, nodes=2, others=others)
    reason = why_empty(replace(SMALL, cluster=cluster), space_of("trainer"))
    assert "a stage has GPUs of one kind: give one hardware name, or a space with" in reason
    assert not why_empty(replace(SMALL, cluster=cluster), space_of("mist"))


def test_frozen_weights_that_no_engine_divides_are_given_no_other_degree() -> None:
    problem = problem_with(batch=7, gpus=3)
    quantised = replace(problem.workload, train="adapters", base="4bit")
    reason = why_empty(
        replace(problem, workload=quantised), space_of("mist").on("trainer").holding("4bit")
    )
    assert reason.startswith("space mist has no plan on 3 GPUs for a global batch of 7: there is")
    assert "pipeline" not in reason
    assert "tensor_parallel" not in reason


def test_blocks_that_no_number_treats_are_said() -> None:
    space = replace(space_of("mist"), recomputation="all", core_recomputed_layers=(1,))
    assert "lets no stage treat its blocks" in why_empty(SMALL, space)


@pytest.mark.parametrize("name", SPACES)
def test_a_space_that_has_pipelines_is_not_empty(name: str) -> None:
    assert (next(pipelines(SMALL, SPACES[name]), None) is None) == bool(
        why_empty(SMALL, SPACES[name])
    )


def test_ratios_that_memory_cannot_list_are_refused_with_what_they_take() -> None:
    assert ways_listed(FINE) == 3 * 1001**4
    reason = too_many_ways(SMALL, FINE)
    assert "space fine has 3,012,018,012,003 ways" in reason
    assert "6,171,352.8 GiB" in reason
    space = space_of("mist")
    needed = ways_listed(space) * WAY_BYTES
    assert not too_many_ways(SMALL, space, room_bytes=needed)
    assert too_many_ways(SMALL, space, room_bytes=needed - 1)
    assert 0 < free_bytes() < 1 << 50


def test_only_a_search_of_all_ways_refuses_fine_ratios() -> None:
    budget = Budget(evaluations=20)
    statuses = {
        name: StrategySearcher(strategy=SEARCHERS[name], predictor=predictor_of(SMALL))
        .search(SMALL, FINE, budget, 0)
        .status
        for name in ("exact", "random", "mist")
    }
    assert statuses["exact"] == "REFUSED"
    assert "REFUSED" not in (statuses["random"], statuses["mist"])


def test_a_search_without_a_plan_in_time_says_so() -> None:
    searcher = StrategySearcher(strategy=SEARCHERS["mist"], predictor=predictor_of(SMALL))
    result = searcher.search(SMALL, space_of("mist"), Budget(seconds=1e-9), 0)
    assert (result.status, result.plan) == ("BUDGET", None)
    assert result.reason.startswith("no plan in time: the budget of 1e-09 s was spent when")
