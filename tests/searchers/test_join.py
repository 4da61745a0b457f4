"""Joining stages: against brute force over the same menus, with both solvers, in processes."""

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from time import perf_counter

import numpy as np
import pulp
import pytest
from joblib import parallel_config

from mistlab import catalog
from mistlab.cost.chains import ISSUED
from mistlab.cost.pipeline import no_stages, prepended
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan
from mistlab.plan.space import OffloadRatios, SearchSpace
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import TIMES, StageTimes
from searchers.exact import milp
from searchers.exact.candidates import Grain, Menus, Options, fastest, spread, undominated
from searchers.exact.groups import Group, groups_of, work_of
from searchers.exact.milp import join_by
from searchers.exact.programme import join, join_hastily, places_by_stage
from searchers.registry import SEARCHERS
from searchers.strategy import Ledger, StrategySearcher
from simulators.symbolic import SymbolicPredictor
from tests.searchers.small import small_problem

SEED = 4


def predictor_of(problem: Problem) -> SymbolicPredictor:
    return SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)


def menus_of(problem: Problem, space: SearchSpace, group: Group) -> Menus:
    ledger = Ledger(
        predictor=predictor_of(problem), budget=Budget(seconds=1000), clock=perf_counter
    )
    work = work_of(problem, space, ledger, group.meshes)
    return Menus(problem=problem, space=space, ledger=ledger, group=group, work=work)


def fastest_by_hand(menus: Menus) -> float:
    """The time of the best of all combinations of candidates for all stages."""
    stages = [
        [(place, row) for place in places for row in range(len(menus[place]))]
        for places in places_by_stage(menus, np.inf)
    ]
    micro_batches = np.array([menus.group.micro_batches])
    best = np.inf
    for chosen in product(*stages):
        if sum(place.layers for place, _ in chosen) != menus.problem.workload.model.layers:
            continue
        chains = no_stages(1)
        for after, (place, row) in enumerate(chosen):
            times = menus[place].chosen(np.array([row])).times
            chains = prepended(times, chains, micro_batches, after + 1)
        best = min(best, float(chains.whole[0]))
    return best


@pytest.fixture(scope="module")
def group() -> tuple[Problem, SearchSpace, Group]:
    """Two stages or more that are not all alike, with few enough combinations."""
    problem, space = small_problem(SEED)
    found = [g for g in groups_of(problem, space, equal_sizes=True) if g.num_stages == 2]
    return problem, space, found[0]


@pytest.mark.parametrize(
    "joiner", [join, join_by("highs", 60), join_by("cbc", 60)], ids=["dynamic", "highs", "cbc"]
)
def test_joined_stages_are_the_best_combination(
    group: tuple[Problem, SearchSpace, Group],
    joiner: Callable[[Menus, float], tuple[float, Plan] | None],
) -> None:
    menus = menus_of(*group)
    best_s = fastest_by_hand(menus)
    found = joiner(menus, np.inf)
    assert found is not None
    seconds, plan = found
    assert seconds == pytest.approx(best_s, rel=1e-6)
    assert predictor_of(group[0]).predict(plan).iteration_s == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize("micro_batches", [2, 4, 24], ids=["fewer", "as many", "more"])
def test_solver_and_dynamic_programme_agree_where_stages_wait_for_sends(
    micro_batches: int,
) -> None:
    """Four stages on two nodes of a slow network."""
    problem = Problem(
        workload=Workload(
            model=replace(catalog.model("gpt3-1.3b"), name="small", layers=6),
            sequence_length=2048,
            global_batch=micro_batches,
            attention="flash",
            precision="fp16",
        ),
        cluster=Cluster(
            hardware=catalog.hardware("l4-24gb"),
            nodes=2,
            gpus_per_node=2,
            inter_node_gbytes_per_s=0.2,
        ),
    )
    space = replace(
        space_of("mist"),
        pipeline=(4,),
        micro_batches=(micro_batches,),
        offload=OffloadRatios(optimizer=(0.0, 0.5), activations=(0.0, 1.0)),
    )
    (four,) = groups_of(problem, space)
    found = [
        joiner(menus_of(problem, space, four), np.inf) for joiner in (join, join_by("highs", 60))
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    for seconds, plan in found:
        assert predictor_of(problem).predict(plan).iteration_s == pytest.approx(seconds, rel=1e-6)


def test_a_solver_that_is_stopped_leaves_the_proof_to_the_dynamic_programme(
    group: tuple[Problem, SearchSpace, Group],
) -> None:
    best, stopped = join(menus_of(*group), np.inf), join_by("highs", 1e-9)(menus_of(*group), np.inf)
    assert best is not None
    assert stopped is not None
    assert stopped[0] == pytest.approx(best[0], rel=1e-9)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 9, 34])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_what_is_looked_at_coarsely_holds_both_ends(count: int, parts: int) -> None:
    chosen = spread(range(count), parts)
    assert (chosen[0], chosen[-1]) == (0, count - 1)
    assert len(chosen) == min(count, parts + 1)


