"""Runs that go on: from the newest checkpoint that can be read, by themselves after a crash."""

import io
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from experiments import run_plan
from experiments.cli.command import CRASHED
from experiments.cli.commandline import DONE, INTERRUPTED, NO_ANSWER, WRONG_USAGE, run
from experiments.training import run_plan as trained
from tests.experiments.tiny_plans import plan_file

STEPS = 6
FAILING = ("-m", "tests.experiments.failing_plan")


class Runs:
    """Runs of one plan into one folder."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.plan, self.out, self._capfd = plan_file(folder), folder / "out", capfd
        self.checkpoints = self.out / "checkpoints"

    def __call__(self, *options: object, status: int = DONE) -> tuple[Mapping[str, Any], str]:
        """What a run that saves every two steps says, and complains of."""
        saving = ("--out", self.out, "--save-every", 2, "--json")
        arguments = (self.plan, "--steps", STEPS, *saving, *options)
        assert run(run_plan.main, [str(argument) for argument in arguments]) == status
        said = self._capfd.readouterr()
        return json.loads(said.out or "{}"), said.err

    @property
    def rows(self) -> list[tuple[int, float]]:
        """Step and loss of each row in the folder."""
        lines = (self.out / "rows.jsonl").read_text(encoding="utf-8").splitlines()
        return [(row["step"], row["loss"]) for row in map(json.loads, lines)]


@pytest.fixture
def runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Runs:
    return Runs(tmp_path, capfd)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run of the same plan that nothing happens to."""
    folder, said = tmp_path_factory.mktemp("undisturbed"), io.StringIO()
    saving = ["--out", str(folder / "out"), "--save-every", "2", "--json"]
    with redirect_stdout(said):
        run(run_plan.main, [str(plan_file(folder)), "--steps", str(STEPS), *saving])
    losses: list[float] = json.loads(said.getvalue())["losses"]
    return losses


def test_a_run_goes_on_until_it_has_its_steps(runs: Runs, undisturbed: list[float]) -> None:
    """Its rows after the checkpoint go, with one that was cut off; the others are its history."""
    first, _ = runs("--steps", 5)
    with (runs.out / "rows.jsonl").open("a") as rows:
        rows.write('{"step": 6, "lo')
    said, complaint = runs("--resume", "latest")
    assert f"going on from {runs.checkpoints / 'step-4'}\n" in complaint
    assert "step 5 " in complaint
    assert "step 4 " not in complaint
    assert first["losses"] == undisturbed[:5]
    assert said["losses"] == undisturbed
    assert runs.rows == [*enumerate(undisturbed, 1)]
    assert len(said["iteration_s"]) == STEPS


def test_a_run_without_a_checkpoint_begins(runs: Runs, undisturbed: list[float]) -> None:
    said, complaint = runs("--resume", "latest")
    assert "no checkpoint yet" in complaint
    assert said["losses"] == undisturbed


def test_a_run_that_has_its_steps_has_nothing_to_train(runs: Runs, tmp_path: Path) -> None:
    first, _ = runs()
    weights = tmp_path / "weights.safetensors"
    said, complaint = runs("--resume", "latest", "--export", weights)
    assert said["losses"] == first["losses"]
    assert "step 6 " not in complaint
    assert weights.is_file()
    assert len(runs.rows) == STEPS


def test_a_damaged_checkpoint_is_left_out_and_that_is_said(
    runs: Runs, undisturbed: list[float]
) -> None:
    runs("--steps", 4)
    (runs.checkpoints / "step-4" / "__0_0.distcp").write_bytes(b"no longer what it was")
    (runs.checkpoints / "step-6.part").mkdir()
    said, complaint = runs("--resume", "latest")
    assert f"{runs.checkpoints / 'step-4'}: cannot be read (" in complaint
    assert f"going on from {runs.checkpoints / 'step-2'}\n" in complaint
    assert said["losses"] == undisturbed
    assert runs.rows == [*enumerate(undisturbed, 1)]


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(runs: Runs) -> None:
    runs("--steps", 4)
    for path in runs.checkpoints.glob("step-*"):
        (path / ".metadata").unlink()
    _, complaint = runs("--resume", "latest", status=WRONG_USAGE)
    assert "none of the checkpoints in this folder can be read: move the folder" in complaint
    assert len(runs.rows) == 4


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill:step:0:4", "the run was ended by SIGKILL: the last checkpoint is"),
        pytest.param(
            *("kill:save:0:4", "the run was ended by SIGKILL: the last checkpoint is"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("raise:step:0:4", "the run crashed: the last checkpoint is"), marks=pytest.mark.slow
        ),
    ],
    ids=["killed in a step", "killed while it saves", "crashed in a step"],
)
def test_a_run_alone_starts_again_after_a_crash(
    runs: Runs,
    undisturbed: list[float],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    warm_python: str,
    fault: str,
    words: str,
) -> None:
    """In a step, and while a checkpoint is written."""
    monkeypatch.setenv("FAULT", f"{fault}:{tmp_path / 'marker'}")
    monkeypatch.setattr(trained, "COMMAND", (warm_python, *FAILING))
    said, complaint = runs("--restarts", 1)
    assert words in complaint
    assert f"going on from {runs.checkpoints / 'step-2'}\n" in complaint
    assert said["losses"] == undisturbed
    assert runs.rows == [*enumerate(undisturbed, 1)]


Ended = Callable[[Sequence[int]], tuple[int, int]]


@pytest.fixture
def ended(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Ended:
    """A run with two restarts whose processes end so: its own status, and how many there were."""

    def of(statuses: Sequence[int]) -> tuple[int, int]:
        left = [*statuses]
        monkeypatch.setattr(trained, "_status_of", lambda _: left.pop(0))
        options = [runs.plan, "--restarts", 2, "--save-every", 1, "--out", runs.out]
        status = run(run_plan.main, [str(option) for option in options])
        return status, len(statuses) - len(left)

    return of


KILL, FAULT, TERM = -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([DONE], (DONE, 1)),
        ([KILL, FAULT, DONE], (DONE, 3)),
        ([CRASHED, KILL, FAULT, DONE], (128 + 11, 3)),
        ([CRASHED, NO_ANSWER, DONE], (NO_ANSWER, 2)),
        ([WRONG_USAGE, DONE], (WRONG_USAGE, 1)),
        ([INTERRUPTED, DONE], (INTERRUPTED, 1)),
        ([TERM, DONE], (128 + 15, 1)),
    ],
)
def test_what_would_come_again_ends_a_run(
    ended: Ended, statuses: list[int], expected: tuple[int, int]
) -> None:
    assert ended(statuses) == expected


def test_wrong_usage_is_refused(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused(*options: object) -> str:
        arguments = [str(runs.plan), *map(str, options)]
        assert run(run_plan.main, arguments) == WRONG_USAGE
        return capfd.readouterr().err

    saving = ("--out", runs.out, "--save-every", 2)
    assert "--resume latest needs a folder: give --out" in refused("--resume", "latest")
    assert "--restarts -1: is too small: give a number of at least 0" in refused("--restarts", -1)
    assert "--restarts needs checkpoints" in refused("--restarts", 1, "--out", runs.out)
    other = refused("--restarts", 1, *saving, "--resume", runs.out)
    assert "give --resume latest, or leave --resume out" in other
    runs("--steps", 2)
    assert "has checkpoints of a run before" in refused("--restarts", 1, *saving)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "give torchrun --max-restarts 1" in refused("--restarts", 1, *saving)
