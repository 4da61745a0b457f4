"""Parses redirections, and the patterns of ``case``."""

import re
from collections.abc import Callable

from mistlab.shell.lexer import BLANK, WORD_ENDS, Lexer
from mistlab.shell.syntax import Literal, RawWord, Redirect

_REDIRECT = re.compile(
    r"(\d+|\{\w+\})?(&>>|&>|<<<|<<-|<<|<>|<&|<(?!\()|>>|>&|>\||>(?!\())", re.ASCII
)


def read_redirect(lexer: Lexer, blanks: Callable[[], None]) -> Redirect | None:
    """The redirection at a lexer's position, or None for another word."""
    match = _REDIRECT.match(lexer.text, lexer.at, lexer.end)
    if match is None or BLANK.match(lexer.text, lexer.at, lexer.end):
        return None
    line = lexer.line
    lexer.at = match.end()
    blanks()
    target = lexer.word()
    if not target.source:
        lexer.fail(f"{match[0]} names no file: write it", line)
    redirect = Redirect(operator=match[2], target=target, line=line, descriptor=match[1] or "")
    if match[2] in ("<<", "<<-"):
        plain = re.sub(r"\\(.)|['\"]", r"\1", target.source)
        lexer.awaited.append((redirect, plain, plain != target.source))
    return redirect


def read_pattern(lexer: Lexer) -> RawWord:
    """A pattern of ``case``; those of ``extglob`` have parentheses."""
    parts, start = list[RawWord](), lexer.at
    while True:
        parts.append(lexer.word(WORD_ENDS))
        before = lexer.text[lexer.at - 1 : lexer.at]
        if lexer.peek() != "(" or before not in "?*+@!":
            break
        line = lexer.line
        lexer.at += 1
        inner = lexer.word(")")
        if lexer.peek() != ")":
            lexer.unclosed("(", line)
        lexer.at += 1
        parts += [_literal("(", line), inner, _literal(")", line)]
    if len(parts) == 1:
        return parts[0]
    every = tuple(part for word in parts for part in word.parts)
    return RawWord(parts=every, line=parts[0].line, source=lexer.text[start : lexer.at])


def _literal(text: str, line: int) -> RawWord:
    return RawWord(parts=(Literal(text=text, line=line),), line=line, source=text)
