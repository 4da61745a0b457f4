"""How the process of a command that runs a plan ends.

Exit status 3 is a failure that the run has no words for, of a device as a rule; a traceback is in
place of them.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from experiments.cli.commandline import DONE, NO_ANSWER, run

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
