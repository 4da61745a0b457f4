"""What runs keep beside their plans: masks before adapters, returned keys, experts of 16 bits."""

from dataclasses import replace
from typing import Any

import pytest

from experiments.runs.configuration import Configuration, configuration_of
from experiments.runs.run_jobs import job_of
from experiments.runs.runs_table import TableRow
from experiments.runs.sized_models import parameters_of
from mistlab.engines.adapters import BASE_BYTES
from simulators.symbolic import SymbolicPredictor

# Llama-3 8B: of a block the widths of the residual stream, of queries, of keys, of the network.
LAYERS, HIDDEN, KEYS, FFN = 32, 4096, 1024, 14336
VOCABULARY = 128256
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
        # GLM-4's file adapts attention alone, with a dropout.
        ({"engine": "HF Trainer + DeepSpeed", "source": "THUDM/GLM-4"}, (2 + 2) * HIDDEN),
        ({"engine": "torchtune", "date": "2024-06"}, 0),
        ({"engine": "HF PEFT 0.19"}, 0),
    ],
)
def test_masks_before_adapters_are_kept(cells: dict[str, str], of_token: int) -> None:
    # GLM-4's script recomputes all blocks.
    layers = 1 if "GLM-4" in cells.get("source", "") else LAYERS
    assert run(**LORA, **cells).elsewhere.beside_bytes == TOKENS * layers * of_token
    # Blocks that are recomputed keep them one after another. Litgpt's files of adapters are of one
    # GPU, on which litgpt recomputes nothing.
    again = run(**{**LORA, **cells, "recompute": "full"})
    kept = LAYERS if cells["engine"] == "litgpt" else 1
    assert again.elsewhere.beside_bytes == TOKENS * kept * of_token


def test_frozen_products_of_few_bits_keep_their_own_inputs() -> None:
    cells: dict[str, Any] = {"engine": "litgpt", **LORA}
    wide, narrow = (
        run(**{**cells, "method": method, "base_bits": bits}).elsewhere.beside_bytes
        for method, bits in (("lora", "16"), ("qlora", "4"))
    )
    assert narrow - wide == TOKENS * LAYERS * 2 * HIDDEN


@pytest.mark.parametrize(
    ("notes", "bytes_of_weight"),
    [
        ("quantization bnb.nf4", 4 / 64 - 1 / 64 - 4 / (64 * 256)),
        ("config file llama-3-8b/qlora.yaml", 4 / 64 - 1 / 64 - 4 / (64 * 256)),
        ("quantization bnb.nf4-dq", 0),
    ],
)
def test_scales_that_are_not_quantised_have_32_bits(notes: str, bytes_of_weight: float) -> None:
    cells = {**LORA, "method": "qlora", "base_bits": "4"}
    plain, script = (run(**cells, engine="litgpt", notes=each) for each in ("", notes))
    weights = parameters_of(script.shape.model) - 2 * VOCABULARY * HIDDEN
    more = script.elsewhere.beside_bytes - plain.elsewhere.beside_bytes
    assert more == pytest.approx(bytes_of_weight * weights, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "method", "times"),
    [("llama3-8b", "full", 2), ("llama3-8b", "lora", 1), ("llama3.2-1b", "full", 0)],
)
def test_tables_sharded_apart_are_not_gathered_while_blocks_run(
    model: str, method: str, times: int
) -> None:
    cells = {"method": method, "model": model, "gpus": "8", "zero": "fsdp", "precision": "bf16"}
    before, after = (
        run(**cells, engine="TRL SFTTrainer (FSDP2)", date=date) for date in ("2026-03", "2026-08")
    )
    tables = 2 * after.shape.model.vocab * after.shape.model.hidden
    less = before.elsewhere.beside_bytes - after.elsewhere.beside_bytes
    assert less == times * 2 * tables


@pytest.mark.parametrize(
    ("date", "is_apart"),
    [
        ("2025-12", False),
        ("2026", False),
        ("2026-04", False),
        ("2026-05", True),
        ("2026-12", True),
        ("2027-01", True),
        ("2030-06", True),
    ],
)
def test_tables_are_sharded_apart_since_may_2026(date: str, is_apart: bool) -> None:
    cells = {"method": "full", "gpus": "8", "zero": "fsdp", "precision": "bf16", "date": date}
    assert (run(**cells, engine="TRL SFTTrainer (FSDP2)").elsewhere.beside_bytes < 0) == is_apart


