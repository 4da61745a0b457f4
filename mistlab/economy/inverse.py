"""Solves inverse questions: the smallest number, such as a bandwidth, for which a condition
holds.
"""

import math
from collections.abc import Callable

from mistlab.core.values import InputError

# The number of points at which a condition is evaluated, to verify that it changes only once.
PROBES = 9
# The relative tolerance of the smallest number for which a condition holds.
NEAR = 1e-4


class TurnsTwiceError(InputError):
    """Raised if a condition on a number does not change exactly once from false to true as the
    number grows.
    """


def least_that(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The smallest number in a range for which a condition is true, within a relative tolerance of
    1e-4; the condition must change exactly once, from false to true, as the number grows.

    >>> round(least_that(lambda rate: 100 / rate <= 2, 1.0, 1000.0), 2)
    50.0
    >>> least_that(lambda rate: True, 1.0, 1000.0)
    1.0
    """
    step: float = (high / low) ** (1 / (PROBES - 1))
    answers = [holds(low * step**place) for place in range(PROBES)]
    if sorted(answers) != answers:
        numbers = [f"{low * step**place:.3g}" for place, yes in enumerate(answers) if yes]
        message = (
            f"of {PROBES} values tried, the goal is met at {', '.join(numbers)}, but not at others "
            "between or above them, so no single smallest value exists: predict each value by "
            "itself"
        )
        raise TurnsTwiceError(message)
    if not answers[-1]:
        return math.inf
    first = answers.index(True)
    if first == 0:
        return low
    below, above = low * step ** (first - 1), low * step**first
    while above / below > 1 + NEAR:
        middle = math.sqrt(below * above)
        below, above = (below, middle) if holds(middle) else (middle, above)
    return above
