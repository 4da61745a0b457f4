"""Recipes for fine-tuning: kernels that the GPUs have, start lines for one GPU, and what users are
told of files that are no recipe.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.given import Given
from mistlab.export.nearest import nearest
from mistlab.formats.file_formats import FORMATS
from mistlab.formats.recipes.exports import RECIPES
from mistlab.formats.recipes.recipe_rules import fused_kernel
from mistlab.job.job import Job, load_job
from tests.mistlab.launch_files import H100, imported, source_of, texts
from tests.mistlab.test_tuner_launchers import FACTORY, RECIPE

HALF = RECIPE.replace("bf16: true", "fp16: true\nuse_peft: true\nload_in_4bit: true")


def on(hardware: str, gpus: int, precision: str = "fp16") -> Job:
    job = imported(HALF, nodes=1, gpus_per_node=gpus).job
    cluster = replace(job.cluster, hardware=catalog.hardware(hardware))
    workload = replace(job.workload, precision=precision)
    return replace(job, cluster=cluster, workload=workload)


def written(job: Job, name: str) -> str:
    return RECIPES[name].write(nearest(job, RECIPES[name]).job)


@pytest.mark.parametrize("name", ["trl", "axolotl", "llama-factory"])
@pytest.mark.parametrize(
    ("hardware", "is_flash"),
    [("t4-16gb", False), ("v100-32gb", False), ("rtx-3090-24gb", True), ("mi300x-192gb", True)],
)
def test_gpus_before_ampere_have_no_flash_attention(
    name: str, hardware: str, *, is_flash: bool
) -> None:
    text = written(on(hardware, 1), name)
    assert ("flash_attention_2" in text or "fa2" in text) == is_flash
    assert ("sdpa" in text) != is_flash
    if name == "trl":
        assert ("packing_strategy: bfd" in text) == is_flash


@pytest.mark.parametrize(
    ("precision", "kernel"),
    [
        *((name, "fa2") for name in ("fp16", "bf16", "fp8", "fp4")),
        ("fp32", "sdpa"),
        ("tf32", "sdpa"),
    ],
)
def test_attention_has_16_bits_unless_all_has_32(precision: str, kernel: str) -> None:
    assert fused_kernel(on("b200-180gb", 1, precision), "fa2") == kernel


@pytest.mark.parametrize(
    ("name", "alone", "several"),
    [
        ("trl", "# Start: trl sft --config FILE", "accelerate launch --multi_gpu"),
        ("llama-factory", "# Start: llamafactory-cli train FILE", "FORCE_TORCHRUN=1"),
        ("torchtune", "tune run lora_finetune_single_device", "lora_finetune_distributed"),
    ],
)
def test_a_single_gpu_has_its_own_start_line(name: str, alone: str, several: str) -> None:
    one, four = (written(on("h100-80gb", gpus, "bf16"), name) for gpus in (1, 4))
    assert alone in one
    assert several not in one
    assert several in four
    assert ("fsdp_cpu_offload" in four) == (name == "torchtune")
    assert "fsdp_cpu_offload" not in one


@pytest.mark.parametrize("name", ["run.yaml", "ds.json", "train.py"])
def test_a_file_of_another_framework_is_no_plan(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text('{"train_batch_size": 8}' if name == "ds.json" else FACTORY)
    with pytest.raises(InputError, match=r"is no plan, .* by mistlab import_plan"):
        load_job(path)


UNSLOTH = """
from unsloth import FastLanguageModel as F
max_seq_length = 1024
model = F.from_pretrained(model_name="unsloth/Qwen2.5-7B-bnb-4bit")
model = F.get_peft_model(model, r=32, dtype=None)
train(per_device_train_batch_size=2, gradient_accumulation_steps=4)
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "from unsloth import FastLanguageModel\nload(load_in_4bit=True)\nget_peft_model()\n",
            "with unsloth, .* mistlab tune --train lora --base 4bit --engine trainer-fused",
        ),
        (
            "from trl import SFTTrainer\nSFTTrainer()\n",
            "with trl, .* mistlab tune --engine trainer",
        ),
        ("from trl import DPOTrainer\nDPOTrainer()\n", "DPOTrainer, which trains by preferences"),
        (
            "# or a DPOTrainer()\nfrom trl import SFTTrainer\nSFTTrainer()\n",
            "--model NAME --sequence-length N --global-batch N,",
        ),
        (UNSLOTH, "--train lora --rank 32 --engine trainer-fused --model unsloth/Qwen2.5-7B --seq"),
        (UNSLOTH, "--model unsloth/Qwen2.5-7B --sequence-length 1024 --global-batch 8,"),
        ("import torch\nprint(1)\n", "builds no configuration of torchtitan"),
    ],
)
def test_python_programs_are_refused_with_what_to_do(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(text, "train.py")


def test_misspelled_keys_are_told_by_the_right_ones() -> None:
    text = RECIPE.replace("gradient_checkpointing", "gradient_chekpointing") + "my_key: 1\n"
    ignored = texts(imported(text, gpus_per_node=1), "ignored")
    assert "did you mean gradient_checkpointing?" in ignored["gradient_chekpointing"]
    assert "did you mean" not in ignored["my_key"]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("[q_proj, v_proj]", "q_proj v_proj: predicted with adapters on all four layers"),
        ("[q_proj, v_proj, gate_proj]", "predicted with adapters on all linear layers"),
        ("[q_proj, k_proj, v_proj, o_proj]", None),
        ("all-linear", None),
    ],
)
def test_adapters_on_fewer_layers_than_predicted_are_told(names: str, told: str | None) -> None:
    text = f"{RECIPE}use_peft: true\nlora_r: 8\nlora_target_modules: {names}\n"
    assumed = texts(imported(text, gpus_per_node=1), "assumed")
    if told is None:
        assert "lora_target_modules" not in assumed
    else:
        assert told in assumed["lora_target_modules"]


