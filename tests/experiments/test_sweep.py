"""Sweeps: files of many problems, answers that outlive stops and killed workers, equal tables."""

import json
import socket
import sys
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, field
from operator import neg
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from joblib import parallel_config
from joblib.parallel import ThreadingBackend, register_parallel_backend

from experiments import sweep
from experiments.cli.command import parser_for
from experiments.cli.commandline import run
from experiments.commands import COMMANDS
from experiments.commands.search_commands import SWEEP_EXAMPLE
from experiments.pages.study import Study
from experiments.sweeps.cell import Cell, CellAnswer, solved
from experiments.sweeps.sweep import Answers, cells_of, load_cells, report, sweep_from_mapping
from experiments.sweeps.workers import (
    AT_ONCE,
    OtherVersionError,
    Workers,
    check_equal,
    here,
    versions_here,
    workers,
)
from mistlab.core.values import InputError
from mistlab.job.search import Budget
from tests.experiments.killed_once import KilledOnce

SMALL = """
models: [llama-350m]
clusters: [{hardware: l4-24gb, nodes: 1, gpus_per_node: 2}]
global_batches: [4, 8]
sequence_lengths: [1024]
spaces: [3d]
budget: {evaluations: 100}
cases:
  - {model: gpt3-13b, cluster: {hardware: l4-24gb, nodes: 1, gpus_per_node: 1}, global_batch: 2}
"""
ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class Counted:
    """Answers at once, and counts; raises an error at some calls."""

    errors: dict[int, type[BaseException]] = field(default_factory=dict)
    calls: int = 0
    status: str = "BUDGET"

    def __call__(self, cell: Cell) -> CellAnswer:
        self.calls += 1
        if self.calls in self.errors:
            raise self.errors[self.calls]
        timing = {"wall_s": 0.0, "cpu_s": 0.0}
        return CellAnswer(
            row={**cell.asked(), "status": self.status, "reason": "", "timing": timing}
        )


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    return path


@pytest.fixture
def begun(small: Path, tmp_path: Path) -> Callable[[], tuple[list[Cell], Answers]]:
    """Begins a sweep of the small file in one folder, as the command does."""

    def begin() -> tuple[list[Cell], Answers]:
        options = parser_for(COMMANDS["sweep"], "sweep").parse_args(
            [str(small), "--out", str(tmp_path / "run")]
        )
        cells = load_cells(small, 0)
        return cells, Answers(
            Study.begin("sweep", options), [cell.key(here()["sources"]) for cell in cells]
        )

    return begin


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_lists_multiply_and_cases_are_added(tmp_path: Path) -> None:
    plain = {
        "models": ["llama-350m", "gpt3-1.3b"],
        "clusters": [
            {"hardware": "l4-24gb", "nodes": nodes, "gpus_per_node": 2} for nodes in (1, 2)
        ],
        "global_batches": [4, 8, 16],
        "searchers": ["mist", "megatron"],
        "spaces": ["3d", {"like": "mist", "name": "half", "offload": {"optimizer": [0, 0.5]}}],
        "budget": {"seconds": 1},
    }
    cells = cells_of(sweep_from_mapping(plain, tmp_path), 3)
    # A grid has a space of its own, so it stands once and not once a space.
    assert len(cells) == 2 * 2 * 3 * (2 + 1)
    assert {cell.seed for cell in cells} == {3}
    assert {cell.budget for cell in cells} == {Budget(seconds=1)}
    assert {(cell.searcher, cell.space.name) for cell in cells} == {
        *(("mist", "3d"), ("mist", "half"), ("megatron", "megatron"))
    }
    half = next(cell.space for cell in cells if cell.space.name == "half")
    assert half.offload.optimizer == (0.0, 0.5)
    assert len(half.offload.weights) == 9
    again = cells_of(sweep_from_mapping({"cases": [_case(8)]}, tmp_path), 0)
    assert [cell.problem.workload.sequence_length for cell in again] == [4096]


@pytest.mark.parametrize(
    ("spaces", "names"),
    [
        ({}, [("gpt3-1.3b", "mist"), ("mixtral-8x7b", "moe")] * 2),
        ({"spaces": ["3d"]}, [("gpt3-1.3b", "3d"), ("mixtral-8x7b", "3d")] * 2),
    ],
)
def test_without_spaces_each_model_has_its_usual_one(
    spaces: dict[str, Any], names: list[tuple[str, str]], tmp_path: Path
) -> None:
    models = ["gpt3-1.3b", "mixtral-8x7b"]
    cases = [{**_case(8), "model": model} for model in models]
    several = {"models": models, "clusters": [_case(4)["cluster"]], "global_batches": [4]}
    cells = cells_of(sweep_from_mapping({**several, "cases": cases, **spaces}, tmp_path), 0)
    found = [(cell.problem.workload.model.name, cell.space.name) for cell in cells]
    assert found == names


