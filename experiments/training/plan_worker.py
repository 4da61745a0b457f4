"""Runs one plan after another in a single process, so that imports and the CUDA context are paid
for once.

Each line of standard input is a list of ``run_plan``'s arguments as JSON. Each run ends with a line
on standard output: its exit status and, with ``--json``, its output. Host memory that a run has
pinned is reused by the next one. After a failed run, the process runs no further plan.
"""

import gc
import io
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from experiments.cli.command import main_of
from experiments.cli.commandline import DONE, run
from experiments.commands import COMMANDS


def main(arguments: Sequence[str]) -> int:
    """Run the plans named on standard input, until the input ends or a run fails."""
    assert not arguments, "everything comes by standard input"
    from runtime.devices.driver import kept  # noqa: PLC0415 (needs torch)

    with kept():
        return _run_all()


def _run_all() -> int:
    for line in sys.stdin:
        printed = io.StringIO()
        with redirect_stdout(printed):
            status = run(main_of("run_plan", COMMANDS["run_plan"]), json.loads(line))
        result = json.loads(printed.getvalue()) if status == DONE else None
        print(json.dumps({"status": status, "said": result}), flush=True)
        if status != DONE:
            return status
        # The executor of a run has reference cycles; its memory must be free before the next run.
        gc.collect()
    return DONE


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
