import json
from dataclasses import replace
from typing import Any

import pytest

from mistlab.core.values import FieldError, from_mapping, to_mapping
from mistlab.job.prediction import Prediction
from mistlab.job.search import Budget, Improvement, SearchResult
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.space import OffloadRatios, SearchSpace

STAGE = StagePlan(layers=1, data_parallel=1, tensor_parallel=1, micro_batch=1)
PLAN = Plan(micro_batches=1, stages=(STAGE,))
FITS = Prediction(
    iteration_s=2,
    iteration_s_low=1,
    iteration_s_high=3,
    tokens_per_s=1,
    mfu=0.5,
    fits=True,
    predictor="fixed",
    stages=(),
)
FOUND = SearchResult(
    status="OPTIMAL",
    plan=PLAN,
    prediction=FITS,
    plan_evaluations=3,
    stage_evaluations=100,
    wall_s=0.1,
    lower_bound_s=2,
    gap=0,
    history=(Improvement(iteration_s=2, plan_evaluations=1, stage_evaluations=0, wall_s=0.05),),
    seed=0,
)
SPACE = SearchSpace(
    name="3d",
    data_parallel=(1, 2),
    micro_batch=(1, 2, 4),
    zero=(0, 1),
    offload=OffloadRatios(optimizer=(0, 0.125, 0.25)),
    unequal_stages=True,
    layers_off_balance=None,
)


def test_values_come_back_from_json() -> None:
    for value in (FOUND, SPACE, Budget(evaluations=5), Budget(seconds=0.5)):
        plain = json.loads(json.dumps(to_mapping(value)))
        assert from_mapping(type(value), plain) == value


BUDGETS = {
    "none": ({}, "evaluations: missing, and seconds too: give at least one of them"),
    "no evaluations": ({"evaluations": 0}, "evaluations: 0 is too small: give a whole number"),
    "no time": ({"seconds": 0}, "seconds: 0.0 is too small: give a number above 0"),
}


@pytest.mark.parametrize(("limits", "message"), BUDGETS.values(), ids=BUDGETS.keys())
def test_a_budget_has_a_limit(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError) as caught:
        Budget(**limits)
    assert str(caught.value).startswith(message)


RESULTS = {
    "plan alone": ({"prediction": None}, "plan: is given without prediction"),
    "prediction alone": ({"plan": None}, "prediction: is given without plan"),
    "optimal without a plan": (
        {"plan": None, "prediction": None},
        "status: OPTIMAL needs a plan that fits: give it",
    ),
    "feasible that does not fit": (
        {"status": "FEASIBLE", "prediction": replace(FITS, fits=False)},
        "status: FEASIBLE needs a plan that fits: give it",
    ),
    "infeasible that fits": (
        {"status": "INFEASIBLE"},
        "status: INFEASIBLE has a plan that fits: give FEASIBLE",
    ),
    "unknown status": ({"status": "DONE"}, "status: 'DONE' is unknown: give one of OPTIMAL"),
}


@pytest.mark.parametrize(("change", "message"), RESULTS.values(), ids=RESULTS.keys())
def test_a_status_agrees_with_the_plan(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError) as caught:
        replace(FOUND, **change)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("status", ["INFEASIBLE", "BUDGET", "REFUSED"])
def test_a_search_may_end_without_a_plan(status: Any) -> None:
    result = replace(FOUND, status=status, plan=None, prediction=None, reason="too small")
    assert result.plan is None


SPACES = {
    "no degrees": ({"tensor_parallel": ()}, "tensor_parallel: is empty: give at least one choice"),
    "degree 0": ({"data_parallel": (0,)}, "data_parallel[0]: 0 is too small: give"),
    "ZeRO 4": ({"zero": (0, 4)}, "zero[1]: 4 is too large: give a whole number between 0 and 3"),
}


@pytest.mark.parametrize(("change", "message"), SPACES.values(), ids=SPACES.keys())
def test_a_bad_space_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError) as caught:
        replace(SPACE, **change)
    assert str(caught.value).startswith(message)


def test_a_space_without_ratios_is_refused() -> None:
    with pytest.raises(FieldError, match=r"^weights: is empty: give at least one choice$"):
        OffloadRatios(weights=())
    with pytest.raises(FieldError, match=r"^weights\[1\]: 1\.5 is not a ratio: give"):
        OffloadRatios(weights=(0, 1.5))
