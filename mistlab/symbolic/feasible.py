"""Which sizes mean anything: a mask over columns of candidates, never an exception."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sympy
from numpy.typing import NDArray

from mistlab.symbolic.compiled import Compiled, compile_expressions
from mistlab.symbolic.graph import Condition
from mistlab.symbolic.text import relation_from


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
    indicators = {
        text: sympy.Piecewise((1, relation_from(text)), (0, True)) for text in assumptions
    }
    values = compile_expressions(indicators, columns=tuple(columns), constants={})(columns)
    return np.asarray((values == 1).all(axis=0))
