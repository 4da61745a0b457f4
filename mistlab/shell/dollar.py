"""Reads what stands between the braces of ``${...}``, and the escapes of ``$'...'``."""

import re
from typing import Protocol

from mistlab.shell.syntax import Dollar, RawWord

_HEAD = re.compile(r"[A-Za-z_]\w*|[0-9]+|[@*#?$!-]", re.ASCII)
_OPERATORS = re.compile(
    r":-|:=|:\?|:\+|##|#|%%|%|//|/#|/%|/|\^\^|\^|,,|,|@[A-Za-z]|:|-|=|\?|\+", re.ASCII
)
_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{1,4})|U([0-9A-Fa-f]{1,8})|([0-7]{1,3})|(.))", re.DOTALL
)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b"}
_LETTERS |= {"f": "\f", "v": "\v", "\\": "\\", "'": "'", '"': '"', "?": "?"}


class WordReader(Protocol):
    """What is asked of a lexer."""

    text: str
    at: int
    end: int

    @property
    def line(self) -> int:
        """The line of the position."""

    def peek(self, ahead: int = 0) -> str:
        """The character at the position."""

    def word(self, ends: str = ..., *, double: bool = ...) -> RawWord:
        """A word up to an unquoted character of ``ends``."""

    def unclosed(self, opening: str, line: int) -> object:
        """Refuse a script whose bracket is never closed."""

    def fail(self, problem: str, line: int | None = None) -> object:
        """Refuse the script at a line."""

    def deeper(self) -> None:
        """Count a level of nesting."""

    depth: int


def read_braces(lexer: WordReader, quoted: bool) -> Dollar:
    """The expansion at ``${``."""
    start, line = lexer.at, lexer.line
    lexer.deeper()
    lexer.at += 2
    prefix = _prefix(lexer)
    head = _HEAD.match(lexer.text, lexer.at, lexer.end)
    if head is None:
        lexer.fail("${ is followed by no variable's name: write ${NAME}", line)
    assert head is not None
    lexer.at = head.end()
    subscript = _subscript(lexer, line)
    operator, argument, second = _operator(lexer, prefix, quoted)
    if lexer.peek() != "}":
        lexer.unclosed("${", line)
    lexer.at += 1
    lexer.depth -= 1
    return Dollar(
        name=head[0],
        line=line,
        source=lexer.text[start : lexer.at],
        quoted=quoted,
        prefix=prefix,
        subscript=subscript,
        operator=operator,
        argument=argument,
        second=second,
    )


def _prefix(lexer: WordReader) -> str:
    """``#`` or ``!`` before a name; both are names, too."""
    letter, after = lexer.peek(), lexer.peek(1)
    if letter and letter in "#!" and after and after not in "}:-=+?%/":
        lexer.at += 1
        return letter
    return ""


def _subscript(lexer: WordReader, line: int) -> RawWord | None:
    if lexer.peek() != "[":
        return None
    lexer.at += 1
    # A key's own brackets, as in ${a[${b[0]}]}, are inside its parts.
    key = lexer.word("]")
    if lexer.peek() != "]":
        lexer.unclosed("[", line)
    lexer.at += 1
    return key


def _operator(
    lexer: WordReader, prefix: str, quoted: bool
) -> tuple[str, RawWord | None, RawWord | None]:
    match = _OPERATORS.match(lexer.text, lexer.at, lexer.end)
    if match is None:
        return _names(lexer, prefix), None, None
    operator = match[0]
    lexer.at = match.end()
    if operator.startswith("@"):
        return operator, None, None
    if operator == ":":
        offset = lexer.word(":}")
        return operator, offset, _after(lexer, ":", "}", False)
    if operator.startswith("/"):
        pattern = lexer.word("/}")
        return operator, pattern, _after(lexer, "/", "}", quoted)
    is_pattern = operator[0] in "#%^,"
    return operator, lexer.word("}", double=quoted and not is_pattern), None


def _names(lexer: WordReader, prefix: str) -> str:
    if prefix == "!" and lexer.peek() and lexer.peek() in "*@" and lexer.peek(1) == "}":
        lexer.at += 1
        return "names"
    return ""


def _after(lexer: WordReader, separator: str, end: str, quoted: bool) -> RawWord | None:
    if lexer.peek() != separator:
        return None
    lexer.at += 1
    return lexer.word(end, double=quoted)


def escaped(text: str) -> str:
    """A text between ``$'`` and ``'`` with its escapes replaced.

    >>> escaped("a\\\\tb") == "a" + chr(9) + "b"
    True
    """
    return _ESCAPE.sub(_letter, text)


def _letter(match: re.Match[str]) -> str:
    for group, base in ((1, 16), (2, 16), (3, 16), (4, 8)):
        if match[group]:
            code = int(match[group], base)
            return chr(code) if code <= 0x10FFFF else match[0]
    return _LETTERS.get(match[5], "\\" + match[5])
