"""The names that a script assigns somewhere, with the first line that does."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from mistlab.shell.syntax import (
    Arithmetic,
    Assignment,
    Count,
    Dollar,
    ForCount,
    ForIn,
    RawWord,
    Simple,
)

_SETTERS = frozenset(("read", "mapfile", "readarray", "getopts", "printf", "let", "local"))
_SETTERS_OF_NAMES = frozenset(("declare", "typeset"))
_COUNTED = re.compile(
    r"(?:\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)?"
    r"(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))",
    re.ASCII,
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def assigned_names(node: object) -> dict[str, int]:
    """The names that a part of a script assigns, with the first line of each."""
    names: dict[str, int] = {}
    for name, line in _assigned(node):
        names[name] = min(line, names.get(name, line))
    return names


def _assigned(node: object) -> Iterator[tuple[str, int]]:
    pending = [node]
    while pending:
        item = pending.pop()
        if isinstance(item, tuple | list):
            pending += item
        elif is_dataclass(item):
            yield from _of(item)
            pending += [getattr(item, each.name) for each in fields(item)]


def _of(item: object) -> Iterator[tuple[str, int]]:
    if isinstance(item, Assignment | ForIn) or (
        isinstance(item, Dollar) and item.operator.lstrip(":") == "="
    ):
        yield item.name, item.line
    elif isinstance(item, Arithmetic | Count):
        yield from _counted(item.expression)
    elif isinstance(item, ForCount):
        yield from _counted(item.start)
        yield from _counted(item.step)
    elif isinstance(item, Simple) and item.words:
        yield from _set_by_builtin(item)


def _counted(word: RawWord) -> Iterator[tuple[str, int]]:
    for match in _COUNTED.finditer(word.source):
        yield match[1] or match[2], word.line


def _set_by_builtin(item: Simple) -> Iterator[tuple[str, int]]:
    first, *rest = item.words
    program = first.bare if isinstance(first, RawWord) else None
    if program in _SETTERS or program in _SETTERS_OF_NAMES:
        for word in rest:
            text = word.bare if isinstance(word, RawWord) else None
            if text and _NAME.fullmatch(text):
                yield text, item.line
            elif program == "let" and isinstance(word, RawWord):
                yield from _counted(word)
