"""The two operations that pipelines are made of, the longest of some durations and their sum.

A recurrence that is written with an ``Algebra`` holds for whatever durations are: for numbers, for
columns of candidates, and for expressions of a linear programme, where the longest of several ways
becomes a variable with an inequality for each (``searchers.joining.milp``).
"""

from functools import reduce
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray


class Duration(Protocol):
    """Whatever can be added, subtracted, and counted several times."""

    def __add__(self, other: Any, /) -> Any: ...

    def __sub__(self, other: Any, /) -> Any: ...

    def __mul__(self, other: Any, /) -> Any: ...


Length = TypeVar("Length", bound=Duration)
Column = NDArray[np.float64]


class Algebra(Protocol[Length]):
    """How durations of one kind are compared; their sums are their own."""

    def longest(self, name: str, *ways: Length) -> Length:
        """The longest of some ways. ``name`` says which chain of a stage they are ways of."""
        ...

    @property
    def nothing(self) -> Length:
        """A duration of zero."""
        ...


class Numbers:
    """Durations that are plain numbers: the fastest way for a single pipeline."""

    nothing = 0.0

    def longest(self, _name: str, *ways: float) -> float:
        """The largest number."""
        return max(ways)


class Columns:
    """Durations that are columns of candidates."""

    def __init__(self, candidates: int) -> None:
        self.nothing = np.zeros(candidates)

    def longest(self, _name: str, *ways: Column) -> Column:
        """The largest of each row."""
        # One after another: a table of all takes longer to put together than to go through.
        return reduce(np.maximum, ways)
