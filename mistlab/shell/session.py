"""What an evaluation knows besides its state: what is given, unknown, and left to do."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from mistlab.shell.shell_text import FIRST_PLACEHOLDER, LAST_PLACEHOLDER, LineError, Text, plain
from mistlab.shell.shell_text import is_placeholder as _is_placeholder
from mistlab.shell.source import Source
from mistlab.shell.state import State
from mistlab.shell.syntax import Script, Simple
from mistlab.shell.word import Unknown, Word

# Lines of the files that a script reads are told apart by thousands of millions.
FILE = 10_000_000
_STEPS = 60_000
_DEEPEST = 25


class StepsError(LineError):
    """A script that takes too many steps to follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A condition under which commands run; ``cause`` is why it is not known, None if it is."""

    line: int
    source: str
    cause: Unknown | None = None
    assumed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A command that was evaluated and may start training.

    ``loops`` are loops around the command: their variable, their line and its value there.
    ``callers`` are lines from which the command was reached.
    """

    words: tuple[Text, ...]
    outer: tuple[Text, ...]
    simple: Simple
    conditions: tuple[Guard, ...]
    loops: tuple[tuple[str, int, str], ...]
    callers: tuple[int, ...]
    environment: dict[str, Text]
    written: dict[str, Text]
    is_captured: bool


@dataclass(slots=True, kw_only=True)
class Session:
    """One evaluation of a script.

    ``run`` evaluates a script in a state. ``parked`` are, for each running function or loop, states
    that left it early under a condition that is not known. ``tests`` counts the conditions that are
    being evaluated, ``asks`` those of ``if`` and ``while`` among them, ``assumed`` is what the last
    condition rests on. ``facts`` are values that a header for the queue gives, with a note.
    ``missing`` are files that a script reads and that are not at hand, ``started_scripts`` scripts
    that it starts. ``absent`` are placeholders of variables that nobody sets, with their names,
    ``filled`` those of variables that surely have a value.
    """

    source: Source
    run: Callable[[Script, State], None]
    files: list[str] = field(default_factory=list)
    conditions: list[Guard] = field(default_factory=list)
    loops: list[tuple[str, int, str]] = field(default_factory=list)
    callers: list[int] = field(default_factory=list)
    outer: tuple[Text, ...] = ()
    captures: int = 0
    started: list[Started] = field(default_factory=list)
    exits: list[tuple[int, tuple[Guard, ...]]] = field(default_factory=list)
    parked: list[tuple[str, list[tuple[State, Unknown]]]] = field(default_factory=list)
    unknowns: list[Unknown] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)
    assigned: dict[str, int] = field(default_factory=dict)
    mentioned: set[str] = field(default_factory=set)
    missing: list[tuple[int, str]] = field(default_factory=list)
    facts: dict[str, tuple[str, str]] = field(default_factory=dict)
    assumed: frozenset[str] = frozenset()
    tests: int = 0
    asks: int = 0
    started_scripts: list[tuple[int, str]] = field(default_factory=list)
    running: list[tuple[str, ...]] = field(default_factory=list)
    steps: int = 0

    def spend(self, line: int, size: int = 0) -> None:
        """Count a step of the evaluation."""
        self.steps += 1 + size // 256
        if self.steps > _STEPS:
            message = "the script takes too many steps to follow: give the launch line alone"
            raise StepsError(line, message)

    def enter(self, line: int) -> None:
        """Count a call of a function or of another script."""
        self.callers.append(line)
        if len(self.callers) > _DEEPEST:
            raise LineError(line, f"calls are nested deeper than {_DEEPEST} levels: call fewer")

    def unknown(self, unknown: Unknown) -> Text:
        """A text of one unknown part."""
        if unknown in self.unknowns[-20:]:
            number = self.unknowns.index(unknown)
        else:
            number = len(self.unknowns)
            self.unknowns.append(unknown)
        if FIRST_PLACEHOLDER + number > LAST_PLACEHOLDER:
            raise LineError(unknown.line, "too much is unknown: give the launch line alone")
        return plain(chr(FIRST_PLACEHOLDER + number), unknown.line)

    def first_unknown(self, *texts: Text) -> Unknown | None:
        """What is unknown in texts, None where all is known."""
        for text in texts:
            if not text.is_known:
                letter = next(filter(_is_placeholder, text.chars))
                return self.unknowns[ord(letter) - FIRST_PLACEHOLDER]
        return None

    def rendered(self, text: Text) -> str:
        """The characters of a text, with unknown parts as the script writes them."""
        if text.is_known:
            return text.chars
        return "".join(
            self.unknowns[ord(letter) - FIRST_PLACEHOLDER].expression
            if _is_placeholder(letter)
            else letter
            for letter in text.chars
        )

    def rendered_in_file(self, text: Text) -> str:
        """A file's characters; unknown parts stand without quotes, which would end a text of it."""
        if text.is_known:
            return text.chars
        return "".join(
            re.sub(r"[\"'\\\n]", "", self.rendered(plain(letter)))
            if _is_placeholder(letter)
            else letter
            for letter in text.chars
        )

    def word(self, text: Text) -> Word:
        """A text as a word of a command."""
        line, file = self.place(text.line)
        unknown = self.first_unknown(text)
        return Word(text=self.rendered(text), line=line, unknown=unknown, file=file)

    def place(self, line: int) -> tuple[int, str]:
        """A line's number in its file, and the file's name where it is not the first one."""
        number, line = divmod(line, FILE)
        return line, self.files[number] if number else ""

    def at(self, line: int) -> str:
        """How a line is told to the user."""
        number, file = self.place(line)
        return f"line {number} of {file}" if file else f"line {number}"

    def unknown_at(
        self,
        line: int,
        expression: str,
        reason: str,
        remedy: str = "",
        either: tuple[str, ...] = (),
    ) -> Text:
        """A text of one unknown part, told at its line."""
        number, file = self.place(line)
        return self.unknown(
            Unknown(
                expression=expression,
                line=number,
                file=file,
                reason=reason,
                remedy=remedy,
                either=either,
            )
        )
