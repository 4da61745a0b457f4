"""Days, bills and failures by formulas, against figures worked out by hand and against play."""

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mistlab.core.values import InputError
from mistlab.economy.bill import (
    Prices,
    batch_of,
    bill_of,
    chinchilla_tokens,
    model_parameters,
    training_s,
    utilisation_of,
)
from mistlab.economy.failures import (
    Reliability,
    TimeShares,
    best_interval_s,
    failures_in,
    shares_of,
)
from simulators.failures import played
from tests.workloads import workload_of

DAY_S = 86_400.0
# 175 failures in 60 days on 992 GPUs, one in 8.2 hours.
EXAMPLE = Reliability(
    gpus=992,
    gpu_hours_between_failures=992 * 60 * 24 / 175,
    checkpoint_s=60.0,
    detection_s=300.0,
    restart_s=300.0,
    reload_s=60.0,
)


def test_the_formula_gives_the_published_days() -> None:
    # Narayanan et al. 2021: 8 x 300e9 x 175e9 / (1024 x 140e12) is 34 days, and 140e12 about 0.44
    # of 312e12.
    gpt = {"tokens": 300e9, "parameters": 175e9, "gpus": 1024, "peak_flop_per_s": 312e12}
    assert training_s(**gpt, utilisation=0.44) / DAY_S == pytest.approx(34.6, abs=0.05)
    # LLaMA 65B in 21 days on 2,048: 8 x 1.4e12 x 65e9 / (2048 x 312e12 x 21 x 86400) = 0.628.
    llama = {"tokens": 1.4e12, "parameters": 65e9, "gpus": 2048, "peak_flop_per_s": 312e12}
    assert utilisation_of(**llama, seconds=21 * DAY_S) == pytest.approx(0.628, abs=5e-4)
    seconds = training_s(**llama, utilisation=0.3)
    assert utilisation_of(**llama, seconds=seconds) == pytest.approx(0.3)


def test_chinchilla_is_twenty_tokens_a_parameter() -> None:
    assert chinchilla_tokens(70e9) == 1.4e12


@pytest.mark.parametrize("batch_tokens", [1.0, 5e5, 1e6, 2e6, 3.2e6, 4e6, 16e6])
def test_a_batch_is_near_the_tokens_asked_for_and_divides(batch_tokens: float) -> None:
    sequences = batch_of(batch_tokens, 2048)
    power = sequences & -sequences
    assert sequences <= 3 * power
    assert sequences == 1 or 0.8 <= sequences * 2048 / batch_tokens <= 1.25


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt3-175b", 175.2), ("llama-65b", 65.3), ("llama3-8b", 8.03)]
)
def test_parameters_are_those_of_the_papers(name: str, billions: float) -> None:
    work = workload_of(name, 2048, 1)
    assert model_parameters(work) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp8"},
        {"precision": "fp4", "train": "adapters"},
        {"optimizer": "adamw-8bit"},
        {"gradients": "16bit", "precision": "bf16"},
    ],
)
def test_parameters_are_the_same_for_whichever_engine_trains(changes: dict[str, Any]) -> None:
    work = workload_of("llama3.2-1b", 2048, 1, "bf16")
    asked = replace(work, **changes)
    plain = replace(work, train=asked.train)
    assert model_parameters(asked) == model_parameters(plain) > 1e9


def test_parameters_of_experts_that_drop_tokens_are_counted() -> None:
    work = workload_of("mixtral-8x7b", 2048, 1)
    dropping = replace(work, expert_capacity=1.5, expert_padding=True)
    assert model_parameters(dropping) == model_parameters(work)


PRICES = Prices(usd_per_gpu_hour=2.0, watts=700.0, overhead=1.0, kg_per_kwh=0.29 / 0.7)


@pytest.mark.parametrize(
    ("million_hours", "million_usd", "carbon_t"),
    [(1.46, 2.92, 420), (7.0, 14.0, 2040), (30.84, 61.68, 8930)],
)
def test_llama_3_1_s_cost_and_carbon(
    million_hours: float, million_usd: float, carbon_t: float
) -> None:
    bill = bill_of(million_hours * 1e6, PRICES)
    assert bill.usd / 1e6 == pytest.approx(million_usd, rel=0.01)
    assert bill.carbon_kg / 1e3 == pytest.approx(carbon_t, rel=0.01)
    assert bill.kwh == pytest.approx(million_hours * 1e6 * 0.7)


def test_a_building_draws_more_than_its_machines() -> None:
    assert bill_of(100, replace(PRICES, overhead=1.2)).kwh == pytest.approx(84)


@pytest.mark.parametrize(
    "change", [{"usd_per_gpu_hour": -2.0}, {"watts": -1.0}, {"overhead": 0.9}, {"kg_per_kwh": -0.1}]
)
def test_no_price_is_negative(change: dict[str, float]) -> None:
    with pytest.raises(InputError, match="is too small: give a number of at least"):
        replace(PRICES, **change)


