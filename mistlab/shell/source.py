"""A text to import, with all that a user gives beside it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


def nothing_beside(path: str) -> None:
    """No file: for texts that come without a folder."""
    del path


# A folder that only a running script knows, at the beginning of a path.
_UNKNOWN_FOLDER = re.compile(r"^(?:`[^`]*`|\$\([^()]*\)|\$\{?\w+\}?)/")


def known_part(path: str) -> str:
    """A path as a script writes it, without leading folders that only the running script knows.

    >>> known_part("$(pwd)/configs/ds.json")
    'configs/ds.json'
    """
    return _UNKNOWN_FOLDER.sub("", path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The text of a file to import, and how to find what the file refers to.

    ``name`` is the file's path. ``beside`` gives the text of another file by the path that the file
    writes, or None where there is no such file. ``settings`` are values of variables that the user
    gives (``--set NAME=value``); they win over the file's own. ``arguments`` are those with which a
    script is started (``$1``, ``$2``, ...); None where the user gives none. ``line`` is a line of
    the command to take, where a script starts several (``--line``).
    """

    text: str
    name: str = ""
    beside: Callable[[str], str | None] = nothing_beside
    settings: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] | None = None
    line: int | None = None
