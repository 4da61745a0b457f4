"""Parses parts of shell commands: braces, assignments with arrays, tests between ``[[`` and
``]]``.
"""

import re
from collections.abc import Callable, Iterator
from itertools import islice

from mistlab.shell.lexer import WORD_ENDS, Lexer
from mistlab.shell.shell_text import LineError
from mistlab.shell.syntax import (
    Assignment,
    Comparison,
    Element,
    Joined,
    Literal,
    Operand,
    RawWord,
    WordPart,
)

_NUMBERS = re.compile(r"(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.(-?\d{1,9}))?")
_MOST, _MOST_STEPS = 10_000, 1_000_000
# What brace expansion works on: an unquoted character, or a quoted or expanded part of a word,
# which is never divided.
Unit = str | WordPart


def unbraced(word: RawWord) -> tuple[RawWord, ...]:
    """Return the words that brace expansion makes of one word: ``a{1,2}`` gives ``a1`` and
    ``a2``.
    """
    if not any(_may_have_braces(part) for part in word.parts):
        return (word,)
    units: list[Unit] = []
    for part in word.parts:
        split = isinstance(part, Literal) and not part.quoted
        units += list(part.text) if isinstance(part, Literal) and split else [part]
    if units.count("{") * len(units) > _MOST_STEPS:
        raise LineError(word.line, f"{word.source[:40]}: the word has too many braces: write fewer")
    expanded = list(islice(_alternatives(units, word.line, 0), _MOST + 1))
    if len(expanded) > _MOST:
        message = f"{word.source}: braces give more than {_MOST} words: write fewer"
        raise LineError(word.line, message)
    if len(expanded) == 1 and expanded[0] == units:
        return (word,)
    return tuple(_expanded_word(each, word) for each in expanded)


def _may_have_braces(part: WordPart) -> bool:
    return isinstance(part, Literal) and not part.quoted and "{" in part.text


def _expanded_word(units: list[Unit], word: RawWord) -> RawWord:
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
    """Return all words that brace expansion makes of characters and parts of a word."""
    if depth > 20:
        raise LineError(line, "braces {...} are nested too deep: write the words instead")
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
    """Return the alternatives between two braces, or None if the braces are literal characters."""
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


# Parses assignments in shell commands, also those of arrays with keys.


DECLARATIONS = frozenset(("export", "declare", "typeset", "local", "readonly"))
_START = re.compile(r"([A-Za-z_]\w*)(\[|\+?=)", re.ASCII)


def read_assignment(lexer: Lexer, blanks: Callable[[], None]) -> Assignment | None:
    """Parse an assignment at the lexer's position, or return None if the next word is none."""
    match = _START.match(lexer.text, lexer.at, lexer.end)
    if match is None:
        return None
    start, line = lexer.at, lexer.line
    lexer.at = match.end(1)
    subscript = _key(lexer) if match[2] == "[" else None
    operator = next((each for each in ("+=", "=") if lexer.starts(each)), "")
    if not operator or (match[2] == "[" and subscript is None):
        lexer.at = start
        return None
    lexer.at += len(operator)
    is_list = lexer.peek() == "(" and subscript is None
    value = _elements(lexer, blanks) if is_list else lexer.word()
    return Assignment(
        name=match[1], value=value, line=line, subscript=subscript, appends=operator == "+="
    )


def _key(lexer: Lexer) -> RawWord | None:
    """Parse the key of an array element between brackets, or return None if the brackets do not
    close on the line.
    """
    stop = lexer.text.find("\n", lexer.at, lexer.end)
    line_end = lexer.end if stop < 0 else stop
    if "]" not in lexer.text[lexer.at : line_end]:
        return None
    lexer.at += 1
    key = lexer.word("]\n")
    if lexer.peek() != "]":
        return None
    lexer.at += 1
    return key


def _elements(lexer: Lexer, blanks: Callable[[], None]) -> tuple[Element, ...]:
    line = lexer.line
    lexer.at += 1
    elements: list[Element] = []
    while True:
        blanks()
        letter = lexer.peek()
        if not letter:
            lexer.unclosed("=(", line)
        if letter == ")":
            lexer.at += 1
            return tuple(elements)
        if letter == "\n":
            lexer.at += 1
        elif letter in ";&|<>(" and lexer.peek(1) != "(":
            lexer.fail(f"{letter} is not expected in an array: quote it")
        else:
            elements += _element(lexer)


