"""The shell's builtin commands that declare variables or affect a launch of training."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from posixpath import join, normpath

from mistlab.shell.dollar_values import key_of, separators
from mistlab.shell.expansion import WordExpander
from mistlab.shell.integers import NotKnownError
from mistlab.shell.loops import Call, Maybe, Tester
from mistlab.shell.outside import echoed, printed
from mistlab.shell.programs import evaluated, sourced
from mistlab.shell.session import (
    BREAK,
    CONTINUE,
    EXIT,
    RETURN,
    Key,
    Status,
    Variable,
    append,
    assign,
    assign_all,
    knows_arguments,
    scalar,
)
from mistlab.shell.shell_text import LineError, Text, Unknown, joined, plain, remedy_of
from mistlab.shell.syntax import Assignment, RawWord

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL | re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def run_assignment(expander: WordExpander, item: Assignment, *, is_map: bool = False) -> None:
    """Run a command that consists of assignments only."""
    session, state = expander.session, expander.state
    if isinstance(item.value, tuple):
        _assign_list(expander, item, is_map=is_map)
        return
    text = expander.text(item.value)
    old = state.variables.get(item.name)
    if old is not None and old.is_integer:
        _assign_number(expander, item, old, text)
        return
    key: Key | None = None
    if item.subscript is not None:
        index = key_of(expander, item.name, item.subscript)
        if isinstance(index, Text):
            message = f"{item.name}[{item.subscript.source}]: its index is not known"
            raise LineError(item.line, f"{message}: {session.first_unknown(index)}")
        key = index
    (append if item.appends else assign)(session, state, item.name, text, key)


def _assign_number(expander: WordExpander, item: Assignment, old: Variable, text: Text) -> None:
    """Assign an arithmetic value to a variable that is declared as an integer (``declare -i``)."""
    try:
        number = expander.number_in(text.chars, item.line)
        if item.appends and old.text is not None:
            number += expander.number_in(old.text.chars, item.line)
        text = plain(str(number), item.line).assuming(text.assumed)
    except NotKnownError as error:
        unknown = error.unknown
        text = expander.session.unknown_at(
            item.line, f"${item.name}", unknown.reason, unknown.remedy
        )
    assign(expander.session, expander.state, item.name, text)


def _assign_list(expander: WordExpander, item: Assignment, *, is_map: bool) -> None:
    assert isinstance(item.value, tuple)
    session, state = expander.session, expander.state
    old = state.variables.get(item.name)
    is_map = is_map or (old is not None and old.is_map)
    items: dict[Key, Text] = dict(old.items) if old is not None and item.appends else {}
    index = max((int(key) for key in items), default=-1) + 1 if not is_map else 0
    for element in item.value:
        if element.key is not None:
            key = (
                expander.text(element.key).chars
                if is_map
                else key_of(expander, item.name, element.key)
            )
            if isinstance(key, Text):
                message = f"{item.name}: an index is not known: {session.first_unknown(key)}"
                raise LineError(item.line, message)
            items[key] = expander.text(element.value)
            index = int(key) + 1 if not is_map else 0
            continue
        for text in expander.fields([element.value]):
            items[index] = text
            index += 1
    assign_all(session, state, item.name, items, is_map=is_map)


def run_declaration(
    expander: WordExpander, program: str, items: Sequence[RawWord | Assignment]
) -> int:
    """Run ``export``, ``declare``, ``typeset``, ``local`` or ``readonly``."""
    options = ""
    for item in items:
        if isinstance(item, Assignment):
            _declare(expander, program, options, item.name, item)
            continue
        for text in expander.fields([item]):
            if re.fullmatch(r"[-+][a-zA-Z]+", text.chars):
                options += text.chars.lstrip("-") if text.chars[0] == "-" else ""
            elif _NAME.fullmatch(text.chars):
                _declare(expander, program, options, text.chars, None)
            elif match := _ASSIGNED.fullmatch(text.chars):
                _declare(expander, program, options, match[1], None)
                value = text.part(match.start(3))
                act = append if match[2] else assign
                act(expander.session, expander.state, match[1], value)
    return 0


def _declare(
    expander: WordExpander, program: str, options: str, name: str, item: Assignment | None
) -> None:
    session, state = expander.session, expander.state
    session.mentioned.add(name)
    is_local = program == "local" or (program in ("declare", "typeset") and "g" not in options)
    is_given = name in session.source.settings
    before = state.variables.get(name)
    text: Text | None = None
    if is_local and state.frames and not is_given:
        if item is not None and isinstance(item.value, RawWord) and item.subscript is None:
            # Expand the value before the variable is declared, as for ``local x=$x``.
            text = expander.text(item.value)
        state.hide(name)
        if before is not None:
            kept = scalar(Text()) if item is None else None
            state.variables.pop(name, None)
            if kept is None and item is not None and item.appends:
                state.variables[name] = before
    _mark(expander, name, options, program)
    if item is not None:
        if text is not None and "i" not in options:
            (append if item.appends else assign)(session, state, name, text)
        else:
            run_assignment(expander, item, is_map="A" in options)
        _mark(expander, name, options, program)


def _mark(expander: WordExpander, name: str, options: str, program: str) -> None:
    """Give a variable the attributes of its declaration, such as exported or integer."""
    state = expander.state
    old = state.variables.get(name)
    exports = program == "export" or "x" in options
    if old is None:
        if "A" in options or "a" in options:
            is_map = "A" in options
            old = Variable(items={}, is_map=is_map, is_list=not is_map)
        elif "i" in options:
            old = Variable(items={}, is_integer=True)
        else:
            return
    is_map = old.is_map or "A" in options
    state.variables[name] = replace(
        old,
        exported=old.exported or exports,
        is_map=is_map,
        is_integer=old.is_integer or "i" in options,
    )


def run_unset(expander: WordExpander, arguments: Sequence[Text]) -> int:
    """Run ``unset``."""
    state = expander.state
    for text in arguments:
        name, _, key = text.chars.partition("[")
        if name in expander.session.source.settings:
            continue
        if not key:
            state.variables.pop(name, None)
            if not text.chars.startswith("-"):
                state.functions.pop(name, None)
            # After ``unset`` the variable is empty rather than unknown, as if the script had
            # assigned it.
            expander.session.assigned.setdefault(name, 0)
            expander.session.assigned[name] = 0
        elif (old := state.variables.get(name)) is not None:
            at: Key = (
                key.rstrip("]") if old.is_map else expander.number_in(key.rstrip("]"), text.line)
            )
            items = {index: value for index, value in old.items.items() if index != at}
            state.variables[name] = replace(old, items=items)
    return 0


def assigned_texts(expander: WordExpander, items: Sequence[Assignment]) -> dict[str, Text]:
    """Return the values that ``A=1 command`` assigns while the command runs."""
    texts: dict[str, Text] = {}
    for item in items:
        if isinstance(item.value, tuple):
            continue
        text = expander.text(item.value)
        old = expander.state.variables.get(item.name)
        if item.appends and old is not None and old.text is not None:
            text = joined((old.text, text))
        given = expander.session.source.settings.get(item.name)
        expander.session.mentioned.add(item.name)
        texts[item.name] = text if given is None else plain(given)
    return texts


# The builtin ``getopts``, which parses a script's short options one at a time.


def run_getopts(call: Call) -> Status:
    """Parse the script's next option into a variable; ``OPTIND`` holds the position, ``OPTARG`` the
    option's value.
    """
    if len(call.arguments) < 2:
        return 2
    name = call.arguments[1].chars
    arguments = call.arguments[2:] or call.state.arguments
    if unknown := call.session.first_unknown(*arguments):
        return unknown
    index, inner = _position(call)
    current = arguments[index - 1] if 0 < index <= len(arguments) else Text()
    is_option = len(current) > 1 and current.chars[0] == "-"
    if not is_option or current.chars == "--":
        _assign(call, name, plain("?"))
        _place(call, index + (current.chars == "--"), 1)
        return 1
    return _option(call, name, arguments, (index, inner))


def _option(
    call: Call, name: str, arguments: tuple[Text, ...], position: tuple[int, int]
) -> Status:
    """Parse the option at an offset in an argument, which an index selects."""
    index, inner = position
    letters, current = call.arguments[0].chars, arguments[index - 1]
    letter = current.chars[inner]
    after = letters.partition(letter)[2] if letter != ":" and letter in letters else None
    rest = current.part(inner + 1)
    if after is None or not after.startswith(":"):
        _place(call, index if rest else index + 1, inner + 1 if rest else 1)
        return _take(call, name, letter if after is not None else "?", None)
    if rest:
        _place(call, index + 1, 1)
        return _take(call, name, letter, rest)
    _place(call, index + 2, 1)
    if index >= len(arguments):
        return _take(call, name, ":" if letters.startswith(":") else "?", plain(letter))
    return _take(call, name, letter, arguments[index])


def _position(call: Call) -> tuple[int, int]:
    variables = call.state.variables
    texts = [variables[each].text if each in variables else None for each in ("OPTIND", " OPTAT")]
    numbers = [int(text.chars) if text and text.chars.isdecimal() else 1 for text in texts]
    return numbers[0], numbers[1]


def _place(call: Call, index: int, inner: int) -> None:
    call.state.variables["OPTIND"] = scalar(plain(str(index)))
    call.state.variables[" OPTAT"] = scalar(plain(str(inner)))


def _assign(call: Call, name: str, text: Text) -> None:
    assign(call.session, call.state, name, text)


def _take(call: Call, name: str, letter: str, value: Text | None) -> Status:
    _assign(call, name, plain(letter, call.line))
    if value is None:
        call.state.variables.pop("OPTARG", None)
        call.session.assigned.setdefault("OPTARG", 0)
    else:
        _assign(call, "OPTARG", value)
    return 0


# The shell's builtin commands that affect a launch of training.


Builtin = Callable[[Call], Status]
_OPTIONS = {"e": "errexit", "a": "allexport"}
# Matches names of files that set up a machine, such as its modules, and hold no options of
# training.
_OF_MACHINES = re.compile(
    r"activate|bashrc|bash_profile|profile|conda\.sh|/etc/|setvars|set_env\.sh|modules?\b|venv|/init/"
    r"|\.cargo|\.env$|vars\.sh"
)


def _status(value: Maybe) -> Status:
    return value if isinstance(value, Unknown) else int(not value)


def _bracket(call: Call) -> Status:
    arguments = call.arguments
    if call.program == "[":
        arguments = arguments[:-1] if arguments and arguments[-1].chars == "]" else arguments
    return _status(Tester(call.expander, call.line).plain(arguments))


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
        return call.expander.number_in(text.chars, call.line)

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
    number = call.expander.number_in(text.chars, call.line)
    if unknown := call.session.first_unknown(*state.arguments[:number]):
        # An unknown argument may be several arguments or none, so it is unknown which ones
        # ``shift`` leaves.
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
            value = call.expander.number_in(text.chars, call.line)
    except NotKnownError as error:
        return error.unknown
    return int(value == 0)


def _read(call: Call) -> Status:
    """Run ``read``: assign the fields of the next input line to variables."""
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
            reason, remedy = unknown.reason, remedy_of(name)
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
    """Split a line into at most ``most`` fields; the last one takes the rest of the line."""
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


def _cd(call: Call) -> Status:
    """Run ``cd``: enter a folder with a known path, usually the script's own."""
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
    """Run ``pwd``: print the folder that the script has entered; the folder in which it starts is
    unknown.
    """
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
    **dict.fromkeys((*_NO_EFFECT.split(), ":", "true"), lambda _: 0),
    "cd": _cd,
    "false": lambda _: 1,
    **dict.fromkeys(("[", "test"), _bracket),
    "echo": _echo,
    "printf": _printf,
    "exit": _exit,
    "return": _return,
    "let": _let,
    **dict.fromkeys(("break", "continue"), _leave),
    "shift": _shift,
    "set": _set,
    "unset": lambda call: run_unset(call.expander, call.arguments),
    "eval": _eval,
    **dict.fromkeys(("source", "."), _source),
    "read": _read,
    "pwd": _pwd,
    **dict.fromkeys(("mapfile", "readarray"), _mapfile),
    "getopts": run_getopts,
}
