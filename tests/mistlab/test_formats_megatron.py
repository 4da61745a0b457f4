"""Megatron-LM's options in YAML: its tests, Primus, NeMo, Megatron-Bridge and FlagScale."""

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from tests.mistlab.launch_files import imported, imported_from, source_of, texts

TEST = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
TEST_TYPE: regular
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --micro-batch-size: 4
  --global-batch-size: 32
  --seq-length: 1024
  --max-position-embeddings: 1024
  --vocab-size: 50304
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 2
  --use-distributed-optimizer: true
  --untie-embeddings-and-output-weights: false
  --attention-dropout: 0.0
  --hidden-dropout: 0.0
  --data-path: ${DATA_PATH}/text
  --bf16: true
"""


def test_a_test_of_megatron_is_its_options_on_a_node_of_eight() -> None:
    found = imported(TEST)
    job = found.job
    assert (job.workload.model.layers, job.workload.model.hidden) == (12, 512)
    assert (job.workload.sequence_length, job.workload.global_batch) == (1024, 32)
    assert (job.cluster.nodes, job.cluster.gpus_per_node, job.plan.num_stages) == (1, 8, 2)
    (first, _) = job.plan.stages
    assert (first.data_parallel, first.tensor_parallel, first.micro_batch) == (2, 2, 4)
    assert first.zero == 1
    # A switch that is false is not given.
    assert job.workload.model.tied_embeddings
    assert "as in Megatron-LM's tests" in texts(found, "assumed")["gpus_per_node"]


def test_a_test_has_values_that_a_shell_takes() -> None:
    text = TEST.replace("  --bf16", "  --pipeline-model-parallel-layout: Et*7\\|t*5L\n  --bf16")
    assert [stage.layers for stage in imported(text).job.plan.stages] == [7, 5]


def test_a_test_names_its_ranks_in_its_environment_or_folder() -> None:
    more = TEST.replace("CUDA_DEVICE_MAX_CONNECTIONS: 1", "NUM_NODES: 2\n  GPUS_PER_NODE: 4")
    cluster = imported(more).job.cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 4)
    cluster = imported(TEST, "gpt/gpt_dgx_a100_2N4G/model_config.yaml").job.cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (2, 4)


@pytest.mark.parametrize(
    ("old", "new", "name", "words"),
    [
        ("--num-layers", "--img-h: 336\n  --num-layers", "a.yaml", "a test of a model of images"),
        ("--num-layers", "--encoder-seq-length: 5\n  --num-layers", "a.yaml", "a test of T5"),
        ("TEST_TYPE", "MODE: rl\nTEST_TYPE", "a.yaml", "a test of reinforcement learning"),
        ("--num-layers", "trainer.num_nodes: 1\n  --x", "a.yaml", "changes a recipe of NeMo"),
        ("--hidden-size: 512", "", "a.yaml", "--hidden-size: is missing"),
    ],
)
def test_a_test_of_another_program_is_refused(old: str, new: str, name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(TEST.replace(old, new), name)


PRIMUS = """
work_group: ${PRIMUS_TEAM:amd}
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: ${PRIMUS_MODEL:llama3.1_8B}.yaml
    overrides:
      micro_batch_size: 2
      global_batch_size: ${PRIMUS_GBS:128}
      seq_length: 8192
      tensor_model_parallel_size: ${PRIMUS_TP:2}
      overlap_grad_reduce: true
      overlap_param_gather: true
      use_turbo_attention: true
      stderr_sink_level: DEBUG
      train_data_path: null
