"""Searchers compared: rows, reasons, run directories, and what happens when nothing fits."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from experiments import compare_searchers
from experiments.cli.commandline import run
from experiments.tuning.explain import Rejected
from experiments.tuning.smallest import Smallest
from mistlab.job.job import job_from_mapping, load_job
from searchers.registry import SEARCHERS
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor

NAMES = ("random", "megatron", "proven", "refusing")
KEYS = {
    *("searcher", "engine", "space", "status", "predicted_s", "simulated_s", "plan_evaluations"),
    *("stage_evaluations", "wall_s", "gap", "plan"),
}


Compare = Callable[..., int]
Answers = list[tuple[Path, dict[str, Any]]]


ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference" / "json-output.md"


class Page(HTMLParser):
    """What a page loads from elsewhere, its ids, and what it says of them."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"script", "link", "img", "iframe", "object"}:
            self.loads.append(tag)
        for name, value in attrs:
            assert value is not None
            if name == "id":
                self.ids.append(value)
            elif name in {"href", "xlink:href", "src"}:
                (self.references if value.startswith("#") else self.loads).append(value[1:])
            self.references += re.findall(r"url\(#([^)]+)\)", value)


@pytest.fixture(scope="module")
def compare(
    small_options: tuple[str, ...], strategies: dict[str, Any]
) -> Iterator[Callable[..., int]]:
    """The command on a small problem, with a few strategies of its own."""

    def command(out: Path, *options: str, searchers: str = ",".join(NAMES)) -> int:
        given = ("--searchers", searchers, "--out", str(out))
        return run(compare_searchers.main, [*small_options, *given, *options])

    with pytest.MonkeyPatch.context() as patch:
        for name, strategy in strategies.items():
            patch.setitem(SEARCHERS, name, strategy)  # type: ignore[arg-type]
        yield command