@pytest.mark.parametrize(
    ("settings", "train"),
    [
        ("use_peft: false\nlora_r: 8", "all"),
        ("use_lora: 0\nlora_r: 8", "all"),
        ("use_lora: 1", "adapters"),
        ("use_lora: true\nq_lora: false\nlora_r: 8", "adapters"),
        ("q_lora: false\nlora_r: 8", "adapters"),
        ("lora_r: 8", "adapters"),
    ],
)
def test_a_switch_decides_whether_a_rank_means_adapters(settings: str, train: str) -> None:
    found = imported(f"{RECIPE}{settings}\n", gpus_per_node=1)
    assert found.job.workload.train == train
    assert not any("use_" in remark.choice for remark in found.remarks if remark.kind == "ignored")


def test_layers_of_adapters_that_the_file_leaves_open_are_told() -> None:
    unsaid = texts(imported(f"{RECIPE}use_peft: true\nlora_r: 8\n", gpus_per_node=1), "assumed")
    assert "PEFT's default is fewer" in unsaid["adapter_targets"]
    given = f"{RECIPE}use_peft: true\nlora_target_modules: all-linear\n"
    assert "adapter_targets" not in texts(imported(given, gpus_per_node=1), "assumed")


def test_adapters_of_ms_swift_are_read_with_its_defaults() -> None:
    line = (
        "swift sft --model meta-llama/Llama-3.1-8B --train_type lora --max_length 2048 "
        "--per_device_train_batch_size 1 --torch_dtype bfloat16 --packing true\n"
    )
    for text in (line, line.replace("--train_type lora ", "")):
        work = imported(text, "run.sh", nodes=1, gpus_per_node=1).job.workload
        assert (work.train, work.adapter_rank, work.adapter_targets) == ("adapters", 8, "all")
    full = imported(line.replace(" lora ", " full "), "run.sh", nodes=1, gpus_per_node=1)
    assert full.job.workload.train == "all"
    with pytest.raises(InputError, match="train_type: adalora is not supported"):
        imported(line.replace(" lora ", " adalora "), "run.sh", nodes=1, gpus_per_node=1)


def test_misspelled_options_of_megatron_are_named_beside_what_is_missing() -> None:
    line = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
        "--num-attention-heads 32 --seqlen 2048 --micro-batchsize 1 --global-batch-size 16 "
        "--bf16 --vocab-size 32000\n"
    )
    with pytest.raises(InputError) as caught:
        FORMATS["megatron"].imported(source_of(line, "run.sh"), Given(hardware=H100))
    assert "or --micro-batch-size in place of --micro-batchsize" in str(caught.value)
    assert "or --seq-length in place of --seqlen" in str(caught.value)
