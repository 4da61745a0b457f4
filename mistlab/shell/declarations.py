"""The builtins that declare variables: ``export``, ``declare``, ``local``, ``unset`` and others."""

import re
from collections.abc import Sequence
from dataclasses import replace

from mistlab.shell.dollar_values import key_of
from mistlab.shell.expansion import Words
from mistlab.shell.integers import NotKnownError
from mistlab.shell.shell_text import LineError, Text, joined, plain
from mistlab.shell.state import Key, Variable, scalar
from mistlab.shell.syntax import Assignment, RawWord
from mistlab.shell.variables import append, assign, assign_all

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL | re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def run_assignment(words: Words, item: Assignment, *, is_map: bool = False) -> None:
    """Carry out an assignment."""
    session, state = words.session, words.state
    if isinstance(item.value, tuple):
        _assign_list(words, item, is_map=is_map)
        return
    text = words.text(item.value)
    old = state.variables.get(item.name)
    if old is not None and old.is_integer:
        _assign_number(words, item, old, text)
        return
    key: Key | None = None
    if item.subscript is not None:
        index = key_of(words, item.name, item.subscript)
        if isinstance(index, Text):
            message = f"{item.name}[{item.subscript.source}]: its index is not known"
            raise LineError(item.line, f"{message}: {session.first_unknown(index)}")
        key = index
    (append if item.appends else assign)(session, state, item.name, text, key)


def _assign_number(words: Words, item: Assignment, old: Variable, text: Text) -> None:
    """An assignment to a variable of ``declare -i``."""
    try:
        number = words.number_in(text.chars, item.line)
        if item.appends and old.text is not None:
            number += words.number_in(old.text.chars, item.line)
        text = plain(str(number), item.line).assuming(text.assumed)
    except NotKnownError as error:
        unknown = error.unknown
        text = words.session.unknown_at(item.line, f"${item.name}", unknown.reason, unknown.remedy)
    assign(words.session, words.state, item.name, text)


def _assign_list(words: Words, item: Assignment, *, is_map: bool) -> None:
    assert isinstance(item.value, tuple)
    session, state = words.session, words.state
    old = state.variables.get(item.name)
    is_map = is_map or (old is not None and old.is_map)
    items: dict[Key, Text] = dict(old.items) if old is not None and item.appends else {}
    index = max((int(key) for key in items), default=-1) + 1 if not is_map else 0
    for element in item.value:
        if element.key is not None:
            key = words.text(element.key).chars if is_map else key_of(words, item.name, element.key)
            if isinstance(key, Text):
                message = f"{item.name}: an index is not known: {session.first_unknown(key)}"
                raise LineError(item.line, message)
            items[key] = words.text(element.value)
            index = int(key) + 1 if not is_map else 0
            continue
        for text in words.fields([element.value]):
            items[index] = text
            index += 1
    assign_all(session, state, item.name, items, is_map=is_map)


def run_declaration(words: Words, program: str, items: Sequence[RawWord | Assignment]) -> int:
    """Carry out ``export``, ``declare``, ``typeset``, ``local`` or ``readonly``."""
    options = ""
    for item in items:
        if isinstance(item, Assignment):
            _declare(words, program, options, item.name, item)
            continue
        for text in words.fields([item]):
            if re.fullmatch(r"[-+][a-zA-Z]+", text.chars):
                options += text.chars.lstrip("-") if text.chars[0] == "-" else ""
            elif _NAME.fullmatch(text.chars):
                _declare(words, program, options, text.chars, None)
            elif match := _ASSIGNED.fullmatch(text.chars):
                _declare(words, program, options, match[1], None)
                value = text.part(match.start(3))
                act = append if match[2] else assign
                act(words.session, words.state, match[1], value)
    return 0


def _declare(words: Words, program: str, options: str, name: str, item: Assignment | None) -> None:
    session, state = words.session, words.state
    session.mentioned.add(name)
    is_local = program == "local" or (program in ("declare", "typeset") and "g" not in options)
    is_given = name in session.source.settings
    before = state.variables.get(name)
    text: Text | None = None
    if is_local and state.frames and not is_given:
        if item is not None and isinstance(item.value, RawWord) and item.subscript is None:
            # The value is of before: local x=$x.
            text = words.text(item.value)
        state.hide(name)
        if before is not None:
            kept = scalar(Text()) if item is None else None
            state.variables.pop(name, None)
            if kept is None and item is not None and item.appends:
                state.variables[name] = before
    _mark(words, name, options, program)
    if item is not None:
        if text is not None and "i" not in options:
            (append if item.appends else assign)(session, state, name, text)
        else:
            run_assignment(words, item, is_map="A" in options)
        _mark(words, name, options, program)


def _mark(words: Words, name: str, options: str, program: str) -> None:
    """Give a variable the attributes of its declaration."""
    state = words.state
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


def run_unset(words: Words, arguments: Sequence[Text]) -> int:
    """Carry out ``unset``."""
    state = words.state
    for text in arguments:
        name, _, key = text.chars.partition("[")
        if name in words.session.source.settings:
            continue
        if not key:
            state.variables.pop(name, None)
            if not text.chars.startswith("-"):
                state.functions.pop(name, None)
            # What is unset is empty from here on.
            words.session.assigned.setdefault(name, 0)
            words.session.assigned[name] = 0
        elif (old := state.variables.get(name)) is not None:
            at: Key = key.rstrip("]") if old.is_map else words.number_in(key.rstrip("]"), text.line)
            items = {index: value for index, value in old.items.items() if index != at}
            state.variables[name] = replace(old, items=items)
    return 0


def assigned_texts(words: Words, items: Sequence[Assignment]) -> dict[str, Text]:
    """Assignments before a command, which hold for the command alone."""
    texts: dict[str, Text] = {}
    for item in items:
        if isinstance(item.value, tuple):
            continue
        text = words.text(item.value)
        old = words.state.variables.get(item.name)
        if item.appends and old is not None and old.text is not None:
            text = joined((old.text, text))
        given = words.session.source.settings.get(item.name)
        words.session.mentioned.add(item.name)
        texts[item.name] = text if given is None else plain(given)
    return texts
