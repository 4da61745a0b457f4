"""A folder of results that says what made it: its configuration, versions and revision.

``config.json`` holds the options, the source revision and the versions of the packages;
``rows.jsonl`` one row a line, ``README.md`` the command that makes them again.
"""

import json
import platform
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from mistlab.values.datafile import read_json
from mistlab.values.errors import InputError

PACKAGES = ("mistlab", "highspy", "numpy", "optuna", "pulp", "scipy", "simpy", "sympy")


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
        config = _config(command, options)
        text = json.dumps(config, indent=2, allow_nan=False)
        (path / "config.json").write_text(text + "\n", encoding="utf-8")
        made = f"Made by `{command_line(config)}`.\n"
        (path / "README.md").write_text(made, encoding="utf-8")
        return cls(path=path)

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Append to ``rows.jsonl``."""
        with (self.path / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def write_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write ``rows.jsonl``; whoever reads it finds the rows before, or all of these."""
        lines = [json.dumps(row, allow_nan=False) + "\n" for row in rows]
        unfinished = self.path / "rows.jsonl.part"
        unfinished.write_text("".join(lines), encoding="utf-8")
        unfinished.replace(self.path / "rows.jsonl")

    def rows(self) -> list[dict[str, Any]]:
        """What ``rows.jsonl`` holds; a last line that was cut off is none."""
        path = self.path / "rows.jsonl"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return _parsed(text[: text.rfind("\n") + 1], path)


def earlier_rows(
    path: Path, command: str, options: Mapping[str, Any], *, aside: Sequence[str]
) -> list[dict[str, Any]]:
    """The rows that an equal run has left in a folder: of the same sources, with the same options
    but for those ``aside``. Rows of another run are none."""
    rows, config = path / "rows.jsonl", path / "config.json"
    if not (rows.is_file() and config.is_file()):
        return []
    here, there = (
        {**one, "options": {k: v for k, v in one["options"].items() if k not in aside}}
        for one in (_config(command, options), {"options": {}, **read_json(config)})
    )
    return _parsed(rows.read_text(encoding="utf-8"), rows) if here == there else []


def _parsed(text: str, path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in text.splitlines()]
    except ValueError:
        message = f"{path}: is damaged: move it away, or give another --out"
        raise InputError(message) from None


def _config(command: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "command": command,
        "options": {name: str(v) if isinstance(v, Path) else v for name, v in options.items()},
        "revision": revision(),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
    }


def _version(package: str) -> str | None:
    """A package's version; none of one that is not installed, as on a machine that only trains."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


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


def command_line(config: Mapping[str, Any]) -> str:
    """The command that a configuration was written for."""
    parts = []
    for name, value in config["options"].items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            parts.append(option)
        elif value not in (False, None):
            parts += [option, str(value)]
    return f"python -m experiments.{config['command']} {shlex.join(parts)}"
