"""Holds the evaluation of a script: its text, the user's variables, and how many steps are left."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from mistlab.shell.shell_text import (
    FIRST_PLACEHOLDER,
    LAST_PLACEHOLDER,
    LAUNCH_LINE_ALONE,
    LineError,
    Text,
    Unknown,
    Word,
    joined,
    plain,
    remedy_of,
)
from mistlab.shell.shell_text import is_placeholder as _is_placeholder
from mistlab.shell.syntax import Command, Script, Simple


def nothing_beside(path: str) -> None:
    """Return None for every path: the loader of files for a text that is in no folder."""
    del path


# Matches a folder at the start of a path that is known only when the script runs.
_UNKNOWN_FOLDER = re.compile(r"^(?:`[^`]*`|\$\([^()]*\)|\$\{?\w+\}?)/")


def known_part(path: str) -> str:
    """Return a path without leading folders that are known only when the script runs.

    >>> known_part("$(pwd)/configs/ds.json")
    'configs/ds.json'
    """
    return _UNKNOWN_FOLDER.sub("", path)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFile:
    """The text of a launch script or configuration file to import, and a function that loads files
    to which it refers.

    ``name`` is the file's path. ``beside`` returns the text of another file for its path as this
    file writes it, or None if there is no such file. ``settings`` are values that the user gives to
    variables (``--set NAME=value``); they replace the values in the file. ``arguments`` are the
    script's arguments (``$1``, ``$2``, ...), None if the user gives none. ``line`` is the line of
    the command to import if the script starts several (``--line``), None if the user gives none.
    """

    text: str
    name: str = ""
    beside: Callable[[str], str | None] = nothing_beside
    settings: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] | None = None
    line: int | None = None


# The state of a script between two commands: variables, arguments, files and output.


Key = int | str
# How a command ends: normally, or by a jump out of a loop, a function or the script.
NORMAL, BREAK, CONTINUE, RETURN, EXIT = "", "break", "continue", "return", "exit"
Status = int | Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A shell variable with its values by index or key; if it is no array, it has only index 0."""

    items: Mapping[Key, Text]
    is_list: bool = False
    is_map: bool = False
    is_integer: bool = False
    exported: bool = False

    @property
    def text(self) -> Text | None:
        """The value that ``$name`` has: for an array, that of its element 0."""
        return self.items.get("0" if self.is_map else 0)

    @property
    def values(self) -> list[Text]:
        """All values of the shell variable, in the order of indices."""
        if self.is_map:
            return list(self.items.values())
        return [self.items[key] for key in sorted(self.items, key=int)]

    @property
    def line(self) -> int:
        """The script line that wrote the shell variable's first value, 0 if no line did."""
        return next((text.line for text in self.items.values()), 0)

    def is_same(self, other: "Variable | None") -> bool:
        """Whether another variable has the same values, whichever lines wrote them."""
        if other is None or self.items.keys() != other.items.keys():
            return False
        return all(text.chars == other.items[key].chars for key, text in self.items.items())

    def assuming(self, notes: frozenset[str]) -> "Variable":
        """Return a copy of the variable whose values depend on further assumptions."""
        return replace(self, items={key: each.assuming(notes) for key, each in self.items.items()})

    @property
    def keys(self) -> list[Key]:
        """All indices or keys of the shell variable, in order."""
        return list(self.items) if self.is_map else sorted(self.items, key=int)


def scalar(text: Text, *, exported: bool = False) -> Variable:
    """Make a variable with a single value, at index 0."""
    return Variable(items={0: text}, exported=exported)


