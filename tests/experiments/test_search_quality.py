"""Searchers over problems and seeds: rows, gaps and spread, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import search_quality
from experiments.bench import remembered
from experiments.cli.commandline import run
from experiments.studies.search_quality import PROBLEMS, report


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, and in a space that is soon proven."""
    monkeypatch.setattr(remembered, "FEW", 1000)
    in_small_space = replace(PROBLEMS["default"], space="+checkpointing")
    monkeypatch.setitem(PROBLEMS, "default", in_small_space)  # type: ignore[arg-type]


def answer(capsys: pytest.CaptureFixture[str], out: Path, *options: str) -> dict[str, Any]:
    given = ["--problems", "default", "--searchers", "mist,random", "--out", str(out), "--json"]
    assert run(search_quality.main, [*given, *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_each_searcher_that_draws_runs_once_a_seed_and_equal_runs_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--seeds", "3", "--evaluations", "60", "--page", str(tmp_path / "page.md"))
    found = answer(capsys, tmp_path / "run", *options)
    runs = [(row["searcher"], row["seed"], row["is_reference"]) for row in found["rows"]]
    assert runs == [
        ("mist", 0, True),
        ("mist", 0, False),
        *(("random", s, False) for s in range(3)),
    ]
    reference, *others = found["rows"]
    assert reference["status"] == "OPTIMAL"
    for row in others:
        assert row["iteration_s"] >= reference["iteration_s"] * (1 - 1e-12)
        assert [seconds for _, seconds in row["history"]][-1] == row["iteration_s"]
        assert row["evaluations"] <= 80
    random = found["searchers"][1]
    gaps = sorted(row["iteration_s"] / reference["iteration_s"] - 1 for row in others[1:])
    assert [random["least_gap"], random["median_gap"], random["most_gap"]] == pytest.approx(gaps)
    assert len(set(gaps)) > 1
    assert {path.name for path in tmp_path.glob("*.svg")} == {
        "search_quality.svg",
        "search_quality-seconds.svg",
    }
    rows = (tmp_path / "run" / "rows.csv").read_bytes()
    answer(capsys, tmp_path / "again", *options)
    assert (tmp_path / "again" / "rows.csv").read_bytes() == rows


def test_a_budget_of_the_processor_s_seconds_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, tmp_path, "--seeds", "1", "--cpu-seconds", "0.3")
    assert found["rows"][-1]["status"] == "BUDGET"
    assert 0.25 <= found["rows"][-1]["timing"]["cpu_s"] <= 0.6
    assert found["rows"][-1]["evaluations"] > 10


def row(searcher: str, seconds: float | None, **others: Any) -> dict[str, Any]:
    history = [] if seconds is None else [[1.0, 2 * seconds], [4.0, seconds]]
    return {
        "problem": "one",
        "words": "one",
        "searcher": searcher,
        "seed": 0,
        "is_reference": False,
        "status": "BUDGET",
        "iteration_s": seconds,
        "bound_s": None,
        "evaluations": 10.0,
        "history": history,
        "timing": {"cpu_s": 1.0, "history": history},
        **others,
    }


def test_seeds_without_a_plan_count_in_the_median_and_are_told() -> None:
    proven = row("mist", 10.0, is_reference=True, status="OPTIMAL")
    rows = [proven, *(row("random", seconds) for seconds in (11.0, 12.0, None))]
    rows += [row("rl", None), row("rl", None), row("alpa", None, status="REFUSED")]
    words = report(rows, ["random", "rl", "alpa"])
    of_random, of_rl, _ = words.summary["searchers"]
    assert of_random["without_plan"] == 1
    assert of_random["median_gap"] == pytest.approx(0.2)
    assert of_random["most_gap"] == pytest.approx(0.2)
    assert of_rl["median_gap"] is None
    (table,) = (one for one in words.words if "(10.00% to 20.00%) / 1" in one)
    assert "no plan" in table
    assert "refuses" in table
    # At one evaluation the plan takes twice as long, and the gap is drawn at its largest.
    curve = words.pictures[0].curves["random"]  # type: ignore[union-attr]
    assert curve[0] == (1.0, 50.0)
    assert curve[-1][1] == pytest.approx(20.0)
    assert "rl" not in words.pictures[0].curves  # type: ignore[union-attr]


def test_a_plan_faster_than_the_reference_s_is_what_gaps_are_measured_from() -> None:
    bound = row("mist", 10.0, is_reference=True, status="FEASIBLE", bound_s=8.0)
    found = report([bound, row("random", 9.0), row("exact", 9.9)], ["random", "exact"])
    gaps = [one["median_gap"] for one in found.summary["searchers"]]
    assert gaps == pytest.approx([0.0, 0.1])
    assert "at most 20.0% from the best" in found.words[1]


def test_every_problem_can_be_searched() -> None:
    for problem in PROBLEMS.values():
        assert problem.problem().cluster.num_gpus in {4, 8, 32}
        assert problem.space in problem.words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--problems", "defaul"], "did you mean 'default'"),
        (["--searchers", "randm"], "did you mean 'random'"),
        (["--seeds", "0"], "--seeds 0"),
        (["--evaluations", "0"], "give each search a budget"),
        (["--cpu-seconds", "-1"], "give each search a budget"),
    ],
)
def test_what_has_no_sense_is_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(search_quality.main, [*options, "--out", str(tmp_path / "new")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
