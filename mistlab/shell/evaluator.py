"""Evaluates the simple commands and control structures of a shell script, without running
programs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from mistlab.shell.command_parts import DECLARATIONS
from mistlab.shell.expansion import WordExpander, redirected
from mistlab.shell.flows import apart, collected, divided, guarded
from mistlab.shell.integers import NotKnownError
from mistlab.shell.loops import Call, Maybe, Runner, Tester, run_for_count, run_for_in, run_while
from mistlab.shell.patterns import matches
from mistlab.shell.programs import run_program
from mistlab.shell.session import EXIT, NORMAL, RETURN, Guard, Session, State, Variable, scalar
from mistlab.shell.shell_builtins import BUILTINS, assigned_texts, run_assignment, run_declaration
from mistlab.shell.shell_text import LineError, Text, Unknown
from mistlab.shell.syntax import (
    AndOr,
    Arm,
    Background,
    Bracketed,
    Case,
    Command,
    Count,
    ForCount,
    ForIn,
    Function,
    Group,
    If,
    Pipeline,
    RawWord,
    Redirected,
    Script,
    Simple,
    While,
    assigned_names,
)


def run_simple(runner: Runner, command: Simple, state: State) -> None:
    """Evaluate a simple command, which consists of assignments followed by words."""
    try:
        redirected(
            runner.session, state, command.redirects, lambda each: _run(runner, command, each)
        )
    except NotKnownError as error:
        message = f"{command.source[:80]} cannot be followed: {error.unknown}"
        raise LineError(command.line, message) from None


def _run(runner: Runner, command: Simple, state: State) -> None:
    expander = WordExpander(runner.session, state)
    first = command.words[0] if command.words else None
    program = first.bare if isinstance(first, RawWord) else None
    if program in DECLARATIONS and program not in state.functions:
        state.status = run_declaration(expander, program, command.words[1:])
        return
    raw = [word for word in command.words if isinstance(word, RawWord)]
    fields = expander.fields(raw)
    if not fields:
        for item in command.assignments:
            run_assignment(expander, item)
        state.status = 0 if expander.status is None else expander.status
        if state.input is not None and command.redirects and not command.assignments:
            state.print(state.input)
        return
    _called(runner, command, state, expander, fields)


def _called(
    runner: Runner, command: Simple, state: State, expander: WordExpander, fields: list[Text]
) -> None:
    texts = assigned_texts(expander, command.assignments)
    before = _set(runner, state, texts)
    call = Call(
        runner=runner,
        state=state,
        expander=expander,
        command=command,
        program=fields[0].chars,
        arguments=tuple(fields[1:]),
        fields=tuple(fields),
        environment=texts,
    )
    run_call(call)
    state.restore(before)
    runner.session.assumed |= expander.assumed


def _set(runner: Runner, state: State, texts: Mapping[str, Text]) -> dict[str, Variable | None]:
    """Set variables while one command runs; returns the values that they had before."""
    before = {name: state.variables.get(name) for name in texts}
    for name, text in texts.items():
        runner.session.spend(text.line, len(text))
        state.variables[name] = scalar(text, exported=True)
    return before


def run_call(call: Call) -> None:
    """Evaluate a command with expanded words: it calls a function, a builtin or a program."""
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
    """Evaluate the builtin ``command``: ``command name`` calls the program even if a function has
    its name, ``command -v name`` asks whether it exists.
    """
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
    state.restore(hidden)
    state.arguments = before
    session.callers.pop()


# Evaluates the control structures of a shell script (``if``, loops, ``case``), without running
# programs.


class Evaluator:
    """Evaluates commands of a script; each command changes the state (variables, files, output) and
    sets the status.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        session.run = self.run

    def run(self, script: Script, state: State) -> None:
        """Run commands one after another until one of them jumps away (exit, return, break)."""
        for command in script.commands:
            if state.flow:
                return
            self.command(command, state)

    def command(self, command: Command, state: State) -> None:
        """Evaluate one shell command of any kind: simple, loop, condition or function
        definition.
        """
        self.session.spend(command.line)
        self._evaluate(command, state)
        failed = isinstance(state.status, int) and state.status != 0
        ends = "errexit" in state.options and not self.session.tests and not state.flow
        is_asked = isinstance(command, AndOr | If | While) or _is_negated(command)
        if failed and ends and not is_asked:
            self.session.exits.append((command.line, tuple(self.session.conditions)))
            state.flow = EXIT

    def _evaluate(self, command: Command, state: State) -> None:
        match command:
            case Simple():
                run_simple(self, command, state)
            case AndOr():
                self._and_or(command, state)
            case Pipeline():
                self._pipeline(command, state)
            case If():
                self._if(command, 0, state)
            case Case():
                self._case(command, state)
            case ForIn() | ForCount() | While():
                self._loop(command, state)
            case Bracketed() | Count():
                self._test(command, state)
            case _:
                self._wrapped(command, state)

    def _loop(self, command: ForIn | ForCount | While, state: State) -> None:
        if isinstance(command, ForIn):
            run_for_in(self, command, state)
        elif isinstance(command, ForCount):
            run_for_count(self, command, state)
        else:
            run_while(self, command, state)

    def _wrapped(self, command: Command, state: State) -> None:
        if isinstance(command, Function):
            state.functions[command.name] = command.body
            state.status = 0
        elif isinstance(command, Redirected):
            inner = command.command
            redirected(
                self.session, state, command.redirects, lambda each: self.command(inner, each)
            )
        elif isinstance(command, Background):
            self._subshell(command.command, state)
            state.status = 0
        elif isinstance(command, Group):
            if command.subshell:
                self._subshell(command, state)
            else:
                self.run(command.script, state)

    def _subshell(self, command: Command, state: State) -> None:
        child = state.copy()
        if isinstance(command, Group):
            script = command.script
            apart(self.session, child, lambda each: self.run(script, each))
        else:
            apart(self.session, child, lambda each: self.command(command, each))
        _return(state, child)

    def _test(self, command: Bracketed | Count, state: State) -> None:
        expander = WordExpander(self.session, state)
        value: Maybe
        if isinstance(command, Bracketed):
            value = Tester(expander, command.line).bracketed(command.condition)
        else:
            try:
                value = expander.number(command.expression) != 0
            except NotKnownError as error:
                value = error.unknown
        state.status = value if isinstance(value, Unknown) else int(not value)
        self.session.assumed |= expander.assumed

    def test(self, script: Script, state: State) -> tuple[Maybe, frozenset[str]]:
        """Return whether a condition holds, and the assumptions on which that depends."""
        before, self.session.assumed = self.session.assumed, frozenset()
        self.session.tests += 1
        self.session.asks += 1
        self.run(script, state)
        self.session.asks -= 1
        self.session.tests -= 1
        assumed, self.session.assumed = self.session.assumed, before
        return truth(state), assumed

    def condition(
        self, line: int, source: str, cause: Maybe = True, assumed: frozenset[str] = frozenset()
    ) -> Guard:
        """Return a condition as text for messages to the user."""
        source = " ".join(source.rstrip(";").split())[:80]
        if not isinstance(cause, Unknown):
            return Guard(line=line, source=source, assumed=assumed)
        number, file = self.session.place(line)
        unknown = Unknown(
            expression=source, line=number, file=file, reason="is not known", remedy=cause.remedy
        )
        return Guard(line=line, source=source, cause=unknown, assumed=assumed)

    def _if(self, command: If, number: int, state: State) -> None:
        if number == len(command.branches):
            state.status = 0
            if command.otherwise is not None:
                self.run(command.otherwise, state)
            return
        test, body = command.branches[number]
        value, assumed = self.test(test, state)
        if state.flow:
            return
        line = test.commands[0].line if test.commands else command.line
        condition = self.condition(line, test.source, value, assumed)
        rest: Callable[[State], None] = lambda each: self._if(command, number + 1, each)  # noqa: E731
        ways = [lambda each: self._body(body, each), rest]
        if isinstance(value, Unknown):
            assert condition.cause is not None
            divided(self.session, state, condition.cause, ways, condition)
        else:
            guarded(self.session, state, ways if value else ways[::-1], condition)
        self._assume(command, state, assumed)

    def _body(self, body: Script, state: State) -> None:
        state.status = 0
        self.run(body, state)

    def _assume(self, command: Command, state: State, assumed: frozenset[str]) -> None:
        """Attach the assumptions of a condition to variables that are assigned only because the
        condition holds.
        """
        if not assumed:
            return
        for name in assigned_names(command):
            if variable := state.variables.get(name):
                state.variables[name] = variable.assuming(assumed)

    def _and_or(self, command: AndOr, state: State) -> None:
        before, self.session.assumed = self.session.assumed, frozenset()
        self.session.tests += 1
        self.command(command.commands[0], state)
        self.session.tests -= 1
        self._rest(command, 0, state)
        self._assume(command, state, self.session.assumed)
        self.session.assumed |= before

    def _rest(self, command: AndOr, number: int, state: State) -> None:
        """Run or skip the commands after ``&&`` or ``||``, depending on the status of those
        before.
        """
        if state.flow or number == len(command.operators):
            return
        value = truth(state)
        source = command.sources[number]
        condition = self.condition(command.line, source, value, self.session.assumed)
        if isinstance(value, Unknown):
            assert condition.cause is not None
            ways = [partial(self._as, command, number, status) for status in (0, 1)]
            divided(self.session, state, condition.cause, ways, condition)
            return
        status = 0 if value else 1
        guarded(
            self.session,
            state,
            [partial(self._next, command, number, each) for each in (status, 1 - status)],
            condition,
        )

    def _next(self, command: AndOr, number: int, status: int, state: State) -> None:
        """Run the command after ``&&`` or ``||`` if the status requires it, then go on with the
        commands after it.
        """
        if (truth(state) is True) != (status == 0):
            state.status = status
        if (status == 0) == (command.operators[number] == "&&"):
            is_last = number + 1 == len(command.operators)
            self.session.tests += not is_last
            self.command(command.commands[number + 1], state)
            self.session.tests -= not is_last
        self._rest(command, number + 1, state)

    def _as(self, command: AndOr, number: int, status: int, state: State) -> None:
        state.status = status
        self._rest(command, number, state)

    def _pipeline(self, command: Pipeline, state: State) -> None:
        if len(command.commands) == 1:
            self.session.tests += 1
            self.command(command.commands[0], state)
            self.session.tests -= 1
        else:
            self._piped(command.commands, state)
        if command.negated:
            value = truth(state)
            state.status = value if isinstance(value, Unknown) else int(value)

    def _piped(self, commands: Sequence[Command], state: State) -> None:
        given = state.input
        for number, command in enumerate(commands):
            self.session.spend(command.line, 1024)
            child = state.copy()
            child.input = given
            if number < len(commands) - 1:
                child.output = Text()
            apart(self.session, child, partial(self.command, command))
            given = child.output
            state.written.update(child.written)
        _return(state, child)

    def _case(self, command: Case, state: State) -> None:
        expander = WordExpander(self.session, state)
        subject = expander.text(command.subject)
        unknown = self.session.first_unknown(subject)
        for number, arm in enumerate(command.arms):
            if unknown is not None:
                break
            for pattern in arm.patterns:
                text = expander.pattern(pattern)
                unknown = unknown or self.session.first_unknown(text)
                self.session.spend(command.line, len(subject) * len(text) * 8)
                if unknown is None and matches(text.chars, subject.chars):
                    source = f"case {command.subject.source} in {pattern.source})"
                    condition = self.condition(command.line, source, assumed=expander.assumed)
                    self.session.conditions.append(condition)
                    self._arms(command.arms, number, state, subject, expander)
                    self.session.conditions.pop()
                    self._assume(command, state, expander.assumed)
                    return
        state.status = 0
        if unknown is not None:
            self._either_arm(command, state, unknown, expander.assumed)
        else:
            self._assume(command, state, expander.assumed)

    def _arms(
        self, arms: Sequence[Arm], number: int, state: State, subject: Text, expander: WordExpander
    ) -> None:
        """Run the commands of a branch of ``case``, and those of the next branches if ``;&`` or
        ``;;&`` continues there.
        """
        self._body(arms[number].body, state)
        ending = arms[number].ending
        for after in range(number + 1, len(arms)):
            if ending == ";;" or state.flow:
                return
            patterns = [expander.pattern(pattern).chars for pattern in arms[after].patterns]
            if ending == ";&" or any(matches(each, subject.chars) for each in patterns):
                self.run(arms[after].body, state)
                ending = arms[after].ending

    def _either_arm(
        self, command: Case, state: State, unknown: Unknown, assumed: frozenset[str]
    ) -> None:
        source = f"case {command.subject.source}"
        condition = self.condition(command.line, source, unknown, assumed)
        assert condition.cause is not None
        ways: list[Callable[[State], None]] = [
            partial(self._arm_way, command.arms, number) for number in range(len(command.arms))
        ]
        is_whole = any(pattern.bare == "*" for arm in command.arms for pattern in arm.patterns)
        if not is_whole:
            ways.append(lambda _: None)
        divided(self.session, state, condition.cause, ways, condition)

    def _arm_way(self, arms: Sequence[Arm], number: int, state: State) -> None:
        for arm in arms[number:]:
            self._body(arm.body, state)
            if arm.ending != ";&" or state.flow:
                return


def truth(state: State) -> Maybe:
    """Return whether the last command succeeded (status 0)."""
    return state.status == 0 if isinstance(state.status, int) else state.status


def _is_negated(command: Command) -> bool:
    return isinstance(command, Pipeline) and command.negated


def _return(state: State, child: State) -> None:
    """Copy status, output and written files of a subshell to the shell that started it."""
    state.status = child.status
    state.written.update(child.written)
    if state.output is not None:
        state.output = child.output
