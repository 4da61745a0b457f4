"""The builtins of the shell that change what a launch is."""

import re
from collections.abc import Callable, Mapping
from posixpath import join, normpath

from mistlab.shell.call import Call
from mistlab.shell.conditions import Maybe, Tester
from mistlab.shell.declarations import run_unset
from mistlab.shell.getopts import run_getopts
from mistlab.shell.integers import NotKnownError
from mistlab.shell.output import echoed, printed
from mistlab.shell.pieces import separators
from mistlab.shell.scripts import evaluated, sourced
from mistlab.shell.shell_text import Text, joined, plain
from mistlab.shell.state import BREAK, CONTINUE, EXIT, RETURN, Status, scalar
from mistlab.shell.variables import assign, assign_all, knows_arguments
from mistlab.shell.word import Unknown

Builtin = Callable[[Call], Status]
_OPTIONS = {"e": "errexit", "a": "allexport"}
# Files that set up a machine, and no options of a training.
_OF_MACHINES = re.compile(
    r"activate|bashrc|bash_profile|profile|conda\.sh|/etc/|setvars|set_env\.sh|modules?\b|venv|/init/"
    r"|\.cargo|\.env$|vars\.sh"
)


def _status(value: Maybe) -> Status:
    return value if isinstance(value, Unknown) else int(not value)


def _true(_: Call) -> Status:
    return 0


def _false(_: Call) -> Status:
    return 1


def _bracket(call: Call) -> Status:
    arguments = call.arguments
    if call.program == "[":
        arguments = arguments[:-1] if arguments and arguments[-1].chars == "]" else arguments
    return _status(Tester(call.words, call.line).plain(arguments))


def _echo(call: Call) -> Status:
    call.state.print(echoed(call.arguments))
    return 0


def _printf(call: Call) -> Status:
    arguments, name = call.arguments, ""
    if len(arguments) > 1 and arguments[0].chars == "-v":
        name, arguments = arguments[1].chars, arguments[2:]
    if arguments and arguments[0].chars == "--":
        arguments = arguments[1:]

    def number(text: Text) -> int:
        return call.words.number_in(text.chars, call.line)

    text = printed(call.session, arguments, call.line, number)
    if name:
        assign(call.session, call.state, name, text)
    else:
        call.state.print(text)
    return 0


def _exit(call: Call) -> Status:
    call.session.exits.append((call.line, tuple(call.session.conditions)))
    call.state.flow = EXIT
    return _given_status(call)


def _given_status(call: Call) -> Status:
    if not call.arguments:
        return call.state.status
    unknown = call.session.first_unknown(call.arguments[0])
    text = call.arguments[0].chars
    return unknown or (int(text) % 256 if text.isdecimal() and len(text) < 9 else 2)


def _return(call: Call) -> Status:
    call.state.flow = RETURN
    return _given_status(call)


def _leave(call: Call) -> Status:
    text = call.arguments[0].chars if call.arguments else "1"
    if any(kind == "loop" for kind, _ in call.session.parked):
        call.state.flow = BREAK if call.program == "break" else CONTINUE
        call.state.levels = int(text) if text.isdecimal() and len(text) < 4 else 1
    return 0


def _shift(call: Call) -> Status:
    state = call.state
    text = call.arguments[0] if call.arguments else plain("1")
    number = call.words.number_in(text.chars, call.line)
    if unknown := call.session.first_unknown(*state.arguments[:number]):
        # What is shifted away may be several arguments, or none.
        reason, remedy = unknown.reason, unknown.remedy
        state.arguments = (call.session.unknown_at(call.line, '"$@"', reason, remedy),)
        return 0
    if number > len(state.arguments):
        return int(knows_arguments(call.session, state))
    state.arguments = state.arguments[number:]
    state.options |= {"arguments"}
    return 0


def _set(call: Call) -> Status:
    state, arguments = call.state, list(call.arguments)
    while arguments:
        text = arguments[0].chars
        if text in ("--", "-") or not re.fullmatch(r"[-+][a-zA-Z]+", text):
            break
        arguments.pop(0)
        letters = {_OPTIONS[letter] for letter in text[1:] if letter in _OPTIONS}
        if text.endswith("o") and arguments:
            letters.add(arguments.pop(0).chars)
        state.options = state.options | letters if text[0] == "-" else state.options - letters
    if arguments:
        is_end = arguments[0].chars in ("--", "-")
        state.arguments = tuple(arguments[1:] if is_end else arguments)
        state.options |= {"arguments"}
    return 0


def _unset(call: Call) -> Status:
    return run_unset(call.words, call.arguments)


def _eval(call: Call) -> Status:
    evaluated(call, joined(call.arguments, " "))
    return call.state.status


def _source(call: Call) -> Status:
    if not call.arguments:
        return 1
    if sourced(call) is None:
        path = call.session.rendered(call.arguments[0])
        if not _OF_MACHINES.search(path):
            call.session.missing.append((call.line, path))
        return 0
    return call.state.status


