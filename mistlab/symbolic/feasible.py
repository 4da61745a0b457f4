"""Which sizes mean anything: a mask over columns of candidates, never an exception."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mistlab.symbolic.compiled import Compiled, compile_expressions
from mistlab.symbolic.kept import kept
from mistlab.symbolic.lazily import sympy
from mistlab.symbolic.symbols import size_symbol

if TYPE_CHECKING:
    from mistlab.symbolic.graph import Condition


def remainders(
    conditions: Sequence[Condition], columns: tuple[str, ...], constants: Mapping[str, int]
) -> Compiled:
    """What is left over of every size that must divide; zero where it does."""
    left_over = {
        f"{condition.size} over {condition.divisor}": sympy.Mod(condition.size, condition.divisor)
        for condition in conditions
    }
    return compile_expressions(left_over, columns=columns, constants=constants)


def divides(compiled: Compiled, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
    """For each row, whether every size divides, by the ``remainders`` of a graph.

    Columns and constants are given by the symbols' short names: heads that do not divide over the
    tensor-parallel ranks, for one, make a row infeasible.
    """
    return np.asarray((compiled(columns) == 0).all(axis=0))


def holds(
    assumptions: Sequence[str],
    columns: Mapping[str, NDArray[Any]],
) -> NDArray[np.bool_]:
    """For each row, whether the comparisons hold on which the traced code branched."""
    values = _indicators(tuple(assumptions), tuple(columns))(columns)
    return np.asarray((values == 1).all(axis=0))


def broken_at(assumptions: Sequence[str], sequence_length: int) -> list[str]:
    """The comparisons that cannot hold for sequences of a length, whatever other sizes are."""
    return [*_broken(tuple(assumptions), sequence_length).numbers]


@kept
def _indicators(assumptions: tuple[str, ...], columns: tuple[str, ...]) -> Compiled:
    """One where a comparison holds, else zero."""
    from mistlab.symbolic.text import relation_from  # noqa: PLC0415 (needs SymPy)

    indicators = {
        text: sympy.Piecewise((1, relation_from(text)), (0, True)) for text in assumptions
    }
    return compile_expressions(indicators, columns=columns, constants={})


@kept
def _broken(assumptions: tuple[str, ...], sequence_length: int) -> Compiled:
    """No expressions; the comparisons that are false are its numbers."""
    from mistlab.symbolic.text import relation_from  # noqa: PLC0415 (needs SymPy)

    at = {size_symbol("s"): sequence_length}
    false = [text for text in assumptions if relation_from(text).subs(at) == False]  # noqa: E712
    return compile_expressions({}, columns=(), constants={}, numbers=dict.fromkeys(false, 1))
