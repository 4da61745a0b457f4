"""Sums of products of sizes, such as ``2*b*h*s/tp + 2*h``, which are faster than SymPy's
expressions.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from mistlab.core.values import InputError

if TYPE_CHECKING:
    import sympy as sympy  # noqa: PLC0414 (for others to import from here)
else:

    class _OnUse:
        """A module that is imported when one of its names is first used."""

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("sympy"), name)

    sympy = _OnUse()

# Imports SymPy only when one of its names is first used, since importing it takes longer than
# answering a small question.


# Sums of products of sizes, such as ``2*b*h*s/tp + 2*h``, of which layer graphs consist. SymPy
# takes some twenty times as long to parse, add and print them.


# The sizes that are multiplied in a product, each with its power.
Powers = tuple[tuple[str, int], ...]
Number = int | Fraction

_NO_FACTORS: Powers = ()
_MOST_POWER = 64


class Sum:
    """A sum of products of sizes; ``terms`` has the non-zero coefficient of each product.

    Coefficients are exact. A factor that is not a size (a maximum, a remainder, a choice) is kept
    as NumPy text.
    """

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[Powers, Number]) -> None:
        self.terms = {powers: number for powers, number in terms.items() if number}
        self._hash: int | None = None

    @classmethod
    def of(cls, value: Sum | Number) -> Sum:
        """Make a sum of products that is a number."""
        if isinstance(value, Sum):
            return value
        return cls({_NO_FACTORS: value if isinstance(value, int) else _whole(value)})

    @classmethod
    def named(cls, name: str) -> Sum:
        """Make a sum of products that is a single factor: a size, or another factor by its NumPy
        text.
        """
        return cls({((name, 1),): 1})

    @classmethod
    def total(cls, parts: Iterable[Sum]) -> Sum:
        """The sum of several sums of products."""
        terms: dict[Powers, Number] = {}
        for part in parts:
            for powers, number in part.terms.items():
                terms[powers] = terms.get(powers, 0) + number
        return cls(terms)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sum) and self.terms == other.terms

    def __hash__(self) -> int:
        # Most sums are intermediate results that are never hashed, so the hash is computed only
        # when it is needed.
        if self._hash is None:
            self._hash = hash(frozenset(self.terms.items()))
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
        """The sum of products as NumPy source text."""
        texts = (text_of_term(powers, number) for powers, number in self.terms.items())
        return " + ".join(texts) or "0"

    __repr__ = __str__

    @property
    def names(self) -> frozenset[str]:
        """The names of the sizes that occur in the sum of products."""
        return frozenset(
            name for powers in self.terms for factor, _ in powers for name in names_of(factor)
        )


def total(parts: Iterable[Any], *, like: Any) -> Any:
    """The sum of several expressions, which are all sums of products or all SymPy's."""
    return Sum.total(parts) if isinstance(like, Sum) else sympy.Add(*parts)


def product(parts: Sequence[Any]) -> Any:
    """The product of several expressions (sums of products or SymPy's) as a sum of products."""
    if all(isinstance(part, Sum) for part in parts):
        return prod(parts, start=Sum.of(1))
    return sympy.expand(sympy.prod(parts))


def names_in(value: Any) -> frozenset[str]:
    """The names of the sizes in a sum of products, in an expression of SymPy or in a number."""
    if isinstance(value, Sum):
        return value.names
    return frozenset(symbol.name for symbol in getattr(value, "free_symbols", ()))


def where(condition: str) -> Sum:
    """An expression that is 1 where a condition on sizes holds, else 0; the condition is NumPy
    text.
    """
    # Booleans are multiplied by a float, since the sum of two booleans is a boolean and not 2.
    return Sum.named(f"(1.0*{condition})")


def text_of_term(powers: Powers, number: Number) -> str:
    """A product of sizes with its coefficient, as NumPy source text."""
    above = [_power(name, power) for name, power in powers if power > 0]
    below = [_power(name, -power) for name, power in powers if power < 0]
    if number != 1 or not above:
        above.insert(0, text_of_number(number))
    return "*".join(above) + "".join(f"/{one}" for one in below)


def text_of_number(number: Number) -> str:
    """A number as text; a fraction is printed as a quotient of integers."""
    if isinstance(number, Fraction) and number.denominator != 1:
        return f"({number.numerator}/{number.denominator})"
    return str(int(number)) if number >= 0 else f"({int(number)})"


@cache
def names_of(factor: str) -> frozenset[str]:
    """The names of the sizes in a factor's text."""
    return frozenset(re.findall(r"(?<![\w.])(?!numpy\b)[A-Za-z_]\w*", factor))


