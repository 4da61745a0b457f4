"""Runs a command by its name, as ``python -m experiments.NAME`` does; without a name, lists all.

``mistlab NAME ...`` is the same, where the package is installed.
"""

import runpy
import sys
from collections.abc import Sequence

from experiments.cli.commandline import DONE, run
from experiments.cli.listing import GROUPS, listing
from mistlab.values.errors import InputError, near_matches


def main(arguments: Sequence[str]) -> int:
    """List the commands, or become the one that is named."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("\n".join(listing()))
        return DONE
    name = arguments[0]
    commands = [command for names in GROUPS.values() for command in names]
    if name not in commands:
        message = f"command {name!r} is unknown{near_matches(name, commands)}"
        raise InputError(message)
    sys.argv = [name, *arguments[1:]]
    runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
    return DONE


def console() -> int:
    """The console command ``mistlab``."""
    return run(main, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(console())
