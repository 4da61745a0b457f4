"""run_plan in several processes of which one dies, or answers no more."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from experiments import run_plan
from experiments.cli.command import CRASHED
from experiments.cli.commandline import DONE, INTERRUPTED, NO_ANSWER, run
from tests.experiments.tiny_plans import UNLIKE, plan_file

ROOT = Path(__file__).parents[2]

Process = subprocess.Popen[str]
TWO = ({"data_parallel": 2, "micro_batch": 1, "zero": 3},)
ENDLESS = 100_000


@contextmanager
def processes(
    count: int, command: Callable[[int], list[str]], **environment: str
) -> Iterator[list[Process]]:
    """Ranks without torchrun, which would end the others itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, *command(rank)],
            cwd=ROOT,
            env={
                **os.environ,
                **world,
                **environment,
                "RANK": str(rank),
                "OMP_NUM_THREADS": "1",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@contextmanager
def ranks_of(
    plan: Path, out: Path, count: int, *options: object, fault: str | None = None
) -> Iterator[list[Process]]:
    """Ranks that train and save."""
    module = "experiments.run_plan" if fault is None else "tests.experiments.failing_plan"
    command = ["-m", module, plan, "--out", out, "--save-every", 1, "--steps", ENDLESS, *options]
    words = [str(part) for part in command]
    with processes(count, lambda _: words, FAULT=f"{fault}:{out / 'marker'}") as ranks:
        deadline = time.monotonic() + 150
        while not list((out / "checkpoints").glob("step-?")) and time.monotonic() < deadline:
            time.sleep(0.1)
        yield ranks


def told(process: Process) -> str:
    """The one line that a rank ends with, within a minute."""
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == NO_ANSWER
    (line,) = [line for line in complaint.splitlines() if not line.startswith("step ")]
    return line


WORLDS: Mapping[str, tuple[tuple[Mapping[str, Any], ...], int, int]] = {
    "the first of two": (TWO, 2, 0),
    "the second of two": (TWO, 2, 1),
    "the last stage of three ranks": (UNLIKE, 3, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_a_rank_that_is_killed_ends_the_others_and_leaves_the_checkpoint(
    tmp_path: Path, name: str
) -> None:
    stages, count, victim = WORLDS[name]
    out, plan = tmp_path / "out", plan_file(tmp_path, *stages)
    with ranks_of(plan, out, count) as ranks:
        ranks[victim].send_signal(signal.SIGKILL)
        lines = [told(process) for rank, process in enumerate(ranks) if rank != victim]
    for line in lines:
        assert "has ended or did not answer in time" in line
        assert "the last checkpoint is" in line
    named = (f"waited for rank {victim}, which has ended", "one of which has ended")
    assert any(text in line for line in lines for text in named)
    again = [str(plan_file(tmp_path)), "--steps", "1", "--resume", str(out / "checkpoints")]
    assert run(run_plan.main, again) == DONE


LOST = "rank 0 waited for rank 1, which has ended or did not answer in time"
DYING = """
import os, signal, sys
from experiments import run_plan
from runtime.comm import topology
topology.{when} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
run_plan.main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["enter", "greet"])
def test_a_rank_that_dies_while_it_connects_is_told(tmp_path: Path, when: str) -> None:
    """Before any call of a group, and before any message between two stages."""
    plan = plan_file(tmp_path, *UNLIKE)
    code = ["-c", DYING.format(when=when)]
    commands = [["-m", "experiments.run_plan"], code, ["-m", "experiments.run_plan"]]
    with processes(3, lambda rank: [*commands[rank], str(plan), "--timeout", "20"]) as ranks:
        lines = [told(process) for rank, process in enumerate(ranks) if rank != 1]
    for line in lines:
        assert "has ended or did not answer in time" in line
        assert "there is no checkpoint" in line


@pytest.mark.slow
def test_a_rank_that_hangs_is_waited_for_as_long_as_was_said(tmp_path: Path) -> None:
    plan = plan_file(tmp_path, *TWO)
    with ranks_of(plan, tmp_path / "out", 2, "--timeout", 5) as ranks:
        ranks[1].send_signal(signal.SIGSTOP)
        assert LOST in told(ranks[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("raise", CRASHED, "RuntimeError: CUDA error: unspecified launch failure"),
        ("interrupt", INTERRUPTED, ""),
    ],
)
def test_a_rank_that_fails_ends_and_lets_nobody_wait(
    tmp_path: Path, how: str, status: int, words: str
) -> None:
    """Those that wait for it would do so for five minutes."""
    plan, fault = plan_file(tmp_path, *TWO), f"{how}:step:1:3"
    with ranks_of(plan, tmp_path / "out", 2, fault=fault) as ranks:
        assert LOST in told(ranks[0])
        _, complaint = ranks[1].communicate(timeout=60)
    assert ranks[1].returncode == status
    assert words in complaint


def restarted_losses(plan: Path, out: Path, fault: str) -> tuple[list[float], str]:
    """The losses of six steps of two ranks under a torchrun that starts them again once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command += ["--nproc-per-node", "2", "-m", "tests.experiments.failing_plan", plan, "--json"]
    command += ["--steps", 6, "--out", out, "--save-every", 2, "--resume", "latest"]
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FAULT": f"{fault}:{out.parent / 'marker'}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == DONE, done.stderr
    rows = map(json.loads, (out / "rows.jsonl").read_text(encoding="utf-8").splitlines())
    losses: list[float] = json.loads(done.stdout)["losses"]
    assert [(row["step"], row["loss"]) for row in rows] == [*enumerate(losses, 1)]
    return losses, done.stderr


@pytest.mark.slow
def test_a_killed_rank_costs_no_change_of_losses(tmp_path: Path) -> None:
    """In a step, and while a checkpoint is written."""
    plan = plan_file(tmp_path, *TWO)
    undisturbed, _ = restarted_losses(plan, tmp_path / "out", "kill:step:9:1")
    assert len(undisturbed) == 6
    for number, fault in enumerate(("kill:step:1:4", "kill:save:0:4")):
        folder = tmp_path / str(number)
        folder.mkdir()
        losses, complaint = restarted_losses(plan, folder / "out", fault)
        assert (folder / "marker").exists()
        assert f"going on from {folder / 'out' / 'checkpoints' / 'step-2'}" in complaint
        assert losses == undisturbed
