"""Predictions of plans of which a predictor refuses some."""

from collections.abc import Sequence
from typing import Any

import pytest

from experiments.bench.problem import predicted_each
from mistlab.core.values import InputError


class RefusesOdd:
    """Predicts a number by ten times itself, and refuses odd ones."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def predict_many(self, plans: Sequence[int]) -> list[int]:
        self.asked.append([*plans])
        odd = [plan for plan in plans if plan % 2]
        if odd:
            message = f"{odd[0]} is odd"
            raise InputError(message)
        return [10 * plan for plan in plans]


@pytest.mark.parametrize("plans", [[], [2], [3], [2, 4, 6], [2, 3, 4, 5, 6], [1, 3, 5]])
def test_each_plan_has_its_prediction_or_its_own_reason_in_order(plans: list[int]) -> None:
    predictor: Any = RefusesOdd()
    answers: Sequence[Any] = predicted_each(predictor, plans)
    told = [str(one) if isinstance(one, InputError) else one for one in answers]
    assert told == [f"{plan} is odd" if plan % 2 else 10 * plan for plan in plans]


def test_plans_of_which_none_is_refused_are_asked_at_once() -> None:
    predictor: Any = RefusesOdd()
    predicted_each(predictor, [2, 4, 6, 8])
    assert predictor.asked == [[2, 4, 6, 8]]
