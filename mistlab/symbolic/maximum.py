"""The maximum of several expressions in sizes, without those that can never be the largest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, TypeVar

from mistlab.symbolic.lazily import sympy
from mistlab.symbolic.sum_source import Largest
from mistlab.symbolic.sums import Sum

T = TypeVar("T")

# The terms of an expanded expression, and the factor of each.
_Factors = Mapping[Any, "int | Fraction | sympy.Expr"]


def largest(expressions: Iterable[sympy.Expr]) -> sympy.Expr:
    """The maximum of the expressions, as ``Max`` of those that can be the largest."""
    first, *others = undominated(map(expanded, expressions), lambda e: e)
    if isinstance(first, Sum):
        return Largest((first, *others)) if others else first
    # Not evaluated: SymPy's own search for terms to drop takes ten times as long and finds no more.
    return sympy.Max(first, *others, evaluate=False) if others else first


def expanded(expression: sympy.Expr) -> sympy.Expr:
    """The expression as a sum of products; SymPy is not asked if it is one already."""
    if isinstance(expression, Sum):
        return expression
    return expression if _is_expanded(expression) else sympy.expand(expression)


def undominated(items: Iterable[T], size: Callable[[T], sympy.Expr]) -> list[T]:
    """The items, without those that are never larger than another item.

    An item is dropped if the difference to another item's size has no negative coefficient. The
    difference is a polynomial in symbols that are not negative, so the other is at least as large.
    """
    kept: list[tuple[T, _Factors]] = []
    for item in items:
        own = factors_of(size(item))
        if any(_at_least(factors, own) for _, factors in kept):
            continue
        kept = [(other, factors) for other, factors in kept if not _at_least(own, factors)]
        kept.append((item, own))
    return [item for item, _ in kept]


def _at_least(larger: _Factors, smaller: _Factors) -> bool:
    """Whether no term of the difference has a negative factor."""
    return all(larger.get(term, 0) >= factor for term, factor in smaller.items()) and all(
        factor >= 0 or term in smaller for term, factor in larger.items()
    )


def factors_of(expression: Any) -> _Factors:
    """The terms of an expanded expression of SymPy or of a sum of products, and their factors."""
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
    """Whether a factor has nothing to expand: a number, a size or its power, a choice of such."""
    if factor.is_Symbol or factor.is_Rational:
        return True
    if factor.is_Pow:
        return bool(factor.base.is_Symbol and factor.exp.is_Integer)
    return isinstance(factor, sympy.Piecewise) and all(_is_expanded(e) for e, _ in factor.args)
