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
        ("n_heads: 16", "peft_config: {peft_type: IA3}", r"model\.peft_config\.peft_type: IA3 is"),
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


CHECKPOINT = """
max_seq_len: 2048
model:
  name: hf_causal_lm
  pretrained_model_name_or_path: mosaicml/mpt-7b
  config_overrides: {max_seq_len: 2048, attn_config: {attn_impl: flash}}
train_loader: {name: finetuning}
global_train_batch_size: 64
device_train_microbatch_size: 2
fsdp_config: {sharding_strategy: FULL_SHARD}
"""


def test_released_mpts_are_known_by_their_names() -> None:
    found = imported(CHECKPOINT, nodes=1, gpus_per_node=8)
    model = found.job.workload.model
    assert (model.hidden, model.layers, model.vocab) == (4096, 32, 50432)
    assert (model.position_embedding, found.job.workload.attention) == ("none", "flash")
    assert not texts(found, "ignored")
    changed = CHECKPOINT.replace("attn_impl: flash}", "attn_impl: torch}, n_layers: 8")
    found = imported(changed, nodes=1, gpus_per_node=8)
    assert found.job.workload.attention == "math"
    assert "config_overrides" in str(texts(found, "ignored"))


def test_adapters_of_a_checkpoint_are_read() -> None:
    peft = "peft_config: {peft_type: LORA, r: 64, target_modules: [Wqkv]}"
    text = CHECKPOINT.replace("name: hf_causal_lm", f"name: hf_causal_lm\n  {peft}")
    for model in (None, catalog.model("llama-7b")):
        work = imported(text, nodes=1, gpus_per_node=8, model=model).job.workload
        assert (work.train, work.adapter_rank) == ("adapters", 64)
        assert work.adapter_targets == "attention"
    wide = text.replace("[Wqkv]", "[Wqkv, up_proj, down_proj]")
    assert imported(wide, nodes=1, gpus_per_node=8).job.workload.adapter_targets == "all"


BERT = """
tokenizer_name: bert-base-uncased
max_seq_len: 128
mlm_probability: 0.15
model:
  name: hf_bert
  pretrained_model_name: ${tokenizer_name}
  model_config: {num_hidden_layers: 6}
train_loader: {name: text, dataset: {max_seq_len: 128}}
optimizer: {name: decoupled_adamw}
max_duration: 1000ba
global_train_batch_size: 4096
device_train_microbatch_size: 128
precision: amp_bf16
"""


def test_composer_s_bert_is_an_encoder_with_the_changes_of_the_file() -> None:
    found = imported(BERT, nodes=1, gpus_per_node=8)
    work, (stage,) = found.job.workload, found.job.plan.stages
    assert (work.model.is_encoder, work.model.layers, work.model.hidden) == (True, 6, 768)
    assert (work.model.vocab, work.attention, work.sequence_length) == (30528, "math", 128)
    assert (stage.micro_batch, found.job.plan.micro_batches, stage.zero) == (128, 4, 0)
    assert "masked tokens" in texts(found, "assumed")["model.family"]
    mosaic = imported(BERT.replace("hf_bert", "mosaic_bert"), nodes=1, gpus_per_node=8)
    assert (mosaic.job.workload.model.ffn, mosaic.job.workload.attention) == (4608, "flash")
    assert "ALiBi as learned positions" in texts(mosaic, "ignored")["model.name"]
    with pytest.raises(InputError, match=r"model\.num_labels: trains a classifier"):
        imported(BERT.replace("hf_bert", "hf_bert\n  num_labels: 2"), nodes=1, gpus_per_node=8)