def _case(batch: int) -> dict[str, Any]:
    cluster = {"hardware": "l4-24gb", "nodes": 1, "gpus_per_node": 2}
    return {"model": "llama-350m", "cluster": cluster, "global_batch": batch}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [llama-350m]", "clusters: missing: give a list"),
        ("model: llama-350m", "model: unknown key: did you mean 'models'?"),
        ("models: []", "models: is empty: give at least one item"),
        ("models: llama-350m", "models: 'llama-350m' is not a list: write its items"),
        ("models: [llama-35m]", "models[0]: 'llama-35m' is unknown: did you mean"),
        ("global_batches: [4, 8, 4]", "global_batches[2]: is listed twice, as"),
        ("searchers: [mistt]", "searchers[0]: 'mistt' is unknown: did you mean 'mist'"),
        ("spaces: [mst]", "spaces[0]: space 'mst' is unknown: did you mean 'mist'?"),
        ("spaces: [{like: mist}]", "spaces[0].name: missing"),
        ("spaces: [{like: mist, name: a, zeros: [1]}]", "spaces[0].zeros: unknown key: did you"),
        ("clusters: [{hardware: l4}]", "clusters[0].hardware: 'l4' is unknown: did you mean"),
        ("clusters: [3]", "clusters[0]: 3 is not a cluster: give hardware"),
        ("cases: [3]", "cases[0]: 3 is not a mapping: give the keys model"),
        ("cases: [{model: gtp}]", "cases[0].model: 'gtp' is unknown"),
        (
            f"{SMALL}searchers: [mist, exact]",
            "cases[0].searcher: missing, and the sweep's list for it has",
        ),
    ],
)
def test_bad_files_are_refused_with_their_place(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "sweep.yaml", tmp_path / "run"
    path.write_text(text, encoding="utf-8")
    assert run(sweep.main, [str(path), "--out", str(out)]) == 2
    assert f"error: {path}: {message}" in capsys.readouterr().err
    assert not out.exists()


def test_what_a_killed_worker_was_at_is_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with workers(2, None) as two:
        found = [*two.answers(KilledOnce(tmp_path / "killed", 2, neg), range(4))]
    assert sorted(found) == [(0, 0), (1, -1), (2, -2), (3, -3)]
    assert "a worker process was lost (TerminatedWorkerError)" in capsys.readouterr().err


class AllAtOnce(ThreadingBackend):
    """A backend that gives no answer before all are there, as Ray's own."""

    supports_return_generator = False


def test_backends_that_answer_at_the_end_get_some_items_at_a_time() -> None:
    register_parallel_backend("all at once", AllAtOnce)
    begun: list[int] = []

    def seen(number: int) -> int:
        begun.append(number)
        return -number

    with parallel_config(backend="all at once", n_jobs=2):
        answers = Workers().answers(seen, range(20))
        assert next(answers) == (0, 0)
        assert len(begun) == 2 * AT_ONCE
        assert sorted(answers) == [(number, -number) for number in range(1, 20)]


def test_rows_are_equal_for_any_number_of_workers(
    small: Path,
    begun: Callable[[], tuple[list[Cell], Answers]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cells, answers = begun()
    with workers(2, None) as two:
        assert not answers.fill(cells, two)
    # The command takes up what they have kept, and solves nothing.
    assert run(sweep.main, [str(small), "--out", str(tmp_path / "run"), "--json"]) == 0
    captured = capsys.readouterr()
    assert "cells: 3 of 3 are kept from before" in captured.err
    assert run(sweep.main, [str(small), "--out", str(tmp_path / "alone")]) == 0
    for name in ("rows.csv", "sweep.svg"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert files_of(tmp_path / "run" / "plans") == {"0001.yaml", "0002.yaml"}
    rows = json.loads(captured.out)["rows"]
    assert [row["status"] for row in rows] == ["OPTIMAL", "OPTIMAL", "INFEASIBLE"]
    assert rows[2]["reason"].startswith("memory: the plan that comes nearest needs ")
    assert "of a GPU's 22.0" in rows[2]["reason"]


def test_an_interrupted_sweep_says_so_and_goes_on(
    begun: Callable[[], tuple[list[Cell], Answers]], capsys: pytest.CaptureFixture[str]
) -> None:
    cells, answers = begun()
    with workers(None, None) as one:
        assert answers.fill(cells, one, Counted({3: KeyboardInterrupt}))
    assert "interrupted: 2 of 3 cells are done and kept" in capsys.readouterr().err
    rows = [answer.row for answer in answers.in_order()]
    page = report(rows, len(cells), is_interrupted=True)
    assert page.words[0].startswith("Interrupted: 2 of 3 cells are done.")
    cells, answers = begun()
    with workers(None, None) as one:
        assert not answers.fill(cells, one, again := Counted())
    assert again.calls == 1
    assert [answer.row["global_batch"] for answer in answers.in_order()] == [4, 8, 2]


def test_a_damaged_answer_is_said_and_made_again(
    begun: Callable[[], tuple[list[Cell], Answers]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cells, answers = begun()
    with workers(None, None) as one:
        answers.fill(cells, one, Counted())
        victim = tmp_path / "run" / "cells" / f"{cells[0].key(here()['sources'])}.json"
        victim.write_bytes(victim.read_bytes()[:-9])
        cells, answers = begun()
        answers.fill(cells, one, again := Counted())
    assert again.calls == 1
    assert "this cell is done again" in capsys.readouterr().err
    # It is answered last, and yet its row comes first.
    assert [answer.row["global_batch"] for answer in answers.in_order()] == [4, 8, 2]


def test_what_was_refused_is_asked_again(
    begun: Callable[[], tuple[list[Cell], Answers]],
) -> None:
    calls = []
    with workers(None, None) as one:
        for again in (Counted(status="REFUSED"), Counted(), Counted()):
            cells, answers = begun()
            answers.fill(cells, one, again)
            calls.append(again.calls)
    assert calls == [3, 3, 0]


def test_a_cell_that_always_loses_its_worker_is_given_up_and_the_others_done(
    begun: Callable[[], tuple[list[Cell], Answers]], capsys: pytest.CaptureFixture[str]
) -> None:
    cells, answers = begun()
    # The second cell is asked first again and again, at calls 2, 4, 5 and 6.
    losing = Counted(dict.fromkeys((2, 4, 5, 6, 7), BrokenExecutor))
    with workers(None, None) as one:
        assert not answers.fill(cells, one, losing)
    rows = [answer.row for answer in answers.in_order()]
    assert [row["global_batch"] for row in rows] == [4, 2]
    assert report(rows, len(cells)).words[0].startswith("1 of 3 cells have no row")


def test_answers_of_other_sources_or_questions_are_not_taken_up(small: Path) -> None:
    cells = load_cells(small, 0)
    keys = {cell.key(sources) for cell in cells for sources in ("a", "b")}
    assert len(keys) == 2 * len(cells)
    assert load_cells(small, 1)[0].key("a") not in keys


def test_a_worker_of_another_version_is_refused() -> None:
    check_equal("far", versions_here(), here())
    for name in ("python", "numpy", "mistlab", "sources"):
        with pytest.raises(OtherVersionError, match=f"other versions: {name} 0 instead of"):
            check_equal("far", {**versions_here(), name: "0"}, here())


def test_what_cannot_be_asked_is_a_row(tmp_path: Path) -> None:
    case = {**_case(4), "precision": "fp8"}
    (cell,) = cells_of(sweep_from_mapping({"cases": [case]}, tmp_path), 0)
    row = solved(cell).row
    assert row["status"] == "REFUSED"
    assert "fp8" in row["reason"]
    space = {"like": "mist", "name": "threes", "data_parallel": [3], "tensor_parallel": [3]}
    plain = {"cases": [_case(4)], "spaces": [space]}
    (cell,) = cells_of(sweep_from_mapping(plain, tmp_path), 0)
    row = solved(cell).row
    assert row["status"] == "INFEASIBLE"
    assert "space threes has no plan on 2 GPUs" in row["reason"]


def test_a_deadline_that_is_too_near_is_said(tmp_path: Path) -> None:
    plain = {"cases": [_case(4)], "budget": {"seconds": 1e-9}}
    (cell,) = cells_of(sweep_from_mapping(plain, tmp_path), 0)
    row = solved(cell).row
    assert row["status"] == "BUDGET"
    assert row["reason"].startswith("no plan in time: the budget of 1e-09 s was spent")


def test_the_example_is_the_default_and_in_order() -> None:
    assert (ROOT / "examples" / "sweep.yaml").read_bytes() == SWEEP_EXAMPLE.read_bytes()
    assert len(load_cells(SWEEP_EXAMPLE, 0)) == 19


def test_a_cluster_that_does_not_answer_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with (
        pytest.raises(InputError, match=f"ray:127.0.0.1:{port}: no Ray cluster answers there"),
        workers(2, f"ray:127.0.0.1:{port}"),
    ):
        pass


@pytest.mark.parametrize("kind", [RuntimeError, OSError, ValueError])
def test_ray_that_does_not_start_is_said_in_a_line(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        message = "\nThe raylet process died.\n  Traceback of a daemon\n"
        raise kind(message)

    fake = ModuleType("ray")
    fake.init, fake.is_initialized = init, lambda: False  # type: ignore[attr-defined]
    fake.exceptions = SimpleNamespace(RayError=LookupError)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", fake)
    with (
        pytest.raises(InputError) as refused,
        workers(2, "ray"),
    ):
        pytest.fail("work has begun")
    said = str(refused.value)
    assert "Ray does not start on this machine (The raylet process died.)" in said
    assert "give --jobs N instead" in said
    assert "\n" not in said


def test_strange_workers_are_refused() -> None:
    with (
        pytest.raises(InputError, match="--cluster slurm: is unknown: give ray"),
        workers(2, "slurm"),
    ):
        pass
