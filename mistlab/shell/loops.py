"""Evaluates tests and loops of a script. A loop runs iteration by iteration if everything is known;
otherwise whatever it may change becomes unknown.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from posixpath import normpath
from typing import Protocol

from mistlab.shell.expansion import WordExpander
from mistlab.shell.flows import Way, collected, depends, divided
from mistlab.shell.integers import NotKnownError
from mistlab.shell.patterns import matches
from mistlab.shell.session import (
    BREAK,
    CONTINUE,
    EXIT,
    NORMAL,
    Guard,
    Key,
    Session,
    State,
    Variable,
    assign,
    scalar,
    taken_as,
    without_arguments,
)
from mistlab.shell.shell_text import LineError, Text, Unknown, is_placeholder, plain, remedy_of
from mistlab.shell.syntax import (
    Command,
    Comparison,
    ForCount,
    ForIn,
    Joined,
    Operand,
    Script,
    Simple,
    While,
)

Maybe = bool | Unknown
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
}
_TEXTS = ("=", "==", "!=", "<", ">")
_FILES = frozenset(("-e", "-f", "-d", "-r", "-w", "-x", "-s", "-h", "-L", "-p", "-S", "-b", "-c"))
_UNARY = _FILES | {"-z", "-n", "-v", "-t", "-o", "-R", "-a", "-O", "-G", "-N"}
_POSIX = {"alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "space": r"\s"}
_POSIX |= {"upper": "A-Z", "lower": "a-z", "punct": r"!-/:-@\[-`{-~", "xdigit": "0-9a-fA-F"}
_REPEATED = re.compile(r"\)[*+{]")
_MOST_STEPS = 3_000_000


class Tester:
    """Evaluates the tests on a line of the script."""

    def __init__(self, expander: WordExpander, line: int) -> None:
        self._expander = expander
        self._session = expander.session
        self._line = line

    def bracketed(self, condition: Comparison) -> Maybe:
        """Evaluate a test between ``[[`` and ``]]``."""
        if isinstance(condition, Joined):
            return self._joined(condition)
        try:
            return self._operand(condition)
        except NotKnownError as error:
            return error.unknown

    def _joined(self, condition: Joined) -> Maybe:
        if condition.operator == "!":
            return negated(self.bracketed(condition.tests[0]))
        decides = condition.operator == "||"
        result: Maybe = not decides
        for test in condition.tests:
            value = self.bracketed(test)
            if value is decides:
                return decides
            result = value if isinstance(value, Unknown) else result
        return result

    def _operand(self, operand: Operand) -> Maybe:
        expander, operator = self._expander, operand.operator
        if operand.left is None:
            return self._unary(operator, expander.text(operand.right))
        left = expander.text(operand.left)
        if operator in _NUMBERS:
            right = expander.number(operand.right)
            return _NUMBERS[operator](expander.number_in(left.chars, self._line), right)
        if operator == "=~":
            return self._regular(left, expander.pattern(operand.right))
        if operator in ("=", "==", "!="):
            pattern = expander.pattern(operand.right)
            equal = self._equal(left, pattern, is_pattern=True)
            return negated(equal) if operator == "!=" else equal
        return self._binary(operator, left, expander.text(operand.right))

    def plain(self, arguments: Sequence[Text]) -> Maybe:
        """Evaluate a test that consists of words, those between ``[`` and ``]`` or after
        ``test``.
        """
        return _TestReader(self, list(arguments)).whole()

    def _unary(self, operator: str, text: Text) -> Maybe:
        if operator in ("-n", "-z"):
            filled = self._is_filled(text)
            return negated(filled) if operator == "-z" else filled
        if operator == "-v":
            return self._is_set(text)
        if operator in _FILES and text.is_known and self._is_at_hand(text.chars):
            return operator not in ("-d", "-h", "-L")
        unknown = self._session.first_unknown(text)
        reason = unknown.reason if unknown else "asks the machine where the script runs"
        return self._unknown(f"{operator} {self._session.rendered(text)}", reason, unknown)

    def _unknown(self, expression: str, reason: str, inner: Unknown | None) -> Unknown:
        line, file = self._session.place(self._line)
        remedy = inner.remedy if inner else ""
        return Unknown(expression=expression, line=line, file=file, reason=reason, remedy=remedy)

    def _is_filled(self, text: Text) -> Maybe:
        rest = self._without_absent(text)
        unknown = self._session.first_unknown(rest)
        filled = self._session.filled
        is_sure = any(not is_placeholder(each) or each in filled for each in rest.chars)
        if unknown is not None and not is_sure:
            return unknown
        if not rest:
            self._assume(text)
        return bool(rest)

    def _without_absent(self, text: Text) -> Text:
        """Remove variables that are set nowhere from a text, since they are assumed to be empty."""
        if text.is_known:
            return text
        absent = self._session.absent
        return replace(text, chars="".join(each for each in text.chars if each not in absent))

    def _assume(self, text: Text) -> None:
        """Add the note that the variables in a text are assumed to be unset."""
        for letter in text.chars:
            name = self._session.absent.get(letter)
            if name is not None and name.startswith("$"):
                self._expander.assumed |= without_arguments(self._session, self._line, name)
            elif name is not None:
                self._expander.assumed |= taken_as(self._session, name, self._line, "not set")

    def _is_set(self, text: Text) -> Maybe:
        if unknown := self._session.first_unknown(text):
            return unknown
        name = text.chars.partition("[")[0]
        self._session.mentioned.add(name)
        variable: Variable | None = self._expander.state.variables.get(name)
        if variable is None and name not in self._session.assigned:
            self._expander.assumed |= taken_as(self._session, name, self._line, "not set")
        return variable is not None and bool(variable.items)

    def _is_at_hand(self, path: str) -> bool:
        if normpath(path) in self._expander.state.written:
            return True
        return bool(path) and self._session.source.beside(path) is not None

    def _equal(self, left: Text, right: Text, *, is_pattern: bool) -> Maybe:
        """Return whether two texts are equal, assuming if necessary that variables which are set
        nowhere are empty.
        """
        if not left.is_known and right.is_known and not right.chars.strip("*"):
            rest = self._without_absent(left)
            if rest.is_known and not right.chars:
                self._assume(left)
                return not rest.chars
        if not left.is_known or not right.is_known:
            rest = self._without_absent(left)
            if rest.chars and rest.is_known and rest.chars == self._without_absent(right).chars:
                self._assume(left + right)
                return True
            unknown = self._session.first_unknown(left, right)
            assert unknown is not None
            return unknown
        self._session.spend(self._line, len(left) * len(right) * 8)
        return matches(right.chars, left.chars) if is_pattern else left.chars == right.chars

    def _binary(self, operator: str, left: Text, right: Text) -> Maybe:
        if operator in ("=", "=="):
            return self._equal(left, right, is_pattern=False)
        if operator == "!=":
            return negated(self._equal(left, right, is_pattern=False))
        unknown = self._session.first_unknown(left, right)
        if operator in ("-nt", "-ot", "-ef") or unknown is not None:
            reason = unknown.reason if unknown else "asks the machine where the script runs"
            expression = (
                f"{self._session.rendered(left)} {operator} {self._session.rendered(right)}"
            )
            return self._unknown(expression, reason, unknown)
        if operator in ("<", ">"):
            return left.chars < right.chars if operator == "<" else left.chars > right.chars
        return self._compared(operator, left, right)

    def _compared(self, operator: str, left: Text, right: Text) -> Maybe:
        numbers = [each.chars.strip() for each in (left, right)]
        if not all(re.fullmatch(r"[-+]?\d{1,18}", each, re.ASCII) for each in numbers):
            return False
        return _NUMBERS[operator](int(numbers[0]), int(numbers[1]))

    def _regular(self, text: Text, pattern: Text) -> Maybe:
        if unknown := self._session.first_unknown(text, pattern):
            return unknown
        repeats = len(re.findall(r"[*+{]", pattern.chars))
        if _REPEATED.search(pattern.chars) or (len(text) + 1) ** repeats > _MOST_STEPS:
            return self._unknown(f"=~ {pattern.chars}", "takes too long to match", None)
        try:
            match = re.search(_python(pattern.chars), text.chars)
        except re.error:
            problem = f"{pattern.chars} is not a regular expression that can be read: simplify it"
            raise LineError(self._line, problem) from None
        groups = [match[0], *match.groups("")] if match else []
        items: dict[Key, Text] = {
            number: plain(group, self._line) for number, group in enumerate(groups)
        }
        self._expander.state.variables["BASH_REMATCH"] = Variable(items=items, is_list=True)
        return match is not None


def _python(pattern: str) -> str:
    """Translate a POSIX regular expression to Python's syntax."""
    inner = re.sub(r"\[:(\w+):\]", lambda match: _POSIX.get(match[1], ""), pattern)
    return inner.replace("(?", "(\\?")


