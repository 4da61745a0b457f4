"""Megatron's arguments in the notes of measured runs."""

import pytest

from experiments.runs.configuration import Configuration, configuration_of
from experiments.runs.run_jobs import job_of
from experiments.runs.runs_table import TableRow
from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.engines.engine import ENGINES

TEST = {
    "engine": "Megatron-Core (CI)",
    "hardware": "H100",
    "model": "gpt tiny",
    "layers": "12",
    "hidden": "512",
    "heads": "8",
    "kv_heads": "8",
    "ffn": "2048",
    "sequence_length": "1024",
    "global_batch": "32",
    "micro_batch": "4",
    "tp": "2",
    "pp": "1",
    "zero": "none",
    "sequence_parallel": "0",
    "recompute": "none",
    "precision": "bf16",
}
TE = "transformer-impl=transformer_engine"


def run(notes: str, **changes: str) -> Configuration:
    cells = {**TEST, "notes": notes, **changes}
    return configuration_of(TableRow(file="runs.csv", number=1, line=2, cells=cells))


def test_what_arguments_do_not_say_is_megatron_s_default() -> None:
    found = run(TE)
    # GPT-2's 50257 tokens, padded to 128 for each of two parts.
    assert (found.shape.model.dropout, found.shape.vocab, found.attention) == (0.1, 50432, "flash")
    assert (found.num_gpus, found.data_parallel) == (8, 4)
    plain = run("a run of ours")
    assert (plain.shape.model.dropout, plain.shape.vocab, plain.num_gpus) == (0.0, 50304, 2)


def test_what_arguments_say_is_taken() -> None:
    said = "hidden-dropout=0.0; make-vocab-size-divisible-by=64; data parallel about 16"
    found = run(f"{TE}; {said}; cross-entropy-loss-fusion=1")
    assert (found.shape.model.dropout, found.shape.vocab) == (0.0, 50304)
    assert (found.num_gpus, found.engine) == (32, "megatron-core-fused-loss")
    assert run("transformer-impl=local").attention == "math"


def test_the_oldest_container_writes_attention_out_where_kernels_are_deterministic() -> None:
    old = "tests/golden_values_lts_dgxa100_cluster.json"
    exact = f"{TE}; deterministic-mode=1"
    assert run(exact, source=old).attention == "math"
    assert run(TE, source=old).attention == "flash"
    assert run(exact, source="tests/golden_values_dev_dgx_h100.json").attention == "flash"
    assert run(f"{exact}; attention-backend=flash", source=old).attention == "flash"


def test_a_gated_network_is_two_thirds_as_wide_unless_its_width_is_given() -> None:
    # Two thirds of 2048 are 1365, in whole 64s 1344.
    assert run(f"{TE}; swiglu=1").shape.ffn == 1344
    assert run(f"{TE}; swiglu=1", ffn="1536").shape.ffn == 1536
    assert run("swiglu=1").shape.ffn == 2048
    latent = run(f"{TE}; multi-latent-attention=1").shape
    assert (latent.family, latent.ffn) == ("llama", 1344)


def test_tiny_models_have_the_vocabulary_of_tests() -> None:
    experts = {"experts": "8", "topk": "2"}
    tiny = run(TE, model="mixtral tiny", **experts).shape
    whole = run(TE, model="mixtral release", hidden="4096", heads="32", **experts).shape
    assert (tiny.vocab, whole.vocab) == (50432, 32000)
    latent = f"{TE}; multi-latent-attention=1"
    own = run(f"{latent}; make-vocab-size-divisible-by=3232").shape
    assert (run(latent).shape.vocab, own.vocab) == (50432, 129280)


def test_the_ends_of_a_pipeline_have_the_blocks_that_are_said() -> None:
    ends = "decoder-first-pipeline-num-layers=1; decoder-last-pipeline-num-layers=3"
    plan = job_of(run(f"{TE}; {ends}", tp="1", pp="4")).job.plan
    assert [stage.layers for stage in plan.stages] == [1, 4, 4, 3]
    with pytest.raises(InputError, match=r"12 blocks, less those .* among the 2 stages between"):
        job_of(run(f"{TE}; {ends.replace('=1', '=2')}", tp="1", pp="4"))


def test_blocks_of_mamba_are_those_of_the_pattern() -> None:
    said = f"{TE}; hybrid-layer-pattern=MEM*E/*E; mtp-num-layers=1; kv-channels=64"
    found = run(said, layers="5", experts="8", topk="2", ffn="256", kv_heads="2")
    model = found.shape.model
    assert (model.pattern, model.head_dim, model.ffn) == ("MEM*E", 64, 256)
    assert (model.experts.count, model.experts.active) == (8, 2)  # type: ignore[union-attr]
    assert "blocks that predict later tokens are not counted" in found.notes
    plain = run(f"{TE}; hybrid-layer-pattern=M-*-", layers="4")
    assert (plain.shape.model.experts, plain.shape.model.pattern) == (None, "M-*-")


def test_a_pattern_alone_says_no_vocabulary() -> None:
    found = run("hybrid-layer-pattern=M-*-", layers="4")
    assert found.shape.vocab == catalog.model("nemotron-h-56b").vocab


def test_a_fused_loss_holds_one_more_wide_copy_of_the_logits() -> None:
    for precision, memory in ENGINES["megatron-core"].memory.items():
        fused = ENGINES["megatron-core-fused-loss"].memory[precision]
        # 4 bytes a logit are two times those of 16-bit logits.
        assert fused.wide_logits == memory.wide_logits + 2
        assert fused.fixed_mib == memory.fixed_mib == 3 * 32
