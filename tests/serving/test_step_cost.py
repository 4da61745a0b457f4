"""Steps of an engine: never below the roofline, and never faster with more to do."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mistlab import catalog
from mistlab.core.arrays import Floats
from mistlab.serving.engine_constants import DEFAULTS
from mistlab.serving.gpu_facts import EVENNESS
from mistlab.serving.steady import (
    SteadyLoad,
    capacity_tokens,
    decode_step_s,
    prompt_pass_s,
    steady_state,
)
from mistlab.serving.step_cost import LayoutColumns, RankLayout, fullest_rank, prefill_parts

MODELS = ("llama3-8b", "llama3-70b", "gpt-oss-120b", "deepseek-v3", "qwen3.5-397b-a17b")
BY = {name: np.array([value]) for name, value in DEFAULTS.items()}


def layout_of(name: str, **others: object) -> RankLayout:
    plain = RankLayout(
        model=catalog.model(name), gpu="H200", engine="vllm", weights="fp8", cache="fp8"
    )
    return replace(plain, **others)  # type: ignore[arg-type]


def column(value: float) -> Floats:
    return np.array([float(value)])


def decode(layout: RankLayout, running: float, context: float) -> float:
    of = LayoutColumns.of([layout])
    return float(decode_step_s(of, BY, column(running), column(context))[0])


def test_a_step_takes_longer_than_reading_its_weights_and_caches() -> None:
    layout = layout_of("llama3-70b", tp=4)
    of = LayoutColumns.of([layout])
    read = of.weight_bytes[0] + 32 * 2000 * of.cache_bytes[0]
    assert decode(layout, 32, 2000) > read / 4.8e12


def test_a_pass_over_prompts_takes_longer_than_its_products_at_the_peak() -> None:
    of = LayoutColumns.of([layout_of("llama3-70b", tp=4)])
    seconds = prompt_pass_s(of, BY, column(8192), column(4096))[0]
    assert seconds > 2 * 68.5e9 / 4 * 8192 / 1979e12


@given(
    name=st.sampled_from(MODELS),
    tp=st.sampled_from((1, 2, 4, 8)),
    has_ranks=st.booleans(),
    running=st.integers(1, 2000),
    context=st.integers(1, 30000),
)
def test_more_to_do_never_takes_less(
    name: str, tp: int, has_ranks: bool, running: int, context: int
) -> None:
    ep = tp if has_ranks and catalog.model(name).experts else 1
    layout = layout_of(name, tp=tp, ep=ep)
    seconds = decode(layout, running, context)
    assert decode(layout, running + 10, context) >= seconds
    assert decode(layout, running, context + 100) >= seconds


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("tokens", [1, 8, 64, 512])
def test_all_ranks_wait_for_the_fullest_one(ranks: int, tokens: int) -> None:
    # Routes drawn one by one: each token takes eight of 256 experts, which lie in rows of ranks;
    # experts' shares have a gamma distribution (of shape 1 they are exponential).
    draw = np.random.default_rng(0)
    largest = []
    for _ in range(400 // tokens + 60):
        shares = draw.gamma(EVENNESS, size=256)
        times = draw.exponential(size=(tokens, 256)) / shares
        routes = np.argsort(times, axis=1)[:, :8]
        rows = np.bincount((routes * ranks // 256).ravel(), minlength=ranks)
        reached = np.bincount(np.unique(routes) * ranks // 256, minlength=ranks)
        largest.append((reached.max(), rows.max()))
    of = LayoutColumns.of([layout_of("deepseek-v3", tp=ranks, ep=ranks)])
    found = [float(one[0]) for one in fullest_rank(of, column(tokens))]
    assert found == pytest.approx(np.mean(largest, axis=0).tolist(), rel=0.12)
    whole = LayoutColumns.of([layout_of("deepseek-v3", tp=ranks)])
    assert fullest_rank(whole, column(tokens))[1][0] == tokens * 8


def test_parts_of_experts_move_all_rows_and_whole_experts_their_own() -> None:
    # Weights are the same on a rank, so that a long pass tells what rows take.
    parts, whole = (
        prefill_parts(
            LayoutColumns.of([layout_of("deepseek-v3", tp=8, ep=ep)]), column(16384), column(1)
        ).experts[0]
        for ep in (1, 8)
    )
    assert parts > 1.5 * whole


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_fewer_bits_leave_more_room(weights: str) -> None:
    wide, narrow = (
        capacity_tokens(LayoutColumns.of([layout_of("llama3-70b", tp=2, weights=one)]), BY)[0]
        for one in (weights, "nvfp4")
    )
    assert narrow > wide


def test_requests_in_flight_obey_littles_law() -> None:
    of = LayoutColumns.of([layout_of("llama3-70b", tp=4)])
    for in_flight in (1, 16, 500, 20000):
        load = SteadyLoad(
            in_flight=column(in_flight),
            prompt=column(1000),
            output=column(500),
            sequences=column(256),
            budget=column(8192),
        )
        state = steady_state(of, BY, load)
        answer_s = state.first_s + 499 * state.token_s
        assert float(state.requests_per_s[0] * answer_s[0]) == pytest.approx(in_flight, rel=1e-6)
        assert state.running[0] <= 256