@cache
def sum_from(text: str) -> Sum:
    """The sum of products that a text in a graph file stands for.

    >>> sum_from("2*b*(s + 1)/tp - b*s/tp")
    b*s/tp + 2*b/tp
    """
    try:
        return _build(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, ZeroDivisionError) as error:
        message = f"{text[:80]!r} is not an expression in sizes, of + - * / ** and symbols"
        raise InputError(message) from error


def _power(name: str, power: int) -> str:
    return name if power == 1 else f"{name}**{power}"


def _whole(number: Fraction) -> Number:
    return number.numerator if number.denominator == 1 else number


@cache
def _together(left: Powers, right: Powers) -> Powers:
    """Multiply two products of sizes: powers of equal factors are added."""
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
    """The terms of a parsed sum, with their coefficients."""
    signed: list[tuple[ast.expr, int]] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        signed.append((node.right, -1 if isinstance(node.op, ast.Sub) else 1))
        node = node.left
    signed.append((node, 1))
    terms: dict[Powers, Number] = {}
    for part, sign in reversed(signed):
        for powers, number in _build(part).terms.items():
            terms[powers] = terms.get(powers, 0) + sign * number
    return terms


# Generates one NumPy function that computes many sums of products, in which common products are
# computed once.


# The number of preceding sums that are tried as the start of a new sum, to which the missing terms
# are added.
_LOOKED_AT = 24


@dataclass(frozen=True, slots=True)
class Largest:
    """The maximum of several sums of products."""

    sums: tuple[Sum, ...]


Value = Sum | Largest


def source_of_sums(values: Sequence[Value], columns: Sequence[str]) -> str:
    """The source text of a function of ``columns`` that returns the values of the sums.

    Products are computed once, as named values, each from a product with one factor less. A sum
    that contains all terms of an earlier sum, and few more, starts from that sum. No subtraction is
    introduced that the sums do not contain.
    """
    every = [one for value in values for one in _sums_of(value)]
    unknown = {name for one in dict.fromkeys(every) for name in one.names} - {*columns}
    if unknown:
        message = f"symbols {', '.join(sorted(unknown))} are neither columns nor constants"
        raise ValueError(message)
    names = _Names(order=_order(every))
    texts = names.of_sums(every)
    results = ", ".join(_text(value, texts) for value in values)
    lines = [f"    {line}" for line in names.lines]
    return "\n".join([f"def compiled({', '.join(columns)}):", *lines, f"    return [{results}]"])


def _sums_of(value: Value) -> Iterator[Sum]:
    if isinstance(value, Largest):
        yield from value.sums
    else:
        yield value


def _text(value: Value, texts: Mapping[Sum, str]) -> str:
    if isinstance(value, Sum):
        return texts[value]
    first, *others = (texts[one] for one in value.sums)
    for other in others:
        first = f"numpy.maximum({first}, {other})"
    return first


def _order(sums: Sequence[Sum]) -> Mapping[str, int]:
    """The order of factors in products: the most frequent factor first, so that more products have
    a common beginning.
    """
    products = {powers for one in sums for powers in one.terms}
    counts = Counter(name for powers in products for name, _ in powers)
    return {name: place for place, (name, _) in enumerate(counts.most_common())}


@dataclass(slots=True)
class _Names:
    """The variables of the generated function, and the ``lines`` of source text that compute
    them.
    """

    order: Mapping[str, int]
    lines: list[str] = field(default_factory=list)
    products: dict[Powers, str] = field(default_factory=dict)
    terms: dict[tuple[Powers, Number], str] = field(default_factory=dict)

    def of_sums(self, sums: Sequence[Sum]) -> dict[Sum, str]:
        """The variable or the number that holds the value of each sum of products in the generated
        function.
        """
        distinct = sorted(dict.fromkeys(sums), key=lambda one: len(one.terms))
        texts: dict[Sum, str] = {}
        for number, longer in enumerate(distinct):
            texts[longer] = self._sum(longer, distinct[max(0, number - _LOOKED_AT) : number], texts)
        return texts

    def _sum(self, whole: Sum, before: Sequence[Sum], texts: Mapping[Sum, str]) -> str:
        base = _base(whole, before)
        left = whole.terms if base is None else _left(whole, base)
        parts = [self._term(powers, number) for powers, number in left.items()]
        if base is not None:
            parts.insert(0, texts[base])
        if len(parts) <= 1:
            return parts[0] if parts else "0"
        return self._line(" + ".join(parts))

    def _term(self, powers: Powers, number: Number) -> str:
        if not powers:
            return text_of_number(number)
        product = self._product(tuple(sorted(powers, key=lambda one: self.order[one[0]])))
        if number == 1:
            return product
        if (powers, number) not in self.terms:
            self.terms[powers, number] = self._line(f"{text_of_number(number)}*{product}")
        return self.terms[powers, number]

    def _product(self, powers: Powers) -> str:
        """The variable that holds the value of a product, given the product's factors in order."""
        if powers not in self.products:
            *others, (name, power) = powers
            power_text = name if abs(power) == 1 else f"{name}**{abs(power)}"
            if others:
                sign = "*" if power > 0 else "/"
                text = self._line(f"{self._product(tuple(others))}{sign}{power_text}")
            else:
                text = (
                    name
                    if power_text.isidentifier() and power == 1
                    else self._line(power_text if power > 0 else f"1/{power_text}")
                )
            self.products[powers] = text
        return self.products[powers]

    def _line(self, text: str) -> str:
        name = f"x{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name


