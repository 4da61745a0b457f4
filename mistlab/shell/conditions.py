"""Evaluates tests, ``[ ]`` and ``[[ ]]``: true, false, or why it is not known."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from posixpath import normpath

from mistlab.shell.expansion import Words
from mistlab.shell.integers import NotKnownError
from mistlab.shell.patterns import matches
from mistlab.shell.shell_text import LineError, Text, is_placeholder, plain
from mistlab.shell.state import Key, Variable
from mistlab.shell.syntax import Comparison, Joined, Operand
from mistlab.shell.variables import taken_as, without_arguments
from mistlab.shell.word import Unknown

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
    """Evaluates tests that stand on a line."""

    def __init__(self, words: Words, line: int) -> None:
        self._words = words
        self._session = words.session
        self._line = line

    def bracketed(self, condition: Comparison) -> Maybe:
        """A test between ``[[`` and ``]]``."""
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
        words, operator = self._words, operand.operator
        if operand.left is None:
            return self._unary(operator, words.text(operand.right))
        left = words.text(operand.left)
        if operator in _NUMBERS:
            right = words.number(operand.right)
            return _NUMBERS[operator](words.number_in(left.chars, self._line), right)
        if operator == "=~":
            return self._regular(left, words.pattern(operand.right))
        if operator in ("=", "==", "!="):
            pattern = words.pattern(operand.right)
            equal = self._equal(left, pattern, is_pattern=True)
            return negated(equal) if operator == "!=" else equal
        return self._binary(operator, left, words.text(operand.right))

    def plain(self, arguments: Sequence[Text]) -> Maybe:
        """A test of words: those of ``[`` without its ``]``, or those of ``test``."""
        return _Reader(self, list(arguments)).whole()

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
        """A text without the variables that nobody sets."""
        if text.is_known:
            return text
        absent = self._session.absent
        return replace(text, chars="".join(each for each in text.chars if each not in absent))

    def _assume(self, text: Text) -> None:
        """Note that the variables of a text are taken as not set."""
        for letter in text.chars:
            name = self._session.absent.get(letter)
            if name is not None and name.startswith("$"):
                self._words.assumed |= without_arguments(self._session, self._line, name)
            elif name is not None:
                self._words.assumed |= taken_as(self._session, name, self._line, "not set")

    def _is_set(self, text: Text) -> Maybe:
        if unknown := self._session.first_unknown(text):
            return unknown
        name = text.chars.partition("[")[0]
        self._session.mentioned.add(name)
        variable: Variable | None = self._words.state.variables.get(name)
        if variable is None and name not in self._session.assigned:
            self._words.assumed |= taken_as(self._session, name, self._line, "not set")
        return variable is not None and bool(variable.items)

    def _is_at_hand(self, path: str) -> bool:
        if normpath(path) in self._words.state.written:
            return True
        return bool(path) and self._session.source.beside(path) is not None

    def _equal(self, left: Text, right: Text, *, is_pattern: bool) -> Maybe:
        """Whether texts are equal; variables that nobody sets are empty if this makes them so."""
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
            problem = f"{pattern.chars} is no regular expression that can be read: simplify it"
            raise LineError(self._line, problem) from None
        groups = [match[0], *match.groups("")] if match else []
        items: dict[Key, Text] = {
            number: plain(group, self._line) for number, group in enumerate(groups)
        }
        self._words.state.variables["BASH_REMATCH"] = Variable(items=items, is_list=True)
        return match is not None


def _python(pattern: str) -> str:
    """A POSIX regular expression as one of Python's."""
    inner = re.sub(r"\[:(\w+):\]", lambda match: _POSIX.get(match[1], ""), pattern)
    return inner.replace("(?", "(\\?")


def negated(value: Maybe) -> Maybe:
    """The opposite of a test's value."""
    return value if isinstance(value, Unknown) else not value


class _Reader:
    """Reads the words of ``test`` from left to right."""

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
    """Whether one of two tests is true."""
    if first is True or second is True:
        return True
    return first if isinstance(first, Unknown) else second
