"""Processes of a machine that has what training needs and nothing else."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What docs/reference/running.md asks of a machine that trains, as pip calls it.
NEEDED = ("torch", "numpy", "sympy", "pyyaml")

# A process imports this before anything else, and so do the processes that it starts.
_SITE = """\
import json, os, sys

LEFT_OUT = frozenset(json.loads(os.environ["LEFT_OUT"]))

# A process that comes from tests.warm.server has imported things already; torch imports tqdm if it
# is there, and nothing else may have come.
loaded = {name for name in sys.modules if name.partition(".")[0] in LEFT_OUT}
for name in loaded:
    del sys.modules[name]
assert {name.partition(".")[0] for name in loaded} <= {"tqdm"}, loaded


class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in LEFT_OUT:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = map(Without, sys.meta_path)
"""


def left_out() -> list[str]:
    """Every module that is installed here and comes with none of what is needed."""
    present = {_plain(name) for name in _with_requirements(NEEDED)}
    own = {"mistlab", "setuptools", "pip"}
    return sorted(
        module
        for module, distributions in packages_distributions().items()
        if not {_plain(one) for one in distributions} & (present | own)
    )


def bare_process(
    folder: Path, *arguments: object, program: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Run a Python with these arguments where nothing else can be imported."""
    (folder / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(folder), "LEFT_OUT": json.dumps(left_out())}
    return subprocess.run(
        [program, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def _with_requirements(names: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    wanted = list(names)
    while wanted:
        name = _plain(wanted.pop())
        if name in found:
            continue
        try:
            said = requires(name) or []
        except PackageNotFoundError:
            continue
        found.add(name)
        wanted += [
            re.split(r"[^\w.-]", one, maxsplit=1)[0] for one in said if "extra ==" not in one
        ]
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