"""


def test_primus_names_a_model_and_overrides_of_megatron() -> None:
    found = imported(PRIMUS)
    job = found.job
    assert job.workload.model == catalog.model("llama3-8b")
    assert (job.workload.sequence_length, job.workload.global_batch) == (8192, 128)
    (stage,) = job.plan.stages
    assert (stage.tensor_parallel, stage.data_parallel, stage.micro_batch) == (2, 4, 2)
    # The trainer's own defaults: the distributed optimizer, bf16, fused attention.
    assert (stage.zero, job.workload.precision, job.workload.attention) == (1, "bf16", "flash")
    ignored = texts(found, "ignored")
    assert ignored["modules.pre_trainer.overrides.use_turbo_attention"].startswith("attention is")
    assert "llama3.1_8B.yaml is not in this file's folder" in texts(found, "assumed")["model"]


def test_variables_of_primus_can_be_given() -> None:
    source = source_of(PRIMUS)
    object.__setattr__(source, "settings", {"PRIMUS_TP": "4"})
    assert imported_from(source).job.plan.stages[0].tensor_parallel == 4


def test_presets_of_primus_beside_the_file_are_read_with_what_they_extend() -> None:
    base = """
        num_layers: 4
        hidden_size: 256
        num_attention_heads: 4
        ffn_hidden_size: 1024
        swiglu: true
        normalization: RMSNorm
        position_embedding_type: rope
        add_bias_linear: false
        vocab_size: 32000
        untie_embeddings_and_output_weights: true
    """
    files = {
        "mine__yaml": "extends: [base.yaml]\nnum_layers: 6\n",
        "base__yaml": base,
    }
    model = imported(PRIMUS.replace("llama3.1_8B", "mine"), files=files).job.workload.model
    assert (model.layers, model.hidden, model.biases, model.vocab) == (6, 256, False, 32000)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("llama3.1_8B", "moe_4T", "moe_4T.yaml is neither a known model .* give --model"),
        ("framework: megatron", "framework: maxtext", "framework: maxtext is not supported"),
        (
            "seq_length: 8192",
            "hidden_size: 64",
            "overrides.hidden_size: changes the preset's model",
        ),
        ("micro_batch_size: 2", "micro_batch_size: x", "pre_trainer.overrides.micro_batch_size"),
        ("pre_trainer:\n", "sft_trainer:\n", "modules.sft_trainer: fine-tunes a model"),
    ],
)
def test_what_primus_does_not_say_is_refused_by_its_path(old: str, new: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(PRIMUS.replace(old, new))


def test_a_proxy_of_primus_has_fewer_blocks_of_its_preset() -> None:
    text = PRIMUS.replace("seq_length: 8192", "seq_length: 8192\n      num_layers: 4")
    assert imported(text).job.workload.model.layers == 4


def test_primus_on_torchtitan_has_torchtitan_s_sections_and_its_own_defaults() -> None:
    found = imported(
        """
        modules:
          pre_trainer:
            framework: torchtitan
            model: qwen3_4B.yaml
            overrides:
              training: {local_batch_size: 4, seq_len: 4096}
              primus_turbo: {enable_primus_turbo: true}
        """
    )
    (stage,) = found.job.plan.stages
    assert found.job.workload.model == catalog.model("qwen3-4b")
    assert (stage.micro_batch, stage.zero, stage.checkpointed_layers) == (4, 3, 0)
    assert found.job.plan.engine == "fsdp-compiled"
    assert "modules.pre_trainer.overrides.primus_turbo" in texts(found, "ignored")


NEMO = """
trainer: {devices: 8, num_nodes: 2, precision: bf16}
model:
  micro_batch_size: 1
  global_batch_size: 64
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: null
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: ${multiply:2, ${.hidden_size}}
  num_attention_heads: 32
  num_query_groups: 8
  hidden_dropout: 0.0
  attention_dropout: 0.0
  normalization: rmsnorm
  activation: fast-swiglu
  bias: false
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  vocab_size: 32000
  sequence_parallel: true
  activations_checkpoint_granularity: full
  activations_checkpoint_method: uniform
  activations_checkpoint_num_layers: 1
  optim: {name: distributed_fused_adam}
