"""The parts of a large space with which its search begins."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from mistlab import catalog
from mistlab.job.search import Budget, Problem, SearchResult
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.space import SearchSpace
from mistlab.plan.workload import Workload
from searchers.meshes import as_in, common, parts_of
from searchers.methods import mist
from searchers.registry import SEARCHERS
from searchers.savings import Chooser, Members, chosen_plan, contains
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor

PROBLEM = Problem(
    workload=Workload(
        model=replace(catalog.model("gpt3-7b"), name="", layers=16),
        sequence_length=2048,
        global_batch=64,
        attention="flash",
        precision="fp16",
    ),
    cluster=Cluster(hardware=catalog.hardware("a100-40gb"), nodes=2, gpus_per_node=4),
)


def test_a_search_of_everything_begins_with_the_published_spaces() -> None:
    first, alike, second, last = parts_of(space_of("everything"))
    # With the lowest ZeRO level of the whole space.
    assert replace(first, name="3d") == replace(space_of("3d"), zero=(0, 1))
    assert replace(second, name="mist") == replace(space_of("mist"), zero=(0, 1, 2, 3))
    assert alike.sequence_parallel == last.sequence_parallel == (0, 1)
    assert not alike.unequal_stages
    assert not last.unequal_meshes
    # Spaces without a choice of the meshes begin without stages that are alike.
    assert [part.zero for part in parts_of(space_of("wide"))] == [first.zero, second.zero]
    assert [*parts_of(space_of("mist"))] == []


@pytest.mark.parametrize("name", ["wide", "everything", "aceso"])
def test_a_part_has_plans_of_its_space_alone(name: str) -> None:
    space = space_of(name)
    members, draw = Members(problem=PROBLEM, space=space), np.random.default_rng(1)
    chooser = Chooser(lambda _, count: int(draw.integers(count)))
    for part in parts_of(space):
        drawn = [chosen_plan(PROBLEM, part, chooser) for _ in range(20)]
        found = [plan for plan in drawn if plan is not None]
        assert found
        assert all(as_in(plan, space) in members for plan in found)


def test_spaces_without_common_plans_have_no_common_part() -> None:
    assert common(replace(space_of("wide"), tensor_parallel=(3,)), space_of("mist")) is None
    for less, more in pairwise(["3d", "+zero", "+checkpointing", "+offload", "mist", "wide"]):
        found = common(space_of(more), space_of(less))
        assert found is not None
        assert replace(found, name=less) == space_of(less)


def test_a_small_budget_finds_as_much_in_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """And finds less without parts."""
    everything_s = searched_s("everything", 8)
    assert everything_s <= min(searched_s("3d", 8), searched_s("mist", 8))
    monkeypatch.setattr(mist, "parts_of", lambda _: ())
    searched.cache_clear()
    whole_s = searched_s("everything", 8)
    searched.cache_clear()
    assert whole_s > everything_s


def test_everything_is_no_worse_than_a_space_of_experts_that_it_contains() -> None:
    """Llama 3 70B on 64 H100: the parts whose stages choose for themselves take most of a budget
    before they come to sequence parallelism."""
    workload = Workload(
        model=catalog.model("llama3-70b"),
        sequence_length=8192,
        global_batch=512,
        attention="flash",
        precision="bf16",
    )
    cluster = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=8, gpus_per_node=8)
    problem = Problem(workload=workload, cluster=cluster)
    less, more = (
        found_s(problem, space_of(name).on("megatron-core"), 20) for name in ("moe", "everything")
    )
    assert more <= less


def test_a_budget_that_ends_in_a_part_leaves_a_gap_of_the_whole_space() -> None:
    found = searched("everything", 8)
    assert found.status == "BUDGET"
    assert found.gap is not None
    assert 0 < found.gap < 1


def found_s(problem: Problem, space: SearchSpace, evaluations: int) -> float:
    predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
    searcher = StrategySearcher(strategy=SEARCHERS["mist"], predictor=predictor)
    found = searcher.search(problem, space, Budget(evaluations=evaluations), 0)
    assert found.prediction is not None
    return found.prediction.iteration_s


def searched_s(name: str, evaluations: int) -> float:
    found = searched(name, evaluations)
    assert found.prediction is not None
    assert found.plan is not None
    assert contains(PROBLEM, space_of(name), found.plan)
    return found.prediction.iteration_s if found.prediction.fits else float("inf")


@cache
def searched(name: str, evaluations: int) -> SearchResult:
    predictor = SymbolicPredictor(workload=PROBLEM.workload, cluster=PROBLEM.cluster)
    searcher = StrategySearcher(strategy=SEARCHERS["mist"], predictor=predictor)
    return searcher.search(PROBLEM, space_of(name), Budget(evaluations=evaluations), 0)
