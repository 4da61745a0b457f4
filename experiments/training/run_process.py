"""Messages for errors that end a run of a plan."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from experiments.cli.commandline import DONE, NO_ANSWER, NoAnswerError, run
from experiments.training.run_options import checkpoints_of
from experiments.training.run_results import shortage_words
from mistlab.job.job import Job
from runtime.checkpoints.checkpoint import latest


def last_checkpoint(options: argparse.Namespace) -> str:
    """The checkpoint from which a run can go on, in words."""
    if options.out is not None:
        path = latest(checkpoints_of(options))
    else:
        path = None if options.resume is None else latest(Path(options.resume))
    return f"the last checkpoint is {path}" if path else "there is no checkpoint"


def in_words(error: RuntimeError, job: Job, options: argparse.Namespace) -> NoAnswerError | None:
    """The error that ended a run, in words; None if there are no words for it."""
    from runtime.checkpoints.checkpoint import UnsavedError  # noqa: PLC0415 (needs torch)
    from runtime.comm.group import (  # noqa: PLC0415 (needs torch)
        RankLostError,
        ShortageError,
    )

    if isinstance(error, RankLostError | UnsavedError):
        text = str(error)
    elif isinstance(error, ShortageError):
        text = shortage_words(error.shortage, job, options.stage)
    else:
        return None
    return NoAnswerError(f"{options.plan}: {text}; {last_checkpoint(options)}")


# How the process of a command that runs a plan ends.
#
# Exit status 3 is a failure that the run has no words for, of a device as a rule; a traceback is
# in place of them.


CRASHED = 3


def run_as_process(
    main: Callable[[Sequence[str]], int], arguments: Sequence[str], *, at_once: bool = False
) -> NoReturn:
    """Run a command, and end the process: at once with ``at_once``, after a failure, or if there
    were other ranks.

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
