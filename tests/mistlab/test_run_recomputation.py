"""What a run recomputes, in the words of tables of runs."""

import math

import pytest

from experiments.measured.predict_runs import RowPredictor
from experiments.runs.run_jobs import job_of
from mistlab.core.values import InputError
from mistlab.cost.confidence import REACH, known_sureness
from tests.mistlab.test_runs import row, run

LAYERS = 24


@pytest.mark.parametrize(
    ("words", "notes", "whole", "core"),
    [
        ("none", "", 0, 0),
        ("full", "", LAYERS, 0),
        ("block 5", "", 5, 0),
        ("selective:core_attn", "", 0, LAYERS),
        ("core attention", "", 0, LAYERS),
        # A recipe recomputes attention's core, which fused attention does not keep.
        ("selective (recipe default)", "", 0, 0),
        ("selective (recipe default)", "unfused attention", 0, LAYERS),
        ("selective:layernorm", "unfused attention", 0, 0),
        ("minimal", "", 0, 0),
    ],
)
def test_words_say_which_blocks_are_recomputed(
    words: str, notes: str, whole: int, core: int
) -> None:
    one_stage = {"layers": str(LAYERS), "pp": "1", "gpus": "4", "engine": "megatron-core"}
    made = job_of(run(**one_stage, recompute=words, notes=notes))
    (stage,) = made.job.plan.stages
    assert stage.checkpointed_layers == whole
    assert stage.value("core_recomputed_layers") == core


def test_other_words_are_refused() -> None:
    with pytest.raises(InputError, match="'now and then' is unknown: give none, full"):
        job_of(run(recompute="now and then"))


MOONLIGHT = {
    "model": "moonlight-16b-a3b",
    "engine": "Megatron-Bridge",
    "gpus": "8",
    "tp": "2",
    "dp": "4",
    "pp": "1",
    "ep": "8",
    "etp": "1",
    "global_batch": "4",
    "micro_batch": "1",
    **dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), ""),
    "precision": "bf16",
    "notes": "",
}
LLAMA = {**MOONLIGHT, "model": "llama3-8b", "ep": "1", "etp": ""}


def freed(words: str, **cells: str) -> float:
    return job_of(run(**cells, recompute=words)).elsewhere.freed_share


@pytest.mark.parametrize("cells", [LLAMA, MOONLIGHT])
def test_names_free_what_their_modules_keep(cells: dict[str, str]) -> None:
    assert freed("none", **cells) == freed("full", **cells) == 0
    assert freed("selective:core_attn", **cells) == 0
    is_dense = cells is LLAMA
    one = freed("selective:layernorm", **cells)
    other = freed("selective:mlp" if is_dense else "selective:moe_act", **cells)
    assert 0 < one < 1
    assert freed(f"selective:{'mlp' if is_dense else 'moe_act'}+layernorm", **cells) > max(
        one, other
    )
    assert freed("selective:mla_up_proj", **cells) == pytest.approx(0, abs=0 if is_dense else 1)
    assert (freed("selective:mla_up_proj", **cells) > 0) != is_dense


def test_the_share_is_that_of_what_a_block_keeps() -> None:
    """Of a block of Llama 8B, ``mlp`` frees gate, network and their product."""
    hidden, keys, ffn, layers, sums = 4096, 1024, 14336, 32, 4 * 32 + 2 * 4
    # Inputs of both norms and of the products behind them, then operands and result of the core.
    kept = 2 * 4 * hidden + 2 * (2 * hidden + 2 * keys) + sums
    network = 2 * 3 * ffn
    found = freed("selective:mlp", **LLAMA)
    assert found == pytest.approx(network / (network + kept) * (1 - 1 / layers), rel=0.05)


def test_what_names_free_is_not_in_the_peak() -> None:
    rows = [row(**MOONLIGHT, recompute=words) for words in ("none", "selective:moe_act")]
    every, fewer = (
        one.answer.prediction.stages[0]
        for one in RowPredictor().answers_of(rows)
        if one.answer.prediction is not None
    )
    share = freed("selective:moe_act", **MOONLIGHT)
    assert every.peak_allocated_bytes - fewer.peak_allocated_bytes == int(
        share * every.memory.activations
    )
    assert every.peak_reserved_bytes > fewer.peak_reserved_bytes


JAX = {**LLAMA, "engine": "MaxText (JAX)", "ep": "1", "tp": "1", "dp": "8"}


def test_minimal_keeps_results_of_products_alone() -> None:
    some, more = freed("minimal_flash policy", **JAX), freed("selective:layernorm+mlp", **JAX)
    assert 0 < some < more


def test_xla_assigns_memory_ahead_and_caches_none() -> None:
    (jax,) = RowPredictor().answers_of([row(**JAX)])
    (torch,) = RowPredictor().answers_of([row(**{**JAX, "engine": "torchtitan"})])
    for answered, caches in ((jax.answer, False), (torch.answer, True)):
        assert answered.prediction is not None
        (stage,) = answered.prediction.stages
        assert (stage.peak_reserved_bytes > stage.peak_allocated_bytes) == caches
    # No engine is MaxText's, so peaks of any software say whether it fits.
    assert jax.answer.peak is not None
    assert jax.answer.prediction is not None
    (stage,) = jax.answer.prediction.stages
    spread = known_sureness().peak_spread("")
    reach = REACH * math.hypot(spread.between, spread.within)
    high = stage.peak_reserved_bytes * math.exp(spread.offset + reach)
    assert jax.answer.peak.peak_reserved_bytes_high == int(high)
