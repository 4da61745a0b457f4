"""Evaluates the arithmetic expressions of shell scripts: 64-bit integers with C's operators."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from mistlab.shell.shell_text import LineError, Unknown

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+#[\w@]+|0[xX][0-9a-fA-F]+|\d+)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<operator><<=|>>=|\*\*|\+\+|--|&&|\|\||<<|>>|[-+*/%&|^<>=!]=|[-+*/%&|^<>=!~?:,()\[\]])"
    r"|(?P<unknown>[\U000F0000-\U000FFFFD])|(?P<rest>\S))",
    re.ASCII,
)
_NAME = re.compile(r"\s*[A-Za-z_]", re.ASCII)
_BINARY = {
    ",": 1,
    "||": 4,
    "&&": 5,
    "|": 6,
    "^": 7,
    "&": 8,
    "==": 9,
    "!=": 9,
    "<": 10,
    ">": 10,
    "<=": 10,
    ">=": 10,
    "<<": 11,
    ">>": 11,
    "+": 12,
    "-": 12,
    "*": 13,
    "/": 13,
    "%": 13,
    "**": 14,
}
_ASSIGNS = frozenset(("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "^=", "|="))
_CHOICE, _ASSIGN = 3, 2
_DEEPEST = 30
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ@_"


class NotKnownError(Exception):
    """Raised if the value of an arithmetic expression depends on an unknown part of the script."""

    def __init__(self, unknown: Unknown) -> None:
        super().__init__(str(unknown))
        self.unknown = unknown


class Names:
    """How an arithmetic expression reads and assigns shell variables: by name, and by index for
    arrays.
    """

    def __init__(
        self,
        read: Callable[[str, str | None], str],
        write: Callable[[str, str | None, int], None],
        unknown: Callable[[str], Unknown],
    ) -> None:
        self.read = read
        self.write = write
        self.unknown = unknown


def number_of(text: str, names: Names, line: int, depth: int = 0) -> int:
    """Evaluate an arithmetic expression; raises ``NotKnownError`` if the value depends on an
    unknown part.
    """
    if depth > _DEEPEST:
        problem = "variables refer to one another without end: write a number instead"
        raise LineError(line, f"{text.strip()[:40]}: {problem}")
    return _Expression(text.replace('"', ""), names, line, depth).value()


def wrapped(value: int) -> int:
    """Wrap an integer to 64 bits with a sign, as shells do."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _divided(left: int, right: int) -> int:
    size = abs(left) // abs(right)
    return size if (left < 0) == (right < 0) else -size


def _power(left: int, right: int) -> int:
    return wrapped(pow(left, right, 1 << 64))


_COUNTED: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": _divided,
    "%": lambda left, right: left - right * _divided(left, right),
    "**": _power,
    "<<": lambda left, right: left << (right % 64),
    ">>": lambda left, right: left >> (right % 64),
    "&": lambda left, right: left & right,
    "|": lambda left, right: left | right,
    "^": lambda left, right: left ^ right,
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
    "<": lambda left, right: left < right,
    ">": lambda left, right: left > right,
    "<=": lambda left, right: left <= right,
    ">=": lambda left, right: left >= right,
    ",": lambda _, right: right,
}


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """Split an arithmetic expression into tokens: kind, characters and end of each."""
    at, before = 0, ""
    while match := _TOKEN.match(text, at):
        kind = match.lastgroup or ""
        token, at = match[kind], match.end()
        counts = before == "name" or _NAME.match(text, at)
        if token in ("++", "--") and not counts:
            # Before a number, ``++`` and ``--`` are two signs, since only a variable can be
            # incremented.
            token, at = token[0], at - 1
        yield kind, token, at
        before = "name" if token == "]" else kind


