"""A text to import, with all that a user gives beside it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


def nothing_beside(path: str) -> None:
    """No file: for texts that come without a folder."""
    del path


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
