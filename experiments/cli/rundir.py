"""A folder with a command's results and a record of what made them: configuration, versions and git
revision.

``config.json`` holds the options, the source revision and the versions of the packages;
``rows.jsonl`` has one result row a line; ``README.md`` has the command that makes them again.
"""

import fcntl
import json
import os
import platform
import shlex
import subprocess
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from experiments.cli.commandline import as_json, progress, writable
from mistlab.core.files import naming, read_json
from mistlab.core.values import InputError, reject

PACKAGES = ("mistlab", "highspy", "numpy", "optuna", "pulp", "scipy", "simpy", "sympy")


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class RunDirectory:
    """The folder with the results of one run of a command, and the configuration of that run."""

    path: Path
    config: Mapping[str, Any]

    @classmethod
    def make(cls, path: Path, command: str, options: Mapping[str, Any]) -> Self:
        """Create the folder, and record the configuration in it. If the folder cannot be created,
        results go to a temporary folder, and a message says so. A file at the path, or a folder
        that another run is using, is refused.
        """
        config = _config(command, options)
        directory = cls(path=_folder(path), config=config)
        directory._hold()
        text = as_json(config, indent=2)
        directory.write_text("config.json", text + "\n")
        directory.write_text("README.md", f"Made by `{command_line(config)}`.\n")
        return directory

    def _hold(self) -> None:
        """Lock the folder against other processes as long as this object exists; the operating
        system releases the lock however the process ends.
        """
        folder = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, folder)
        status = os.fstat(folder)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _HELD[status.st_dev, status.st_ino] = self
        except BlockingIOError:
            if (status.st_dev, status.st_ino) in _HELD:
                return
            reject(
                f"--out {self.path}: another run is writing to this folder: wait until it ends, or "
                "give another folder"
            )
        except OSError:
            # The file system of the folder does not support locks.
            return

    def write_text(self, name: str, text: str) -> None:
        """Write a file atomically: a reader sees either the old or the new text."""
        unfinished = self.path / f"{name}.part"
        with naming(self.path / name):
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(self.path / name)

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Append a row to ``rows.jsonl``."""
        path = self.path / "rows.jsonl"
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(as_json(row) + "\n")

    def write_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write ``rows.jsonl`` atomically: a reader sees either the old or the new rows."""
        lines = [as_json(row) + "\n" for row in rows]
        self.write_text("rows.jsonl", "".join(lines))

    def rows(self) -> list[dict[str, Any]]:
        """The rows in ``rows.jsonl``, without a last line that was cut off."""
        return read_rows(self.path / "rows.jsonl")


# The folders that this process has locked.
_HELD: weakref.WeakValueDictionary[tuple[int, int], RunDirectory] = weakref.WeakValueDictionary()


def earlier_rows(
    path: Path, command: str, options: Mapping[str, Any], *, aside: Sequence[str]
) -> list[dict[str, Any]]:
    """The result rows that an earlier run left in a folder. Its sources and options must be the
    same, except for the options named in ``aside``, which may differ.
    """
    config = path / "config.json"
    if not ((path / "rows.jsonl").is_file() and config.is_file()):
        return []
    try:
        noted = {"options": {}, **read_json(config)}
    except InputError as error:
        progress(f"warning: {error}: what is in this folder is made again")
        return []
    here, there = (
        {**config, "options": {k: v for k, v in config["options"].items() if k not in aside}}
        for config in (_config(command, options), noted)
    )
    return read_rows(path / "rows.jsonl") if here == there else []


def file_at(path: Path, what: str) -> Path:
    """The path of a file for results. If it cannot be written, a path in a temporary folder, and a
    message says so; a folder at that path is refused.
    """
    if path.is_dir():
        return writable(path, what)
    folder = _folder(path.parent)
    if folder == path.parent and path.exists() and not os.access(path, os.W_OK):
        folder = _temporary(path, "it may not be changed")
    return folder / path.name


def _folder(path: Path) -> Path:
    """The folder at this path, which is created if necessary; a temporary folder if it cannot be
    written.
    """
    if path.exists() and not path.is_dir():
        reject(f"--out {path}: is a file: give another folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        return _temporary(path, error.strerror or str(error))


def _temporary(path: Path, problem: str) -> Path:
    """A temporary folder that takes the place of a path that cannot be written."""
    other = Path(tempfile.mkdtemp(prefix="mistlab-"))
    progress(f"warning: --out {path}: {problem}: results go to {other}")
    return other


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file up to the first damaged line, such as a last line that was cut off. A
    damaged file is also kept under another name.
    """
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError):
            kept = path.with_name(f"{path.name}.damaged")
            kept.write_bytes(path.read_bytes())
            what = f"{path}: line {number} is damaged: it and what follows are made again"
            progress(f"warning: {what}; the file as it was: {kept}")
            break
    return rows


def _config(command: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "command": command,
        "options": {name: _plain(value) for name, value in options.items()},
        "revision": revision(),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
    }


def _plain(value: Any) -> Any:
    """An option's value as plain data for JSON."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _version(package: str) -> str | None:
    """The version of a package; None if it is not installed, as on a machine used only for
    training.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def revision() -> str:
    """The git revision of the source, with ``-dirty`` if files were changed; empty outside of a git
    checkout.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()


def command_line(config: Mapping[str, Any]) -> str:
    """The command line that a recorded configuration stands for; ``arguments`` are the names of
    positional arguments in the record.
    """
    arguments, parts = [], []
    named = config["options"].get("arguments") or ()
    for name, value in config["options"].items():
        values = [str(one) for one in value] if isinstance(value, list) else [str(value)]
        option = f"--{name.replace('_', '-')}"
        if name in named:
            arguments += values if value is not None else []
        elif value is True:
            parts.append(option)
        elif value is not None and value is not False and name != "arguments":
            parts += [option, *values]
    line = shlex.join([*arguments, *parts])
    return f"python -m experiments.{config['command']} {line}".rstrip()
