"""Reads the words of a shell script: quotes, variables and substitutions."""

import re
from bisect import bisect_right
from collections.abc import Callable
from typing import NoReturn

from mistlab.shell.shell_text import LAUNCH_LINE_ALONE, LineError, Text
from mistlab.shell.syntax import (
    Arithmetic,
    Dollar,
    Literal,
    Pipe,
    RawWord,
    Redirect,
    Script,
    Substitution,
    WordPart,
)

_HEAD = re.compile(r"[A-Za-z_]\w*|[0-9]+|[@*#?$!-]", re.ASCII)
_OPERATORS = re.compile(
    r":-|:=|:\?|:\+|##|#|%%|%|//|/#|/%|/|\^\^|\^|,,|,|@[A-Za-z]|:|-|=|\?|\+", re.ASCII
)
_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{1,4})|U([0-9A-Fa-f]{1,8})|([0-7]{1,3})|(.))", re.DOTALL
)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "E": "\x1b"}
_LETTERS |= {"f": "\f", "v": "\v", "\\": "\\", "'": "'", '"': '"', "?": "?"}


def read_braces(lexer: "Lexer", quoted: bool) -> Dollar:
    """Read an expansion ``${...}`` at the lexer's position."""
    start, line = lexer.at, lexer.line
    lexer.deeper()
    lexer.at += 2
    prefix = _prefix(lexer)
    head = _HEAD.match(lexer.text, lexer.at, lexer.end)
    if head is None:
        lexer.fail("${ is followed by no variable's name: write ${NAME}", line)
    lexer.at = head.end()
    subscript = _subscript(lexer, line)
    operator, argument, second = _operator(lexer, prefix, quoted)
    lexer.close("}", "${", line)
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


def _prefix(lexer: "Lexer") -> str:
    """Read the operator ``#`` or ``!`` in ``${...}``, unless the character is itself the variable's
    name.
    """
    letter, after = lexer.peek(), lexer.peek(1)
    if letter and letter in "#!" and after and after not in "}:-=+?%/":
        lexer.at += 1
        return letter
    return ""


def _subscript(lexer: "Lexer", line: int) -> RawWord | None:
    if lexer.peek() != "[":
        return None
    lexer.at += 1
    # In a key such as that of ``${a[${b[0]}]}`` the inner brackets belong to an expansion, so the
    # next bracket outside it ends the key.
    key = lexer.word("]")
    lexer.close("]", "[", line)
    return key


