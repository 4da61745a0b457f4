"""Runs a command by its name, as ``python -m experiments.NAME`` does; without a name, lists all
commands.

``mistlab NAME ...`` is the same, where the package is installed.
"""

import sys
from collections.abc import Iterator, Sequence

from experiments.cli.command import execute
from experiments.cli.commandline import DONE, run
from experiments.cli.installed import SHELLS, completion, version
from experiments.cli.other_programs import command_here
from experiments.commands import COMMANDS, GROUPS
from mistlab.core.values import InputError, near_matches, one_of, reject


def main(arguments: Sequence[str], program: str = "python -m experiments") -> int:
    """List the commands, or run the named one."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("\n".join(listing()))
        return DONE
    name, *line = arguments
    if name == "--version":
        print(f"mistlab {version()}")
        return DONE
    if name == "completion":
        print(completion(_shell(line), COMMANDS), end="")
        return DONE
    if name in COMMANDS:
        execute(name, COMMANDS[name], line, program=f"{program} {name}")
    instead = command_here(name)
    ending = f": {instead}" if instead else near_matches(name, COMMANDS)
    message = f"command {name!r} is unknown{ending}"
    raise InputError(message)


def _shell(line: Sequence[str]) -> str:
    """The name of a shell, such as ``bash``, if it is the only word of a command line; any other
    command line is refused.
    """
    if len(line) != 1 or line[0] not in SHELLS:
        given = f"{' '.join(line)!r} is not one of the shells" if line else "no shell is given"
        reject(f"completion: {given}: give {one_of(SHELLS)}, such as completion {SHELLS[0]}")
    return line[0]


def listing() -> Iterator[str]:
    """The lines that list all commands, each with its summary."""
    width = max(map(len, COMMANDS))
    yield "mistlab NAME ..., the same as python -m experiments.NAME ...; --help explains each."
    yield f"mistlab --version; mistlab completion {'|'.join(SHELLS)} prints a shell's script."
    for title, group in GROUPS.items():
        yield f"\n{title}"
        for name, command in group.items():
            yield f"  {name:{width}}  {command.summary}"


def console() -> int:
    """The entry point of the installed console command ``mistlab``."""
    return run(lambda line: main(line, "mistlab"), sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
