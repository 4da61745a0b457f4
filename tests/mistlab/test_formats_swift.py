"""Launch lines of ms-swift and Megatron-SWIFT: names, defaults, and the processes that start."""

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.given import MissingError
from mistlab.formats.file_formats import format_of
from tests.mistlab.launch_files import imported, imported_from, source_of, texts

TUNED = """
CUDA_VISIBLE_DEVICES=0,1,2,3 \\
NPROC_PER_NODE=4 \\
swift sft \\
  --model Qwen/Qwen2.5-7B-Instruct \\
  --torch_dtype bfloat16 \\
  --max_length 2048 \\
  --target_modules all-linear \\
  --model_name my-robot
"""


def test_the_name_of_a_robot_is_not_the_model() -> None:
    assert format_of(source_of(TUNED, "a.sh")).name == "ms-swift"
    workload = imported(TUNED, "a.sh").job.workload
    assert not any("model_name" in remark.choice for remark in imported(TUNED, "a.sh").remarks)
    assert (workload.model.name, workload.train, workload.rank) == ("qwen2.5-7b", "adapters", 8)
    assert (workload.precision, workload.adapter_targets) == ("bf16", "all")


def test_a_step_has_16_sequences_and_blocks_are_recomputed() -> None:
    found = imported(TUNED, "a.sh")
    job, (stage,) = found.job, found.job.plan.stages
    assert (job.cluster.num_gpus, stage.data_parallel) == (4, 4)
    assert (stage.micro_batch, job.plan.micro_batches, job.workload.global_batch) == (1, 4, 16)
    assert stage.checkpointed_layers == 28
    assert "checkpointed_layers" not in texts(found, "assumed")
    assert texts(found, "assumed")["micro_batch"] == "1, ms-swift's default"
    more = "  --gradient_accumulation_steps 2 --gradient_checkpointing false\n"
    found = imported(TUNED.replace("my-robot\n", f"my-robot \\\n{more}"), "a.sh")
    assert found.job.workload.global_batch == 8
    assert found.job.plan.stages[0].checkpointed_layers == 0


def test_without_its_variable_a_single_process_is_started() -> None:
    found = imported(TUNED.replace("NPROC_PER_NODE=4 \\\n", ""), "a.sh")
    assert found.job.cluster.num_gpus == 1
    assert "splits by device_map" in texts(found, "ignored")["CUDA_VISIBLE_DEVICES"]
    assert "CUDA_VISIBLE_DEVICES" not in texts(imported(TUNED, "a.sh"), "ignored")


@pytest.mark.parametrize(
    ("name", "level", "states", "weights"),
    [("zero2", 2, 0, 0), ("zero2_offload", 2, 1, 0), ("zero3_offload", 3, 1, 1)],
)
def test_configurations_of_deepspeed_have_names(
    name: str, level: int, states: int, weights: int
) -> None:
    text = TUNED.replace("my-robot", f"my-robot --tuner_type full --deepspeed {name}")
    job = imported(text, "a.sh").job
    (stage,) = job.plan.stages
    assert stage.zero == level
    assert (stage.offload.optimizer, stage.offload.weights) == (states, weights)


def test_its_program_may_be_started_by_another_launcher() -> None:
    text = "torchrun --nproc_per_node 2 swift/cli/sft.py --model Qwen/Qwen2.5-7B --max_length 512\n"
    found = imported(text, "a.sh")
    assert (found.job.cluster.num_gpus, found.job.workload.global_batch) == (2, 16)
    assert texts(found, "assumed")["precision"].startswith("bf16, as ms-swift takes")


def test_full_training_and_quantised_bases_are_read() -> None:
    full = imported(TUNED.replace("my-robot", "my-robot --tuner_type full"), "a.sh")
    assert full.job.workload.train == "all"
    small = imported(TUNED.replace("my-robot", "my-robot --quant_bits 4"), "a.sh")
    assert small.job.workload.base == "4bit"


def test_a_missing_length_is_asked_for() -> None:
    with pytest.raises(MissingError, match="sequence_length: is missing"):
        imported(TUNED.replace("  --max_length 2048 \\\n", ""), "a.sh")


MEGATRON = """
NPROC_PER_NODE=8 \\
megatron sft \\
  --model Qwen/Qwen3-30B-A3B \\
  --tensor_model_parallel_size 4 \\
  --expert_model_parallel_size 4 \\
  --sequence_parallel true \\
  --max_length 8192 \\
  --model_name my-robot \\
"""


DENSE = MEGATRON.replace("Qwen3-30B-A3B", "Qwen2.5-7B").replace("--expert_model", "--context")
DENSE = DENSE.replace("size 4", "size 2")


