"""Runs plans in other processes, stores the results, and finds the error message of a run that
failed.
"""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from tempfile import NamedTemporaryFile
from threading import Thread
from typing import Any

from experiments.cli.commandline import WRONG_USAGE
from mistlab.core.files import naming
from mistlab.core.values import reject

# Finds the error message of a run that failed: the line of its standard error that names the error.


ERROR = "error: "
# Matches a line of a rank's traceback as torch prints it: the rank, and then the error.
_RAISED = re.compile(r"\[rank\d+\]: ((?:\w+\.)*\w*(?:Error|Exception)\b.*)")


def last_words(errors: str, otherwise: str) -> str:
    """The line in which a command or a rank names its error; if there is none, the last line. A
    launcher of several ranks prints further lines below it.
    """
    lines = [line for line in errors.splitlines() if line.strip()]
    complaints = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    raised = [found[1] for line in lines if (found := _RAISED.match(line))]
    return [*complaints[:1], *raised[-1:], *(line.strip() for line in lines[-1:]), otherwise][0]


# Runs plans in other processes, and stores the result of each run.


Said = Mapping[str, Any]

PARTING_S = 10.0
# The seconds between two checks whether a running command hangs.
LOOK_S = 0.5
# The limit for gradient clipping: far above the gradient norms of models at the start of training,
# so that clipping changes hardly anything.
CLIP_NORM = "1000"
WORKER = (sys.executable, "-m", "experiments.training.plan_worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRun:
    """A plan file that is to be run for some steps.

    With ``serialises``, no two tasks overlap; with a ``stage``, only this stage runs. A ``strict``
    run gives bitwise equal results for equal work; ``with_norms``, it reports gradient norms.
    ``gpus`` is the number of GPUs.
    """

    plan: Path
    steps: int
    gpus: int = 1
    serialises: bool = False
    stage: int | None = None
    strict: bool = False
    with_norms: bool = False
    seed: int = 0

    @property
    def words(self) -> list[str]:
        """The arguments of the command ``run_plan`` for this run."""
        arguments = [str(self.plan), "--json", "--steps", str(self.steps), "--draw-on-device"]
        arguments += ["--seed", str(self.seed)] if self.seed else []
        arguments += ["--serialise"] if self.serialises else []
        arguments += [] if self.stage is None else ["--stage", str(self.stage)]
        arguments += ["--deterministic"] if self.strict else []
        return arguments + (["--clip-norm", CLIP_NORM] if self.with_norms else [])


# A function that runs a plan within a number of seconds. It returns what ``run_plan --json``
# prints, or a mapping with ``error``; None if the time was not enough.
PlanRunner = Callable[[PlanRun, float], Said | None]


class WorkerRunner:
    """Runs plans on a device by ``python -m experiments.run_plan``, all of them in one process.

    Starting a process and a device, and pinning memory, often take longer than a run. A new process
    starts after a run that failed, and when runs change between strict and normal mode.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._worker: _Worker | None = None
        self._is_strict = False

    def __call__(self, run: PlanRun, seconds: float) -> Said | None:
        """Run a plan. If the run fails, the last line of its standard error is returned as the
        error; wrong usage ends the caller as well.
        """
        if run.strict != self._is_strict:
            self.close()
        if self._worker is None:
            self._worker, self._is_strict = _Worker(), run.strict
        answer = self._worker.ask([*run.words, "--device", self._device], seconds)
        if answer is None or answer["status"]:
            self.close()
        if answer is None:
            return None
        if answer["status"] == WRONG_USAGE:
            problem = answer["error"].removeprefix(ERROR)
            reject(problem if str(run.plan) in problem else f"{run.plan}: {problem}")
        outcome: Said = {"error": answer["error"]} if answer["status"] else answer["said"]
        return outcome

    def close(self) -> None:
        """End the process of the runs, if there is one."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
RUN_PLAN = ("-m", "experiments.run_plan")


class NodeRunner:
    """Runs plans on a node: those for one GPU in a process that they share, each other plan under a
    torchrun of its own.

    The shared process ends before a torchrun starts, since it holds memory of the first GPU.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._alone = WorkerRunner(device)

    def __call__(self, run: PlanRun, seconds: float) -> Said | None:
        """Run a plan. If the run fails, the line in which a rank names its error is returned."""
        if run.gpus == 1:
            return self._alone(run, seconds)
        self.close()
        command = [*TORCHRUN, str(run.gpus), *RUN_PLAN, *run.words, "--device", self._device]
        done = ended_within(command, seconds)
        if done is None:
            return None
        if done.returncode:
            return {"error": last_words(done.stderr, silent(done.returncode))}
        outcome: Said = json.loads(done.stdout.strip().splitlines()[-1])
        return outcome

    def close(self) -> None:
        """End the process for plans on one GPU, if there is one."""
        self._alone.close()


def silent(status: int) -> str:
    """The error of a run that ended without printing a result."""
    return f"it ended with status {status}, without a word"


class _Worker:
    """A process of ``experiments.training.plan_worker``, and what it prints."""

    def __init__(self) -> None:
        self._errors = NamedTemporaryFile("w", encoding="utf-8")  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            WORKER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        assert self._process.stdin is not None
        self._input = self._process.stdin
        self._lines: Queue[str] = Queue()
        self._listener = Thread(target=self._listen, daemon=True)
        self._listener.start()

    def ask(self, arguments: Sequence[str], seconds: float) -> Said | None:
        """The exit status of the worker's run, and its output or error; None if the time is
        over.
        """
        # If the process has ended, an empty line says so later.
        with suppress(BrokenPipeError):
            self._input.write(json.dumps(arguments) + "\n")
            self._input.flush()
        try:
            line = self._lines.get(timeout=max(0.0, seconds))
        except Empty:
            # Unlike a kill, an interrupt lets the process first end the processes that it has
            # started.
            self._process.send_signal(signal.SIGINT)
            return None
        answer = json.loads(line) if line else {"status": self._process.wait(), "said": None}
        return {**answer, "error": self._last_words()}

    def close(self) -> None:
        """Let the worker process end, within some seconds."""
        with suppress(BrokenPipeError):
            self._input.close()
        try:
            self._process.wait(PARTING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()
        self._errors.close()

    def _listen(self) -> None:
        """Pass on each line that the worker prints, and an empty one when it ends."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def _last_words(self) -> str:
        lines = Path(self._errors.name).read_text(encoding="utf-8").strip().splitlines()
        return lines[-1] if lines else "it ended without a word"


def ended_within(
    command: Sequence[str],
    seconds: float,
    *,
    env: Mapping[str, str] | None = None,
    hangs: Callable[[], bool] = lambda: False,
) -> subprocess.CompletedProcess[str] | None:
    """The output of a command; None if it was interrupted because its time was over or it hung."""
    pipe = subprocess.PIPE
    ends = time.monotonic() + seconds
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        while True:
            left = max(0.0, ends - time.monotonic())
            try:
                out, err = process.communicate(timeout=min(left, LOOK_S))
                break
            except subprocess.TimeoutExpired:
                if left > LOOK_S and not hangs():
                    continue
            # Unlike a kill, an interrupt lets the process first end the processes that it has
            # started.
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=PARTING_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@dataclass(slots=True, kw_only=True)
class RunRows:
    """A file of runs with one JSON object per line, read by plan; a last line that was cut off is
    dropped.
    """

    path: Path
    said: dict[str, Said] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            with naming(self.path):
                self.path.write_text(whole, encoding="utf-8")
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                self.said[row.pop("plan")] = row
            except (ValueError, KeyError):
                reject(
                    f"{self.path}: line {number} is not a JSON object with a field plan: remove "
                    "the line, so that its plan is run again"
                )

    def add(self, name: str, outcome: Said) -> None:
        """Store a run under its plan, whatever file name its output reports."""
        outcome = {key: value for key, value in outcome.items() if key != "plan"}
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"plan": name, **outcome}) + "\n")
        self.said[name] = outcome
