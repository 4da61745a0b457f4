"""Counts the files and functions that a command enters: how much code one must read to follow it.

    python -m benchmarks.walk NAME [ARGUMENT ...]

Only calls after ``main`` began count, without the bodies of modules and classes, and without code
compiled from text, such as cached expressions. Files are printed first; the last line has both
counts.
"""

import contextlib
import inspect
import io
import runpy
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("mistlab", "simulators", "searchers", "runtime", "experiments")


class Walk:
    """A profiler that records which functions are entered, by file of the packages."""

    def __init__(self, root: Path = ROOT) -> None:
        self.functions: dict[str, set[str]] = defaultdict(set)
        self._beginnings = tuple(f"{root / name}/" for name in PACKAGES)
        self._start = len(f"{root}/")
        self._has_begun = False
        self._importing = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Record one call or return."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self._beginnings):
            return
        if code.co_name == "<module>":
            self._importing += (1 if event == "call" else -1) if self._has_begun else 0
        elif event == "call":
            self._has_begun = self._has_begun or code.co_name == "main"
            # CO_OPTIMIZED marks functions: bodies of modules and classes lack this flag.
            is_function = code.co_flags & inspect.CO_OPTIMIZED
            if self._has_begun and not self._importing and is_function:
                self.functions[code.co_filename[self._start :]].add(code.co_qualname)


def walked(name: str, arguments: Sequence[str]) -> Mapping[str, set[str]]:
    """The functions that a command enters, by file."""
    walk = Walk()
    sys.argv = [name, *arguments]
    sys.setprofile(walk)
    threading.setprofile(walk)
    try:
        with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
            runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return walk.functions


def main(arguments: Sequence[str]) -> int:
    """Print the files and the counts of a walk."""
    functions = walked(arguments[0], arguments[1:])
    lines = [f"{len(functions[file]):4} {file}" for file in sorted(functions)]
    total = sum(map(len, functions.values()))
    sys.stdout.write("\n".join([*lines, f"{len(functions)} files, {total} functions"]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
