"""Reads and assigns variables: given ones win, and those that nobody sets are unknown."""

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

from mistlab.shell.session import Session
from mistlab.shell.shell_text import Text, joined, plain
from mistlab.shell.state import Key, State, Variable, scalar
from mistlab.shell.word import Unknown

# Every shell has these, with values of its own.
ALWAYS_SET = frozenset(
    [
        "HOME",
        "PATH",
        "PWD",
        "OLDPWD",
        "USER",
        "LOGNAME",
        "HOSTNAME",
        "SHELL",
        "LANG",
        "TMPDIR",
        "UID",
        "EUID",
        "RANDOM",
        "SECONDS",
        "PPID",
        "HOSTTYPE",
        "OSTYPE",
        "BASH",
        "BASHPID",
        "BASH_VERSION",
        "EPOCHSECONDS",
        "LINENO",
        "SHLVL",
        "TERM",
        "COLUMNS",
    ]
)


class Absence(Enum):
    """Why a variable has no value."""

    EMPTY = "the script leaves it without a value"
    UNSET = "neither the script nor the user sets it"


def given(text: str) -> Text:
    """A text that the user gives."""
    return plain(text)


def value_of(session: Session, state: State, name: str, line: int) -> Text | Absence:
    """The value of ``$name``."""
    session.mentioned.add(name)
    variable = state.variables.get(name)
    if variable is not None:
        text = variable.text
        return Absence.EMPTY if text is None else text
    return absence_of(session, name, line)


def absence_of(session: Session, name: str, line: int) -> Text | Absence:
    """Why a variable is not set; an unknown text for those that a shell or a job always has."""
    remedy = f"give --set {name}=VALUE"
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
    """The unknown value of a variable that nobody sets."""
    reason = "is not set in the script"
    if session.missing:
        at, path = session.missing[-1]
        reason += f" ({path}, which {session.at(at)} reads, is not at hand)"
    text = session.unknown_at(line, source, reason, f"give --set {name}=VALUE")
    session.absent[text.chars] = name
    return text


def taken_as(session: Session, name: str, line: int, taken: str) -> frozenset[str]:
    """The note on a variable that is taken for granted."""
    return frozenset((f"{session.at(line)}: {name} is taken as {taken}: --set {name}=VALUE",))


def assign(session: Session, state: State, name: str, text: Text, key: Key | None = None) -> None:
    """Give a variable a value; values that the user gives win."""
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
    """Give an array its values."""
    session.mentioned.add(name)
    if name in session.source.settings:
        return
    session.spend(0, 8 * len(items))
    old = state.variables.get(name)
    is_map = is_map or (old is not None and old.is_map)
    made = {key: named(session, name, text) for key, text in items.items()}
    exported = old is not None and old.exported
    state.variables[name] = Variable(
        items=made, is_list=not is_map, is_map=is_map, exported=exported
    )


def append(session: Session, state: State, name: str, text: Text, key: Key | None = None) -> None:
    """Lengthen a variable's value."""
    old = state.variables.get(name)
    at: Key = key if key is not None else ("0" if old is not None and old.is_map else 0)
    before = old.items.get(at) if old is not None else None
    assign(session, state, name, joined((before, text)) if before else text, key)


def named(session: Session, name: str, text: Text) -> Text:
    """The text, where its unknown part gets a remedy from the variable that it is assigned to."""
    unknown = session.first_unknown(text)
    if unknown is None or unknown.remedy:
        return text
    better = session.unknown(replace(unknown, remedy=f"give --set {name}=VALUE"))
    old = next(letter for letter in text.chars if session.first_unknown(Text(letter)) == unknown)
    return Text(text.chars.replace(old, better.chars), text.marks, text.assumed)


def argument_of(session: Session, state: State, number: int, line: int) -> Text | Absence:
    """The value of ``$1``, ``$2``, ...; ``$0`` is the script's name."""
    if number == 0:
        if state.name is not None:
            return state.name
        name = session.source.name
        return plain(name, line) if name else unknown_path(session, line)
    if number <= len(state.arguments):
        return state.arguments[number - 1]
    return Absence.EMPTY if knows_arguments(session, state) else Absence.UNSET


def unknown_path(session: Session, line: int) -> Text:
    """The unknown path of the script itself."""
    return session.unknown_at(line, "$0", "is the script's path, which is not known")


def knows_arguments(session: Session, state: State) -> bool:
    """Whether ``$1`` and others are those of a call, of ``set --`` or of the user."""
    if session.source.arguments is not None or session.callers or state.arguments:
        return True
    return "arguments" in state.options


def unset_argument(session: Session, number: int, source: str, line: int) -> Text:
    """The unknown value of an argument that the user does not give."""
    remedy = "give its arguments after --: -- " + " ".join(
        f"ARG{each}" for each in range(1, min(number, 9) + 1)
    )
    text = session.unknown_at(line, source, "is an argument of the script", remedy)
    session.absent[text.chars] = f"${number}"
    return text


def without_arguments(session: Session, line: int, source: str) -> frozenset[str]:
    """The note on a script that is taken as started without arguments."""
    where = f"{session.at(line)}: {source}"
    note = f"{where}: the script is taken as started without arguments: -- ARG1 ..."
    return frozenset((note,))


def unknown_of(unknown: Unknown, expression: str) -> Unknown:
    """The same lack of knowledge, of another expression."""
    return replace(unknown, expression=expression, either=())
