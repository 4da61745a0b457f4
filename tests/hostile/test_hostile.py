"""Hostile inputs: a part of ``python -m tests.hostile``, and that its oracle sees what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments import commands as table
from tests.hostile import run
from tests.hostile.case import Case
from tests.hostile.commands import COMMANDS, options_of
from tests.hostile.draw import cases
from tests.hostile.oracle import problems
from tests.hostile.run import Outcome

INPUTS = 80
CASE = Case(
    command="predict",
    kind="plan file, fields",
    about="nothing",
    arguments=("plan.yaml", "--json"),
    echo={"sequence_length": 256, "global_batch": 16},
)
ANSWER = {"iteration_s": 2.0, "tokens_per_s": 2048.0, "stages": [{"peak_allocated_bytes": 1}]}


def test_hostile_inputs_are_refused_or_answered_as_they_should_be(warm_python: str) -> None:
    command = [warm_python, "-m", "tests.hostile", "--inputs", str(INPUTS), "--seed", "1"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.returncode == 0, done.stderr
    assert f"{INPUTS} inputs, 0 wrong" in done.stderr


def outcome(**changes: Any) -> Outcome:
    """A good outcome of ``CASE``, with changes."""
    good = {"status": 0, "out": json.dumps(ANSWER), "err": "", "cpu_s": 1.0, "wall_s": 1.0}
    return Outcome(**{**good, "grown_bytes": 0, **changes})


def said(**changes: Any) -> Outcome:
    """The outcome with other entries in its answer."""
    return outcome(out=json.dumps({**ANSWER, **changes}))


def test_a_good_answer_has_no_problem() -> None:
    assert problems(CASE, outcome()) == []
    assert problems(CASE, outcome(status=2, out="", err="error: a.yaml: is empty")) == []


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (outcome(status=2, err="Traceback (most recent call last):\nKeyError: 'a'"), "traceback"),
        (outcome(status=99, err="error: x"), "exit status 99"),
        (outcome(status=-11), "exit status -11"),
        (outcome(status=3), "exit status 3"),
        (outcome(status=-9, cpu_s=10.5), "hangs"),
        (outcome(status=-9, wall_s=41.0), "hangs"),
        (outcome(grown_bytes=2 << 30), "grows by 2.0 GiB"),
        (outcome(status=2, out="", err="x" * 3000), "a message of 3000 letters"),
        (outcome(status=1, out="", err=""), "refused without a word"),
        (outcome(out="{"), "no JSON"),
        (outcome(out='{"iteration_s": NaN}'), "no JSON: NaN is not a number"),
        (said(iteration_s=0), "iteration_s is 0, not above 0"),
        (said(iteration_s=-1.5), "iteration_s is -1.5, not above 0"),
        (said(iteration_s="2"), "iteration_s is '2'"),
        (said(global_batch=64), "global_batch was 16, and is read as 64"),
        (said(tokens_per_s=4096.0), "8192 tokens a step, of 16 sequences of 256"),
        (said(stages=[{"peak_allocated_bytes": 0}]), "peak_allocated_bytes is 0, not above 0"),
    ],
)
def test_the_oracle_sees_what_is_wrong(wrong: Outcome, problem: str) -> None:
    assert any(one.startswith(problem) for one in problems(CASE, wrong))


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("while True: pass", "hangs"),
        ("import time\ntime.sleep(60)", "hangs"),
        ("held = bytearray(200 << 20)", "grows by"),
        ("import os\nos.abort()", "exit status -6"),
    ],
)
def test_a_process_is_ended_and_measured(
    program: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "MOST_CPU_S", 0.5)
    monkeypatch.setattr(run, "MOST_WALL_S", 3.0)
    for name in ("stdout", "stderr"):
        tmp_path.with_name(f"{tmp_path.name}.{name}").touch()
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", program], {}, setsid=True)
    ended = run._awaited(child, tmp_path, 0)
    monkeypatch.setattr("tests.hostile.oracle.MOST_BYTES", 100 << 20)
    monkeypatch.setattr("tests.hostile.oracle.MOST_CPU_S", 0.5)
    monkeypatch.setattr("tests.hostile.oracle.MOST_WALL_S", 3.0)
    assert any(one.startswith(problem) for one in problems(CASE, ended))


def test_every_command_gets_options_within_two_hundred_inputs() -> None:
    drawn = cases(0)
    commands = {next(drawn).command for _ in range(200)}
    assert commands == set(COMMANDS) == {*table.COMMANDS}


def test_every_option_of_a_command_is_known() -> None:
    names = {word for one in options_of("tune") for word in one.option_strings}
    assert {"--model", "--budget-evaluations", "--from", "--json"} <= names


def test_equal_seeds_draw_equal_inputs() -> None:
    first, again, other = (
        [(case.arguments, case.files) for case, _ in zip(cases(seed), range(40), strict=False)]
        for seed in (5, 5, 6)
    )
    assert first == again != other
