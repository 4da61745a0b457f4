"""Parses assignments, with arrays and their keys."""

import re
from collections.abc import Callable

from mistlab.shell.braces import unbraced
from mistlab.shell.lexer import Lexer
from mistlab.shell.syntax import Assignment, Element, RawWord

DECLARATIONS = frozenset(("export", "declare", "typeset", "local", "readonly"))
_START = re.compile(r"([A-Za-z_]\w*)(\[|\+?=)", re.ASCII)


def read_assignment(lexer: Lexer, blanks: Callable[[], None]) -> Assignment | None:
    """The assignment at a lexer's position, or None for another word."""
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
    """A key between brackets, or None where they do not close on the line."""
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
