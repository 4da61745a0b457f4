"""Evaluates loops: turn by turn where all is known, and all turns at once where it is not."""

from typing import Protocol

from mistlab.shell.conditions import Maybe
from mistlab.shell.expansion import Words
from mistlab.shell.flows import Way, collected, divided
from mistlab.shell.integers import NotKnownError
from mistlab.shell.merge import depends
from mistlab.shell.session import Condition, Session
from mistlab.shell.shell_text import LineError, plain
from mistlab.shell.state import BREAK, CONTINUE, EXIT, NORMAL, State, scalar
from mistlab.shell.syntax import Command, ForCount, ForIn, Script, While
from mistlab.shell.variables import assign
from mistlab.shell.word import Unknown


class Runner(Protocol):
    """What parts of the evaluation ask of the evaluator."""

    session: Session

    def run(self, script: Script, state: State) -> None:
        """Evaluate commands one after another."""

    def command(self, command: Command, state: State) -> None:
        """Evaluate a command."""

    def test(self, script: Script, state: State) -> tuple[Maybe, frozenset[str]]:
        """Whether a condition holds, and what this rests on."""

    def condition(
        self, line: int, source: str, cause: Maybe = True, assumed: frozenset[str] = frozenset()
    ) -> Condition:
        """A condition as others are told of it."""


def run_for_in(runner: Runner, command: ForIn, state: State) -> None:
    """Evaluate ``for name in words``; a value that the user gives is the only one."""
    session, words = runner.session, Words(runner.session, state)
    values = list(state.arguments) if command.words is None else words.fields(command.words)
    if command.name in session.source.settings:
        values = [plain(session.source.settings[command.name], command.line)]
    state.status = 0
    if unknown := session.first_unknown(*values):
        reason, remedy = unknown.reason, f"give --set {command.name}=VALUE"
        value = session.unknown_at(command.line, f"${command.name}", reason, remedy)
        source = f"for {command.name} in ..."
        condition = runner.condition(command.line, source, unknown)

        def way(each: State) -> None:
            assign(session, each, command.name, value)
            runner.run(command.body, each)

        _unknown_loop(runner, state, condition, way)
        return
    _begin(session)
    for value in values:
        assign(session, state, command.name, value)
        session.loops.append((command.name, command.line, value.chars))
        goes_on = _turn(runner, command.body, state)
        session.loops.pop()
        if not goes_on:
            break
    _end(session, state)


def run_for_count(runner: Runner, command: ForCount, state: State) -> None:
    """Evaluate ``for ((start; condition; step))``."""
    session, words = runner.session, Words(runner.session, state)
    state.status = 0
    _begin(session)
    try:
        words.number(command.start)
        while not command.condition.parts or words.number(command.condition):
            session.spend(command.line)
            if not _turn(runner, command.body, state):
                break
            words.number(command.step)
    except NotKnownError as error:
        source = f"for (( {command.start.source}; {command.condition.source}; ... ))"
        condition = runner.condition(command.line, source, error.unknown)
        _unknown_loop(runner, state, condition, lambda each: _count(runner, command, each))
    _end(session, state)


def _count(runner: Runner, command: ForCount, state: State) -> None:
    runner.run(command.body, state)
    try:
        Words(runner.session, state).number(command.step)
    except NotKnownError:
        return


def run_while(runner: Runner, command: While, state: State) -> None:
    """Evaluate ``while`` or ``until``."""
    session, started = runner.session, len(runner.session.started)
    _begin(session)
    while True:
        before = state.copy()
        session.spend(command.line)
        value, assumed = runner.test(command.condition, state)
        if isinstance(value, Unknown):
            condition = runner.condition(command.line, command.condition.source, value, assumed)
            _unknown_loop(runner, state, condition, lambda each: _while_way(runner, command, each))
            break
        if state.flow or value == command.until:
            state.status = 0
            break
        if not _turn(runner, command.body, state):
            break
        if _is_same(before, state):
            _stop_endless(session, command, state, launches=len(session.started) > started)
            break
    _end(session, state)


def _while_way(runner: Runner, command: While, state: State) -> None:
    runner.run(command.body, state)
    if not state.flow:
        runner.test(command.condition, state)


def _is_same(before: State, after: State) -> bool:
    """Whether a turn changed nothing, so that all others are like it."""
    names = ("variables", "arguments", "input", "written", "functions")
    return all(getattr(before, name) == getattr(after, name) for name in names)


def _stop_endless(session: Session, command: While, state: State, *, launches: bool) -> None:
    """Leave a loop whose turns are all alike, by what may end it."""
    _, parked = session.parked[-1]
    if any(each.flow == BREAK for each, _ in parked) or launches:
        state.flow = EXIT
        return
    raise LineError(command.line, "the loop never ends: nothing in it changes: take it out")


def _begin(session: Session) -> None:
    session.parked.append(("loop", []))


def _end(session: Session, state: State) -> None:
    """Leave a loop, with the states that left it early."""
    collected(session, state, (BREAK, CONTINUE))
    session.parked.pop()


def _turn(runner: Runner, body: Script, state: State) -> bool:
    """One turn of a loop; whether another may follow."""
    runner.run(body, state)
    collected(runner.session, state, (CONTINUE,))
    if state.flow not in (BREAK, CONTINUE):
        return state.flow == NORMAL
    state.levels -= 1
    if state.levels > 0:
        return False
    ended = state.flow == BREAK
    state.flow = NORMAL
    return not ended


def _unknown_loop(runner: Runner, state: State, condition: Condition, way: Way) -> None:
    """A loop of which it is not known how often it runs: what it changes becomes unknown."""
    session = runner.session
    assert condition.cause is not None
    cause = condition.cause
    trial, kept = state.copy(), (len(session.started), len(session.exits))
    session.parked.append(("loop", []))
    way(trial)
    session.parked.pop()
    del session.started[kept[0] :], session.exits[kept[1] :]
    changed = [
        name
        for name, variable in trial.variables.items()
        if not variable.is_same(state.variables.get(name))
    ]

    def widened(each: State) -> None:
        for name in changed:
            line = trial.variables[name].line or condition.line
            text = session.unknown_at(line, f"${name}", depends(cause), cause.remedy)
            each.variables[name] = scalar(text)
        if each.input is not None and trial.input != each.input:
            each.input = session.unknown_at(condition.line, "the input", depends(cause))
        way(each)
        if each.flow in (BREAK, CONTINUE):
            each.flow = NORMAL

    divided(session, state, cause, (lambda _: None, widened), condition)
    for name in changed:
        line = trial.variables[name].line or condition.line
        text = session.unknown_at(line, f"${name}", depends(cause), cause.remedy)
        state.variables[name] = scalar(text)
