"""Expressions compiled once to NumPy and evaluated over columns of candidates.

Common parts are shared, and rows go through in blocks that stay in the processor's cache: the time
a row takes does not depend on how many there are.

Axes: E expressions, C candidates.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
from numpy.typing import NDArray
from sympy.printing.numpy import NumPyPrinter

from mistlab.symbolic.maximum import largest

ROWS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Expressions as one function of columns."""

    names: tuple[str, ...]
    columns: tuple[str, ...]
    function: Callable[..., tuple[Any, ...]]

    def __call__(
        self, columns: Mapping[str, NDArray[Any]], shared: "Shared | None" = None
    ) -> NDArray[np.float64]:
        """The values (E, C) for ``columns`` of length C each, in the order of ``names``.

        Columns that many candidates have in common may come as ``shared`` instead.
        """
        rows = len(next(iter(columns.values())))
        values = np.empty((len(self.names), rows))
        for start in range(0, rows, ROWS_AT_ONCE):
            block = slice(start, start + ROWS_AT_ONCE)
            inputs = [
                columns[name][block].astype(np.float64, copy=False)
                if name in columns
                else shared.column(name, block)  # type: ignore[union-attr]
                for name in self.columns
            ]
            for row, value in enumerate(self.function(*inputs)):
                values[row, block] = value
        return values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shared:
    """Columns that many candidates have in common: a short table, and each candidate's row."""

    table: Mapping[str, NDArray[np.float64]]
    index: NDArray[np.int64]

    def column(self, name: str, block: slice) -> NDArray[np.float64]:
        """A block of one column."""
        return self.table[name][self.index[block]]


def compile_expressions(
    expressions: Mapping[str, sympy.Expr],
    *,
    columns: tuple[str, ...],
    constants: Mapping[str, int],
) -> Compiled:
    """Compile ``expressions``; symbols are columns or constants, by their short names."""
    substituted = [with_constants(e, constants) for e in expressions.values()]
    free = {symbol.name: symbol for e in substituted for symbol in e.free_symbols}
    unknown = sorted(set(free) - set(columns))
    if unknown:
        message = f"symbols {', '.join(unknown)} are neither columns nor constants"
        raise ValueError(message)
    arguments = [free.get(name, sympy.Symbol(name)) for name in columns]
    printer = _Printer({"fully_qualified_modules": False, "inline": True})
    function = sympy.lambdify(arguments, substituted, modules="numpy", printer=printer, cse=True)
    return Compiled(names=tuple(expressions), columns=columns, function=function)


def with_constants(expression: sympy.Expr, constants: Mapping[str, int]) -> sympy.Expr:
    """An expression with numbers for the symbols that have one; as it is if none has."""
    known = {
        symbol: sympy.Integer(constants[symbol.name])
        for symbol in expression.free_symbols
        if symbol.name in constants
    }
    if not known:
        return expression
    # With numbers for the model's sizes, few of a maximum's terms can still be the largest.
    return sympy.expand(expression.subs(known)).replace(sympy.Max, lambda *terms: largest(terms))


class _Printer(NumPyPrinter):  # type: ignore[misc]
    """Prints maxima and choices as the two-argument functions that NumPy runs fastest."""

    def _print_Max(self, expression: sympy.Expr) -> str:  # noqa: N802
        first, *others = map(self._print, expression.args)
        for other in others:
            first = f"numpy.maximum({first}, {other})"
        return str(first)

    def _print_Piecewise(self, expression: sympy.Expr) -> str:  # noqa: N802
        *choices, (last, _) = expression.args
        if last == 0 and len(choices) == 1:
            # A product with the condition takes a fifth of the time of a choice.
            ((value, condition),) = choices
            return f"(({self._print(value)})*({self._print(condition)}))"
        text = self._print(last)
        for value, condition in reversed(choices):
            text = f"numpy.where({self._print(condition)}, {self._print(value)}, {text})"
        return str(text)