@dataclass(slots=True, kw_only=True)
class State:
    """What the commands of a script can read and change: variables, arguments, files and output.

    ``name`` is the script's own name (``$0``). ``frames`` has an entry for each running function:
    the values that the function's local variables hide. ``written`` holds the files that the script
    wrote, by path. ``output`` is what was printed so far if a command reads it, else None.
    ``folder`` is the folder that the script has changed to, if its path is known; None in the
    folder where the script was started.
    """

    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Command] = field(default_factory=dict)
    name: Text | None = None
    arguments: tuple[Text, ...] = ()
    frames: tuple[dict[str, Variable | None], ...] = ()
    options: frozenset[str] = frozenset()
    written: dict[str, Text] = field(default_factory=dict)
    output: Text | None = None
    input: Text | None = None
    folder: Text | None = None
    status: Status = 0
    flow: str = NORMAL
    levels: int = 0

    def copy(self) -> "State":
        """Return a copy of the state that can be changed independently."""
        made = replace(self)
        made.variables = dict(self.variables)
        made.functions = dict(self.functions)
        made.frames = tuple(dict(frame) for frame in self.frames)
        made.written = dict(self.written)
        return made

    def take(self, other: "State") -> None:
        """Replace this evaluation state (variables, commands and so on) by another one."""
        for name in State.__slots__:
            setattr(self, name, getattr(other, name))

    def print(self, text: Text) -> None:
        """Append text to the script's output, unless nothing reads the output."""
        if self.output is not None:
            self.output = joined((self.output, text))

    def hide(self, name: str) -> None:
        """Make a variable local to the shell function that is running."""
        if self.frames and name not in self.frames[-1]:
            self.frames[-1][name] = self.variables.get(name)

    def restore(self, before: Mapping[str, Variable | None]) -> None:
        """Give variables their previous values back; None unsets a variable."""
        for name, variable in before.items():
            if variable is None:
                self.variables.pop(name, None)
            else:
                self.variables[name] = variable


# Holds what an evaluation needs besides the script's state: the user's values, unknown parts, and
# how many steps are left.


# Added to the line numbers of further files of a script, so that lines of different files have
# different numbers.
FILE = 10_000_000
_STEPS = 60_000
_DEEPEST = 25


class StepsError(LineError):
    """Raised if the evaluation of a script takes too many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A condition under which commands run; ``cause`` says why it is unknown whether it holds, None
    if it is known.
    """

    line: int
    source: str
    cause: Unknown | None = None
    assumed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A command of the script that may start training.

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
    """One evaluation of a script: the user's values, the unknown parts, and the commands that were
    started.

    ``run`` evaluates a script in a state. ``parked`` has an entry for each running function or
    loop: the states in which it was left early, under conditions that are not known. ``tests`` is
    the number of conditions that are being evaluated, ``asks`` the number of those that belong to
    ``if`` or ``while``. ``assumed`` holds the assumptions on which the last condition rests.

    ``facts`` are values of variables that the header for the job queue implies, each with a note.
    ``missing`` are files that the script reads and that were not found, ``started_scripts`` the
    scripts that it starts. ``absent`` maps the placeholders of variables that nobody sets to their
    names. ``filled`` holds the placeholders of variables that surely have a value.
    """

    source: LaunchFile
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
        """Count steps of the evaluation, and end it if there are too many."""
        self.steps += 1 + size // 256
        if self.steps > _STEPS:
            message = f"the script takes too many steps to follow: {LAUNCH_LINE_ALONE}"
            raise StepsError(line, message)

    def enter(self, line: int) -> None:
        """Count a call of a function or another script; refuses calls that are nested too deep."""
        self.callers.append(line)
        if len(self.callers) > _DEEPEST:
            raise LineError(line, f"calls are nested deeper than {_DEEPEST} levels: call fewer")

    def unknown(self, unknown: Unknown) -> Text:
        """Make a text that consists of one unknown part."""
        if unknown in self.unknowns[-20:]:
            number = self.unknowns.index(unknown)
        else:
            number = len(self.unknowns)
            self.unknowns.append(unknown)
        if FIRST_PLACEHOLDER + number > LAST_PLACEHOLDER:
            message = f"too many values of the script are unknown: {LAUNCH_LINE_ALONE}"
            raise LineError(unknown.line, message)
        return plain(chr(FIRST_PLACEHOLDER + number), unknown.line)

    def first_unknown(self, *texts: Text) -> Unknown | None:
        """Return the first unknown part in some texts, or None if all of them are known."""
        for text in texts:
            if not text.is_known:
                letter = next(filter(_is_placeholder, text.chars))
                return self.unknowns[ord(letter) - FIRST_PLACEHOLDER]
        return None

    def rendered(self, text: Text) -> str:
        """Return a text as a string; unknown parts appear as the script writes them."""
        if text.is_known:
            return text.chars
        return "".join(
            self.unknowns[ord(letter) - FIRST_PLACEHOLDER].expression
            if _is_placeholder(letter)
            else letter
            for letter in text.chars
        )

    def rendered_in_file(self, text: Text) -> str:
        """Return a file's text as a string; unknown parts appear without quotes, which would end a
        string in the file.
        """
        if text.is_known:
            return text.chars
        return "".join(
            re.sub(r"[\"'\\\n]", "", self.rendered(plain(letter)))
            if _is_placeholder(letter)
            else letter
            for letter in text.chars
        )

    def word(self, text: Text) -> Word:
        """Make a word of a command, as options and messages use it, from a text."""
        line, file = self.place(text.line)
        unknown = self.first_unknown(text)
        return Word(text=self.rendered(text), line=line, unknown=unknown, file=file)

    def place(self, line: int) -> tuple[int, str]:
        """Return the line number in its file, and the file's name unless it is the script
        itself.
        """
        number, line = divmod(line, FILE)
        return line, self.files[number] if number else ""

    def at(self, line: int) -> str:
        """Describe a line for messages by its number, and by its file unless it is the script
        itself.
        """
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
        """Make a text that consists of one unknown part, with the script line that messages name
        for it.
        """
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


