"""Batches in flight in a pipeline: what a step takes is that of batches played through stages one
by one."""

import numpy as np
import pytest

from mistlab import catalog
from mistlab.serving.engine_constants import ServedRun, fitted_constants
from mistlab.serving.load import ServingLoad
from mistlab.serving.steady import _waits, capacity_tokens
from mistlab.serving.step_cost import LayoutColumns, RankLayout
from simulators.serving.continuous import Batching, play_continuous
from simulators.serving.step_clock import StepClock


def through_stages(batches: list[float], stages: int, rounds: int) -> float:
    """Seconds of a round in which each batch goes through all stages, one after another and none
    past another, and begins again when it has come back."""
    free = [0.0] * stages
    back = [0.0] * len(batches)
    ends = []
    for _ in range(rounds):
        for number, each_s in enumerate(batches):
            now = back[number]
            for stage in range(stages):
                now = free[stage] = max(now, free[stage]) + each_s
            back[number] = now
        ends.append(back[0])
    return (ends[-1] - ends[rounds // 2]) / (rounds - 1 - rounds // 2)


def layout_of(stages: int) -> RankLayout:
    return RankLayout(
        model=catalog.model("llama3-8b"),
        gpu="A100",
        engine="vllm",
        weights="bf16",
        cache="bf16",
        pp=stages,
    )


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_a_step_is_that_of_batches_in_flight(stages: int) -> None:
    layout = layout_of(stages)
    clock = StepClock.of(layout, {"host": 0.0, "stall": 1.0}, most=256)
    draw = np.random.default_rng(stages)
    decode_s = clock.decode_s(200, 1000.0) / stages
    for _ in range(5):
        passes = [(int(draw.integers(0, 2000)), 500.0) for _ in range(stages)]
        each = [decode_s + (clock.pass_s(*one) if one[0] else 0.0) for one in passes]
        expected = through_stages(each, stages, rounds=40)
        assert clock.step_s(200, 1000.0, passes) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_waits_of_the_closed_form_are_a_mean_over_prompts(stages: int) -> None:
    layout = layout_of(stages)
    draw = np.random.default_rng(0)
    for mean in (0.05, 0.7, 3.0, 20.0):
        counts = draw.poisson(mean, 400_000)
        expected = np.mean(stages * -(-counts // stages)) / mean
        of = LayoutColumns.of([layout])
        assert _waits(of, np.array([mean]))[0] == pytest.approx(expected, rel=0.02)


def of_experts(engine: str, dp: int) -> RankLayout:
    return RankLayout(
        model=catalog.model("qwen3-30b-a3b"),
        gpu="H100",
        engine=engine,
        weights="bf16",
        cache="bf16",
        ep=dp,
        dp=dp,
    )


def test_ranks_in_lockstep_wait_for_the_fullest() -> None:
    draw = np.random.default_rng(0)
    for mean in (0.05, 0.7, 3.0):
        counts = draw.poisson(mean, 400_000)
        expected = np.mean(4 * -(-counts // 4)) / mean
        of = LayoutColumns.of([of_experts("vllm", 4), of_experts("sglang", 4)])
        lockstep, together = _waits(of, np.full(2, mean))
        assert lockstep == pytest.approx(expected, rel=0.02)
        assert together == 1.0


def test_a_prompt_of_one_rank_holds_up_all_in_lockstep() -> None:
    lockstep, together = (
        StepClock.of(of_experts(engine, 4), {"stall": 1.0}, most=64)
        for engine in ("vllm", "sglang")
    )
    for clock, ranks in ((lockstep, 1), (together, 4)):
        longer_s = clock.step_s(64, 1000.0, [(800, 400.0)]) - clock.decode_s(64, 1000.0)
        assert longer_s == pytest.approx(clock.pass_s(800, 400.0) / ranks)
    # Four prompts at once, one for each rank, take no longer than one.
    assert lockstep.batches == 4
    one, four = (lockstep.step_s(64, 1000.0, [(800, 400.0)] * count) for count in (1, 4))
    assert four == pytest.approx(one)


# Output tokens a second of llama3-70b in nvfp4 on pipelines of RTX PRO 6000, by tokens of prompts
# and outputs and by stages: NVIDIA's performance page of TensorRT-LLM 1.0 (Apache-2.0).
MEASURED = {
    (128, 2048): {1: 2422, 2: 4993, 4: 7922, 8: 9833},
    (5000, 500): {1: 401, 2: 812, 4: 1511, 8: 2491},
}


def played_rate(lengths: tuple[int, int], stages: int) -> float:
    """Output tokens a second of requests that all come at once."""
    layout = RankLayout(
        model=catalog.model("llama3-70b"),
        gpu="RTXPRO6000",
        engine="trtllm",
        weights="nvfp4",
        cache="fp8",
        pp=stages,
    )
    run = ServedRun(
        engine="trtllm",
        version="1.0",
        gpu="RTXPRO6000",
        model="llama3-70b",
        weights="nvfp4",
        kind="offline",
    )
    by = fitted_constants().of([run])
    prompt, output = lengths
    capacity = int(capacity_tokens(LayoutColumns.of([layout]), by)[0])
    count = min(6144, round(3 * capacity / (prompt + 0.6 * output))) + 16
    load = ServingLoad(
        prompts=(prompt,) * count, outputs=(output,) * count, arrivals_s=(0.0,) * count
    )
    constants = {name: float(values[0]) for name, values in by.items()}
    clock = StepClock.of(layout, constants, most=2048)
    batching = Batching(capacity=capacity, budget=8192, sequences=2048)
    return play_continuous(load, clock, batching).requests_per_s * output


@pytest.mark.slow
@pytest.mark.parametrize("lengths", MEASURED)
def test_pipelines_scale_as_measured_ones(lengths: tuple[int, int]) -> None:
    measured = MEASURED[lengths]
    shares = {stages: played_rate(lengths, stages) / rate for stages, rate in measured.items()}
    for stages, share in shares.items():
        # As far from what was measured as a single GPU, within a quarter.
        assert share / shares[1] == pytest.approx(1, abs=0.25), stages
