"""Matches shell patterns (``*``, ``?``, ``[...]`` and ``extglob`` lists) in bounded time."""

import re
from dataclasses import dataclass, field

from mistlab.shell.shell_text import Text

# Matches characters with a special meaning in shell patterns; a backslash makes the next one
# literal.
_SPECIAL = re.compile(r"[\\*?\[\]()|+@!]")
_CLASSES = {
    "alpha": "a-zA-Z",
    "digit": "0-9",
    "alnum": "a-zA-Z0-9",
    "upper": "A-Z",
    "lower": "a-z",
    "space": r"\s",
    "blank": " \t",
    "punct": r"!-/:-@\[-`{-~",
    "xdigit": "0-9A-Fa-f",
    "word": r"\w",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    """An item of a shell pattern: a character, a class, any text, or a list of alternatives."""

    kind: str
    letter: str = ""
    letters: re.Pattern[str] | None = None
    choices: list[list["_Token"]] = field(default_factory=list)


def quoted(text: str) -> str:
    """Return a shell pattern that matches only the given text."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def matches(pattern: str, text: str) -> bool:
    """Return whether a shell pattern matches the whole text.

    >>> matches("*.py", "train.py"), matches("[0-9]b", "13b")
    (True, False)
    """
    return len(text) in _ends(_tokens(pattern), text, {0})


def ends_from(pattern: str, text: str, start: int) -> list[int]:
    """Return where matches of a shell pattern that begin at an offset end, in ascending order."""
    return sorted(_ends(_tokens(pattern), text, {start}))


def without(text: Text, pattern: str, operator: str) -> Text:
    """Remove the prefix (``#``) or suffix (``%``) that a shell pattern matches from a text."""
    chars = text.chars
    if operator.startswith("#"):
        stops = ends_from(pattern, chars, 0)
        if not stops:
            return text
        return text.part(stops[-1] if operator == "##" else stops[0])
    tokens = _tokens(pattern)
    starts = range(len(chars) + 1) if operator == "%%" else range(len(chars), -1, -1)
    for start in starts:
        if len(chars) in _ends(tokens, chars, {start}):
            return text.part(0, start)
    return text


def spans(pattern: str, text: str, *, every: bool) -> list[tuple[int, int]]:
    """Return start and end of the longest first match of a shell pattern, or of all matches without
    overlap.
    """
    tokens, bounds, start = _tokens(pattern), list[tuple[int, int]](), 0
    while start < len(text):
        stop = max(_ends(tokens, text, {start}), default=start)
        if stop > start:
            bounds.append((start, stop))
            if not every:
                break
        start = max(stop, start + 1)
    return bounds


def _ends(tokens: list[_Token], text: str, starts: set[int]) -> set[int]:
    """Return where matches of a shell pattern that begin at one of ``starts`` can end."""
    at = starts
    for token in tokens:
        if not at:
            break
        at = _after(token, text, at)
    return at


def _after(token: _Token, text: str, starts: set[int]) -> set[int]:
    if token.kind == "any":
        return set(range(min(starts), len(text) + 1))
    if token.kind == "list":
        return _after_list(token, text, starts)
    return {at + 1 for at in starts if at < len(text) and _takes(token, text[at])}


def _takes(token: _Token, letter: str) -> bool:
    if token.kind == "letter":
        return token.letter == letter
    return token.letters is None or token.letters.fullmatch(letter) is not None


def _after_list(token: _Token, text: str, starts: set[int]) -> set[int]:
    if token.letter == "!":
        taken = {at: set().union(*(_ends(c, text, {at}) for c in token.choices)) for at in starts}
        return {stop for at in starts for stop in range(at, len(text) + 1) if stop not in taken[at]}
    ends = set(starts) if token.letter in "?*" else set()
    fresh = starts
    while fresh:
        reached = set().union(*(_ends(choice, text, fresh) for choice in token.choices))
        fresh = reached - ends if token.letter in "*+" else set()
        ends |= reached
    return ends


def _tokens(pattern: str) -> list[_Token]:
    tokens, at = list[_Token](), 0
    while at < len(pattern):
        letter = pattern[at]
        if letter in "?*+@!" and pattern[at + 1 : at + 2] == "(":
            token, at = _list(pattern, at)
        elif letter == "[":
            token, at = _class(pattern, at)
        else:
            escapes = letter == "\\" and at + 1 < len(pattern)
            token = _single(pattern[at + 1]) if escapes else _wild(letter)
            at += 2 if escapes else 1
        tokens.append(token)
    return tokens


def _wild(letter: str) -> _Token:
    kinds = {"*": "any", "?": "class"}
    return _Token(kind=kinds[letter]) if letter in kinds else _single(letter)


def _single(letter: str) -> _Token:
    return _Token(kind="letter", letter=letter)


def _list(pattern: str, at: int) -> tuple[_Token, int]:
    level, start, items, stop = 0, at + 2, list[str](), at + 1
    while stop < len(pattern):
        letter = pattern[stop]
        level += (letter == "(") - (letter == ")")
        if level == 0 or (level == 1 and letter == "|"):
            items.append(pattern[start:stop])
            start = stop + 1
        if level == 0:
            choices = [_tokens(item) for item in items]
            return _Token(kind="list", letter=pattern[at], choices=choices), stop + 1
        stop += 2 if letter == "\\" else 1
    return _single(pattern[at]), at + 1


def _class(pattern: str, at: int) -> tuple[_Token, int]:
    """Return the characters that a bracket expression of a shell pattern matches; an unclosed
    bracket is a literal character.
    """
    stop = at + 1
    negated = pattern[stop : stop + 1] in ("!", "^")
    stop += negated
    inner = ""
    while stop < len(pattern) and (pattern[stop] != "]" or not inner):
        if match := re.compile(r"\[:(\w+):\]").match(pattern, stop):
            inner += _CLASSES.get(match[1], "")
            stop = match.end()
            continue
        if pattern[stop] == "\\":
            stop += 1
        letter = pattern[stop : stop + 1]
        inner += letter if letter == "-" else re.escape(letter)
        stop += 1
    if stop >= len(pattern):
        return _single("["), at + 1
    try:
        letters = re.compile(f"[{'^' if negated else ''}{inner}]", re.DOTALL)
    except re.error:
        return _single("["), at + 1
    return _Token(kind="class", letters=letters), stop + 1
