"""A run of a plan that begins again from its newest checkpoint when its process is lost.

What would come again, and what somebody asked for, ends it: wrong usage, memory that runs out, a
loss that is no number, a full disk, an interrupt. What is left are crashes, of the process or of a
device, and kills, as by the kernel where memory of the host runs out.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from experiments.cli.command import CRASHED
from experiments.cli.commandline import INTERRUPTED, progress
from experiments.training.run_endings import last_checkpoint
from experiments.training.run_options import LATEST, checkpoints_of
from mistlab.core.values import InputError
from runtime.checkpoints.checkpoint import latest

COMMAND = (sys.executable, "-m", "experiments.run_plan")
PARTING_S = 10.0
_ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def restarted(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Run in another process, again after each crash, ``options.restarts`` times at most."""
    _check(options)
    # Of options that are given twice the later ones hold.
    command = [*COMMAND, *arguments, "--restarts", "0", "--resume", LATEST]
    for left in range(options.restarts, -1, -1):
        status = _status_of(command)
        if not left or not _is_crash(status):
            break
        progress(
            f"the run {_words(status)}: {last_checkpoint(options)}; it starts again "
            f"({left - 1} restarts left)"
        )
    return status if status >= 0 else 128 - status


def _check(options: argparse.Namespace) -> None:
    message = None
    if os.environ.get("WORLD_SIZE", "1") != "1":
        message = (
            "--restarts is for a run of one process: give torchrun --max-restarts "
            f"{options.restarts}, and the run --resume {LATEST}"
        )
    elif not options.save_every:
        message = "--restarts needs checkpoints: give --save-every N and --out DIR too"
    elif options.resume not in (None, LATEST):
        message = (
            f"--restarts goes on from the run's own checkpoints, not from --resume "
            f"{options.resume}: give --resume {LATEST}, or leave it out"
        )
    elif options.resume is None and latest(checkpoints_of(options)):
        message = (
            f"--out {options.out}: has checkpoints of a run before: give --resume {LATEST} to go "
            "on from them, or another folder"
        )
    if message is not None:
        raise InputError(message)


def _is_crash(status: int) -> bool:
    return status == CRASHED or (status < 0 and -status not in _ASKED)


def _words(status: int) -> str:
    if status == CRASHED:
        return "crashed"
    return f"was ended by {signal.Signals(-status).name}"


def _status_of(command: Sequence[str]) -> int:
    """The exit status of a process, which gets the signals that this one gets."""
    with subprocess.Popen(command) as process:

        def pass_on(number: int, _: FrameType | None) -> None:
            process.send_signal(number)

        before = signal.signal(signal.SIGTERM, pass_on)
        try:
            return process.wait()
        except KeyboardInterrupt:
            # From a terminal it had the same; it has some time to end.
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(PARTING_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return INTERRUPTED
        finally:
            signal.signal(signal.SIGTERM, before)
