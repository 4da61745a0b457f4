"""Experiments: the commands of the project, each a row of a table in ``experiments.commands``, and
the packages with their code.

``python -m experiments.NAME`` runs a command by its name, and ``from experiments import NAME``
gives a module with its ``main``. No file has the command's name: Python asks the module finder that
is defined here, after all other finders, and it makes the module from a few lines of source.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import InspectLoader
else:
    # The finder stands in for ``importlib.abc.MetaPathFinder``, whose import would take a tenth of
    # a short command's time.
    InspectLoader = object

_SOURCE = '''"""The command {name}: ``main`` runs it, with the words of a command line."""
import sys
from experiments.cli.command import execute, main_of
from experiments.commands import COMMANDS

main = main_of({name!r}, COMMANDS[{name!r}])
if __name__ == "__main__":
    execute({name!r}, COMMANDS[{name!r}], sys.argv[1:])
'''


class _CommandModules(InspectLoader):
    """Makes every command importable as ``experiments.NAME``: finds and loads a module for a
    command's name.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != __name__ or name == "commands":
            return None
        from experiments.commands import COMMANDS  # noqa: PLC0415 (imports this package)

        if name not in COMMANDS:
            return None
        return ModuleSpec(fullname, self, origin=f"command {name} of experiments.commands")

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, which tells Python to create the module in the usual way."""

    def exec_module(self, module: ModuleType) -> None:
        exec(self.get_code(module.__name__), module.__dict__)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.get_source(fullname), f"<{fullname}>", "exec", dont_inherit=True)

    def get_source(self, fullname: str) -> str:
        return _SOURCE.format(name=fullname.rpartition(".")[2])

    def is_package(self, fullname: str) -> bool:
        return False


sys.meta_path.append(_CommandModules())