@pytest.fixture(scope="module")
def answers(compare: Compare, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Two equal runs in two folders."""
    found = []
    for name in ("one", "two"):
        out = tmp_path_factory.mktemp(name)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert compare(out, "--json") == 0
        found.append((out, json.loads(printed.getvalue())))
    return found


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without curves and bars: to draw them takes longer than to search."""
    monkeypatch.setattr("experiments.tuning.compare_searchers.svg_of", lambda _: "<svg></svg>")


def rows_of(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["searcher"]: row for row in answer["rows"]}


def without_clock(mapping: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in {"wall_s", "timing"}}


def test_rows_say_what_each_searcher_found(answers: Answers) -> None:
    rows = rows_of(answers[0][1])
    assert list(rows) == ["random", "megatron", "proven", "refusing"]
    assert all(row.keys() >= KEYS for row in rows.values())
    for name in ("random", "megatron", "proven"):
        row = rows[name]
        job = job_from_mapping(row["plan"])
        symbolic = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
        prediction = symbolic.predict(job.plan)
        assert prediction.fits
        assert prediction.iteration_s == row["predicted_s"]
        events = EventSimulator(workload=job.workload, cluster=job.cluster)
        assert events.simulate(job.plan).iteration_s == row["simulated_s"]
        assert row["headroom_bytes"] >= 0
        assert row["plan_evaluations"] == (1 if name == "megatron" else 128)
        assert row["speedup"] == rows["megatron"]["predicted_s"] / row["predicted_s"]
    assert rows["megatron"]["space"] == rows["megatron"]["engine"] == "megatron"
    assert rows["random"]["space"] == "mist"
    assert rows["refusing"]["status"] == "REFUSED"
    assert rows["refusing"]["plan"] is rows["refusing"]["predicted_s"] is None


def test_every_key_is_in_the_reference(answers: Answers) -> None:
    answer = answers[0][1]
    keys = {*answer, *answer["rows"][0], *answer["why"], *answer["why"]["stages"][0]}
    keys |= {*answer["why"]["runner_up"], *answer["why"]["runner_up"]["longer_by"]}
    keys |= {entry.name for kind in (Rejected, Smallest) for entry in fields(kind)}
    text = REFERENCE.read_text(encoding="utf-8")
    assert {key for key in keys if f"`{key}`" not in text} == set()


def test_a_bound_serves_all_of_equal_engine_and_space(
    answers: Answers,
) -> None:
    rows = rows_of(answers[0][1])
    bound_s = rows["proven"]["lower_bound_s"]
    assert rows["proven"]["gap"] == pytest.approx(0.5)
    assert rows["random"]["gap"] == pytest.approx(1 - bound_s / rows["random"]["predicted_s"])
    assert rows["megatron"]["gap"] is None


def test_equal_comparisons_are_equal_but_for_the_clock(
    answers: Answers,
) -> None:
    texts = []
    for _, answer in answers:
        assert answer["timing"]["seconds"] > 0
        rows = [without_clock(row) for row in answer["rows"]]
        texts.append(json.dumps({**without_clock(answer), "rows": rows}))
    assert texts[0] == texts[1]
    (one, _), (two, _) = answers
    assert json.loads((one / "summary.json").read_text(encoding="utf-8")) == answers[0][1]
    for name in (
        "rows.csv",
        "best.svg",
        "best.trace.json",
        "plans/random.yaml",
        "plans/megatron.yaml",
    ):
        assert (one / name).read_bytes() == (two / name).read_bytes()


@pytest.mark.usefixtures("undrawn")
def test_words_tell_the_best_plan_and_why(
    compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(tmp_path) == 0
    captured = capsys.readouterr()
    proven, table, plan, why = captured.out.split("\n\n")[:4]
    assert proven.startswith("Not proven: a plan of space mist that uses all 2 GPUs may be ")
    names = [line.split()[0] for line in table.splitlines()[1:5]]
    assert names[-1] == "refusing"
    seconds = [float(line.split()[3]) for line in table.splitlines()[1:4]]
    assert seconds == sorted(seconds)
    assert "refusing: too many plans" in table
    assert re.match(r"The answer, (predicted best|of the plans near it) .*, by \w+:", plan)
    assert "Stage 0 is limited by" in why
    assert "The runner-up, by" in why
    assert "Megatron grid's plan takes" in why
    assert "random: BUDGET, " in captured.err


def test_the_page_stands_alone_and_tells_all(answers: Answers) -> None:
    (folder, answer), _ = answers
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.loads == []
    assert len(page.ids) == len(set(page.ids))
    assert set(page.references) <= set(page.ids)
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 6
    assert "Where the time goes" in text
    for picture in pictures:
        ET.fromstring(picture)
    for row in answer["rows"]:
        assert row["searcher"] in text
        if row["plan"] is not None:
            assert f"{row['predicted_s']:.3f}" in text
            assert f"{row['simulated_s']:.3f}" in text
    assert "python -m experiments.compare_searchers --model llama-350m" in text


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_a_browser_shows_the_page_without_errors(answers: Answers) -> None:
    (folder, answer), _ = answers
    assert CHROMIUM is not None
    page = folder / "report.html"
    drawn = page.read_text(encoding="utf-8").count("<svg")
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr")
    command = [CHROMIUM, *options, "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in shown.stderr
    assert shown.stdout.count("<svg") == drawn > 0
    assert f"{rows_of(answer)[answer['best']]['predicted_s']:.3f} s" in shown.stdout


@pytest.mark.usefixtures("undrawn")
def test_the_page_may_be_written_elsewhere_too(
    compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "page.html"
    assert compare(tmp_path / "run", "--page", str(page), searchers="random") == 0
    assert page.read_bytes() == (tmp_path / "run" / "report.html").read_bytes()
    assert compare(tmp_path / "run", "--page", str(tmp_path), searchers="random") == 2
    assert "--page" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_a_run_goes_on_where_it_was_stopped(
    compare: Compare,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    strategies: dict[str, Any],
) -> None:
    monkeypatch.setitem(SEARCHERS, "proven", strategies["interrupted"])  # type: ignore[arg-type]
    assert compare(tmp_path, "--json", searchers="random,proven,refusing") == 130
    first = json.loads(capsys.readouterr().out)
    assert first["is_interrupted"]
    assert [row["searcher"] for row in first["rows"]] == ["random", "proven"]
    assert load_job(tmp_path / "plans" / "proven.yaml").plan
    assert (tmp_path / "report.html").is_file()

    monkeypatch.setitem(SEARCHERS, "random", strategies["refusing"])  # type: ignore[arg-type]
    monkeypatch.setitem(SEARCHERS, "proven", strategies["proven"])  # type: ignore[arg-type]
    assert compare(tmp_path, "--json", searchers="random,proven,refusing") == 0
    captured = capsys.readouterr()
    second = json.loads(captured.out)
    assert [row["status"] for row in second["rows"]] == ["BUDGET", "FEASIBLE", "REFUSED"]
    kept, again = rows_of(first)["random"], rows_of(second)["random"]
    assert {**kept, "gap": None} == {**again, "gap": None}
    assert "random: BUDGET" in captured.err
    assert "taken up" in captured.err


@pytest.mark.usefixtures("undrawn")
def test_another_configuration_starts_anew(
    compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(tmp_path, searchers="random") == 0
    assert compare(tmp_path, "--seed", "4", searchers="random") == 0
    assert "taken up" not in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_damaged_rows_are_said_kept_and_made_again(
    compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(tmp_path, searchers="random") == 0
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    before = rows.read_bytes()
    assert compare(tmp_path, searchers="random") == 0
    assert "line 1 is damaged: it and what follows are made again" in capsys.readouterr().err
    assert (tmp_path / "rows.jsonl.damaged").read_bytes() == before
    assert len([json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]) == 1


WRONG = {
    "searcher": (
        ["--searchers", "randm"],
        "--searchers: 'randm' is unknown: did you mean 'random'?",
    ),
    "no searcher": (["--searchers", ""], "--searchers: '' is unknown: give one of"),
    "space": (["--space", "mst"], "--space: space 'mst' is unknown"),
    "evaluations": (["--budget-evaluations", "0"], "--budget-evaluations: 0 is too small"),
    "seconds": (["--budget-seconds", "0"], "--budget-seconds: 0.0 is too small"),
    "batch": (
        [
            *("--global-batch", "1", "--space", "deepspeed"),
            *("--nodes", "8", "--gpus-per-node", "8"),
        ],
        "--global-batch 1 on 64 GPUs: space deepspeed has no plan on 64 GPUs",
    ),
    "model": (["--model", "gpt3-2"], "--model: 'gpt3-2' is unknown"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_usage_says_what_to_do_and_writes_nothing(
    compare: Compare,
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "new"
    assert compare(out, *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}"), captured.err
    assert not out.exists()


def test_a_file_in_the_place_of_the_folder_stays(
    compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "taken"
    out.write_text("mine", encoding="utf-8")
    assert compare(out) == 2
    assert f"--out {out}" in capsys.readouterr().err
    assert out.read_text(encoding="utf-8") == "mine"


@pytest.mark.usefixtures("undrawn")
def test_when_nothing_fits_it_says_what_would(
    compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--space", "3d", "--model", "gpt3-7b", "--json")
    assert compare(tmp_path, *options, searchers="random,mist") == 1
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["best"] is answer["why"] is None
    smallest = answer["smallest"]
    assert smallest["memory_bytes"] > smallest["limit_bytes"]
    assert smallest["memory_class"] == "optimizer"
    assert any("GPUs (--gpus-per-node 8" in remedy for remedy in smallest["remedies"])
    assert "What would make a plan fit:" in captured.err
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "No plan of space 3d, which is modelled without offloading" in page
    assert ", fits: the one that comes nearest needs" in page


def test_a_searcher_of_a_file_of_its_own_stands_beside_the_others(tmp_path: Path) -> None:
    """The two programs of the page of the searchers, as one file that is no part of the package."""
    page = (ROOT / "docs" / "reference" / "searchers.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    climb, start = (
        next(one for one in blocks if word in one) for word in ("def climb", "sys.exit")
    )
    own = tmp_path / "climb.py"
    own.write_text(climb + start, encoding="utf-8")
    options = ["--searchers", "climb,megatron", "--quick", "--json", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, str(own), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = json.loads(done.stdout)["rows"]
    assert {row["searcher"] for row in rows} == {"climb", "megatron"}
    assert all(row["plan_evaluations"] > 0 for row in rows)
