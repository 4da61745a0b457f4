"""Evaluates simple commands: assignments, functions, builtins, and programs that are not run."""

from collections.abc import Mapping
from dataclasses import replace

from mistlab.shell.assignments import DECLARATIONS
from mistlab.shell.call import Call
from mistlab.shell.declarations import assigned_texts, run_assignment, run_declaration
from mistlab.shell.expansion import Words
from mistlab.shell.flows import collected
from mistlab.shell.integers import NotKnownError
from mistlab.shell.loops import Runner
from mistlab.shell.programs import run_program
from mistlab.shell.redirects import redirected
from mistlab.shell.shell_builtins import BUILTINS
from mistlab.shell.shell_text import LineError, Text
from mistlab.shell.state import NORMAL, RETURN, State, Variable, scalar
from mistlab.shell.syntax import RawWord, Simple


def run_simple(runner: Runner, command: Simple, state: State) -> None:
    """Evaluate a simple command."""
    try:
        redirected(
            runner.session, state, command.redirects, lambda each: _run(runner, command, each)
        )
    except NotKnownError as error:
        message = f"{command.source[:80]} cannot be followed: {error.unknown}"
        raise LineError(command.line, message) from None


def _run(runner: Runner, command: Simple, state: State) -> None:
    words = Words(runner.session, state)
    first = command.words[0] if command.words else None
    program = first.bare if isinstance(first, RawWord) else None
    if program in DECLARATIONS and program not in state.functions:
        state.status = run_declaration(words, program, command.words[1:])
        return
    raw = [word for word in command.words if isinstance(word, RawWord)]
    fields = words.fields(raw)
    if not fields:
        for item in command.assignments:
            run_assignment(words, item)
        state.status = 0 if words.status is None else words.status
        if state.input is not None and command.redirects and not command.assignments:
            state.print(state.input)
        return
    _called(runner, command, state, words, fields)


def _called(
    runner: Runner, command: Simple, state: State, words: Words, fields: list[Text]
) -> None:
    texts = assigned_texts(words, command.assignments)
    before = _set(runner, state, texts)
    call = Call(
        runner=runner,
        state=state,
        words=words,
        command=command,
        program=fields[0].chars,
        arguments=tuple(fields[1:]),
        fields=tuple(fields),
        environment=texts,
    )
    run_call(call)
    for name, variable in before.items():
        if variable is None:
            state.variables.pop(name, None)
        else:
            state.variables[name] = variable
    runner.session.assumed |= words.assumed


def _set(runner: Runner, state: State, texts: Mapping[str, Text]) -> dict[str, Variable | None]:
    """Set variables for one command; what they were before."""
    before = {name: state.variables.get(name) for name in texts}
    for name, text in texts.items():
        runner.session.spend(text.line, len(text))
        state.variables[name] = scalar(text, exported=True)
    return before


def run_call(call: Call) -> None:
    """Evaluate a command whose words are known."""
    state = call.state
    if call.program in state.functions:
        _function(call)
    elif call.program in ("command", "builtin") and call.arguments:
        _past(call)
    elif call.program in BUILTINS:
        state.status = BUILTINS[call.program](call)
    else:
        run_program(call)


def _past(call: Call) -> None:
    """``command name``: no function of this name; ``command -v name`` asks for a program."""
    first = call.arguments[0].chars
    if first in ("-v", "-V"):
        text = call.session.unknown_at(call.line, call.command.source, "is not run")
        call.state.print(text)
        call.state.status = call.session.first_unknown(text) or 0
        return
    rest = call.arguments[1:] if first == "-p" else call.arguments
    if not rest:
        return
    inner = replace(call, program=rest[0].chars, arguments=rest[1:], fields=rest)
    if inner.program in BUILTINS:
        inner.state.status = BUILTINS[inner.program](inner)
    else:
        run_program(inner)


def _function(call: Call) -> None:
    state, session = call.state, call.session
    session.enter(call.line)
    before = state.arguments
    state.arguments = call.arguments
    state.frames = (*state.frames, {})
    session.parked.append(("function", []))
    call.runner.command(state.functions[call.program], state)
    collected(session, state, (RETURN,))
    session.parked.pop()
    if state.flow == RETURN:
        state.flow = NORMAL
    *outer, hidden = state.frames
    state.frames = tuple(outer)
    for name, variable in hidden.items():
        if variable is None:
            state.variables.pop(name, None)
        else:
            state.variables[name] = variable
    state.arguments = before
    session.callers.pop()
