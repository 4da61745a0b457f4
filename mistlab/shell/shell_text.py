"""Represents the texts of an evaluated script: characters with the lines that wrote them, and
placeholders for unknown parts.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from mistlab.core.values import InputError

_SET = re.compile(r"--set (\w+)=VALUE")


def remedy_of(variable: str) -> str:
    """The remedy that the user gives the value of a script's variable; ``Unknown.variable`` reads
    the name back.
    """
    return f"give --set {variable}=VALUE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A part of a script's text that is known only when the script runs.

    ``expression`` is the part as the script writes it (``$(hostname)``, ``$1``), and ``line`` the
    line on which it stands. ``file`` is the script of this line, if it is not the script that the
    user gave. ``reason`` says why the value is not known, ``remedy`` how the user can give it. If
    the part depends on which branch of a condition runs, and its value is known for each branch,
    ``either`` lists these values.
    """

    expression: str
    line: int
    reason: str
    remedy: str
    file: str = ""
    either: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """The variable of the script that the remedy sets; empty if it is another remedy."""
        match = _SET.search(self.remedy)
        return match[1] if match else ""

    def __str__(self) -> str:
        line = f"line {self.line} of {self.file}" if self.file else f"line {self.line}"
        remedy = self.remedy or "write its value into the script"
        return f"{line}: {self.expression} {self.reason}: {remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word of an evaluated command: its text, its line, and its unknown part if it has one.

    In ``text`` unknown parts stand as the script writes them; ``unknown`` describes the first of
    them. ``line`` is the line that wrote the last part of the word: for the value of a variable,
    the line of the assignment. It is 0 for words that do not come from a script. ``file`` is the
    script of this line, if it is not the script that the user gave.
    """

    text: str
    line: int = 0
    unknown: Unknown | None = None
    file: str = ""

    def __str__(self) -> str:
        return self.text


# Represents the texts of an evaluated script: characters with the lines that wrote them, and
# placeholders for unknown parts.


# One private-use character stands for each unknown part of a text, so that texts can be joined and
# split as usual; ``Session.unknowns`` maps the character to the unknown part.
FIRST_PLACEHOLDER, LAST_PLACEHOLDER = 0xF0000, 0xFFFFD
LONGEST = 1 << 18


# What an error message tells the user to do if a script cannot be followed.
LAUNCH_LINE_ALONE = "give a script that holds only the launch line"


class LineError(InputError):
    """Raised if the script cannot be evaluated because of the command on a line."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line


@dataclass(frozen=True, slots=True)
class Text:
    """A text of a script: its characters, and the script lines that wrote them.

    ``marks`` are offsets with the line from there on, in ascending order. ``assumed`` are notes on
    what was taken for granted on the way to the text.
    """

    chars: str = ""
    marks: tuple[tuple[int, int], ...] = ()
    assumed: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.chars)

    def __len__(self) -> int:
        return len(self.chars)

    def __add__(self, other: "Text") -> "Text":
        return joined((self, other))

    @property
    def is_known(self) -> bool:
        """Whether every character of the text is known, rather than the output of an unknown
        command.
        """
        return self.chars.isascii() or not any(map(is_placeholder, self.chars))

    @property
    def line(self) -> int:
        """The script line that wrote the text's last characters, 0 if no line did."""
        return self.marks[-1][1] if self.marks else 0

    def line_at(self, offset: int) -> int:
        """Return the script line that wrote the character at an offset."""
        line = self.marks[0][1] if self.marks else 0
        for start, marked in self.marks:
            if start > offset:
                break
            line = marked
        return line

    def part(self, start: int, stop: int | None = None) -> "Text":
        """The part of a partly known text between two offsets."""
        stop = len(self.chars) if stop is None else stop
        if start == 0 and stop >= len(self.chars):
            return self
        if len(self.marks) <= 1:
            return Text(self.chars[start:stop], self.marks, self.assumed)
        inside = [(at - start, line) for at, line in self.marks if start < at < stop]
        marks = ((0, self.line_at(start)), *inside)
        return Text(self.chars[start:stop], marks, self.assumed)

    def with_chars(self, chars: str) -> "Text":
        """Return a text with other characters, which count as written by the same lines."""
        return Text(chars, ((0, self.line),) if self.line else (), self.assumed)

    def assuming(self, notes: frozenset[str]) -> "Text":
        """Return a copy of the text whose value depends on further assumptions."""
        if notes <= self.assumed:
            return self
        return Text(self.chars, self.marks, self.assumed | notes)


def is_placeholder(letter: str) -> bool:
    """Return whether a character stands for an unknown part."""
    return FIRST_PLACEHOLDER <= ord(letter) <= LAST_PLACEHOLDER


def plain(chars: str, line: int = 0) -> Text:
    """Make a text whose characters were all written by one script line."""
    return Text(chars, ((0, line),) if line else ())


def joined(parts: Iterable[Text], separator: str = "") -> Text:
    """Join several texts; each character keeps the line that wrote it."""
    chars: list[str] = []
    marks: list[tuple[int, int]] = []
    assumed: frozenset[str] = frozenset()
    length = 0
    for number, text in enumerate(parts):
        if number and separator:
            chars.append(separator)
            length += len(separator)
        assumed |= text.assumed
        if text.chars:
            marks += [(at + length, line) for at, line in text.marks]
            chars.append(text.chars)
            length += len(text.chars)
        if length > LONGEST:
            message = (
                f"a value exceeds {LONGEST:,} characters: set its variable by --set NAME=VALUE"
            )
            raise LineError(text.line, message)
    return Text("".join(chars), _distinct(marks), assumed)


def _distinct(marks: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    later = [after for before, after in pairwise(marks) if after[1] != before[1]]
    return (marks[0], *later) if marks else ()
