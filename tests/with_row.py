"""Runs a function in a process whose table of dimensions has one more row.

A dimension is added in the source of its table, so the row is text that goes into that source
before anything is made from the table.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = "mistlab.values.dimensions"
LAST_ROW = "\n}\nRECOMPUTED"
SKIPPED = 77


def run_with_row(row: str, function: Callable[[str], None], argument: str = "") -> None:
    """Run a module's function where ``row`` is the table's last one; fail or skip as it does."""
    asked = [row, function.__module__, function.__name__, argument]
    done = subprocess.run(
        [sys.executable, "-m", "tests.with_row", *asked],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr


def _add(row: str) -> None:
    """Import the table's module with one more row in its source."""
    parent, _, name = TABLE.rpartition(".")
    spec = find_spec(TABLE)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text("utf-8")
    assert source.count(LAST_ROW) == 1, "the end of the table looks otherwise"
    module = module_from_spec(spec)
    sys.modules[TABLE] = module
    setattr(import_module(parent), name, module)
    changed = source.replace(LAST_ROW, f"\n{row.strip()}{LAST_ROW}")
    exec(compile(changed, spec.origin, "exec"), vars(module))


if __name__ == "__main__":
    text, where, called, given = sys.argv[1:]
    _add(text)
    try:
        getattr(import_module(where), called)(given)
    except pytest.skip.Exception as lacking:
        print(lacking)  # noqa: T201
        sys.exit(SKIPPED)
