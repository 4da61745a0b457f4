"""Sums of products of sizes, such as ``2*b*h*s/tp + 2*h``: what layer graphs count.

SymPy can do much more with such expressions, and takes some twenty times as long to read them, to
add them up and to print them. Factors are exact. What is no size (a maximum, a remainder, a choice)
is a factor as well: a text of NumPy.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from math import prod
from typing import Any

from mistlab.symbolic.lazily import sympy
from mistlab.values.errors import InputError

# Factors of one product and their powers, by name; and a whole or rational number.
Powers = tuple[tuple[str, int], ...]
Number = int | Fraction

_NO_FACTORS: Powers = ()
_MOST_POWER = 64


class Sum:
    """A sum of products; ``terms`` has each product's number, and no number is zero."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[Powers, Number]) -> None:
        self.terms = {powers: number for powers, number in terms.items() if number}
        self._hash = hash(frozenset(self.terms.items()))

    @classmethod
    def of(cls, value: Sum | Number) -> Sum:
        """A number as a sum."""
        if isinstance(value, Sum):
            return value
        return cls({_NO_FACTORS: value if isinstance(value, int) else _whole(value)})

    @classmethod
    def named(cls, name: str) -> Sum:
        """A size, or another factor, by its name or text."""
        return cls({((name, 1),): 1})

    @classmethod
    def total(cls, parts: Iterable[Sum]) -> Sum:
        """The sum of sums."""
        terms: dict[Powers, Number] = {}
        for part in parts:
            for powers, number in part.terms.items():
                terms[powers] = terms.get(powers, 0) + number
        return cls(terms)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sum) and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: Sum | Number) -> Sum:
        return Sum.total((self, Sum.of(other)))

    __radd__ = __add__

    def __neg__(self) -> Sum:
        return Sum({powers: -number for powers, number in self.terms.items()})

    def __sub__(self, other: Sum | Number) -> Sum:
        return Sum.total((self, -Sum.of(other)))

    def __mul__(self, other: Sum | Number) -> Sum:
        terms: dict[Powers, Number] = {}
        for right, factor in Sum.of(other).terms.items():
            for left, number in self.terms.items():
                powers = _together(left, right)
                terms[powers] = terms.get(powers, 0) + number * factor
        return Sum(terms)

    __rmul__ = __mul__

    def __truediv__(self, other: Sum | Number) -> Sum:
        return self * Sum.of(other) ** -1

    def __pow__(self, power: int) -> Sum:
        if len(self.terms) == 1:
            ((powers, number),) = self.terms.items()
            raised = tuple((name, own * power) for name, own in powers) if power else _NO_FACTORS
            return Sum({raised: 1 if number == 1 else _whole(Fraction(number) ** power)})
        if power < 0:
            if not self.terms:
                raise ZeroDivisionError
            return Sum({((f"({self})", power),): 1})
        return prod([self] * power, start=Sum.of(1))

    def __str__(self) -> str:
        """The sum as text of NumPy."""
        texts = (text_of_term(powers, number) for powers, number in self.terms.items())
        return " + ".join(texts) or "0"

    __repr__ = __str__

    @property
    def names(self) -> frozenset[str]:
        """The sizes in the sum."""
        return frozenset(
            name for powers in self.terms for factor, _ in powers for name in names_of(factor)
        )


def total(parts: Iterable[Any], *, like: Any) -> Any:
    """The sum of expressions that are like another one: sums of products, or SymPy's."""
    return Sum.total(parts) if isinstance(like, Sum) else sympy.Add(*parts)


def product(parts: Sequence[Any]) -> Any:
    """The product of sums of products, or of SymPy's expressions, as a sum of products."""
    if all(isinstance(part, Sum) for part in parts):
        return prod(parts, start=Sum.of(1))
    return sympy.expand(sympy.prod(parts))


def names_in(value: Any) -> frozenset[str]:
    """The names of the sizes in a sum of products, in an expression of SymPy or in a number."""
    if isinstance(value, Sum):
        return value.names
    return frozenset(symbol.name for symbol in getattr(value, "free_symbols", ()))


def where(condition: str) -> Sum:
    """One where a condition on sizes holds, else zero; the condition is a text of NumPy."""
    # A number times a truth: two truths would not add up.
    return Sum.named(f"(1.0*{condition})")


def text_of_term(powers: Powers, number: Number) -> str:
    """A product as text of NumPy."""
    above = [_power(name, power) for name, power in powers if power > 0]
    below = [_power(name, -power) for name, power in powers if power < 0]
    if number != 1 or not above:
        above.insert(0, text_of_number(number))
    return "*".join(above) + "".join(f"/{one}" for one in below)


def text_of_number(number: Number) -> str:
    """A number as text; a quotient of whole numbers is one."""
    if isinstance(number, Fraction) and number.denominator != 1:
        return f"({number.numerator}/{number.denominator})"
    return str(int(number)) if number >= 0 else f"({int(number)})"


@cache
def names_of(factor: str) -> frozenset[str]:
    """The names of sizes in the text of a factor."""
    return frozenset(re.findall(r"(?<![\w.])(?!numpy\b)[A-Za-z_]\w*", factor))


@cache
def sum_from(text: str) -> Sum:
    """The sum in a graph file's text.

    >>> sum_from("2*b*(s + 1)/tp - b*s/tp")
    b*s/tp + 2*b/tp
    """
    try:
        return _build(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, ZeroDivisionError) as error:
        message = f"{text[:80]!r} is not an expression in sizes: use + - * / ** and symbols"
        raise InputError(message) from error


def _power(name: str, power: int) -> str:
    return name if power == 1 else f"{name}**{power}"


def _whole(number: Fraction) -> Number:
    return number.numerator if number.denominator == 1 else number


@cache
def _together(left: Powers, right: Powers) -> Powers:
    """The factors of two products together."""
    if not left or not right:
        return left or right
    powers = dict(left)
    for name, power in right:
        powers[name] = powers.get(name, 0) + power
    return tuple(sorted((name, power) for name, power in powers.items() if power))


@cache
def _named(name: str) -> Sum:
    return Sum.named(name)


def _build(node: ast.expr) -> Sum:
    match node:
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            made = Sum(_added(node))
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            made = _build(left) * _build(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            made = _build(left) / _build(right)
        case ast.Name(id=name):
            made = _named(name)
        case ast.Constant(value=int(number)):
            made = Sum.of(number)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
            made = _build(left) ** min(power, _MOST_POWER)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            made = -_build(operand)
        case ast.Call(func=ast.Name(id="Max" | "Mod" as name), args=[_, _, *_] as terms):
            function = "maximum" if name == "Max" else "mod"
            made = Sum.named(_in_pairs(f"numpy.{function}", [str(_build(one)) for one in terms]))
        case _:
            raise ValueError(ast.dump(node))
    return made


def _in_pairs(function: str, terms: Sequence[str]) -> str:
    first, *others = terms
    for other in others:
        first = f"{function}({first}, {other})"
    return first


def _added(node: ast.expr) -> dict[Powers, Number]:
    """The terms of a sum; the last ones are the outermost."""
    signed: list[tuple[ast.expr, int]] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        signed.append((node.right, -1 if isinstance(node.op, ast.Sub) else 1))
        node = node.left
    signed.append((node, 1))
    terms: dict[Powers, Number] = {}
    for one, sign in reversed(signed):
        for powers, number in _build(one).terms.items():
            terms[powers] = terms.get(powers, 0) + sign * number
    return terms