def test_megatron_swift_has_defaults_of_its_own() -> None:
    assert format_of(source_of(MEGATRON, "a.sh")).name == "swift-megatron"
    found = imported(MEGATRON, "a.sh")
    work, (stage,) = found.job.workload, found.job.plan.stages
    assert (work.model.name, work.sequence_length) == ("qwen3-30b-a3b", 8192)
    assert (work.precision, work.attention, work.train) == ("bf16", "flash", "all")
    assert (work.global_batch, stage.micro_batch, stage.zero) == (16, 1, 1)
    # Experts are not divided over tensor-parallel ranks, unlike in Megatron-LM.
    assert (stage.tensor_parallel, stage.expert_parallel) == (4, 4)
    assert (stage.expert_tensor_parallel, stage.core_recomputed_layers) == (1, 48)
    assert not texts(found, "ignored")


def test_megatron_swift_trains_adapters_where_it_is_told() -> None:
    dense = MEGATRON.replace("Qwen3-30B-A3B", "Qwen2.5-7B").replace("--expert_model", "--context")
    dense = dense.replace("context_parallel_size 4", "context_parallel_size 2")
    more = "  --tuner_type lora --lora_rank 16 --target_modules linear_qkv linear_proj\n"
    work = imported(dense + more, "a.sh").job.workload
    assert (work.train, work.adapter_rank, work.adapter_targets) == ("adapters", 16, "attention")
    everywhere = imported(dense + more.replace("linear_qkv linear_proj", "all-linear"), "a.sh")
    assert everywhere.job.workload.adapter_targets == "all"
    with pytest.raises(InputError, match="tuner_type: lora_llm is not supported"):
        imported(dense + more.replace("lora ", "lora_llm ", 1), "a.sh")


def test_options_of_megatron_swift_win_over_its_defaults() -> None:
    more = "  --torch_dtype float16 --micro_batch_size 2 --recompute_granularity none\n"
    found = imported(MEGATRON + more, "a.sh")
    (stage,) = found.job.plan.stages
    assert (found.job.workload.precision, stage.micro_batch) == ("fp16", 2)
    assert stage.core_recomputed_layers == 0


def test_weights_of_32_bits_are_trained_in_fp16() -> None:
    text = TUNED.replace("bfloat16", "float32")
    found = imported(text, "a.sh")
    assert found.job.workload.precision == "fp16"
    assert "float32" in texts(found, "assumed")["precision"]
    stated = imported(text.replace("my-robot", "my-robot --fp16 false"), "a.sh")
    assert stated.job.workload.precision == "fp32"
    dense = MEGATRON.replace("Qwen3-30B-A3B", "Qwen2.5-7B").replace(
        "  --expert_model", "  --context"
    )
    found = imported(dense.replace("size 4", "size 2") + "  --torch_dtype float32\n", "a.sh")
    assert found.job.workload.precision == "fp16"
    assert "float32" in texts(found, "assumed")["precision"]


def test_a_precision_that_is_off_leaves_the_other_as_the_data_type_has_it() -> None:
    silent = TUNED.replace("  --torch_dtype bfloat16 \\\n", "")
    for text in (TUNED, silent, silent.replace("my-robot", "my-robot --tuner_type full")):
        found = imported(text.replace("my-robot", "my-robot --fp16 false"), "a.sh")
        assert found.job.workload.precision == "bf16"
        assert ("precision" in texts(found, "assumed")) == (text is not TUNED)
        half = imported(text.replace("my-robot", "my-robot --fp16 true"), "a.sh")
        assert half.job.workload.precision == "fp16"
        off = imported(text.replace("my-robot", "my-robot --bf16 false"), "a.sh")
        assert off.job.workload.precision == "bf16"
    for more, precision in (
        ("--fp16 false", "bf16"),
        ("--fp16 false --torch_dtype bfloat16", "bf16"),
        ("--bf16 false --torch_dtype float16", "fp16"),
        ("--fp16 true", "fp16"),
        ("--bf16 true --torch_dtype float32", "bf16"),
    ):
        found = imported(f"{MEGATRON}  {more}\n", "a.sh")
        assert found.job.workload.precision == precision, more


def test_full_training_tells_of_16_bit_states_also_by_default() -> None:
    stated = TUNED.replace("my-robot", "my-robot --tuner_type full")
    silent = stated.replace("  --torch_dtype bfloat16 \\\n", "")
    for text in (stated, silent):
        found = imported(text, "a.sh")
        assert found.job.workload.precision == "bf16"
        assert any("keeps states in 16 bits" in remark.text for remark in found.remarks)


def test_remarks_on_batches_and_optimizers_are_true() -> None:
    more = "my-robot --sequence_parallel_size 2 --optimizer muon --gradient_checkpointing true"
    found = imported(TUNED.replace("my-robot", more), "a.sh")
    text = texts(found, "assumed")["gradient_accumulation_steps"]
    assert text == "4: ms-swift divides 16 sequences by micro-batch and processes"
    assert texts(found, "ignored")["optimizer"] == "muon is predicted as AdamW"


