"""Starts runs of plans, each with as many processes as it has GPUs, and collects their output."""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from experiments.cli.commandline import missing
from experiments.training.plan_runs import ERROR, PlanRun, WorkerRunner, ended_within, last_words
from mistlab.core.values import InputError

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
RUN_PLAN = ("-m", "experiments.run_plan")


@dataclass(slots=True, kw_only=True)
class Launcher:
    """Runs plan after plan: those of one GPU in one process for all, others under a torchrun each.

    It is a context; what it started has ended with it.
    """

    steps: int
    device: str
    seed: int
    seconds: float
    _worker: WorkerRunner = field(init=False)

    def __enter__(self) -> Self:
        if self.device == "cpu":
            # As torchrun has it for its own: as many threads a process, whoever starts it.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._worker = WorkerRunner(self.device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._worker.close()

    def run(self, plan: Path, gpus: int) -> Mapping[str, Any]:
        """The output of ``run_plan --json`` for a plan, or a mapping with ``error``."""
        run = PlanRun(plan=plan, steps=self.steps, seed=self.seed)
        try:
            said = self._alone(run) if gpus == 1 else self._together(run, gpus)
        except InputError as error:
            return {"error": str(error).removeprefix(f"{plan}: ").removeprefix(ERROR)}
        if said is None:
            return {"error": f"it took more than {self.seconds:g} s: give more --seconds"}
        return said

    def _alone(self, run: PlanRun) -> Mapping[str, Any] | None:
        return self._worker(run, self.seconds)

    def _together(self, run: PlanRun, gpus: int) -> Mapping[str, Any] | None:
        if find_spec("torch") is None:
            return {"error": str(missing("torch"))}
        command = [*TORCHRUN, str(gpus), *RUN_PLAN, *run.words, "--device", self.device]
        done = ended_within(command, self.seconds)
        if done is None:
            return None
        if done.returncode:
            return {"error": last_words(done.stderr, silent(done.returncode))}
        said: Mapping[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return said


def silent(status: int) -> str:
    """The error of a run that ended without a word."""
    return f"it ended with status {status}, without a word"
