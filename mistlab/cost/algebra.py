"""The two operations from which the time of a pipeline is computed: the longest of durations, and
sums.

A recurrence that is written with an ``Algebra`` works for any kind of duration: for numbers, for
columns of candidates, and for expressions of a linear programme. There the longest of several ways
becomes a variable with an inequality for each way (``searchers.exact.milp``).
"""

from functools import reduce
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray


class Duration(Protocol):
    """Anything that can be added, subtracted and multiplied by a count."""

    def __add__(self, other: Any, /) -> Any: ...

    def __sub__(self, other: Any, /) -> Any: ...

    def __mul__(self, other: Any, /) -> Any: ...


Length = TypeVar("Length", bound=Duration)
Column = NDArray[np.float64]


class Algebra(Protocol[Length]):
    """Compares durations of one kind; the durations themselves know how to add up."""

    def longest(self, name: str, *ways: Length) -> Length:
        """The longest of some ways; ``name`` is the name of the chain that has these ways."""
        ...

    @property
    def nothing(self) -> Length:
        """A duration of zero."""
        ...


class Numbers:
    """Durations that are plain numbers: the fastest for a single pipeline."""

    nothing = 0.0

    def longest(self, _name: str, *ways: float) -> float:
        """The largest number."""
        return max(ways)


class Columns:
    """Durations that are columns of candidates."""

    def __init__(self, candidates: int) -> None:
        self.nothing = np.zeros(candidates)

    def longest(self, _name: str, *ways: Column) -> Column:
        """The largest value of each candidate."""
        # One after another: a table of all takes longer to put together than to go through.
        return reduce(np.maximum, ways)
