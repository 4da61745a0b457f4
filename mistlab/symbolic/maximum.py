"""The largest of several expressions in sizes, kept to those that can be the largest."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import sympy

T = TypeVar("T")


def largest(expressions: Iterable[sympy.Expr]) -> sympy.Expr:
    """``Max`` of the expressions that no other exceeds everywhere."""
    first, *others = undominated(map(sympy.expand, expressions), lambda e: e)
    # SymPy's own search for what can be dropped takes ten times as long and finds no more.
    return sympy.Max(first, *others, evaluate=False) if others else first


def undominated(items: Iterable[T], size: Callable[[T], sympy.Expr]) -> list[T]:
    """The items whose size is the largest for some values of the symbols.

    One is dropped only where another is at least as large for all sizes: the difference of the
    two, a polynomial in symbols that are not negative, has no negative coefficient.
    """
    kept: list[T] = []
    for item in items:
        if any(_at_least(size(other), size(item)) for other in kept):
            continue
        kept = [other for other in kept if not _at_least(size(item), size(other))]
        kept.append(item)
    return kept


def _at_least(larger: sympy.Expr, smaller: sympy.Expr) -> bool:
    coefficients = (larger - smaller).as_coefficients_dict().values()
    return all(coefficient >= 0 for coefficient in coefficients)
