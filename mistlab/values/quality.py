"""How long a search took until its plan was good enough, from its history of improvements."""

from collections.abc import Sequence

from mistlab.values.search import Improvement


def seconds_until(history: Sequence[Improvement], iteration_s: float) -> float | None:
    """The seconds until a search had a plan that takes at most so long; None if it never had.

    >>> steps = [(9.0, 1.0), (8.0, 4.0)]
    >>> history = [
    ...     Improvement(iteration_s=s, plan_evaluations=1, stage_evaluations=0, wall_s=wall_s)
    ...     for s, wall_s in steps
    ... ]
    >>> seconds_until(history, 8.5), seconds_until(history, 7.0)
    (4.0, None)
    """
    return next((one.wall_s for one in history if one.iteration_s <= iteration_s), None)


def to_equal_quality(
    first: Sequence[Improvement], second: Sequence[Improvement]
) -> tuple[float, float] | None:
    """The seconds of two searches until each has a plan as good as the worse of their two last
    ones; None where one of them found nothing."""
    if not first or not second:
        return None
    reached_s = max(first[-1].iteration_s, second[-1].iteration_s)
    seconds = [seconds_until(history, reached_s) for history in (first, second)]
    assert seconds[0] is not None
    assert seconds[1] is not None
    return seconds[0], seconds[1]
