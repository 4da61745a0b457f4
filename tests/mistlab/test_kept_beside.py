"""What runs keep beside their plans: masks before adapters, returned keys, experts of 16 bits."""

from dataclasses import replace
from typing import Any

import pytest

from experiments.runs.configuration import Configuration, configuration_of
from experiments.runs.run_jobs import job_of
from experiments.runs.runs_table import TableRow
from mistlab.engines.adapters import BASE_BYTES
from simulators.symbolic import SymbolicPredictor

# Llama-3 8B: of a block the widths of the residual stream, of queries, of keys, of the network.
LAYERS, HIDDEN, KEYS, FFN = 32, 4096, 1024, 14336
TOKENS = 2 * 512
LORA = {"method": "lora", "adapter_rank": "8", "recompute": "none"}


def run(**cells: str) -> Configuration:
    row = {
        "hardware": "A100-80GB",
        "gpus": "1",
        "model": "llama3-8b",
        "precision": "bf16-true",
        "sequence_length": "512",
        "micro_batch": "2",
        "grad_accumulation": "1",
        **cells,
    }
    return configuration_of(TableRow(file="runs.csv", number=1, line=2, cells=row))


@pytest.mark.parametrize(
    ("cells", "of_token"),
    [
        # The mask of the one product that makes queries, keys and values; its copy is the input.
        ({"engine": "litgpt", "notes": "config file llama-3-8b/lora.yaml"}, HIDDEN),
        # Four inputs of the width of the stream, of which gate and value each drop their own.
        ({"engine": "litgpt", "notes": "config file gemma-7b/lora.yaml"}, 6 * HIDDEN + FFN),
        # PEFT drops for query, key and value each.
        (
            {"engine": "TRL SFT", "source": "huggingface/peft docs", "adapter_targets": "q_proj"},
            (2 + 2) * HIDDEN,
        ),
        ({"engine": "torchtune", "date": "2024-06"}, 0),
        ({"engine": "HF PEFT 0.19"}, 0),
    ],
)
def test_masks_before_adapters_are_kept(cells: dict[str, str], of_token: int) -> None:
    assert run(**LORA, **cells).elsewhere.beside_bytes == TOKENS * LAYERS * of_token
    # Blocks that are recomputed keep them one after another.
    again = run(**{**LORA, **cells, "recompute": "full"})
    assert again.elsewhere.beside_bytes == TOKENS * of_token


def test_frozen_products_of_few_bits_keep_their_own_inputs() -> None:
    cells: dict[str, Any] = {"engine": "litgpt", **LORA}
    wide, narrow = (
        run(**{**cells, "method": method, "base_bits": bits}).elsewhere.beside_bytes
        for method, bits in (("lora", "16"), ("qlora", "4"))
    )
    assert narrow - wide == TOKENS * LAYERS * 2 * HIDDEN


def test_a_wrapper_s_checkpointing_leaves_keys_and_values_in_the_output() -> None:
    atorch = {"engine": "atorch FSDP", "method": "full", "precision": "bf16 (amp: fp32 weights)"}
    found = run(**atorch, recompute="full")
    assert found.elsewhere.beside_bytes == TOKENS * LAYERS * 2 * 2 * KEYS
    assert run(**atorch, recompute="none").elsewhere.beside_bytes == 0


def test_experts_that_are_no_linear_modules_stay_in_16_bits() -> None:
    cells = {"engine": "Unsloth", "model": "gemma-4-26B-A4B-it", "adapter_targets": "all linear"}
    found = run(**{**LORA, **cells, "method": "qlora", "base_bits": "4"})
    model = found.shape.model
    assert model.experts is not None
    weights = model.layers * model.experts.count * 3 * model.experts.ffn * model.hidden
    more = weights * (2 - BASE_BYTES["4bit"])
    assert found.elsewhere.beside_bytes == pytest.approx(more)
    assert run(**{**LORA, **cells, "base_bits": "16"}).elsewhere.beside_bytes == 0


def test_a_peak_has_what_is_kept_beside() -> None:
    found = run(engine="litgpt", **LORA)
    job = job_of(found)
    work, cluster = job.job.workload, job.job.cluster
    whole = SymbolicPredictor(workload=work, cluster=cluster).predict(job.job.plan)
    plain = replace(job.elsewhere, beside_bytes=0)
    own, without = (
        kept.applied(whole, lambda _: cluster.memory_bytes).stages[0].peak_allocated_bytes
        for kept in (job.elsewhere, plain)
    )
    assert own - without == job.elsewhere.beside_bytes > 0
