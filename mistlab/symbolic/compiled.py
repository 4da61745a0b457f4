"""Expressions compiled to NumPy, and evaluated over columns of candidates.

Several expressions are the source text of one function of NumPy columns. Rows are evaluated in
blocks that fit in the processor's cache, so the time for a row does not depend on the number of
rows.

Axes: E expressions, C candidates.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.symbolic.grammar import function_of, function_printed_here
from mistlab.symbolic.lazily import sympy
from mistlab.symbolic.sum_source import Value, source_of_sums

ROWS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Expressions as one function of columns, with the function's source text.

    ``numbers`` are whole numbers that belong to the expressions and depend on no column. Text that
    was not ``printed_here``, by this process, is checked before it is run.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    source: str
    numbers: Mapping[str, int] = field(default_factory=dict, compare=False)
    printed_here: bool = field(default=False, repr=False, compare=False)
    function: Callable[..., tuple[Any, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        made = function_printed_here if self.printed_here else function_of
        object.__setattr__(self, "function", made(self.source))

    def __reduce__(self) -> tuple[Callable[[Mapping[str, Any]], Self], tuple[Mapping[str, Any]]]:
        """Pickle the source only; another process makes the function again."""
        return type(self).from_mapping, (self.to_mapping(),)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Expressions from ``to_mapping``; raises ``RefusedError`` for more than arithmetic."""
        return cls(
            names=tuple(mapping["names"]),
            columns=tuple(mapping["columns"]),
            source=mapping["source"],
            numbers=mapping["numbers"],
        )

    def to_mapping(self) -> dict[str, Any]:
        """The expressions as JSON values."""
        return {
            "names": self.names,
            "columns": self.columns,
            "source": self.source,
            "numbers": dict(self.numbers),
        }

    def __call__(
        self, columns: Mapping[str, NDArray[Any]], shared: "Shared | None" = None
    ) -> NDArray[np.float64]:
        """The values (E, C) for ``columns`` of length C each, in the order of ``names``.

        Columns whose values many candidates have in common may be given as ``shared``.
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
    """Columns with few distinct rows: a short table, and the row of each candidate."""

    table: Mapping[str, NDArray[np.float64]]
    index: NDArray[np.int64]

    def column(self, name: str, block: slice) -> NDArray[np.float64]:
        """A block of one column."""
        return self.table[name][self.index[block]]


def compile_expressions(
    expressions: Mapping[str, "sympy.Expr"],
    *,
    columns: tuple[str, ...],
    constants: Mapping[str, int],
    numbers: Mapping[str, int] | None = None,
) -> Compiled:
    """Compile ``expressions``, whose symbols are names of columns or of constants."""
    from mistlab.symbolic.printing import source_of  # noqa: PLC0415 (needs SymPy)

    return Compiled(
        names=tuple(expressions),
        columns=columns,
        source=source_of([*expressions.values()], columns, constants),
        numbers=dict(numbers or {}),
        printed_here=True,
    )


def compile_sums(
    sums: Mapping[str, Value], *, columns: tuple[str, ...], numbers: Mapping[str, int] | None = None
) -> Compiled:
    """Compile sums of products, whose sizes are names of columns."""
    return Compiled(
        names=tuple(sums),
        columns=columns,
        source=source_of_sums([*sums.values()], columns),
        numbers=dict(numbers or {}),
        printed_here=True,
    )