def negated(value: Maybe) -> Maybe:
    """Negate the value of a test, which may be unknown."""
    return value if isinstance(value, Unknown) else not value


class _TestReader:
    """Evaluates the words of a ``test`` command from left to right."""

    def __init__(self, tester: Tester, arguments: list[Text]) -> None:
        self._tester = tester
        self._left = arguments

    def whole(self) -> Maybe:
        if not self._left:
            return False
        value = self._any()
        return False if self._left else value

    def _next(self) -> str:
        return self._left[0].chars if self._left else ""

    def _any(self) -> Maybe:
        value = self._all()
        while self._next() == "-o":
            self._left.pop(0)
            other = self._all()
            value = either(value, other)
        return value

    def _all(self) -> Maybe:
        value = self._single()
        while self._next() == "-a":
            self._left.pop(0)
            value = negated(either(negated(value), negated(self._single())))
        return value

    def _single(self) -> Maybe:
        tester, left = self._tester, self._left
        if len(left) >= 3 and left[1].chars in (*_TEXTS, *_NUMBERS, "-nt", "-ot", "-ef"):
            first, operator, second = (left.pop(0) for _ in range(3))
            return tester._binary(operator.chars, first, second)
        if len(left) >= 2 and self._next() == "!":
            left.pop(0)
            return negated(self._single())
        if len(left) >= 3 and self._next() == "(":
            left.pop(0)
            value = self._any()
            if left:
                left.pop(0)
            return value
        if len(left) >= 2 and self._next() in _UNARY:
            operator = left.pop(0)
            return tester._unary(operator.chars, left.pop(0))
        return tester._unary("-n", left.pop(0)) if left else False


