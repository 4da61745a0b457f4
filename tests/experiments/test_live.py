"""Progress of a search shows the best time and the gap that is left, as the gap shrinks."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep

import pytest

from experiments import tune
from experiments.bench.bench import Bench
from experiments.cli.commandline import run
from experiments.cli.live import Live
from experiments.tuning.search_words import busy_words, verdict
from mistlab.job.search import Budget, SearchResult
from mistlab.plan.named_spaces import space_of
from searchers.registry import SEARCHERS
from searchers.strategy import Ledger, StrategySearcher
from tests.searchers.problems import SMALL, predictor_of

PLENTY = Budget(evaluations=1_000_000)


def told(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> str:
    live = Live(searcher="mist", is_terminal=False)
    live._told_s = -1e9
    live(ledger)
    return capsys.readouterr().err


def test_the_gap_stands_beside_the_best_time(capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(predictor=predictor_of(SMALL), budget=PLENTY, clock=perf_counter)
    result = searched(space="3d")
    assert result.plan is not None
    ledger.predict([result.plan])
    assert "gap" not in told(ledger, capsys)
    ledger.bounded(0.75 * ledger.best_s)
    # A lower bound tells nothing new.
    ledger.bounded(0.5 * ledger.best_s)
    assert f"best {ledger.best_s:.3f} s, gap 25.0%" in told(ledger, capsys)


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (Budget(evaluations=20_000), "19,999 evaluations left"),
        (Budget(seconds=7200.0), "7200 s left"),
        (Budget(evaluations=20_000, seconds=7200.0), "7200 s or 19,999 evaluations left"),
    ],
)
def test_what_is_left_is_told_in_the_budget_s_unit(
    budget: Budget, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(predictor=predictor_of(SMALL), budget=budget, clock=lambda: 0.001)
    ledger.predict([searched(space="3d").plan])
    ledger.clock = lambda: 0.3
    assert text in told(ledger, capsys)


def test_a_file_has_few_lines_where_nothing_better_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("experiments.cli.live.perf_counter", lambda: now[0])
    ledger = Ledger(predictor=predictor_of(SMALL), budget=PLENTY, clock=perf_counter)
    ledger.predict([searched(space="3d").plan])
    live = Live(searcher="mist", is_terminal=False)
    live._told_s = 0.0

    def lines(seconds: range) -> int:
        for now[0] in seconds:
            live(ledger)
        return capsys.readouterr().err.count("\n")

    assert lines(range(1, 3)) == 1
    assert lines(range(3, 33)) == 3


def searched(space: str, budget: Budget = PLENTY, name: str = "mist") -> SearchResult:
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor_of(SMALL))
    return searcher.search(SMALL, space_of(space), budget, 0)


def test_a_proof_tells_of_a_gap_that_shrinks_to_nothing() -> None:
    gaps: list[float] = []

    def listen(ledger: Ledger) -> None:
        if ledger.gap is not None:
            gaps.append(ledger.gap)

    bench = Bench.of(SMALL)
    entry = bench.search("mist", space_of("mist"), PLENTY, 0, listen)
    assert entry.result.status == "OPTIMAL"
    assert entry.front
    assert len({*gaps}) > 2
    # A better plan makes the gap larger, and nothing else does.
    assert all(later <= max(gap, gaps[0]) for gap, later in pairwise(gaps))
    assert gaps[-1] < 1e-9
    gpus = SMALL.cluster.num_gpus
    told = f"Proven: no plan of space mist that uses all {gpus} GPUs is predicted faster than "
    assert verdict(entry).startswith(told)


def test_a_search_that_its_budget_ends_says_its_gap() -> None:
    whole = searched("mist")
    cut = searched("mist", Budget(evaluations=whole.plan_evaluations))
    assert whole.lower_bound_s is not None
    assert cut.status in {"BUDGET", "FEASIBLE"}
    assert cut.lower_bound_s is not None
    assert 0 < cut.lower_bound_s <= whole.lower_bound_s * (1 + 1e-9)


def test_a_millisecond_is_said_to_be_too_little(
    small_options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--budget-seconds", "0.000001", "--out", str(tmp_path / "plan.yaml"))
    assert run(tune.main, [*small_options, *options]) == 1
    error = capsys.readouterr().err
    assert "no plan in time: the budget of 1e-06 s and 128 evaluations was spent" in error
    assert "give a larger" in error
    assert not (tmp_path / "plan.yaml").exists()


def test_what_is_not_proven_is_said() -> None:
    bench = Bench.of(SMALL)
    entry = bench.search("mist", space_of("3d"), PLENTY, 0, lambda _: None)
    assert entry.result.prediction is not None
    half_s = 0.5 * entry.result.prediction.iteration_s
    loose = replace(entry.result, status="FEASIBLE", lower_bound_s=half_s, gap=0.5)
    assert "up to 50.0% faster" in verdict(replace(entry, result=loose))
    nothing = replace(loose, lower_bound_s=None, gap=None, plan_evaluations=1312)
    words = verdict(replace(entry, result=nothing))
    assert words.startswith("Best of 1312 plans tried, no bound: plans of space 3d that use all")


def test_a_search_that_had_no_core_says_so() -> None:
    """Where a budget ended it; a proof is one however long it took."""
    bench = Bench.of(SMALL)
    entry = bench.search("random", space_of("mist"), Budget(evaluations=20), 0, lambda _: None)
    slow = replace(entry, result=replace(entry.result, wall_s=60.0), cpu_s=22.0)
    assert busy_words(slow)[0].startswith(
        "The machine was busy: the search had a core in 22.0 of its 60.0 s."
    )
    assert not busy_words(replace(slow, cpu_s=59.0))
    assert not busy_words(replace(slow, result=replace(slow.result, wall_s=0.5)))
    proven = replace(slow.result, status="OPTIMAL")
    assert not busy_words(replace(slow, result=proven))


def test_a_budget_of_cpu_seconds_is_of_the_process() -> None:
    """Sleeping costs nothing of it, and all of a budget by the clock: ten naps are longer than
    either budget.
    """
    ended = []
    for clock in ("cpu", "wall"):
        searcher = StrategySearcher(
            strategy=SEARCHERS["random"],
            predictor=predictor_of(SMALL),
            listener=lambda _: sleep(0.4),
        )
        budget = Budget(evaluations=300, seconds=0.7 if clock == "wall" else 2.5, clock=clock)
        ended.append(searcher.search(SMALL, space_of("mist"), budget, 0).plan_evaluations)
    assert ended[0] == 300
    assert ended[1] < 300
