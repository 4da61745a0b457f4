"""Averages of ratios, and of differences between iterations in their terms."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The mean of some numbers, the least and the most of them."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Self:
        """The summary of at least one number."""
        return cls(mean=sum(numbers) / len(numbers), least=min(numbers), most=max(numbers))

    def mapping(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


def difference_in_parts(
    pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
) -> dict[str, float]:
    """How much longer the second of two iterations is in each of its terms, as a share of the
    first iteration, on average over pairs.

    >>> difference_in_parts([({"a_s": 3.0, "b_s": 1.0}, {"a_s": 4.0, "b_s": 1.0})])
    {'a_s': 0.25, 'b_s': 0.0}
    """
    first, _ = pairs[0]
    return {
        name: sum((other[name] - own[name]) / sum(own.values()) for own, other in pairs)
        / len(pairs)
        for name in first
    }
