"""The messages for errors that end a run of a plan."""

import argparse
from pathlib import Path

from experiments.cli.commandline import NoAnswerError
from experiments.training.run_options import checkpoints_of
from experiments.training.run_results import shortage_words
from mistlab.job.job import Job
from runtime.checkpoints.checkpoint import latest


def last_checkpoint(options: argparse.Namespace) -> str:
    """A sentence that names the checkpoint from which the run can be resumed."""
    if options.out is not None:
        path = latest(checkpoints_of(options))
    else:
        path = None if options.resume is None else latest(Path(options.resume))
    return f"the last checkpoint is {path}" if path else "there is no checkpoint"


def in_words(error: RuntimeError, job: Job, options: argparse.Namespace) -> NoAnswerError | None:
    """The message for an error that has ended a run; None for errors that are shown as they are."""
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