# Reads and assigns shell variables: values given by the user take precedence, and variables set
# nowhere are unknown.


# Variables that every shell sets: they have a value, which the script does not tell.
ALWAYS_SET = frozenset(
    (
        *("HOME", "PATH", "PWD", "OLDPWD", "USER", "LOGNAME", "HOSTNAME", "SHELL", "LANG"),
        *("TMPDIR", "UID", "EUID", "RANDOM", "SECONDS", "PPID", "HOSTTYPE", "OSTYPE", "BASH"),
        *("BASHPID", "BASH_VERSION", "EPOCHSECONDS", "LINENO", "SHLVL", "TERM", "COLUMNS"),
    )
)


class Absence(Enum):
    """Why a variable has no value."""

    EMPTY = "the script leaves it without a value"
    UNSET = "neither the script nor the user sets it"


def given(text: str) -> Text:
    """Make a text of the value that the user gave to a variable."""
    return plain(text)


def value_of(session: Session, state: State, name: str, line: int) -> Text | Absence:
    """Return the value of ``$name``, or the reason why it has none."""
    session.mentioned.add(name)
    variable = state.variables.get(name)
    if variable is not None:
        text = variable.text
        return Absence.EMPTY if text is None else text
    return absence_of(session, name, line)


def absence_of(session: Session, name: str, line: int) -> Text | Absence:
    """Return why a variable is unset, or an unknown text for a variable that every shell or job
    sets.
    """
    remedy = remedy_of(name)
    value, note = session.facts.get(name, ("", ""))
    if value:
        return plain(value, line).assuming(frozenset((note,)))
    if name in ALWAYS_SET or (name.startswith("SLURM_") and "SLURM_JOB_ID" in session.facts):
        reason = "is known only where the script runs"
        text = session.unknown_at(line, f"${name}", reason, remedy)
        session.filled.add(text.chars)
        return text
    first = session.assigned.get(name)
    if first is not None and (first < line or session.callers):
        return Absence.EMPTY
    return Absence.UNSET


def unset_text(session: Session, name: str, source: str, line: int) -> Text:
    """Return the unknown value of a variable that the script never sets."""
    reason = "is not set in the script"
    if session.missing:
        at, path = session.missing[-1]
        reason += f" ({path}, which {session.at(at)} reads, was not found)"
    text = session.unknown_at(line, source, reason, remedy_of(name))
    session.absent[text.chars] = name
    return text


