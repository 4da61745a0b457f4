"""Follows texts and files that a script hands to a shell: ``eval``, ``source``, ``bash -c``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from posixpath import normpath

from mistlab.shell.assigned import assigned_names
from mistlab.shell.call import Call
from mistlab.shell.flows import apart, collected
from mistlab.shell.headers import facts_of
from mistlab.shell.parser import parsed, parsed_value
from mistlab.shell.redirects import known_path, text_of_file
from mistlab.shell.session import FILE, Guard, Session
from mistlab.shell.shell_text import LineError, Text
from mistlab.shell.state import NORMAL, RETURN, State, Variable
from mistlab.shell.syntax import Script

_MOST_FILES = 50


def parsed_file(session: Session, text: str, name: str) -> Script:
    """A file's commands; the names that it assigns are known from here on."""
    if len(session.files) >= _MOST_FILES:
        raise LineError(0, f"the script reads more than {_MOST_FILES} files: give the launch line")
    number = len(session.files)
    session.files.append(name)
    script = parsed(text, number * FILE)
    _know(session, script)
    for fact, value in facts_of(text, session, number * FILE).items():
        session.facts.setdefault(fact, value)
    return script


def _know(session: Session, script: Script) -> None:
    for assigned, line in assigned_names(script).items():
        session.assigned[assigned] = min(line, session.assigned.get(assigned, line))


def evaluated(call: Call, text: Text) -> None:
    """``eval``: a text's commands in the state at hand."""
    call.session.spend(call.line, len(text))
    script = parsed_value(text)
    _know(call.session, script)
    call.session.enter(call.line)
    call.session.conditions.append(_handed(call, text))
    call.runner.run(script, call.state)
    call.session.conditions.pop()
    call.session.callers.pop()


def sourced(call: Call) -> int | None:
    """``source file arguments``: a file's commands in the state at hand; None if it is missing."""
    state, session, path = call.state, call.session, call.arguments[0]
    text = text_of_file(session, state, path)
    if text is None:
        return None
    script = _file(session, text, path)
    before = state.arguments
    if len(call.arguments) > 1:
        state.arguments = call.arguments[1:]
    session.enter(call.line)
    session.parked.append(("function", []))
    call.runner.run(script, state)
    collected(session, state, (RETURN,))
    session.parked.pop()
    session.callers.pop()
    if state.flow == RETURN:
        state.flow = NORMAL
    if len(call.arguments) > 1:
        state.arguments = before
    return 0


def _file(session: Session, text: Text, path: Text) -> Script:
    """The commands of a file at hand, or of one that the script wrote itself."""
    if text.is_known and len(text.marks) <= 1:
        return parsed_file(
            session, text.chars, normpath(known_path(path) or session.rendered(path))
        )
    script = parsed_value(text)
    _know(session, script)
    return script


def run_text(call: Call, text: Text, arguments: Sequence[Text], outer: Sequence[Text]) -> None:
    """``bash -c text name arguments``: a text's commands in a shell of its own."""
    call.session.spend(call.line, len(text))
    script = parsed_value(text)
    _know(call.session, script)
    call.session.conditions.append(_handed(call, text))
    _run_child(call, script, arguments, outer)
    call.session.conditions.pop()


def _handed(call: Call, text: Text) -> Guard:
    """A text's commands rest on what the text rests on."""
    return Guard(line=call.line, source="", assumed=text.assumed)


def run_file(call: Call, text: Text, words: Sequence[Text], outer: Sequence[Text]) -> None:
    """``bash file arguments``: a file's commands in a shell of its own.

    A script that starts itself with the arguments that it has, such as to submit itself to a queue,
    comes to the same place again: what it starts is taken as done.
    """
    session = call.session
    start = (text.chars, *(session.rendered(word) for word in words[1:]))
    itself = (session.source.text, *map(session.rendered, _own_arguments(call)))
    if start in session.running or (start == itself and not session.running):
        call.state.status = 0
        return
    session.running.append(start)
    _run_child(call, _file(session, text, words[0]), words, outer)
    session.running.pop()


def _own_arguments(call: Call) -> Sequence[Text]:
    """The arguments of the script that is running."""
    return call.state.arguments


def _run_child(call: Call, script: Script, words: Sequence[Text], outer: Sequence[Text]) -> None:
    session, state = call.session, call.state
    child = State(
        variables=exported(state.variables, session),
        name=words[0] if words else None,
        arguments=tuple(words[1:]),
        written=dict(state.written),
        output=state.output,
        input=state.input,
    )
    before, session.outer = session.outer, (*session.outer, *outer)
    session.enter(call.line)
    apart(session, child, lambda each: call.runner.run(script, each))
    session.callers.pop()
    session.outer = before
    state.written.update(child.written)
    state.output = child.output
    state.status = child.status


def exported(variables: Mapping[str, Variable], session: Session) -> dict[str, Variable]:
    """The variables that a program sees: exported ones, and those that the user gives."""
    given = session.source.settings
    return {
        name: replace(variable, is_list=False)
        for name, variable in variables.items()
        if variable.exported or name in given
    }
