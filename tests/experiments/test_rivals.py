"""The plans nearest to the best are played, and the one that is played fastest is the answer."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import tune
from experiments.bench import bench as bench_module
from experiments.bench.bench import MOST_TASKS, Bench, Entry, decided, judged
from experiments.cli.commandline import run
from experiments.tuning.compare_searchers import _played, _played_plans, fastest_played
from experiments.tuning.search_rows import rows_of
from experiments.tuning.search_words import prediction_words, rival_words
from mistlab import catalog
from mistlab.job.job import job_from_mapping, load_job
from mistlab.job.search import TOLD_APART, Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from mistlab.plan.workload import Workload
from searchers.registry import SEARCHERS
from searchers.savings import Chooser, chosen_plan
from searchers.strategy import ROUNDING, Ending, Ledger
from simulators.symbolic import SymbolicPredictor
from tests.searchers.problems import SMALL, predictor_of

ROOMY = replace(SMALL, cluster=replace(SMALL.cluster, memory_gib=None))


@dataclass
class Played:
    iteration_s: float


@dataclass
class PlaysOneFaster:
    """Plays every plan as predicted, but an odd one by a share faster than the fastest."""

    predictor: SymbolicPredictor
    fastest_s: float
    odd: Plan
    share: float

    def simulate(self, plan: Plan) -> Played:
        if plan == self.odd:
            return Played(self.fastest_s * (1 - self.share))
        return Played(self.predictor.predict(plan).iteration_s)


def near_plans(problem: Problem) -> list[Plan]:
    """Three plans that differ by less than the two predictors do, fastest first."""
    draw = np.random.default_rng(0)
    chooser = Chooser(lambda _, options: int(draw.integers(options)))
    drawn = dict.fromkeys(chosen_plan(problem, space_of("mist"), chooser) for _ in range(1000))
    plans = [plan for plan in drawn if plan is not None]
    predictions = predictor_of(problem).predict_many(plans)
    timed = sorted((p.iteration_s, place) for place, p in enumerate(predictions) if p.fits)
    windows = zip(timed, timed[1:], timed[2:], strict=False)
    near = next(some for some in windows if some[2][0] <= some[0][0] * (1 + TOLD_APART))
    return [plans[place] for _, place in near]


def shown(plans: list[Plan]) -> Any:
    """A strategy that asks about some plans."""

    def strategy(
        problem: Problem, space: SearchSpace, ledger: Ledger, _draw: np.random.Generator
    ) -> Ending:
        ledger.predict(plans)
        return Ending()

    return strategy


@pytest.fixture
def shown_plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    plans = near_plans(ROOMY)
    monkeypatch.setitem(SEARCHERS, "shown", shown(plans))  # type: ignore[arg-type]
    return plans


def played(plans: list[Plan], share: float, problem: Problem = ROOMY) -> Entry:
    predictor = predictor_of(problem)
    fastest_s = predictor.predict(plans[0]).iteration_s
    simulator = PlaysOneFaster(predictor, fastest_s, plans[-1], share)
    bench = Bench(
        problem=problem,
        predictor=predictor,
        asked=predictor,
        simulator=simulator,  # type: ignore[arg-type]
    )
    searched = bench.search("shown", space_of("mist"), Budget(evaluations=99), 0, lambda _: None)
    return decided(bench.played(searched))


@pytest.mark.parametrize(
    ("share", "apart"), [(0.9 * TOLD_APART, "within what"), (0.05, "more than what")]
)
def test_of_plans_that_cannot_be_told_apart_the_one_played_fastest_is_the_answer(
    shown_plans: list[Plan], share: float, apart: str
) -> None:
    entry = played(shown_plans, share)
    assert entry.result.plan == shown_plans[0]
    assert entry.faster is not None
    assert entry.faster.plan == shown_plans[-1]
    assert entry.faster_by == pytest.approx(share)
    assert entry.answer is not None
    assert entry.answer[0] == shown_plans[-1]
    (words,) = rival_words(entry)
    assert f"{apart} the predictors differ by: it is the answer" in words


def test_an_order_that_both_predictors_see_leaves_the_best_plan(shown_plans: list[Plan]) -> None:
    entry = played(shown_plans, -0.5)
    assert entry.faster is None
    assert entry.answer is not None
    assert entry.answer[0] == shown_plans[0]
    assert "none is faster when played" in rival_words(entry)[0]


@pytest.mark.parametrize("share", [0.01, -0.5])
def test_a_comparison_says_whether_the_predictors_disagree(
    shown_plans: list[Plan], share: float
) -> None:
    entry = replace(played(shown_plans, share), is_played=False)
    fastest = fastest_played([entry])
    assert fastest is not None
    assert fastest[1] == shown_plans[-1 if share > 0 else 0]
    words = " ".join(_played([entry], entry))
    assert ("The predictors disagree" in words) == (share > 0)
    assert ("the fastest of all when played, too" in words) == (share < 0)


def test_rivals_of_very_many_tasks_are_not_played(
    shown_plans: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "MOST_TASKS", 1)
    assert MOST_TASKS > 1
    entry = played(shown_plans, 0.05)
    assert entry.simulated_s is not None
    assert {rival.simulated_s for rival in entry.rivals} == {None}
    assert "too many tasks" in rival_words(entry)[0]


def test_of_many_tasks_the_nearest_rivals_are_played(
    shown_plans: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = played(shown_plans, 0.05)
    assert [rival.simulated_s is None for rival in entry.rivals] == [False, False]
    nearest = bench_module._tasks(entry.rivals[0].plan)
    monkeypatch.setattr(bench_module, "MOST_TASKS", nearest)
    entry = played(shown_plans, 0.05)
    assert [rival.simulated_s is None for rival in entry.rivals] == [False, True]
    assert ", the nearest 1 played in" in rival_words(entry)[0]


def test_a_best_plan_of_very_many_tasks_is_not_played(
    shown_plans: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "MOST_TASKS_OF_BEST", 1)
    entry = played(shown_plans, -0.5)
    assert entry.simulated_s is None
    assert entry.answer is not None
    words = prediction_words(*entry.answer, entry.answer_simulated_s)
    assert words.endswith("event simulator: too many tasks to play")
    (row,) = rows_of([entry], Bench.of(ROOMY, "symbolic", "full"))
    assert row["simulated_s"] is None


@pytest.mark.parametrize(("share", "chosen_by"), [(0.05, "played"), (-0.001, "predicted")])
def test_tune_writes_the_plan_that_it_names(
    small_options: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    chosen_by: str,
) -> None:
    found: list[Plan] = []

    def near(problem: Problem, _space: SearchSpace, ledger: Ledger, _draw: object) -> Ending:
        found[:] = near_plans(problem)
        ledger.predict(found)
        return Ending()

    def simulator(*, workload: Workload, cluster: Cluster) -> PlaysOneFaster:
        problem = Problem(workload=workload, cluster=cluster)
        fastest, second, _ = near_plans(problem)
        predictor = predictor_of(problem)
        return PlaysOneFaster(predictor, predictor.predict(fastest).iteration_s, second, share)

    monkeypatch.setitem(SEARCHERS, "near", near)  # type: ignore[arg-type]
    monkeypatch.setattr(bench_module, "EventSimulator", simulator)
    out = tmp_path / "plan.yaml"
    options = ("--searcher", "near", "--out", str(out), "--json")
    assert run(tune.main, [*small_options, *options]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["chosen_by"] == chosen_by
    assert row["faster_rival"] == (0 if share > 0 else None)
    assert row["faster_rival_by"] == pytest.approx(max(0.0, share))
    assert job_from_mapping(row["rivals"][0]["plan"]).plan == found[1]
    assert load_job(out).plan == found[1 if chosen_by == "played" else 0]


# Of this problem the searches that ask about few plans miss the one that is played fastest.
NEAR = Problem(
    workload=Workload(
        model=catalog.model("gpt3-1.3b"),
        sequence_length=4096,
        global_batch=8,
        attention="flash",
        precision="fp16",
    ),
    cluster=Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=2),
)
OTHERS = ("aceso", "random")


@pytest.fixture(scope="module")
def compared() -> list[Entry]:
    """A proof and searches that prove nothing, all of them played."""
    bench, space = Bench.of(NEAR), space_of("mist")

    def entry_of(name: str) -> Entry:
        return bench.played(bench.search(name, space, Budget(evaluations=300), 0, lambda _: None))

    return [*map(entry_of, OTHERS), entry_of("mist")]


def test_a_proof_alone_and_a_comparison_have_the_same_answer(compared: list[Entry]) -> None:
    alone, together = judged(compared[-1:]), judged(compared)
    assert alone is not None
    assert together is not None
    assert alone.result.status == "OPTIMAL"
    assert alone.answer == together.answer


def test_no_plan_that_cannot_be_told_from_a_proven_one_is_played_faster(
    compared: list[Entry],
) -> None:
    answer = judged(compared)
    assert answer is not None
    assert answer.result.prediction is not None
    assert answer.answer_simulated_s is not None
    near_s = answer.result.prediction.iteration_s * (1 + TOLD_APART)
    near = [
        seconds
        for entry in compared[:-1]
        for plan, seconds in _played_plans(entry)
        if predictor_of(NEAR).predict(plan).iteration_s <= near_s
    ]
    assert near
    assert min(near) >= answer.answer_simulated_s * (1 - ROUNDING)


PAGES = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize("page", ["cross-check.md", "cross-check-wide.md"])
def test_plans_are_told_apart_as_far_as_the_predictors_agree(page: str) -> None:
    lines = (PAGES / page).read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    (head,) = (row for row in cells if row[:2] == ["plans", "number"])
    (every,) = (row for row in cells if row[0] == "all")
    within = float(every[head.index("95 % within")].removesuffix("%")) / 100
    assert within <= TOLD_APART <= 1.5 * within
