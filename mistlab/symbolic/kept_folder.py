"""The folder in which compiled expressions are kept as source text, between processes.

``MISTLAB_CACHE`` names the folder. By default it is ``mistlab`` in the user's cache folder; an
empty ``MISTLAB_CACHE=`` keeps nothing. Each version of the package has a folder in it, and each
recipe a file. Files appear whole, by renaming, so processes may share the folder, may be killed,
and may delete the folder at any time. If something is wrong with the folder, one warning says so,
and expressions are compiled as if the folder were not there. Only speed depends on it.

A folder to which other users may write is not used: they could plant wrong numbers. In addition
``mistlab.symbolic.grammar`` limits what the text of a file can do when it is run.
"""

import hashlib
import json
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from mistlab.symbolic.recipe import version

VARIABLE = "MISTLAB_CACHE"
# The most folders of versions that stay.
MOST_VERSIONS = 8
MOST_BYTES = 4 * 2**20


class CacheWarning(UserWarning):
    """The folder of compiled expressions, or a file in it, cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFolder:
    """Keeps values as JSON files by recipe, in the folder of one version."""

    path: Path

    def read(self, recipe: str) -> Mapping[str, Any] | None:
        """The value kept for a recipe; None if there is none, or if it cannot be trusted."""
        path = self._file(recipe)
        try:
            text = _trusted_text(path)
            if text is None:
                return None
            digest, _, content = text.partition("\n")
            if digest != _digest(content):
                self.say_damaged()
                return None
            kept: Mapping[str, Any] = json.loads(content)
        except FileNotFoundError:
            return None
        except OSError as error:
            _say(f"{self.path}: {error.strerror}: compiled expressions cannot be read")
            return None
        except ValueError:
            self.say_damaged()
            return None
        return kept if kept.get("recipe") == recipe else None

    def write(self, recipe: str, value: Mapping[str, Any]) -> None:
        """Keep a value, if the folder can be written to."""
        content = json.dumps({"recipe": recipe, **value})
        try:
            if not self.path.is_dir():
                self._make()
            if not _is_ours(self.path.stat()):
                _say(f"{self.path}: others may write to it: it is not used")
                return
            self._put(self._file(recipe), f"{_digest(content)}\n{content}")
        except OSError as error:
            _say(f"{self.path}: {error.strerror}: compiled expressions cannot be kept")

    def say_damaged(self) -> None:
        """Warn, once for all files of the folder, that a file is damaged."""
        _say(f"{self.path}: a file in it is damaged: what it held is compiled again")

    def _put(self, path: Path, text: str) -> None:
        """Write a whole file or none; a file that found no room is removed."""
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=self.path, suffix=".part", delete=False
        ) as file:
            part = Path(file.name)
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        except OSError:
            part.unlink()
            raise

    def _file(self, recipe: str) -> Path:
        return self.path / f"{_digest(recipe)}.json"

    def _make(self) -> None:
        """Make the folder, and remove folders of old versions."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = [one for one in self.path.parent.iterdir() if one.is_dir()]
        others.sort(key=lambda one: one.stat().st_mtime, reverse=True)
        for old in others[MOST_VERSIONS:]:
            if old != self.path:
                shutil.rmtree(old, ignore_errors=True)


def kept_folder() -> KeptFolder | None:
    """This user's folder for this version of the package; None if nothing is to be kept."""
    return _kept_folder(os.environ.get(VARIABLE), os.environ.get("XDG_CACHE_HOME"))


@cache
def _kept_folder(given: str | None, caches: str | None) -> KeptFolder | None:
    if given == "":
        return None
    try:
        folder = Path(given) if given else (Path(caches) if caches else Path.home() / ".cache")
    except RuntimeError:
        # A user without a home.
        return None
    return KeptFolder(path=(folder if given else folder / "mistlab") / version())


def _trusted_text(path: Path) -> str | None:
    """The text of a file; None if others may have written it."""
    with path.open("rb") as file:
        for status in (os.fstat(file.fileno()), path.parent.stat()):
            if not _is_ours(status):
                _say(f"{path.parent}: others may write to it: it is not used")
                return None
        return file.read(MOST_BYTES).decode("utf-8")


def _is_ours(status: os.stat_result) -> bool:
    """Whether only this user and root can have written a file, or to a folder."""
    if os.name != "posix":
        return True
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid in (0, os.geteuid()) and not writable


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _say(text: str) -> None:
    """Warn, once in a process."""
    warnings.warn(text, CacheWarning, stacklevel=2)