@pytest.mark.parametrize(
    ("name", "precision", "engine", "of_value"),
    [
        # Weights and gradients in 16 bits; in 32 under autocast, where the plan gathers these.
        ("TRL SFTTrainer (FSDP2)", "bf16", "trainer", 2 + 2),
        ("HF Trainer (FSDP2)", "bf16 (amp: fp32 weights)", "trainer-autocast", 4 + 4),
        # Plans of this engine keep no tables gathered.
        ("HF Trainer (FSDP2)", "bf16", "fsdp", 0),
    ],
)
def test_no_more_of_tables_is_taken_off_than_the_plan_counts(
    name: str, precision: str, engine: str, of_value: int
) -> None:
    row = {"engine": name, "method": "full", "gpus": "8", "zero": "fsdp", "precision": precision}
    before, after = (run(**row, date=date) for date in ("2026-04", "2026-05"))
    assert after.engine == engine
    less = before.elsewhere.beside_bytes - after.elsewhere.beside_bytes
    assert less == of_value * 2 * VOCABULARY * HIDDEN
    job = job_of(after).job
    plan = SymbolicPredictor(workload=job.workload, cluster=job.cluster).predict(job.plan)
    assert less < plan.stages[0].memory.buffers


@pytest.mark.parametrize(("recompute", "blocks"), [("none", LAYERS), ("full", 1)])
def test_flash_attention_needs_no_copies_of_keys(recompute: str, blocks: int) -> None:
    cells = {"engine": "TRL SFT", "recompute": recompute, "sequence_length": "4096", "cp": "4"}
    sharded = {**cells, "gpus": "4", "micro_batch": "1", "method": "full"}
    copied, grouped = (run(**sharded, attention=each) for each in ("", "flash_attention_2"))
    # Of a rank's own tokens.
    less = 1024 * blocks * 2 * 2 * (HIDDEN - KEYS)
    assert copied.elsewhere.beside_bytes - grouped.elsewhere.beside_bytes == less


@pytest.mark.parametrize(
    ("cells", "needs_none"),
    [
        ({"engine": "TRL SFT", "attention": "flash-attn 2"}, True),
        ({"engine": "TRL SFT", "attention": "sdpa (FlashAttention fallback)"}, True),
        ({"engine": "axolotl", "attention": "flash_attention"}, True),
        # Axolotl's examples have FlashAttention.
        ({"engine": "axolotl"}, True),
        ({"engine": "axolotl", "attention": "eager"}, False),
        ({"engine": "axolotl", "attention": "sdpa"}, False),
        ({"engine": "HF Trainer + DeepSpeed", "attention": "sdpa (no flash)"}, False),
        ({"engine": "TRL SFT", "attention": "no flash"}, False),
        ({"engine": "TRL SFT"}, False),
        # Plans of these engines count no copies.
        ({"engine": "atorch FSDP", "attention": "flash"}, False),
        ({"engine": "DeepSpeed-Ulysses", "attention": "flash", "gpus": "8"}, False),
    ],
)
def test_copies_of_keys_are_taken_off_where_a_plan_counts_them(
    cells: dict[str, str], needs_none: bool
) -> None:
    found = run(**cells, method="full", recompute="none").elsewhere.beside_bytes
    assert found == -needs_none * TOKENS * LAYERS * 2 * 2 * (HIDDEN - KEYS)


def test_a_wrapper_s_checkpointing_leaves_keys_and_values_in_the_output() -> None:
    atorch = {"engine": "atorch FSDP", "method": "full", "precision": "bf16 (amp: fp32 weights)"}
    found = run(**atorch, recompute="full")
    assert found.elsewhere.beside_bytes == TOKENS * LAYERS * 2 * 2 * KEYS
    assert run(**atorch, recompute="none").elsewhere.beside_bytes == 0


def test_moments_of_4_bits_take_half_of_those_of_8() -> None:
    adamw = {"engine": "TRL SFT", "date": "2025-03", "method": "full"}
    eight, four = (run(**adamw, optimizer=f"torchao {bits}-bit AdamW") for bits in (8, 4))
    assert eight.optimizer == four.optimizer == "adamw-8bit"
    of_weight = 2 + 2 * 4 / 256 - 2 * (0.5 + 4 / 128)
    saved = eight.elsewhere.beside_bytes - four.elsewhere.beside_bytes
    assert saved == int(of_weight * parameters_of(four.shape.model))


