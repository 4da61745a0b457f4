"""How a run of a plan ends: what is said of an error, and how its process ends.

Exit status 3 is a failure that the run has no words for, of a device as a rule; a traceback is in
place of them.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from experiments.cli.commandline import DONE, NO_ANSWER, NoAnswerError, run
from experiments.running.run_results import shortage_words
from mistlab.values.job import Job
from runtime.checkpoint_folder import latest

CRASHED = 3
# In place of a folder: the newest checkpoint of the run itself.
LATEST = "latest"


def checkpoints_of(options: argparse.Namespace) -> Path:
    """Where a run has its own checkpoints."""
    folder: Path = options.out / "checkpoints"
    return folder


def last_checkpoint(options: argparse.Namespace) -> str:
    """From which checkpoint a run can go on, in words."""
    if options.out is not None:
        path = latest(checkpoints_of(options))
    else:
        path = None if options.resume is None else latest(Path(options.resume))
    return f"the last checkpoint is {path}" if path else "there is no checkpoint"


def in_words(error: RuntimeError, job: Job, options: argparse.Namespace) -> NoAnswerError | None:
    """What ended a run, if there are words for it."""
    from runtime.checkpoint import UnsavedError  # noqa: PLC0415 (needs torch)
    from runtime.comm.group import RankLostError  # noqa: PLC0415 (needs torch)
    from runtime.shortage import ShortageError  # noqa: PLC0415 (needs torch)

    if isinstance(error, RankLostError | UnsavedError):
        text = str(error)
    elif isinstance(error, ShortageError):
        text = shortage_words(error.shortage, job, options.stage)
    else:
        return None
    return NoAnswerError(f"{options.plan}: {text}; {last_checkpoint(options)}")


def run_as_process(
    main: Callable[[Sequence[str]], int], arguments: Sequence[str], *, at_once: bool = False
) -> NoReturn:
    """Run a command, and end the process: ``at_once`` if that is asked for, where the command
    failed, and where other ranks were there.

    Other ranks learn of a failure when this process's connections close. Threads that wait for a
    device or for them must not keep it. A thread of gloo that meets the interpreter's end takes
    the process with it by force, and so does autograd's for a device without a driver.
    """
    try:
        status = run(main, arguments)
    except Exception as error:
        traceback.print_exc()
        status = CRASHED if isinstance(error, RuntimeError) else NO_ANSWER
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if status == DONE and alone and not at_once:
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