def either(first: Maybe, second: Maybe) -> Maybe:
    """Return whether one of two tests is true, or an unknown value if neither is known to be true
    and one is unknown.
    """
    if first is True or second is True:
        return True
    return first if isinstance(first, Unknown) else second


# Evaluates the loops of a script: iteration by iteration if everything is known, otherwise all
# iterations at once, with unknown results.


class Runner(Protocol):
    """What the evaluation of loops requires of the script's evaluator."""

    session: Session

    def run(self, script: Script, state: State) -> None:
        """Evaluate the commands of a list one after another."""

    def command(self, command: Command, state: State) -> None:
        """Evaluate one command of a loop or list."""

    def test(self, script: Script, state: State) -> tuple[Maybe, frozenset[str]]:
        """Return whether a condition holds, and the assumptions on which that depends."""

    def condition(
        self, line: int, source: str, cause: Maybe = True, assumed: frozenset[str] = frozenset()
    ) -> Guard:
        """Return a condition as text for messages to the user."""


def run_for_in(runner: Runner, command: ForIn, state: State) -> None:
    """Evaluate ``for name in words``; if the user sets the variable, the loop runs for that value
    only.
    """
    session, expander = runner.session, WordExpander(runner.session, state)
    values = list(state.arguments) if command.words is None else expander.fields(command.words)
    if command.name in session.source.settings:
        values = [plain(session.source.settings[command.name], command.line)]
    state.status = 0
    if unknown := session.first_unknown(*values):
        reason, remedy = unknown.reason, remedy_of(command.name)
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
    session, expander = runner.session, WordExpander(runner.session, state)
    state.status = 0
    _begin(session)
    try:
        expander.number(command.start)
        while not command.condition.parts or expander.number(command.condition):
            session.spend(command.line)
            if not _turn(runner, command.body, state):
                break
            expander.number(command.step)
    except NotKnownError as error:
        source = f"for (( {command.start.source}; {command.condition.source}; ... ))"
        condition = runner.condition(command.line, source, error.unknown)
        _unknown_loop(runner, state, condition, lambda each: _count(runner, command, each))
    _end(session, state)