def _operator(
    lexer: "Lexer", prefix: str, quoted: bool
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


def _names(lexer: "Lexer", prefix: str) -> str:
    if prefix == "!" and lexer.peek() and lexer.peek() in "*@" and lexer.peek(1) == "}":
        lexer.at += 1
        return "names"
    return ""


def _after(lexer: "Lexer", separator: str, end: str, quoted: bool) -> RawWord | None:
    if lexer.peek() != separator:
        return None
    lexer.at += 1
    return lexer.word(end, double=quoted)


def escaped(text: str) -> str:
    """Read a text between ``$'`` and ``'``, replacing escape sequences by characters.

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


BLANKS = " \t"
WORD_ENDS = " \t\n;&|<>()"
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9]|[@*#?$!-]", re.ASCII)
_PLAIN = re.compile(r"[\w./,:=+%@^~\-\[\]*?]+")
# Matches a placeholder such as <Specify path>, which the user has to replace.
BLANK = re.compile(r"<[A-Za-z](?:[^<>\n;&|$\"'()]*[^\s<>;&|$\"'()])?>(?=[\s/;)]|$)")
_DEEPEST = 40
_LONGEST_SUM = 20_000


class Lexer:
    """Reads a text from a position on; the function ``script`` parses nested commands up to a
    closing character.
    """

    def __init__(
        self,
        text: str,
        line_of: Callable[[int], int],
        script: "Callable[[Lexer, str], Script]",
        depth: int = 0,
    ) -> None:
        self.text = text
        self.line_of = line_of
        self.script = script
        self.at = 0
        self.end = len(text)
        self.depth = depth
        self.awaited: list[tuple[Redirect, str, bool]] = []

    @property
    def line(self) -> int:
        """The number of the line at the lexer's position."""
        return self.line_of(min(self.at, len(self.text) - 1))

    def peek(self, ahead: int = 0) -> str:
        """Return the character at the lexer's position, empty at the end."""
        return self.text[self.at + ahead] if self.at + ahead < self.end else ""

    def starts(self, prefix: str) -> bool:
        """Return whether the text at the lexer's position starts with a prefix."""
        return self.text.startswith(prefix, self.at, self.end)

    def fail(self, problem: str, line: int | None = None) -> NoReturn:
        """Refuse the script with an error that names a line."""
        raise LineError(self.line if line is None else line, problem)

    def unclosed(self, opening: str, line: int) -> NoReturn:
        """Refuse a script in which a quote or bracket is never closed."""
        self.fail(f"{opening} is never closed: write the mark that closes it", line)

    def close(self, letter: str, opening: str, line: int) -> None:
        """Read the character that closes a bracket, or refuse the script."""
        if self.peek() != letter:
            self.unclosed(opening, line)
        self.at += 1

    def inside(self, start: int, stop: int) -> "Lexer":
        """Make a lexer for a part of the text, with the line numbers of the whole text."""
        part = Lexer(self.text, self.line_of, self.script, self.depth)
        part.at, part.end = start, stop
        return part

    def deeper(self) -> None:
        """Enter one more level of nesting; refuses a script that is nested too deep."""
        self.depth += 1
        if self.depth > _DEEPEST:
            self.fail(f"commands are nested deeper than {_DEEPEST} levels: {LAUNCH_LINE_ALONE}")

    def word(self, ends: str = WORD_ENDS, *, double: bool = False) -> RawWord:
        """Read a word up to an unquoted character in ``ends``; ``double`` applies the rules of
        double quotes.
        """
        start, parts = self.at, Parts(self)
        while letter := self.peek():
            if letter not in ends:
                self._part(letter, parts, ends, double)
            elif ends == WORD_ENDS and (part := self._angled(letter)):
                parts.join(part)
            else:
                break
        source = self.text[start : self.at]
        return RawWord(parts=parts.all(), line=self.line_of(start), source=source)

    def _part(self, letter: str, parts: "Parts", ends: str, double: bool) -> None:
        if not double and (match := _PLAIN.match(self.text, self.at, self.end)):
            run = match[0]
            stop = next((at for at, each in enumerate(run) if each in ends), len(run))
            parts.add(run[:stop], False)
            self.at += stop
        elif letter == "\\":
            self._backslash(parts, double)
        elif letter == "'" and not double:
            self._single(parts)
        elif letter == '"':
            self._double(parts)
        elif letter == "$":
            self._dollar(parts, double)
        elif letter == "`":
            parts.join(self._backquotes(double))
        else:
            parts.add(letter, double)
            self.at += 1

    def _backslash(self, parts: "Parts", double: bool) -> None:
        after = self.peek(1)
        self.at += 2
        if after == "\n":
            return
        if double and after not in '$`"\\}':
            parts.add("\\" + after, True)
        else:
            parts.add(after or "\\", True)

    def _single(self, parts: "Parts") -> None:
        stop = self.text.find("'", self.at + 1, self.end)
        if stop < 0:
            self.unclosed("'", self.line)
        parts.add_lines(self.text[self.at + 1 : stop], self.at + 1)
        self.at = stop + 1

    def _double(self, parts: "Parts") -> None:
        line = self.line
        self.at += 1
        if self.peek() == '"':
            parts.add("", True)
        while self.peek() != '"':
            if not self.peek():
                self.unclosed('"', line)
            self.in_double(parts)
        self.at += 1

    def in_double(self, parts: "Parts", escapes: str = '$`"\\') -> None:
        """Read one part of a text inside double quotes or a here-document."""
        letter = self.peek()
        if letter == "\\":
            after = self.peek(1)
            self.at += 2
            if after != "\n":
                parts.add(after if after and after in escapes else "\\" + after, True)
        elif letter == "$":
            self._dollar(parts, True)
        elif letter == "`":
            parts.join(self._backquotes(True))
        else:
            parts.add(letter, True)
            self.at += 1

    def _dollar(self, parts: "Parts", quoted: bool) -> None:
        start, line, after = self.at, self.line, self.peek(1)
        if after == "'" and not quoted:
            parts.add(self._ansi(), True)
        elif after == '"' and not quoted:
            self.at += 1
        elif self.starts("$((") and (part := self._arithmetic(quoted)):
            parts.join(part)
        elif after == "(":
            parts.join(self._substitution(quoted))
        elif after == "{":
            parts.join(read_braces(self, quoted))
        elif match := _NAME.match(self.text, start + 1, self.end):
            self.at = match.end()
            source = self.text[start : self.at]
            parts.join(Dollar(name=match[0], line=line, source=source, quoted=quoted))
        else:
            parts.add("$", quoted)
            self.at += 1

    def _ansi(self) -> str:
        stop = self.at + 2
        while stop < self.end and self.text[stop] != "'":
            stop += 2 if self.text[stop] == "\\" else 1
        if stop >= self.end:
            self.unclosed("$'", self.line)
        inner = self.text[self.at + 2 : stop]
        self.at = stop + 1
        return escaped(inner)

    def _arithmetic(self, quoted: bool) -> WordPart | None:
        start, line = self.at, self.line
        stop = self.closing_pair(start + 3)
        if stop is None:
            return None
        expression = self.expression(start + 3, stop)
        self.at = stop + 2
        source = self.text[start : self.at]
        return Arithmetic(expression=expression, line=line, source=source, quoted=quoted)

    def expression(self, start: int, stop: int) -> RawWord:
        """Read the arithmetic expression between two offsets of the text as a word to expand."""
        part = self.inside(start, stop)
        part.deeper()
        parts = Parts(part)
        while part.peek():
            part.in_double(parts)
        source = self.text[start:stop]
        return RawWord(parts=parts.all(), line=self.line_of(start), source=source.strip())

    def closing_pair(self, start: int) -> int | None:
        """Return the offset of the ``))`` that closes an arithmetic expression, or None if nothing
        does.
        """
        level, end = 0, min(self.end, start + _LONGEST_SUM)
        for match in re.compile(r"[()]").finditer(self.text, start, end):
            level += {"(": 1, ")": -1}.get(match[0], 0)
            if level < 0:
                closes = self.text.startswith("))", match.start(), self.end)
                return match.start() if closes else None
        return None

    def _substitution(self, quoted: bool) -> WordPart:
        start, line = self.at, self.line
        self.deeper()
        self.at += 2
        script = self.script(self, ")")
        self.close(")", "$(", line)
        self.depth -= 1
        source = self.text[start : self.at]
        return Substitution(script=script, line=line, source=source, quoted=quoted)

    def _backquotes(self, quoted: bool) -> WordPart:
        start, line = self.at, self.line
        stop = start + 1
        while stop < self.end and self.text[stop] != "`":
            stop += 2 if self.text[stop] == "\\" else 1
        if stop >= self.end:
            self.unclosed("`", line)
        escapes = r"\\([$`\\\"])" if quoted else r"\\([$`\\])"
        inner = re.sub(escapes, r"\1", self.text[start + 1 : stop])
        part = Lexer(inner, lambda _: line, self.script, self.depth)
        part.deeper()
        script = self.script(part, "")
        self.at = stop + 1
        source = self.text[start : self.at]
        return Substitution(script=script, line=line, source=source, quoted=quoted)

    def _angled(self, letter: str) -> WordPart | None:
        """Read ``<(...)``, or a placeholder such as ``<path to data>``."""
        if letter in "<>" and self.peek(1) == "(":
            return self._pipe()
        if match := BLANK.match(self.text, self.at, self.end):
            line = self.line
            self.at = match.end()
            return Pipe(line=line, source=match[0])
        return None

    def _pipe(self) -> WordPart:
        start, line = self.at, self.line
        self.deeper()
        self.at += 2
        self.script(self, ")")
        self.close(")", self.text[start : start + 2], line)
        self.depth -= 1
        return Pipe(line=line, source=self.text[start : self.at])

    def here_documents(self) -> None:
        """Read the here-documents that start at the lexer's position."""
        for redirect, delimiter, is_quoted in self.awaited:
            start, strips = self.at, redirect.operator == "<<-"
            kept: list[tuple[int, int]] = []
            while self.at < self.end:
                stop = self.text.find("\n", self.at, self.end)
                stop = self.end if stop < 0 else stop
                first = self.at
                while strips and self.text[first : first + 1] == "\t":
                    first += 1
                self.at = min(stop + 1, self.end)
                if self.text[first:stop] == delimiter:
                    break
                kept.append((first, self.at))
            redirect.body.append(self._body(start, kept, is_quoted))
        self.awaited.clear()

    def _body(self, start: int, kept: list[tuple[int, int]], is_quoted: bool) -> RawWord:
        parts = Parts(self)
        if is_quoted:
            for first, stop in kept:
                parts.add_lines(self.text[first:stop], first)
        else:
            # One lexer reads all lines of a here-document, since a substitution may span several
            # lines.
            text = "".join(self.text[first:stop] for first, stop in kept)
            starts, length = [], 0
            for first, stop in kept:
                starts.append(length)
                length += stop - first
            lines = [self.line_of(first) for first, _ in kept]
            inner = Lexer(
                text, lambda at: lines[bisect_right(starts, at) - 1], self.script, self.depth
            )
            parts = Parts(inner)
            while inner.peek():
                inner.in_double(parts, "$`\\")
        return RawWord(parts=parts.all(), line=self.line_of(start))


class Parts:
    """Collects the parts of a word while it is read; neighbouring characters with the same line and
    quoting form one part.
    """

    def __init__(self, lexer: Lexer) -> None:
        self._lexer = lexer
        self._parts: list[WordPart] = []
        self._letters: list[str] = []
        self._kind = (0, False)

    def add(self, letters: str, quoted: bool) -> None:
        """Append literal characters to the word."""
        kind = (self._lexer.line, quoted)
        if kind != self._kind:
            self._flush()
            self._kind = kind
            if quoted and not letters:
                self._parts.append(Literal(text="", line=kind[0], quoted=True))
        self._letters.append(letters)

    def add_lines(self, text: str, start: int) -> None:
        """Append quoted characters to the word, line by line; ``start`` is their offset in the
        text.
        """
        self._flush()
        if not text:
            self._parts.append(Literal(text="", line=self._lexer.line, quoted=True))
        for line in text.splitlines(keepends=True):
            number = self._lexer.line_of(start)
            self._parts.append(Literal(text=line, line=number, quoted=True))
            start += len(line)
        self._kind = (0, False)

    def join(self, part: WordPart) -> None:
        """Append a part, such as ``$x``, to the word; the part is expanded when the word is
        used.
        """
        self._flush()
        self._kind = (0, False)
        self._parts.append(part)

    def _flush(self) -> None:
        if letters := "".join(self._letters):
            line, quoted = self._kind
            self._parts.append(Literal(text=letters, line=line, quoted=quoted))
        self._letters = []

    def all(self) -> tuple[WordPart, ...]:
        """The parts of the word that have been read so far, in order."""
        self._flush()
        return tuple(self._parts)


def lexer_of(text: str, base: int, script: Callable[[Lexer, str], Script]) -> Lexer:
    """Make a lexer for the text of a file; ``base`` is added to its line numbers."""
    ends = [match.start() for match in re.finditer("\n", text)]
    return Lexer(text, lambda at: base + 1 + bisect_right(ends, at - 1), script)


def lexer_of_value(text: Text, script: Callable[[Lexer, str], Script]) -> Lexer:
    """Make a lexer for a text that the script built; it counts lines as the script lines that wrote
    the text.
    """
    return Lexer(text.chars, text.line_at, script)
