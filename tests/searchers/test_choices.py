"""Choices, taken in every way, make every plan of a space, and each plan once."""

from collections.abc import Iterator

import pytest

from mistlab.job.search import Problem
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from searchers.methods.exhaustive import all_plans
from searchers.savings import Chooser, chosen_plan
from tests.searchers.drawn import NAMES, drawn_problem


def every_way(problem: Problem, space: SearchSpace) -> Iterator[Plan | None]:
    """The plans of all sequences of answers, counted up like the digits of a number."""
    answers: list[int] = []
    more = True
    while more:
        options: list[int] = []

        def place(_name: str, number: int, asked: list[int] = options) -> int:
            if len(asked) == len(answers):
                answers.append(0)
            asked.append(number)
            return answers[len(asked) - 1]

        yield chosen_plan(problem, space, Chooser(place))
        while answers and answers[-1] == options[len(answers) - 1] - 1:
            answers.pop()
        more = bool(answers)
        if more:
            answers[-1] += 1


@pytest.mark.parametrize("seed", range(len(NAMES)), ids=NAMES)
def test_choices_lead_to_every_plan_once(seed: int) -> None:
    problem, space = drawn_problem(seed)
    plans = [plan for plan in every_way(problem, space) if plan is not None]
    assert len(plans) == len(set(plans))
    assert set(plans) == set(all_plans(problem, space))