def taken_as(session: Session, name: str, line: int, taken: str) -> frozenset[str]:
    """Return the note that says which value is assumed for a variable."""
    note = f"{session.at(line)}: {name} is taken as {taken}: --set {name}=VALUE gives another value"
    return frozenset((note,))


def assign(session: Session, state: State, name: str, text: Text, key: Key | None = None) -> None:
    """Assign a value to a variable, unless the user gave it one."""
    session.mentioned.add(name)
    if name in session.source.settings:
        return
    session.spend(text.line, len(text))
    text = named(session, name, text)
    old = state.variables.get(name)
    if old is None:
        made = scalar(text, exported="allexport" in state.options)
        if key is not None:
            made = Variable(items={key: text}, is_list=True)
    else:
        at: Key = key if key is not None else ("0" if old.is_map else 0)
        made = replace(old, items={**old.items, at: text}, is_list=old.is_list or key is not None)
    state.variables[name] = made


def assign_all(
    session: Session, state: State, name: str, items: Mapping[Key, Text], *, is_map: bool = False
) -> None:
    """Assign values to a shell array."""
    session.mentioned.add(name)
    if name in session.source.settings:
        return
    line = max((text.line for text in items.values()), default=0)
    session.spend(line, 128 * len(items))
    old = state.variables.get(name)
    is_map = is_map or (old is not None and old.is_map)
    made = {key: named(session, name, text) for key, text in items.items()}
    exported = old is not None and old.exported
    state.variables[name] = Variable(
        items=made, is_list=not is_map, is_map=is_map, exported=exported
    )


def append(session: Session, state: State, name: str, text: Text, key: Key | None = None) -> None:
    """Append a text to a variable's value."""
    old = state.variables.get(name)
    at: Key = key if key is not None else ("0" if old is not None and old.is_map else 0)
    before = old.items.get(at) if old is not None else None
    assign(session, state, name, joined((before, text)) if before else text, key)


def named(session: Session, name: str, text: Text) -> Text:
    """Return a copy of a text whose unknown part, in error messages, recommends to set the assigned
    variable.
    """
    unknown = session.first_unknown(text)
    if unknown is None or unknown.remedy:
        return text
    better = session.unknown(replace(unknown, remedy=remedy_of(name)))
    old = next(letter for letter in text.chars if session.first_unknown(Text(letter)) == unknown)
    return Text(text.chars.replace(old, better.chars), text.marks, text.assumed)


def argument_of(session: Session, state: State, number: int, line: int) -> Text | Absence:
    """Return the value of an argument (``$1``, ``$2``, ...); ``$0`` is the script's name."""
    if number == 0:
        if state.name is not None:
            return state.name
        name = session.source.name
        return plain(name, line) if name else unknown_path(session, line)
    if number <= len(state.arguments):
        return state.arguments[number - 1]
    return Absence.EMPTY if knows_arguments(session, state) else Absence.UNSET


def unknown_path(session: Session, line: int) -> Text:
    """Return an unknown text for ``$0``, the path of the script."""
    return session.unknown_at(line, "$0", "is the script's path, which is not known")


def knows_arguments(session: Session, state: State) -> bool:
    """Return whether the script's arguments are known: from a call, from ``set --`` or from the
    user.
    """
    if session.source.arguments is not None or session.callers or state.arguments:
        return True
    return "arguments" in state.options


def unset_argument(session: Session, number: int, source: str, line: int) -> Text:
    """Return an unknown text for a script argument that the user did not give."""
    remedy = "give its arguments after --: -- " + " ".join(
        f"ARG{each}" for each in range(1, min(number, 9) + 1)
    )
    text = session.unknown_at(line, source, "is an argument of the script", remedy)
    session.absent[text.chars] = f"${number}"
    return text


def without_arguments(session: Session, line: int, source: str) -> frozenset[str]:
    """Return the note that the script is assumed to be started without arguments."""
    where = f"{session.at(line)}: {source}"
    note = f"{where}: the script is taken as started without arguments: give them by -- ARG1 ..."
    return frozenset((note,))