def _element(lexer: Lexer) -> list[Element]:
    if lexer.peek() == "[":
        start = lexer.at
        key = _key(lexer)
        if key is not None and lexer.peek() == "=":
            lexer.at += 1
            return [Element(value=lexer.word(), key=key)]
        lexer.at = start
    return [Element(value=word) for word in unbraced(lexer.word())]


# Parses the tests of a condition between ``[[`` and ``]]``.


_UNARY = re.compile(r"-[a-zA-Z](?=\s)")
_BINARY = re.compile(r"==|=~|!=|=|<|>|-(?:eq|ne|lt|le|gt|ge|nt|ot|ef)(?=\s)")


def read_condition(lexer: Lexer, line: int) -> Comparison:
    """Parse the condition between ``[[`` and ``]]`` at the lexer's position."""
    condition = _any(lexer, line)
    _blanks(lexer)
    if not lexer.starts("]]"):
        lexer.fail("[[ has no ]]: write ]] after the condition", line)
    lexer.at += 2
    return condition


def _blanks(lexer: Lexer) -> None:
    while (letter := lexer.peek()) and (letter in " \t\n" or lexer.starts("\\\n")):
        lexer.at += 2 if letter == "\\" else 1


def _any(lexer: Lexer, line: int) -> Comparison:
    tests = [_all(lexer, line)]
    while _takes(lexer, "||"):
        tests.append(_all(lexer, line))
    return tests[0] if len(tests) == 1 else Joined(operator="||", tests=tuple(tests))


def _all(lexer: Lexer, line: int) -> Comparison:
    tests = [_single(lexer, line)]
    while _takes(lexer, "&&"):
        tests.append(_single(lexer, line))
    return tests[0] if len(tests) == 1 else Joined(operator="&&", tests=tuple(tests))


def _takes(lexer: Lexer, token: str) -> bool:
    _blanks(lexer)
    if not lexer.starts(token):
        return False
    lexer.at += len(token)
    return True


def _single(lexer: Lexer, line: int) -> Comparison:
    lexer.deeper()
    _blanks(lexer)
    if lexer.peek() == "!" and lexer.peek(1) in (" ", "\t"):
        lexer.at += 1
        made: Comparison = Joined(operator="!", tests=(_single(lexer, line),))
    elif _takes(lexer, "("):
        made = _any(lexer, line)
        if not _takes(lexer, ")"):
            lexer.unclosed("(", line)
    else:
        made = _operand(lexer, line)
    lexer.depth -= 1
    return made


def _operand(lexer: Lexer, line: int) -> Comparison:
    if match := _UNARY.match(lexer.text, lexer.at, lexer.end):
        lexer.at = match.end()
        _blanks(lexer)
        return Operand(operator=match[0], right=_word(lexer, line))
    left = _word(lexer, line)
    _blanks(lexer)
    match = _BINARY.match(lexer.text, lexer.at, lexer.end)
    if match is None:
        return Operand(operator="-n", right=left)
    lexer.at = match.end()
    _blanks(lexer)
    right = _pattern(lexer, line) if match[0] in ("=~", "==", "=", "!=") else _word(lexer, line)
    return Operand(operator=match[0], left=left, right=right)


def _word(lexer: Lexer, line: int) -> RawWord:
    word = lexer.word(WORD_ENDS)
    if not word.source or word.source == "]]":
        lexer.fail("a condition in [[ ]] lacks a word: write both of its sides", line)
    return word


def _pattern(lexer: Lexer, line: int) -> RawWord:
    """Parse the pattern or regular expression on the right side of a test; it may contain
    parentheses and bars.
    """
    start, parts, level = lexer.at, list[WordPart](), 0
    while (letter := lexer.peek()) and not (level == 0 and letter in " \t\n)"):
        if letter in "()|<>&; \t":
            level += (letter == "(") - (letter == ")")
            if level == 0 and letter in "&|;":
                break
            part = lexer.inside(lexer.at, lexer.at + 1).word("")
            lexer.at += 1
        else:
            part = lexer.word(WORD_ENDS)
        parts += part.parts
    if lexer.at == start:
        lexer.fail("a comparison in [[ ]] lacks its right side: write it", line)
    return RawWord(
        parts=tuple(parts), line=lexer.line_of(start), source=lexer.text[start : lexer.at]
    )