reliabilities = st.builds(
    Reliability,
    gpus=st.integers(1, 20_000),
    gpu_hours_between_failures=st.floats(5e3, 1e6),
    checkpoint_s=st.floats(1.0, 300.0),
    detection_s=st.floats(0.0, 600.0),
    restart_s=st.floats(0.0, 600.0),
    reload_s=st.floats(0.0, 600.0),
)


@given(reliabilities, st.floats(60.0, 1e5))
def test_shares_add_up_and_none_is_negative(reliability: Reliability, interval_s: float) -> None:
    shares = shares_of(reliability, interval_s)
    assert shares is not None
    values = [getattr(shares, entry.name) for entry in fields(TimeShares)]
    assert sum(values) == pytest.approx(1.0)
    assert min(values) >= -1e-12
    assert shares.lost == pytest.approx(1 - shares.work)


@given(reliabilities)
def test_no_interval_is_better_than_the_best(reliability: Reliability) -> None:
    best_s = best_interval_s(reliability)
    best = shares_of(reliability, best_s)
    assert best is not None
    for factor in (0.5, 0.98, 1.02, 2.0):
        other = shares_of(reliability, factor * best_s)
        assert other is None or other.work <= best.work * (1 + 1e-12)


def test_the_best_interval_is_nearly_the_root_of_twice_write_times_mean() -> None:
    # Young 1974: sqrt(2 x 60 s x 8.2286 h) is 1885 s. The next term of x^2/2 + x^3/3 + ... = L C
    # makes it 2 C / 3 less.
    between_s = 60 * DAY_S / 175
    assert best_interval_s(EXAMPLE) == pytest.approx(math.sqrt(2 * 60 * between_s) - 40, rel=1e-3)


def test_one_gpu_that_hardly_fails_loses_its_checkpoints_alone() -> None:
    rare = replace(EXAMPLE, gpus=1, gpu_hours_between_failures=1e12)
    shares = shares_of(rare, 600.0)
    assert shares is not None
    assert shares.checkpoints == pytest.approx(60 / 660)
    assert shares.work == pytest.approx(600 / 660)


def test_failures_without_checkpoints_or_waiting_cost_half_an_interval_each() -> None:
    quick = replace(EXAMPLE, checkpoint_s=1e-6, detection_s=0.0, restart_s=0.0, reload_s=0.0)
    shares = shares_of(quick, 600.0)
    assert shares is not None
    assert shares.work_done_again == pytest.approx(quick.failures_per_s * 300, rel=0.02)


def test_failures_come_as_often_as_they_were_told_to() -> None:
    assert failures_in(EXAMPLE, 60 * DAY_S) == pytest.approx(175)


def test_where_no_interval_ends_there_are_no_shares() -> None:
    hopeless = replace(EXAMPLE, gpu_hours_between_failures=0.5)
    assert shares_of(hopeless, 3600.0) is None
    assert best_interval_s(hopeless) == pytest.approx(0.5 * 3600 / 992)
    never_started = replace(EXAMPLE, restart_s=1e9)
    assert shares_of(never_started, 3600.0) is None


@settings(max_examples=10, deadline=None)
@given(reliabilities, st.integers(0, 2**31))
def test_a_played_run_spends_all_of_its_time(reliability: Reliability, seed: int) -> None:
    one = played(reliability, 1800.0, 5 * DAY_S, np.random.default_rng(seed))
    values = [getattr(one.shares, entry.name) for entry in fields(TimeShares)]
    assert sum(values) == pytest.approx(1.0)
    assert min(values) >= 0


@pytest.mark.parametrize(
    "reliability",
    [
        EXAMPLE,
        replace(EXAMPLE, detection_s=1800.0, restart_s=1800.0),
        # A failure every half an hour, often while the run starts again.
        replace(EXAMPLE, gpu_hours_between_failures=496.0),
    ],
    ids=["as opt", "slow to start", "often"],
)
def test_the_closed_form_is_what_play_comes_to(reliability: Reliability) -> None:
    interval_s = best_interval_s(reliability)
    closed = shares_of(reliability, interval_s)
    assert closed is not None
    draw = np.random.default_rng(1)
    runs = [played(reliability, interval_s, 60 * DAY_S, draw) for _ in range(150)]
    for name in (entry.name for entry in fields(TimeShares)):
        mean = float(np.mean([getattr(run.shares, name) for run in runs]))
        assert getattr(closed, name) == pytest.approx(mean, rel=0.02, abs=2e-4), name
    failures = float(np.mean([run.failures for run in runs]))
    assert failures == pytest.approx(failures_in(reliability, 60 * DAY_S), rel=0.02)


def test_equal_seeds_play_equal_runs() -> None:
    one, two = (played(EXAMPLE, 1800.0, DAY_S, np.random.default_rng(3)) for _ in range(2))
    assert one == two