def _let(call: Call) -> Status:
    value = 0
    try:
        for text in call.arguments:
            value = call.words.number_in(text.chars, call.line)
    except NotKnownError as error:
        return error.unknown
    return int(value == 0)


def _read(call: Call) -> Status:
    """``read``: the next line of the input, split among names."""
    names, array, delimiter = _read_options(call)
    state = call.state
    if state.input is None:
        text = call.session.unknown_at(call.line, "read", "asks someone at a terminal")
    else:
        text = state.input
    stop = text.chars.find(delimiter) if delimiter else -1
    line = text.part(0, stop) if stop >= 0 else text
    unknown = call.session.first_unknown(line)
    if state.input is not None and unknown is None:
        state.input = text.part(stop + 1) if stop >= 0 else Text()
    fields = _fields(line, 0 if array else len(names), separators(state))
    if array:
        assign_all(call.session, state, array, dict(enumerate(fields)))
    for number, name in enumerate(names if not array else []):
        value = fields[number] if number < len(fields) else Text()
        if unknown is not None:
            reason, remedy = unknown.reason, f"give --set {name}=VALUE"
            value = call.session.unknown_at(call.line, f"${name}", reason, remedy)
        assign(call.session, state, name, value)
    return unknown or int(stop < 0)


def _read_options(call: Call) -> tuple[list[str], str, str]:
    names, array, delimiter = list[str](), "", "\n"
    rest = call.plain_arguments
    while rest:
        text = rest.pop(0)
        if not text.startswith("-"):
            names.append(text)
        elif text[-1] in "adnNptui" and rest:
            value = rest.pop(0)
            array = value if text[-1] == "a" else array
            delimiter = value[:1] if text[-1] == "d" else delimiter
    return names or ["REPLY"], array, delimiter


def _fields(line: Text, most: int, ends: str) -> list[Text]:
    """A line's fields; the last of ``most`` is all that is left."""
    fields, at, chars = list[Text](), 0, line.chars.rstrip("".join(set(ends) & set(" \t\n")))
    while at < len(chars):
        while at < len(chars) and chars[at] in ends and chars[at] in " \t\n":
            at += 1
        if at >= len(chars):
            break
        stop = at
        while stop < len(chars) and (chars[stop] not in ends or len(fields) == most - 1):
            stop += 1
        fields.append(line.part(at, stop))
        at = stop + 1
    return fields


def _mapfile(call: Call) -> Status:
    arguments = call.plain_arguments
    name = arguments[-1] if arguments and not arguments[-1].startswith("-") else "MAPFILE"
    text = call.state.input
    if text is None or not text.is_known:
        unknown = call.session.unknown_at(call.line, f"${{{name}[@]}}", "is read from a program")
        assign_all(call.session, call.state, name, {0: unknown})
        return 0
    lines, at = dict[int | str, Text](), 0
    for number, line in enumerate(text.chars.splitlines(keepends=True)):
        kept = line.rstrip("\n") if "-t" in arguments else line
        lines[number] = text.part(at, at + len(kept))
        at += len(line)
    assign_all(call.session, call.state, name, lines)
    return 0


def _getopts(call: Call) -> Status:
    return run_getopts(call)


def _cd(call: Call) -> Status:
    """``cd``: a folder whose path is known, mostly the script's own."""
    state = call.state
    paths = [text for text in call.arguments if not text.chars.startswith("-")]
    folder = paths[0] if len(paths) == 1 and paths[0].is_known and paths[0].chars else None
    if folder is not None:
        inside = state.folder.chars if state.folder is not None else ""
        folder = folder.with_chars(normpath(join(inside, folder.chars)))
        state.variables["PWD"] = scalar(folder, exported=True)
    elif state.folder is not None:
        state.variables.pop("PWD", None)
    state.folder = folder
    return 0


def _pwd(call: Call) -> Status:
    """``pwd``: the folder that the script has entered; unknown where it was started from."""
    text = call.state.folder
    if text is None:
        text = call.session.unknown_at(call.line, "$(pwd)", "is known only where the script runs")
    call.state.print(text.with_chars(f"{text.chars}\n"))
    return 0


_NO_EFFECT = """
    pushd popd trap wait ulimit umask shopt alias unalias hash jobs kill disown times bg fg
    history bind complete suspend logout dirs enable caller
"""
BUILTINS: Mapping[str, Builtin] = {
    **dict.fromkeys(_NO_EFFECT.split(), _true),
    ":": _true,
    "cd": _cd,
    "true": _true,
    "false": _false,
    "[": _bracket,
    "test": _bracket,
    "echo": _echo,
    "printf": _printf,
    "exit": _exit,
    "return": _return,
    "let": _let,
    "break": _leave,
    "continue": _leave,
    "shift": _shift,
    "set": _set,
    "unset": _unset,
    "eval": _eval,
    "source": _source,
    ".": _source,
    "read": _read,
    "pwd": _pwd,
    "mapfile": _mapfile,
    "readarray": _mapfile,
    "getopts": _getopts,
}
