"""Parses the tests between ``[[`` and ``]]``."""

import re

from mistlab.shell.lexer import WORD_ENDS, Lexer
from mistlab.shell.syntax import Condition, Joined, Operand, RawWord, WordPart

_UNARY = re.compile(r"-[a-zA-Z](?=\s)")
_BINARY = re.compile(r"==|=~|!=|=|<|>|-(?:eq|ne|lt|le|gt|ge|nt|ot|ef)(?=\s)")


def read_condition(lexer: Lexer, line: int) -> Condition:
    """The test from behind ``[[`` to behind ``]]``."""
    condition = _any(lexer, line)
    _blanks(lexer)
    if not lexer.starts("]]"):
        lexer.fail("[[ has no ]]: write it", line)
    lexer.at += 2
    return condition


def _blanks(lexer: Lexer) -> None:
    while (letter := lexer.peek()) and (letter in " \t\n" or lexer.starts("\\\n")):
        lexer.at += 2 if letter == "\\" else 1


def _any(lexer: Lexer, line: int) -> Condition:
    tests = [_all(lexer, line)]
    while _takes(lexer, "||"):
        tests.append(_all(lexer, line))
    return tests[0] if len(tests) == 1 else Joined(operator="||", tests=tuple(tests))


def _all(lexer: Lexer, line: int) -> Condition:
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


def _single(lexer: Lexer, line: int) -> Condition:
    lexer.deeper()
    _blanks(lexer)
    if lexer.peek() == "!" and lexer.peek(1) in (" ", "\t"):
        lexer.at += 1
        made: Condition = Joined(operator="!", tests=(_single(lexer, line),))
    elif _takes(lexer, "("):
        made = _any(lexer, line)
        if not _takes(lexer, ")"):
            lexer.unclosed("(", line)
    else:
        made = _operand(lexer, line)
    lexer.depth -= 1
    return made


def _operand(lexer: Lexer, line: int) -> Condition:
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
        lexer.fail("[[ ]] lacks a word: write it", line)
    return word


def _pattern(lexer: Lexer, line: int) -> RawWord:
    """A pattern or a regular expression, which may have parentheses and bars inside of them."""
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
        lexer.fail("[[ ]] lacks a pattern: write it", line)
    return RawWord(
        parts=tuple(parts), line=lexer.line_of(start), source=lexer.text[start : lexer.at]
    )