@pytest.mark.parametrize(("date", "tables"), [("2024-06", 1), ("2025-02", 2)])
def test_an_optimizer_in_the_backward_pass_has_a_gradient_at_a_time(date: str, tables: int) -> None:
    """The largest is that of the head; losses in chunks (since autumn of 2024) sum up two."""
    cells = {"engine": "torchtune", "date": date, "method": "full", "recompute": "full"}
    stepping = run(**cells, optimizer="AdamW in backward")
    assert stepping.elsewhere.stepped_bytes == tables * 2 * VOCABULARY * HIDDEN
    assert run(**cells, optimizer="AdamW").elsewhere.stepped_bytes == 0
    job = job_of(stepping)
    whole = SymbolicPredictor(workload=job.job.workload, cluster=job.job.cluster).predict(
        job.job.plan
    )
    phases = whole.stages[0].memory_by_phase
    own, freed = (
        kept.applied(whole, lambda _: 0.0).stages[0].peak_allocated_bytes
        for kept in (job.elsewhere, replace(job.elsewhere, stepped_bytes=0))
    )
    later = max(phases.backward, phases.step) + stepping.elsewhere.stepped_bytes
    assert own - freed == later - whole.stages[0].peak_allocated_bytes > 0


def test_paged_states_make_room_for_the_gradient_that_is_stepped() -> None:
    paged = run(engine="torchtune", method="full", optimizer="8-bit paged AdamW in backward")
    job = job_of(paged)
    whole = SymbolicPredictor(workload=job.job.workload, cluster=job.job.cluster).predict(
        job.job.plan
    )
    kept = job.elsewhere
    freed = replace(kept, stepped_bytes=0).applied(whole, lambda _: 0.0)
    assert kept.counts_pages
    assert kept.stepped_bytes
    room = freed.stages[0].peak_reserved_bytes + kept.stepped_bytes
    assert kept.applied(whole, lambda _: room).fits


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


LLMQ = {"engine": "llmq (C++/CUDA)", "method": "full", "recompute": "none"}


def kept_by_settings(**cells: str) -> int:
    """Bytes a token of a block that llmq keeps."""
    kept = run(**{**LLMQ, **cells}).elsewhere.activation_bytes
    assert kept is not None
    return kept // (TOKENS * LAYERS)


@pytest.mark.parametrize(
    ("recompute", "of_16_bits", "of_8_bits"),
    [
        # What is no longer kept; in 8 bits inputs of products have a byte.
        ("--recompute-norm", 2 * 2 * HIDDEN, 2 * HIDDEN),
        ("--recompute-swiglu", 2 * FFN, FFN),
        ("--recompute-ffn", 6 * FFN + 2 * HIDDEN, 5 * FFN),
        ("--recompute-att", 2 * 2 * HIDDEN, 2 * HIDDEN),
        ("--recompute-qkv --recompute-norm", 6 * HIDDEN + 4 * KEYS, 4 * HIDDEN + 4 * KEYS),
        ("recompute swiglu, norm", 2 * FFN + 4 * HIDDEN, FFN + 2 * HIDDEN),
    ],
)
def test_llmq_keeps_what_its_settings_say(recompute: str, of_16_bits: int, of_8_bits: int) -> None:
    for precision, gone in (("bf16 products", of_16_bits), ("fp8 products", of_8_bits)):
        whole = kept_by_settings(precision=precision)
        assert whole - kept_by_settings(precision=precision, recompute=recompute) == gone
        on_host = kept_by_settings(precision=precision, offload="--offload-residual")
        assert whole - on_host == 2 * HIDDEN


def test_llmq_s_tensors_take_the_place_of_its_plan_s_activations() -> None:
    job = job_of(run(**LLMQ, precision="bf16 products"))
    predictor = SymbolicPredictor(workload=job.job.workload, cluster=job.job.cluster)
    whole = predictor.predict(job.job.plan)
    of_plan, kept = whole.stages[0].memory.activations, job.elsewhere.activation_bytes
    assert kept == pytest.approx(of_plan, rel=0.01)
    less = replace(job.elsewhere, activation_bytes=kept and kept // 2)
    peaks = [
        one.applied(whole, lambda _: 0.0).stages[0].peak_allocated_bytes
        for one in (job.elsewhere, less)
    ]
    assert kept is not None
    assert peaks[0] - peaks[1] == kept - kept // 2
    # Blocks that are recomputed whole, and other software, have their plan's.
    assert run(**{**LLMQ, "recompute": "full"}).elsewhere.activation_bytes is None
    assert run(engine="torchtune", method="full").elsewhere.activation_bytes is None


def test_llmq_s_optimizer_states_are_in_shards() -> None:
    cells = {**LLMQ, "gpus": "4", "zero": "none", "precision": "bf16 products"}
    assert run(**cells).zero == 1