def test_a_quick_answer_is_a_plan_and_not_better_than_the_best(
    group: tuple[Problem, SearchSpace, Group],
) -> None:
    menus = menus_of(*group)
    best, hasty = join(menus, np.inf), join_hastily(menus, np.inf)
    assert best is not None
    assert hasty is not None
    assert hasty[0] >= best[0] * (1 - 1e-12)
    assert predictor_of(group[0]).predict(hasty[1]).iteration_s == pytest.approx(hasty[0])


@pytest.mark.parametrize("joiner", [join, join_by("highs", 60)], ids=["dynamic", "highs"])
def test_nothing_is_joined_above_a_limit(
    group: tuple[Problem, SearchSpace, Group],
    joiner: Callable[[Menus, float], tuple[float, Plan] | None],
) -> None:
    best = join(menus_of(*group), np.inf)
    assert best is not None
    assert joiner(menus_of(*group), best[0] * 0.99) is None


def test_undominated_rows_are_those_that_no_other_beats_everywhere() -> None:
    draw = np.random.default_rng(0)
    points = draw.integers(0, 6, (200, 3)).astype(float)
    kept = set(undominated(list(points.T)).tolist())
    for row, point in enumerate(points):
        beaten = [
            other
            for other, by in enumerate(points)
            if (by <= point).all() and ((by < point).any() or other < row)
        ]
        assert (row in kept) == (not beaten)


@pytest.mark.parametrize("name", ["point_to_point_s", "first_send_late_s", "end_send_late_s"])
def test_a_slower_candidate_whose_sends_are_shorter_stays(name: str) -> None:
    """Copies of different lengths keep sends waiting for different times."""
    columns = {time: np.zeros(3) for time in TIMES}
    columns["forward_s"] = np.array([1.0, 1.1, 1.2])
    columns[name] = np.array([0.3, 0.1, 0.1])
    options = Options(
        savings=np.zeros((3, 5)),
        counts=np.zeros((3, 1)),
        times=StageTimes(**columns),
        host_bytes=np.zeros(3),
    )
    assert sorted(fastest(options, Grain()).times.forward_s.tolist()) == [1.0, 1.1]


def test_chains_of_a_menu_are_those_of_its_times() -> None:
    times = {name: np.array([1.0, 2.0]) for name in StageTimes.__dataclass_fields__}
    for name in (
        "point_to_point_s",
        "first_send_late_s",
        "end_send_late_s",
        "end_return_late_s",
        "within_round_s",
        "round_late_s",
        "queued_late_s",
        "after_first_s",
        *("held_forward_s", "held_backward_s", "left_backward_s", *ISSUED),
    ):
        times[name] = np.zeros(2)
    chains = prepended(StageTimes(**times), no_stages(2), np.array([3, 3]), 1)
    # Three forwards and backwards, and both extras, which lie within the passes.
    assert chains.whole.tolist() == [8.0, 16.0]


@pytest.mark.parametrize("name", ["mist", "exact"])
def test_groups_side_by_side_give_the_same_plan(name: str) -> None:
    problem, space = small_problem(SEED)
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor_of(problem))
    alone = searcher.search(problem, space, Budget(seconds=1000), 0)
    with parallel_config(n_jobs=2):
        together = searcher.search(problem, space, Budget(seconds=1000), 0)
    assert together.plan == alone.plan
    assert together.status == alone.status
    assert together.stage_evaluations > 0


def test_groups_on_a_ray_cluster_give_the_same_plan() -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: make extras")
    from ray.util.joblib import register_ray  # noqa: PLC0415

    problem, space = small_problem(SEED)
    searcher = StrategySearcher(strategy=SEARCHERS["exact"], predictor=predictor_of(problem))
    alone = searcher.search(problem, space, Budget(seconds=1000), 0)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        register_ray()
        with parallel_config(backend="ray", n_jobs=2):
            together = searcher.search(problem, space, Budget(seconds=1000), 0)
    finally:
        ray.shutdown()
    assert together.plan == alone.plan
    assert together.status == alone.status == "OPTIMAL"


def test_a_solver_that_greets_says_nothing_on_standard_output(
    group: tuple[Problem, SearchSpace, Group],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As HiGHS 1.16 does, wherever it is made."""
    made = milp.SOLVERS["highs"]

    class Greeting(pulp.HiGHS):  # type: ignore[misc]
        def createAndConfigureSolver(self, programme: pulp.LpProblem) -> None:  # noqa: N802
            os.write(1, b"Running HiGHS")
            super().createAndConfigureSolver(programme)

    def greeting(seconds: float) -> pulp.LpSolver:
        return Greeting(msg=False, timeLimit=made(seconds).timeLimit)

    monkeypatch.setitem(milp.SOLVERS, "highs", greeting)
    assert join_by("highs", 60)(menus_of(*group), np.inf) is not None
    os.write(1, b"an answer")
    assert capfd.readouterr().out == "an answer"
