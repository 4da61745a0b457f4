"""Bounds of measured runs by kind of run."""

from dataclasses import replace

import pytest

from mistlab.runs.jobs import job_of
from mistlab.runs.sureness import (
    ANY,
    LEAST_BORROWED,
    Miss,
    Range,
    RunKind,
    known_sureness,
    left_out,
    sureness_of,
)
from simulators.symbolic import SymbolicPredictor
from tests.mistlab.test_runs import run

KIND = RunKind(
    software="nemo",
    hardware="h100-80gb",
    blocks="dense",
    bits=16,
    is_tiny=False,
    is_benchmark=True,
)


def misses(*factors: float, kind: RunKind = KIND, model: str = "") -> list[Miss]:
    return [
        Miss(kind=kind, model=model or f"model {place % 2}", gpus=8, factor=factor)
        for place, factor in enumerate(factors)
    ]


def test_a_kind_s_factor_holds_nine_tenths_of_its_runs() -> None:
    kinds = sureness_of(misses(*[1.1] * 18, 1.3, 1.5)).kinds
    assert {one.factor for one in kinds} == {1.3}
    assert kinds[0].runs == 20


def test_a_run_of_an_unmeasured_kind_takes_a_wider_kind_s_factor_and_more() -> None:
    known = sureness_of(misses(*[1.5] * 8))
    own = known.factor(KIND, 8)
    other = known.factor(replace(KIND, hardware="b200-180gb"), 8)
    nobody = known.factor(replace(KIND, software="other", blocks="experts"), 8)
    assert 1.5 < own < other < nobody
    narrow = sureness_of(misses(*[1.01] * 8))
    assert narrow.factor(KIND, 8) < LEAST_BORROWED
    assert narrow.factor(replace(KIND, bits=8), 8) == LEAST_BORROWED


def test_more_gpus_than_were_measured_widen_bounds() -> None:
    known = sureness_of(misses(*[1.5] * 8))
    assert known.factor(KIND, 4) == known.factor(KIND, 8) < known.factor(KIND, 32)


def test_few_runs_of_one_model_make_no_kind() -> None:
    assert [one.name for one in sureness_of(misses(*[1.1] * 7)).kinds] == [ANY]
    assert [one.name for one in sureness_of(misses(*[1.1] * 20, model="one")).kinds] == [ANY]


def test_a_group_that_is_left_out_says_nothing_about_itself() -> None:
    alike, far = misses(*[1.1] * 10), misses(3.0, 3.0)
    every = left_out([*alike, *far], ["near"] * 10 + ["far"] * 2)
    found = [one for one in every if one is not None]
    assert [one.is_inside for one in found] == [True] * 10 + [False] * 2
    assert found[-1].factor == pytest.approx(1.1**1.2)


def test_nothing_is_known_where_all_runs_are_left_out() -> None:
    assert [*left_out(misses(1.1, 1.2), ["all", "all"])] == [None, None]


def test_bounds_of_a_row_lie_a_factor_around_the_range_that_is_predicted() -> None:
    found = job_of(run())
    predictor = SymbolicPredictor(workload=found.job.workload, cluster=found.job.cluster)
    prediction = predictor.predict(found.job.plan)
    around = Range.of(prediction)
    bounded = around.bounded(prediction, 2.0)
    assert bounded.iteration_s_low == prediction.iteration_s / 2
    assert bounded.iteration_s_high == pytest.approx(2 * around.longest_s)
    assert around.miss(prediction.iteration_s / 3) == pytest.approx(3)
    assert around.miss(around.longest_s * 4) == pytest.approx(4)
    assert around.miss(prediction.iteration_s) == 1


def test_the_catalogue_has_a_factor_for_any_run() -> None:
    strange = replace(KIND, software="other", hardware="none", blocks="hybrid", is_tiny=True)
    assert known_sureness().factor(strange, 8) > 1