"""


def test_nemo_s_model_is_megatron_s_options_with_references_resolved() -> None:
    found = imported(NEMO)
    job, model = found.job, found.job.workload.model
    assert (model.ffn, model.kv_heads, model.norm, model.mlp_type) == (
        8192,
        8,
        "rmsnorm",
        "gated_mlp",
    )
    # Padded to a multiple of 128 times the tensor-parallel ranks, as Megatron pads it.
    assert (model.biases, model.tied_embeddings, model.vocab) == (False, False, 32256)
    assert (job.cluster.nodes, job.cluster.gpus_per_node) == (2, 8)
    first, _ = job.plan.stages
    assert (first.tensor_parallel, first.data_parallel, first.sequence_parallel) == (4, 2, 1)
    assert (first.zero, first.checkpointed_layers, job.workload.precision) == (1, 16, "bf16")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("micro_batch_size: 1", "dpo: {beta: 1}", "model.dpo: trains by preferences"),
        ("micro_batch_size: 1", "peft: {peft_scheme: lora}", "model.peft: trains adapters"),
        (
            "micro_batch_size: 1",
            "mm_cfg: {a: 1}",
            "model.mm_cfg: makes the model more than",
        ),
        ("trainer:", "name: megatron_retro\ntrainer:", "megatron_retro trains retro"),
        ("trainer:", "exp_manager: {name: megatron_t5}\ntrainer:", "megatron_t5 trains t5"),
        ("hidden_size: 4096", "hidden_size: ???", r"model.hidden_size: \?\?\? stands for a value"),
        (
            "micro_batch_size: 1",
            "micro_batch_size: x",
            "model.micro_batch_size: 'x' is not a whole",
        ),
    ],
)
def test_what_nemo_trains_otherwise_is_refused_by_its_path(old: str, new: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(NEMO.replace(old, new, 1))


BRIDGE = """
model:
  _target_: megatron.bridge.models.llama.Llama31ModelProvider8B
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  seq_length: 8192
  vocab_size: 128256
  normalization: RMSNorm
  gated_linear_unit: true
  activation_func: {_target_: torch.nn.functional.silu, _call_: false}
  add_bias_linear: false
  position_embedding_type: rope
  rotary_base: 500000
  share_embeddings_and_output_weights: false
  hidden_dropout: 0.0
  attention_dropout: 0.0
  tensor_model_parallel_size: 2
  context_parallel_size: 2
train: {global_batch_size: 32, micro_batch_size: 1}
ddp: {use_distributed_optimizer: true, overlap_grad_reduce: true, overlap_param_gather: true}
mixed_precision: bf16_with_mxfp8_mixed
"""


def test_a_printed_recipe_of_megatron_bridge_is_a_plan() -> None:
    job = imported(BRIDGE, nodes=2, gpus_per_node=8).job
    assert job.workload.model == catalog.model("llama3-8b")
    assert (job.workload.sequence_length, job.workload.precision) == (8192, "fp8")
    (stage,) = job.plan.stages
    assert (stage.tensor_parallel, stage.context_parallel, stage.data_parallel) == (2, 2, 4)
    assert stage.zero == 1


def test_changes_of_a_recipe_need_the_model() -> None:
    text = "recipe: a.b\nmodel: {tensor_model_parallel_size: 2}\ntrain: {train_iters: 9}\n"
    with pytest.raises(InputError, match=r"the file only changes the recipe a.b"):
        imported(text)
    given = {"model": catalog.model("llama3-8b"), "nodes": 1, "gpus_per_node": 8}
    found = imported(text, **given, sequence_length=4096, micro_batch=1)
    assert "whose other settings the import does not read" in texts(found, "ignored")["recipe"]
    adapted = imported("peft: {dim: 8}\n" + text, **given, sequence_length=4096, micro_batch=1)
    workload = adapted.job.workload
    assert (workload.train, workload.rank, workload.adapter_targets) == ("adapters", 8, "all")
    with pytest.raises(InputError, match="peft: trains by DoRA, which is not supported: give LoRA"):
        imported("peft: {_target_: megatron.bridge.peft.dora.DoRA, dim: 8}\n" + text)


def test_flagscale_and_the_yaml_of_megatron_are_its_options() -> None:
    shape = "num_layers: 4, hidden_size: 64, num_attention_heads: 4, vocab_size: 512"
    flagscale = f"""
        system: {{tensor_model_parallel_size: 2, precision: {{bf16: true}}, logging: {{x: 1}}}}
        model: {{{shape}, seq_length: 128, micro_batch_size: 2, global_batch_size: 16}}
    """
    plain = f"""
        language_model: {{{shape}, activation_func: swiglu, add_bias_linear: false}}
        model_parallel: {{tensor_model_parallel_size: 2, bf16: true}}
        seq_length: 128
        micro_batch_size: 2
        global_batch_size: 16
    """
    for text in (flagscale, plain):
        job = imported(text, gpus_per_node=8).job
        (stage,) = job.plan.stages
        assert (stage.tensor_parallel, stage.micro_batch, job.workload.global_batch) == (2, 2, 16)
        assert (job.workload.model.layers, job.workload.precision) == (4, "bf16")
    assert imported(plain, gpus_per_node=8).job.workload.model.mlp_type == "gated_mlp"