def _count(runner: Runner, command: ForCount, state: State) -> None:
    runner.run(command.body, state)
    try:
        WordExpander(runner.session, state).number(command.step)
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
    """Return whether an iteration changed nothing, so that later ones would change nothing
    either.
    """
    names = ("variables", "arguments", "input", "written", "functions")
    return all(getattr(before, name) == getattr(after, name) for name in names)


def _stop_endless(session: Session, command: While, state: State, *, launches: bool) -> None:
    """End the script at a loop that runs for ever without changing anything; refuses the script if
    that loop cannot end.
    """
    _, parked = session.parked[-1]
    if any(each.flow == BREAK for each, _ in parked) or launches:
        state.flow = EXIT
        return
    message = "the loop never ends, because nothing in it changes: leave the loop out"
    raise LineError(command.line, message)


def _begin(session: Session) -> None:
    session.parked.append(("loop", []))


def _end(session: Session, state: State) -> None:
    """Leave a loop, and merge the states of control flows that left it early."""
    collected(session, state, (BREAK, CONTINUE))
    session.parked.pop()


def _turn(runner: Runner, body: Script, state: State) -> bool:
    """Run one iteration of a loop; returns whether another may follow."""
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


def _unknown_loop(runner: Runner, state: State, condition: Guard, way: Way) -> None:
    """Evaluate a loop with an unknown number of iterations: each variable that it changes becomes
    unknown.
    """
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

    def lose_changed(each: State) -> None:
        for name in changed:
            line = trial.variables[name].line or condition.line
            text = session.unknown_at(line, f"${name}", depends(cause), cause.remedy)
            each.variables[name] = scalar(text)

    def widened(each: State) -> None:
        lose_changed(each)
        if each.input is not None and trial.input != each.input:
            each.input = session.unknown_at(condition.line, "the input", depends(cause))
        way(each)
        if each.flow in (BREAK, CONTINUE):
            each.flow = NORMAL

    divided(session, state, cause, (lambda _: None, widened), condition)
    lose_changed(state)


# A command with expanded words, and the state of the script in which it runs.


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A command of the script with expanded words, ``fields``: the program's name, then its
    arguments.

    ``environment`` are variables that are set for this command alone.
    """

    runner: Runner
    state: State
    expander: WordExpander
    command: Simple
    program: str
    arguments: tuple[Text, ...]
    fields: tuple[Text, ...]
    environment: Mapping[str, Text]

    @property
    def session(self) -> Session:
        """The evaluation of the script to which the command belongs."""
        return self.runner.session

    @property
    def line(self) -> int:
        """The line of the command in the script."""
        return self.command.line

    @property
    def plain_arguments(self) -> list[str]:
        """Return the arguments as plain strings."""
        return [text.chars for text in self.arguments]
