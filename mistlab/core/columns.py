"""Defines sets of columns: arrays of equal length with an entry for each candidate."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColumnSet:
    """A set of columns that describe candidates.

    Each field is an array with candidates on axis 0, a nested set of columns, or a value that all
    candidates share.
    """

    def chosen(self, rows: NDArray[Any] | slice) -> Self:
        """Select the candidates with these indices, or those in a mask."""
        if isinstance(rows, np.ndarray) and rows.dtype == bool:
            # A mask takes several times as long as the indices in it, for each column.
            rows = np.flatnonzero(rows)
        columns = {}
        for name in self.__dataclass_fields__:
            part = getattr(self, name)
            if isinstance(part, np.ndarray):
                part = part[rows]
            elif isinstance(part, ColumnSet):
                part = part.chosen(rows)
            columns[name] = part
        return type(self)(**columns)

    @classmethod
    def joined(cls, sets: Sequence[Self]) -> Self:
        """Concatenate the columns of several sets of candidates into one set."""
        columns = {}
        for name in cls.__dataclass_fields__:
            parts = [getattr(columns_of, name) for columns_of in sets]
            joint = parts[0]
            if isinstance(joint, np.ndarray):
                joint = np.concatenate(parts)
            elif isinstance(joint, ColumnSet):
                joint = type(joint).joined(parts)
            columns[name] = joint
        return cls(**columns)

    def and_also(self, others: Self) -> Self:
        """Append the columns of ``others`` to those of these candidates."""
        return self.joined([self, others])