class _Expression:
    """Evaluates an arithmetic expression while parsing it; ``_idle`` counts enclosing parts that
    are parsed but not evaluated, as after ``0 &&``.
    """

    def __init__(self, text: str, names: Names, line: int, depth: int) -> None:
        self._text = text
        self._names = names
        self._line = line
        self._depth = depth
        self._tokens = list(_tokens(text.rstrip()))
        self._at = 0
        self._idle = 0
        self._level = 0

    def value(self) -> int:
        """Evaluate the whole expression; an empty one is 0."""
        if not self._tokens:
            return 0
        value = self._binary(0)
        if self._at < len(self._tokens):
            self._refuse()
        return value

    def _refuse(self, problem: str = "is not an arithmetic expression: correct it") -> NoReturn:
        raise LineError(self._line, f"{self._text.strip()[:60]} {problem}")

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _take(self, token: str) -> None:
        if self._peek() != token:
            self._refuse()
        self._at += 1

    def _binary(self, least: int) -> int:
        self._level += 1
        if self._level > 3 * _DEEPEST:
            self._refuse("is nested too deep: write it in several steps")
        left = self._unary()
        while True:
            operator = self._peek()
            if operator == "?" and least <= _CHOICE:
                left = self._choice(left)
            elif _BINARY.get(operator, -1) >= max(least, 1):
                self._at += 1
                left = self._with(operator, left)
            else:
                self._level -= 1
                return left

    def _with(self, operator: str, left: int) -> int:
        level = _BINARY[operator]
        if operator in ("&&", "||"):
            decided = (left == 0) == (operator == "&&")
            self._idle += decided
            right = self._binary(level + 1)
            self._idle -= decided
            return (
                int(left != 0 and right != 0) if operator == "&&" else int(left != 0 or right != 0)
            )
        right = self._binary(level if operator == "**" else level + 1)
        return self._counted(operator, left, right)

    def _counted(self, operator: str, left: int, right: int) -> int:
        if self._idle:
            return 0
        if operator in "/%" and right == 0:
            self._refuse("divides by 0: correct the divisor")
        if operator == "**" and right < 0:
            self._refuse("has a negative exponent: give one of at least 0")
        return wrapped(int(_COUNTED[operator](left, right)))

    def _choice(self, condition: int) -> int:
        self._take("?")
        self._idle += condition == 0
        first = self._binary(1)
        self._idle -= condition == 0
        self._take(":")
        self._idle += condition != 0
        second = self._binary(_ASSIGN)
        self._idle -= condition != 0
        return first if condition else second

    def _unary(self) -> int:
        kind, token, _ = self._tokens[self._at] if self._at < len(self._tokens) else ("", "", 0)
        if token in ("++", "--") and self._follows_name():
            self._at += 1
            name, key = self._name()
            return self._changed(name, key, 1 if token == "++" else -1)
        if token in ("++", "--", "-", "+", "!", "~"):
            self._at += 1
            self._level += 1
            if self._level > 3 * _DEEPEST:
                self._refuse("is nested too deep: write it in several steps")
            value = self._unary()
            self._level -= 1
            results = {"-": -value, "!": int(value == 0), "~": ~value}
            return wrapped(results.get(token, value))
        return self._operand(kind, token)

    def _follows_name(self) -> bool:
        after = self._tokens[self._at + 1 : self._at + 2]
        return bool(after) and after[0][0] == "name"

    def _operand(self, kind: str, token: str) -> int:
        if kind == "name":
            return self._variable()
        self._at += 1
        if kind == "number":
            return self._number(token)
        if kind == "unknown":
            if not self._idle:
                raise NotKnownError(self._names.unknown(token))
            return 0
        if token != "(":
            self._refuse()
        value = self._binary(1)
        self._take(")")
        return value

    def _number(self, token: str) -> int:
        base, _, digits = token.rpartition("#")
        if not base:
            octal = len(token) > 1 and token[0] == "0" and token[1] not in "xX"
            base, digits = ("8", token) if octal else ("0", token)
        if base == "0":
            return wrapped(int(digits, 0) if len(digits) < 40 else 0)
        value, size = 0, int(base) if len(base) < 3 else 65
        for letter in digits.lower() if size <= 36 else digits:
            digit = _DIGITS.find(letter)
            if not 2 <= size <= 64 or not 0 <= digit < size:
                self._refuse("has a digit that its base lacks: write digits below the base")
            value = wrapped(value * size + digit)
        return value

    def _name(self) -> tuple[str, str | None]:
        kind, name, _ = self._tokens[self._at]
        if kind != "name":
            self._refuse()
        self._at += 1
        if self._peek() != "[":
            return name, None
        level, start = 0, self._tokens[self._at][2]
        while True:
            token = self._peek()
            level += (token == "[") - (token == "]")
            if not token:
                self._refuse()
            self._at += 1
            if level == 0:
                return name, self._text[start : self._tokens[self._at - 1][2] - 1]

    def _variable(self) -> int:
        name, key = self._name()
        operator = self._peek()
        if operator in ("++", "--"):
            self._at += 1
            step = 1 if operator == "++" else -1
            return wrapped(self._changed(name, key, step) - step)
        if operator not in _ASSIGNS:
            return self._read(name, key)
        self._at += 1
        before = 0 if operator == "=" else self._read(name, key)
        value = self._binary(_ASSIGN)
        if operator != "=":
            value = self._counted(operator[:-1], before, value)
        if not self._idle:
            self._names.write(name, key, value)
        return value

    def _changed(self, name: str, key: str | None, step: int) -> int:
        value = wrapped(self._read(name, key) + step)
        if not self._idle:
            self._names.write(name, key, value)
        return value

    def _read(self, name: str, key: str | None) -> int:
        if self._idle:
            return 0
        text = self._names.read(name, key)
        return number_of(text, self._names, self._line, self._depth + 1)
