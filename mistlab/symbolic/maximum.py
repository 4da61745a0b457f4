"""The maximum of several expressions in sizes, without those that can never be the largest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from mistlab.symbolic.lazily import sympy

T = TypeVar("T")


def largest(expressions: Iterable[sympy.Expr]) -> sympy.Expr:
    """The maximum of the expressions, as ``Max`` of those that can be the largest."""
    first, *others = undominated(map(sympy.expand, expressions), lambda e: e)
    # Not evaluated: SymPy's own search for terms to drop takes ten times as long and finds no more.
    return sympy.Max(first, *others, evaluate=False) if others else first


def undominated(items: Iterable[T], size: Callable[[T], sympy.Expr]) -> list[T]:
    """The items, without those that are never larger than another item.

    An item is dropped if the difference to another item's size has no negative coefficient. The
    difference is a polynomial in symbols that are not negative, so the other is at least as large.
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