def _base(whole: Sum, before: Sequence[Sum]) -> Sum | None:
    """The longest of the preceding sums from which a sum can be computed, if that saves
    operations.
    """
    parts = (other for other in before if len(other.terms) > 1 and _begins(whole, other))
    return max(parts, key=lambda other: len(other.terms), default=None)


def _begins(whole: Sum, other: Sum) -> bool:
    """Whether a sum contains all terms of another sum, none of them with a negative coefficient."""
    terms = whole.terms
    return all(0 < number <= terms.get(powers, 0) for powers, number in other.terms.items())


def _left(whole: Sum, base: Sum) -> Mapping[Powers, Number]:
    """The terms of a sum that are missing in the sum from which it is computed."""
    terms = {powers: number - base.terms.get(powers, 0) for powers, number in whole.terms.items()}
    return {powers: number for powers, number in terms.items() if number}


# Builds the maximum of several expressions in sizes without those that can never be the largest.


T = TypeVar("T")

# The terms of an expanded expression, each with its coefficient.
_Factors = Mapping[Any, "int | Fraction | sympy.Expr"]


def largest(expressions: Iterable[sympy.Expr]) -> sympy.Expr:
    """The maximum of several expressions as ``Max``, without expressions that another one always
    equals or exceeds.
    """
    first, *others = undominated(map(expanded, expressions), lambda e: e)
    if isinstance(first, Sum):
        return Largest((first, *others)) if others else first
    # SymPy's own search for redundant terms takes ten times as long and removes no more, so it is
    # switched off.
    return sympy.Max(first, *others, evaluate=False) if others else first


def expanded(expression: sympy.Expr) -> sympy.Expr:
    """The expression as a sum of products; SymPy is not called if it is one already."""
    if isinstance(expression, Sum):
        return expression
    return expression if _is_expanded(expression) else sympy.expand(expression)


def undominated(items: Iterable[T], size: Callable[[T], sympy.Expr]) -> list[T]:
    """The items that no other item dominates, where ``size`` gives the size of an item.

    An item is dropped if the difference to another item's size has no negative coefficient. The
    difference is a polynomial in symbols that are not negative, so the other is at least as large.
    """
    kept: list[tuple[T, _Factors]] = []
    for item in items:
        own_factors = factors_of(size(item))
        if any(_at_least(factors, own_factors) for _, factors in kept):
            continue
        kept = [(other, factors) for other, factors in kept if not _at_least(own_factors, factors)]
        kept.append((item, own_factors))
    return [item for item, _ in kept]


def _at_least(larger: _Factors, smaller: _Factors) -> bool:
    """Whether the first expression is never smaller than the second: their difference has no term
    with a negative coefficient.
    """
    return all(larger.get(term, 0) >= factor for term, factor in smaller.items()) and all(
        factor >= 0 or term in smaller for term, factor in larger.items()
    )


def factors_of(expression: Any) -> _Factors:
    """The terms and coefficients of a sum of products, or of an expanded SymPy expression."""
    if isinstance(expression, Sum):
        return expression.terms
    return {
        term: Fraction(factor.p, factor.q) if factor.is_Rational else factor
        for term, factor in expression.as_coefficients_dict().items()
    }


def _is_expanded(expression: sympy.Expr) -> bool:
    terms = expression.args if expression.is_Add else (expression,)
    return all(_is_plain(one) for term in terms for one in (term.args if term.is_Mul else (term,)))


def _is_plain(factor: sympy.Expr) -> bool:
    """Whether a factor needs no expansion, since it is a number, a size, a power of a size, or a
    choice of these.
    """
    if factor.is_Symbol or factor.is_Rational:
        return True
    if factor.is_Pow:
        return bool(factor.base.is_Symbol and factor.exp.is_Integer)
    return isinstance(factor, sympy.Piecewise) and all(_is_expanded(e) for e, _ in factor.args)
