"""Running plans in processes of their own, and keeping what each run said, run by run."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from experiments.commandline import WRONG_USAGE
from mistlab.errors import InputError

Said = Mapping[str, Any]

PARTING_S = 10.0


class PlanRunner(Protocol):
    """Runs a plan file for some steps: what it says, or None if the time was not enough.

    With ``serialises`` no two of its tasks overlap; a ``stage`` runs by itself.
    """

    def __call__(
        self, plan: Path, *, steps: int, seconds: float, serialises: bool, stage: int | None
    ) -> Said | None:
        """What ``run_plan --json`` prints, or a mapping with ``error``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRunner:
    """``python -m experiments.run_plan`` on a device."""

    device: str

    def __call__(
        self, plan: Path, *, steps: int, seconds: float, serialises: bool, stage: int | None
    ) -> Said | None:
        """Run; a failure is its last line on standard error, wrong usage ends the caller too."""
        command = [sys.executable, "-m", "experiments.run_plan", str(plan), "--json"]
        command += ["--steps", str(steps), "--device", self.device]
        command += ["--serialise"] if serialises else []
        command += [] if stage is None else ["--stage", str(stage)]
        done = ended_within(command, seconds)
        if done is None:
            return None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            if done.returncode == WRONG_USAGE:
                message = f"{plan}: {lines[-1]}"
                raise InputError(message)
            return {"error": lines[-1]}
        said: Said = json.loads(done.stdout)
        return said


def ended_within(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
    """What a command said, or None if it was interrupted because its time was over."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=max(0.0, seconds))
        except subprocess.TimeoutExpired:
            # An interrupt, unlike a kill, lets it end the processes that it started.
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=PARTING_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@dataclass(slots=True, kw_only=True)
class RunRows:
    """A file of one JSON object a run, by its plan; a line that was cut off is dropped."""

    path: Path
    said: dict[str, Said] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        self.path.write_text(whole, encoding="utf-8")
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                self.said[row.pop("plan")] = row
            except (ValueError, KeyError):
                message = f"{self.path}: line {number} is not a run: remove it, and it runs again"
                raise InputError(message) from None

    def add(self, name: str, said: Said) -> None:
        """Write a run down."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"plan": name, **said}) + "\n")
        self.said[name] = said
