"""Inverse questions: the least number, such as a bandwidth, at which something holds."""

import math
from collections.abc import Callable

from mistlab.core.values import InputError

# Numbers between the ends at which a question is asked to see that its answer turns once.
PROBES = 9
# How near the answer lies to the number at which it turns, as a share.
NEAR = 1e-4


class TurnsTwiceError(InputError):
    """A question whose answer does not turn once from no to yes as its number grows."""


def least_that(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The least number between two at which a question is answered with yes, to a share of 1e-4;
    the answers have to turn once, from no to yes, as the number grows.

    >>> round(least_that(lambda rate: 100 / rate <= 2, 1.0, 1000.0), 2)
    50.0
    >>> least_that(lambda rate: True, 1.0, 1000.0)
    1.0
    """
    step: float = (high / low) ** (1 / (PROBES - 1))
    answers = [holds(low * step**place) for place in range(PROBES)]
    if sorted(answers) != answers:
        numbers = [f"{low * step**place:.3g}" for place, yes in enumerate(answers) if yes]
        message = f"the answer is yes at {', '.join(numbers)} and no between: ask for each apart"
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