def test_fsdp_of_megatron_swift_shards_all_states() -> None:
    more = "  --use_megatron_fsdp true\n"
    found = imported(MEGATRON + more, "a.sh")
    assert (found.job.plan.stages[0].zero, found.job.plan.engine) == (3, "megatron-fsdp")
    less = imported(MEGATRON + f"{more.rstrip()} --data_parallel_sharding_strategy optim\n", "a.sh")
    assert less.job.plan.stages[0].zero == 1
    off = imported(MEGATRON + "  --use_megatron_fsdp false\n", "a.sh")
    assert off.job.plan.stages[0].zero == 1
    assert not texts(off, "contradicting")


def test_the_loss_of_megatron_swift_is_fused() -> None:
    assert imported(MEGATRON, "a.sh").job.plan.engine == "megatron-core-fused-loss"
    whole = imported(MEGATRON + "  --cross_entropy_loss_fusion false\n", "a.sh")
    assert whole.job.plan.engine == "megatron-core"
    assert not texts(whole, "ignored")
    asked = imported(MEGATRON, "a.sh", engine="megatron-bridge")
    assert asked.job.plan.engine == "megatron-bridge"


def test_megatron_swift_says_what_it_takes_for_granted() -> None:
    assumed = texts(imported(MEGATRON, "a.sh"), "assumed")
    assert "without packing" in assumed["sequences"]
    assert assumed["precision"].startswith("bf16, as Megatron-SWIFT takes")
    packed = imported(MEGATRON + "  --packing true --torch_dtype bfloat16\n", "a.sh")
    assert not {"sequences", "precision"} & texts(packed, "assumed").keys()
    assert not texts(packed, "ignored")


@pytest.mark.parametrize("option", ["--adapters out/v0", "--mcore_adapter out/v0"])
def test_saved_adapters_make_the_run_train_adapters(option: str) -> None:
    dense = MEGATRON.replace("Qwen3-30B-A3B", "Qwen2.5-7B").replace(
        "  --expert_model", "  --context"
    )
    found = imported(dense.replace("size 4", "size 2") + f"  {option}\n", "a.sh")
    assert (found.job.workload.train, found.job.workload.adapter_rank) == ("adapters", 8)
    told = "8, as the rank of out/v0 is not read: give --lora_rank"
    assert texts(found, "assumed")["adapter_rank"] == told


def test_further_options_of_megatron_swift_are_read() -> None:
    found = imported(MEGATRON + "  --packing_length 16384 --packing true\n", "a.sh")
    assert found.job.workload.sequence_length == 16384
    found = imported(MEGATRON + "  --packing_length 16384\n", "a.sh")
    assert found.job.workload.sequence_length == 8192
    saved = "  --modules_to_save word_embeddings output_layer\n"
    assert "modules_to_save" not in texts(imported(MEGATRON + saved, "a.sh"), "ignored")
    found = imported(f"{DENSE}  --tuner_type lora {saved.lstrip()}", "a.sh")
    assert texts(found, "ignored")["modules_to_save"].startswith("word_embeddings output_layer:")
    with pytest.raises(InputError, match="task_type: seq_cls is not supported"):
        imported(MEGATRON + "  --task_type seq_cls --num_labels 2\n", "a.sh")


@pytest.mark.parametrize(
    ("more", "precision", "gradients"),
    [
        ("", "bf16", "usual"),
        ("--bf16 false", "bf16", "16bit"),
        ("--bf16 false --fp16 false", "bf16", "16bit"),
        ("--bf16 false --torch_dtype bfloat16", "bf16", "16bit"),
        ("--bf16 false --fp16 true", "fp16", "usual"),
        ("--fp16 false --torch_dtype float32", "fp32", "usual"),
        ("--fp16 false --torch_dtype float16", "fp16", "usual"),
    ],
)
def test_weights_of_megatron_swift_keep_their_type_without_mixed_precision(
    more: str, precision: str, gradients: str
) -> None:
    work = imported(f"{DENSE}  {more}\n", "a.sh").job.workload
    assert (work.precision, work.gradients) == (precision, gradients)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "swift deploy --adapters output/x\n",
            "line 1: swift deploy trains nothing: give a script",
        ),
        ("swift export --model Qwen/Qwen3-8B\n", "line 1: swift export is not known to train"),
        ("megatron export --model Qwen/Qwen3-8B\n", "megatron export is not known to train"),
        (TUNED.replace("my-robot", "my-robot --task_type reranker"), "task_type: reranker is not"),
        (f"{DENSE}  --task_type seq_cls\n", "task_type: seq_cls is not supported"),
    ],
)
def test_commands_that_train_no_decoder_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(text, "a.sh", model=catalog.model("llama-7b"))


def test_a_file_may_say_how_fsdp_shards() -> None:
    text = TUNED.replace("my-robot", "my-robot --fsdp conf/mine.json --tuner_type full")
    source = source_of(text, "a.sh")
    content = '{"fsdp": "shard_grad_op", "fsdp_config": {"activation_checkpointing": true}}'
    object.__setattr__(source, "beside", {"conf/mine.json": content}.get)
    (stage,) = imported_from(source).job.plan.stages
    assert stage.zero == 2
    with pytest.raises(InputError, match=r"conf/mine\.json: configures FSDP, but is not in"):
        imported(text, "a.sh")
