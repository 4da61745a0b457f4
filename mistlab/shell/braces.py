"""Brace expansion: ``{a,b}`` and ``{1..4}`` in unquoted parts of a word."""

import re
from collections.abc import Iterator
from itertools import islice

from mistlab.shell.shell_text import LineError
from mistlab.shell.syntax import Literal, RawWord, WordPart

_NUMBERS = re.compile(r"(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d{1,9}))?")
_MOST, _MOST_STEPS = 10_000, 1_000_000
# A unit is an unquoted character, or a part that stays whole.
Unit = str | WordPart


def unbraced(word: RawWord) -> tuple[RawWord, ...]:
    """The words that a word with braces stands for, in order."""
    if not any(_may_have_braces(part) for part in word.parts):
        return (word,)
    units: list[Unit] = []
    for part in word.parts:
        split = isinstance(part, Literal) and not part.quoted
        units += list(part.text) if isinstance(part, Literal) and split else [part]
    if units.count("{") * len(units) > _MOST_STEPS:
        raise LineError(word.line, "a word has too many braces: write fewer")
    expanded = list(islice(_alternatives(units, word.line, 0), _MOST + 1))
    if len(expanded) > _MOST:
        message = f"{word.source}: braces give more than {_MOST} words: write fewer"
        raise LineError(word.line, message)
    if len(expanded) == 1 and expanded[0] == units:
        return (word,)
    return tuple(_word(each, word) for each in expanded)


def _may_have_braces(part: WordPart) -> bool:
    return isinstance(part, Literal) and not part.quoted and "{" in part.text


def _word(units: list[Unit], word: RawWord) -> RawWord:
    parts: list[WordPart] = []
    letters = ""
    for unit in [*units, None]:
        if isinstance(unit, str):
            letters += unit
            continue
        if letters:
            parts.append(Literal(text=letters, line=word.line))
            letters = ""
        if unit is not None:
            parts.append(unit)
    return RawWord(parts=tuple(parts), line=word.line, source=word.source)


def _alternatives(units: list[Unit], line: int, depth: int) -> Iterator[list[Unit]]:
    """All words that units stand for."""
    if depth > 20:
        raise LineError(line, "braces are nested too deep: write the words instead")
    for start, unit in enumerate(units):
        if unit != "{":
            continue
        stop = _closing(units, start)
        choices = _choices(units[start + 1 : stop], line, depth) if stop else None
        if stop and choices is not None:
            before, after = units[:start], units[stop + 1 :]
            for choice in choices:
                for rest in _alternatives(after, line, depth + 1):
                    yield [*before, *choice, *rest]
            return
    yield units


def _closing(units: list[Unit], start: int) -> int:
    depth = 0
    for at in range(start, len(units)):
        depth += (units[at] == "{") - (units[at] == "}")
        if depth == 0:
            return at
    return 0


def _choices(inner: list[Unit], line: int, depth: int) -> Iterator[list[Unit]] | None:
    """What stands between two braces, or None where they are no braces of an expansion."""
    text = "".join(unit if isinstance(unit, str) else "\0" for unit in inner)
    if match := _NUMBERS.fullmatch(text):
        return _numbers(*match.groups())
    if match := _LETTERS.fullmatch(text):
        ends = ord(match[1]), ord(match[2])
        return ([chr(code)] for code in _range(*ends, int(match[3] or 1)))
    items: list[list[Unit]] = [[]]
    level = 0
    for unit in inner:
        level += (unit == "{") - (unit == "}")
        if unit == "," and level == 0:
            items.append([])
        else:
            items[-1].append(unit)
    if len(items) == 1:
        return None
    return (word for item in items for word in _alternatives(item, line, depth + 1))


def _numbers(first: str, last: str, step: str | None) -> Iterator[list[Unit]]:
    padded = any(re.match(r"-?0\d", end) for end in (first, last))
    width = max(len(first), len(last)) if padded else 0
    for number in _range(int(first), int(last), int(step or 1)):
        yield list(f"{number:0{width}d}" if width else str(number))


def _range(first: int, last: int, step: int) -> range:
    size = abs(step) or 1
    return range(first, last + 1, size) if first <= last else range(first, last - 1, -size)
