"""Masks of the candidates whose sizes a layer graph supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mistlab.symbolic.compiled import Compiled, compile_expressions, compile_sums
from mistlab.symbolic.kept import kept
from mistlab.symbolic.lazily import sympy
from mistlab.symbolic.sums import Sum
from mistlab.symbolic.symbols import size_symbol

if TYPE_CHECKING:
    from mistlab.symbolic.graph import Condition


def remainders(conditions: Sequence[Condition], columns: tuple[str, ...]) -> Compiled:
    """The remainder of every size that must divide, as sums; zero if it divides."""
    left_over = {
        f"{one.size} over {one.divisor}": Sum.named(f"numpy.mod({one.size}, {one.divisor})")
        for one in conditions
    }
    return compile_sums(left_over, columns=columns)


def divides(compiled: Compiled, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
    """A mask of rows in which every size divides, from the ``remainders`` of a graph.

    For example, heads that do not divide over the tensor-parallel ranks make a row infeasible.
    """
    return np.asarray((compiled(columns) == 0).all(axis=0))


def holds(
    assumptions: Sequence[str],
    columns: Mapping[str, NDArray[Any]],
) -> NDArray[np.bool_]:
    """A mask of rows for which all comparisons hold on which the traced code branched."""
    values = _indicators(tuple(assumptions), tuple(columns))(columns)
    return np.asarray((values == 1).all(axis=0))


def broken_at(assumptions: Sequence[str], sequence_length: int) -> list[str]:
    """The comparisons that cannot hold for a sequence length, whatever other sizes are."""
    return [*_broken(tuple(assumptions), sequence_length).numbers]


@kept
def _indicators(assumptions: tuple[str, ...], columns: tuple[str, ...]) -> Compiled:
    """Expressions that are one if a comparison holds, else zero."""
    from mistlab.symbolic.text import relation_from  # noqa: PLC0415 (needs SymPy)

    indicators = {
        text: sympy.Piecewise((1, relation_from(text)), (0, True)) for text in assumptions
    }
    return compile_expressions(indicators, columns=columns, constants={})


@kept
def _broken(assumptions: tuple[str, ...], sequence_length: int) -> Compiled:
    """The false comparisons, as ``numbers`` of no expressions, so that they can be kept."""
    from mistlab.symbolic.text import relation_from  # noqa: PLC0415 (needs SymPy)

    at = {size_symbol("s"): sequence_length}
    false = [text for text in assumptions if relation_from(text).subs(at) == False]  # noqa: E712
    return compile_expressions({}, columns=(), constants={}, numbers=dict.fromkeys(false, 1))
