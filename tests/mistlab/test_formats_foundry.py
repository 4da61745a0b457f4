"""gpt-neox and llm-foundry: keys that cost, and what is refused."""

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.formats.file_formats import format_of
from tests.mistlab.launch_files import imported, imported_from, source_of, texts

NEOX = """
{
  "pipe-parallel-size": 2,
  "model-parallel-size": 2,
  "num-layers": 16, "hidden-size": 2048, "num-attention-heads": 8,
  "seq-length": 2048, "max-position-embeddings": 2048,
  "norm": "layernorm", "pos-emb": "rotary", "rotary-pct": 0.25, "no-weight-tying": true,
  "gpt_j_residual": true,
  "attention-config": [[["flash"], 16]],
  "zero_optimization": {"stage": 1, "reduce_bucket_size": 500000000},
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
  "checkpoint-activations": true,
  "fp16": {"fp16": true, "enabled": true},
  "tokenizer-type": "HFTokenizer",
}
"""


def test_gpt_neox_has_keys_with_dashes_or_underlines() -> None:
    for text in (NEOX, NEOX.replace("-", "_").replace("rotary_pct", "rotary-pct")):
        found = imported(text, gpus_per_node=8)
        job, model = found.job, found.job.workload.model
        first, _ = job.plan.stages
        assert (model.ffn, model.rotary_fraction, model.parallel_block) == (8192, 0.25, True)
        assert (model.biases, model.tied_embeddings, model.vocab) == (True, False, 50432)
        assert (first.tensor_parallel, first.data_parallel, first.zero) == (2, 2, 1)
        assert (job.plan.micro_batches, first.checkpointed_layers) == (8, 8)
        assert (job.workload.precision, job.workload.attention) == ("fp16", "flash")
        assert (job.plan.engine, job.plan.overlap_communication) == ("deepspeed", False)


def test_gated_networks_of_gpt_neox_are_a_third_of_what_is_said() -> None:
    text = NEOX.replace('"norm"', '"activation": "swiglu", "intermediate_size": 12288, "norm"')
    found = imported(text, gpus_per_node=8)
    assert found.job.workload.model.ffn == 4096
    assert "a width of 4096" in texts(found, "assumed")["intermediate_size"]


def test_files_of_gpt_neox_are_merged_by_the_script_that_names_them() -> None:
    model, _, rest = NEOX.partition('  "attention-config"')
    script = "#!/bin/bash\npython ./deepy.py train.py -d configs model.yml rest.yml\n"
    source = source_of(script, "run.sh")
    texts_of = {"configs/model.yml": model + "}", "configs/rest.yml": '{"attention-config"' + rest}
    object.__setattr__(source, "beside", texts_of.get)
    job = imported_from(source, gpus_per_node=8).job
    assert (job.plan.num_stages, job.plan.micro_batches) == (2, 8)
    with pytest.raises(InputError, match="hidden_size: is missing: gpt-neox merges several files"):
        imported('{"pipe-parallel-size": 1, "train_micro_batch_size_per_gpu": 4}', gpus_per_node=8)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ('"moe_num_experts": 8,', "moe_num_experts: 8 experts are not supported"),
        ('"train_impl": "dpo",', "train_impl: dpo is not supported"),
        ('"precision": "fp7",', "precision: 'fp7' is unknown"),
    ],
)
def test_what_gpt_neox_trains_otherwise_is_refused(more: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(NEOX.replace("{", "{" + more, 1), gpus_per_node=8)
    mamba = NEOX.replace('["flash"]', '["mamba"]')
    with pytest.raises(InputError, match="attention_config: mamba is not supported"):
        imported(mamba, gpus_per_node=8)


FOUNDRY = """
variables: {max_seq_len: 2048}
max_seq_len: ${variables.max_seq_len}
model:
  name: mpt_causal_lm
  d_model: 2048
  n_heads: 16
  n_layers: 24
  expansion_ratio: 4
  max_seq_len: ${variables.max_seq_len}
  vocab_size: 50368
  no_bias: true
  attn_config: {attn_impl: flash, attn_type: grouped_query_attention, kv_n_heads: 4, rope: true}
optimizer: {name: decoupled_adamw, lr: 1.0e-4}
max_duration: 10ba
global_train_batch_size: 128
device_train_microbatch_size: 4
precision: amp_bf16
fsdp_config: {sharding_strategy: SHARD_GRAD_OP, activation_checkpointing: true}
"""


def test_llm_foundry_s_file_is_a_plan_with_its_variables_resolved() -> None:
    job = imported(FOUNDRY, nodes=1, gpus_per_node=8).job
    model, (stage,) = job.workload.model, job.plan.stages
    assert (model.kv_heads, model.position_embedding, model.biases) == (4, "rotary", False)
    assert (model.tied_embeddings, job.workload.sequence_length) == (True, 2048)
    assert (stage.zero, stage.micro_batch, job.plan.micro_batches) == (2, 4, 4)
    assert (stage.checkpointed_layers, job.plan.engine) == (24, "fsdp")
    plain = FOUNDRY.replace("fsdp_config: {sharding_strategy: SHARD_GRAD_OP, ", "x: {")
    assert imported(plain, nodes=1, gpus_per_node=8).job.plan.stages[0].zero == 0


def test_a_micro_batch_of_llm_foundry_is_no_larger_than_a_device_s_batch() -> None:
    text = FOUNDRY.replace("global_train_batch_size: 128", "global_train_batch_size: 16")
    found = imported(text, nodes=1, gpus_per_node=8)
    assert found.job.plan.stages[0].micro_batch == 2
    assert "predicted with 2" in texts(found, "contradicting")["device_train_microbatch_size"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("microbatch_size: 4", "microbatch_size: auto", "give --micro-batch"),
        ("name: mpt_causal_lm", "name: t5", "model.name: t5 is not supported"),
        ("n_heads: 16", "peft_config: {r: 8}", "model.peft_config: trains adapters only"),
        ("SHARD_GRAD_OP", "ALL", "fsdp_config.sharding_strategy: 'ALL' is unknown"),
        ("amp_bf16", "int8", "precision: 'int8' is unknown"),
    ],
)
def test_what_llm_foundry_does_not_say_is_refused(old: str, new: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(FOUNDRY.replace(old, new), nodes=1, gpus_per_node=8)


def test_llm_foundry_s_file_without_micro_batches_is_known_and_asks_for_them() -> None:
    lines = FOUNDRY.splitlines(keepends=True)
    batches = ("device_train_microbatch_size", "global_train_batch_size", "max_duration")
    text = "".join(line for line in lines if not line.startswith(batches))
    if "train_loader" not in text:
        text += "train_loader: {name: text}\n"
    assert format_of(source_of(text, "run.yaml")).name == "llm-foundry"
    with pytest.raises(InputError, match=r"micro_batch: .*: give --micro-batch"):
        imported(text, nodes=1, gpus_per_node=8)
    job = imported(text, nodes=1, gpus_per_node=8, micro_batch=2, global_batch=32).job
    assert (job.workload.global_batch, job.plan.micro_batches) == (32, 2)


def test_adapters_are_refused_beside_a_given_model_too() -> None:
    text = FOUNDRY.replace("n_heads: 16", "n_heads: 16\n  peft_config: {r: 8}")
    with pytest.raises(InputError, match=r"model.peft_config: trains adapters only"):
        imported(text, nodes=1, gpus_per_node=8, model=catalog.model("llama-7b"))
