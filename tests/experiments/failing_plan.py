"""``run_plan`` with a fault, for tests: a rank fails once, at a step or while it saves.

The environment's FAULT says how (``kill``, ``raise`` or ``interrupt``), where (``step`` or
``save``), on which rank and at which step, and a file that is made when it happens.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from experiments import run_plan
from experiments.cli.command import run_as_process
from runtime.checkpoints.boxes import Saver
from runtime.session import Session

# Whoever imports this without a fault, such as a search for doctests, gets none.
HOW, WHERE, RANK, STEP, MARKER = os.environ.get("FAULT", "none:nowhere:0:0:").split(":")


def fail_once() -> None:
    marker = Path(MARKER)
    if marker.exists() or os.environ.get("RANK", "0") != RANK:
        return
    marker.touch()
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "interrupt":
        raise KeyboardInterrupt
    message = "CUDA error: unspecified launch failure"
    raise RuntimeError(message)


step, resolve_data = Session.step, Saver.resolve_data
steps = 0


def failing_step(self: Session) -> Any:
    global steps  # noqa: PLW0603 (the steps of this process)
    if WHERE == "step" and self.steps + 1 == int(STEP):
        fail_once()
    steps = self.steps + 1
    return step(self)


def failing_resolve_data(self: Saver, item: Any) -> Any:
    if WHERE == "save" and steps == int(STEP):
        fail_once()
    return resolve_data(self, item)


if __name__ == "__main__":
    Session.step = failing_step  # type: ignore[method-assign]
    Saver.resolve_data = failing_resolve_data  # type: ignore[method-assign]
    run_as_process(run_plan.main, sys.argv[1:])
