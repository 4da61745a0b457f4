"""A folder of results that says what made it: its configuration, versions and revision.

``config.json`` holds the options, the source revision and the versions of the packages;
``rows.jsonl`` one row a line, ``README.md`` the command that makes them again.
"""

import json
import platform
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from mistlab.errors import InputError

PACKAGES = ("mistlab", "numpy", "scipy", "simpy", "sympy")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """The folder of one run of a command."""

    path: Path

    @classmethod
    def make(cls, path: Path, command: str, options: Mapping[str, Any]) -> Self:
        """Make the folder, and note what will fill it."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"--out {path}: {error.strerror}: give another folder"
            raise InputError(message) from None
        plain = {name: str(v) if isinstance(v, Path) else v for name, v in options.items()}
        config = {
            "command": command,
            "options": plain,
            "revision": revision(),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in PACKAGES},
            },
        }
        text = json.dumps(config, indent=2, allow_nan=False)
        (path / "config.json").write_text(text + "\n", encoding="utf-8")
        again = f"python -m experiments.{command} {_arguments(plain)}"
        (path / "README.md").write_text(f"Made by `{again.strip()}`.\n", encoding="utf-8")
        return cls(path=path)

    def write_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write ``rows.jsonl``."""
        lines = [json.dumps(row, allow_nan=False) + "\n" for row in rows]
        (self.path / "rows.jsonl").write_text("".join(lines), encoding="utf-8")


def revision() -> str:
    """The source's git revision, with ``-dirty`` for local changes; empty outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()


def _arguments(options: Mapping[str, Any]) -> str:
    parts = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            parts.append(option)
        elif value not in (False, None):
            parts += [option, str(value)]
    return shlex.join(parts)
