"""The work of a rank, against hand arithmetic and published sizes."""

import pytest

from mistlab import catalog
from mistlab.serving.step_cost import parameters_of, rank_work

# Billions of parameters, as published.
PUBLISHED = {
    "llama3-70b": 70.6,
    "qwen3-32b": 32.8,
    "gpt-oss-120b": 116.8,
    "deepseek-v3": 671.0,
    "kimi-k2": 1026.0,
    "mixtral-8x7b": 46.7,
    "minimax-m2": 230.0,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_parameters_are_counted_once(name: str) -> None:
    assert parameters_of(catalog.model(name)) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_a_plain_model_by_hand() -> None:
    work = rank_work(catalog.model("llama3-70b"), tp=4)
    hidden, ffn, heads = 8192, 28672, 64
    attention = hidden * (2 * hidden + 2 * 8 * 128)
    assert work.dense_parameters == 80 * (attention + 3 * hidden * ffn) / 4
    assert work.wide_parameters == 128256 * hidden / 4
    assert work.cache_elements == 2 * 128 * 8 / 4
    assert work.decode_flop == 4 * heads * 128 / 4
    assert work.all_reduces == 160
    assert rank_work(catalog.model("llama3-70b"), tp=1).all_reduces == 0


def test_ranks_beyond_the_heads_of_keys_repeat_them() -> None:
    model = catalog.model("qwen3-30b-a3b")
    assert model.kv_heads == 4
    assert rank_work(model, tp=8).cache_elements == rank_work(model, tp=4).cache_elements


def test_latent_attention_keeps_whole_vectors_on_every_rank() -> None:
    alone, of_eight = (rank_work(catalog.model("deepseek-v3"), tp=tp) for tp in (1, 8))
    assert alone.cache_elements == of_eight.cache_elements == 512 + 64
    assert alone.decode_flop == 8 * of_eight.decode_flop


def test_experts_lie_on_ranks_whole_or_in_parts() -> None:
    model = catalog.model("deepseek-v3")
    whole = rank_work(model, tp=8, ep=8)
    parts = rank_work(model, tp=8, expert_tp=8)
    assert (whole.experts_on_rank, parts.experts_on_rank) == (32, 256)
    assert whole.resident_parameters == parts.resident_parameters


def test_windows_and_scans_are_counted_apart() -> None:
    windows = rank_work(catalog.model("gpt-oss-120b"), tp=1)
    assert (windows.full_layers, windows.window_layers, windows.window) == (18, 18, 128)
    hybrid = rank_work(catalog.model("qwen3.5-397b-a17b"), tp=1)
    assert (hybrid.full_layers, hybrid.scan_layers) == (15, 45)
