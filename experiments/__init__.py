"""Experiments: the commands, a row each of ``experiments.commands``, and the rooms of their code.

``python -m experiments.NAME`` runs the command of a name. Python looks for a module of the name;
there is none, and the finder below gives it one of a few lines, with the command's ``main``.
"""

import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_SOURCE = """
import sys
from experiments.cli.command import execute, main_of
from experiments.commands import COMMANDS

main = main_of({name!r}, COMMANDS[{name!r}])
if __name__ == "__main__":
    execute({name!r}, COMMANDS[{name!r}], sys.argv[1:])
"""


class _Commands(MetaPathFinder, InspectLoader):
    """Finds a module for the name of each command."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != __name__ or name == "commands":
            return None
        from experiments.commands import COMMANDS  # noqa: PLC0415 (imports this package)

        return ModuleSpec(fullname, self) if name in COMMANDS else None

    def get_source(self, fullname: str) -> str:
        return _SOURCE.format(name=fullname.rpartition(".")[2])

    def is_package(self, fullname: str) -> bool:
        return False


sys.meta_path.append(_Commands())
