"""Fine-tuning frameworks are read alike however they are started; each has its engine."""

from typing import Any

import pytest

from mistlab.core.values import InputError, to_mapping
from mistlab.export.given import Imported
from mistlab.formats.file_formats import format_of
from tests.mistlab.launch_files import imported, imported_from, source_of, texts

RECIPE = """
model_name_or_path: meta-llama/Llama-3.1-8B
bf16: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
gradient_checkpointing: true
max_length: 2048
packing: true
"""
FSDP = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n"
FACTORY = """
stage: sft
finetuning_type: lora
model_name_or_path: meta-llama/Llama-3.1-8B
template: llama3
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
bf16: true
"""
TORCHTUNE = """
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_rank: 8}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 2048}
dataset: {packed: true}
optimizer: {_component_: torch.optim.AdamW}
batch_size: 2
gradient_accumulation_steps: 4
dtype: bf16
"""
FILES = {"recipe.yaml": RECIPE, "fsdp.yaml": FSDP, "lf.yaml": FACTORY, "tt.yaml": TORCHTUNE}


def started(line: str, **given: Any) -> Imported:
    source = source_of(f"{line}\n", "run.sh")
    object.__setattr__(source, "beside", FILES.get)
    return imported_from(source, **given)


def machine(found: Imported) -> tuple[int, int, int]:
    job = found.job
    return job.plan.stages[0].zero, job.cluster.nodes, job.cluster.gpus_per_node


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("accelerate launch --config_file fsdp.yaml sft.py --config recipe.yaml", (3, 1, 8)),
        ("accelerate launch --config_file fsdp.yaml trl sft --config recipe.yaml", (3, 1, 8)),
        ("trl sft --config recipe.yaml --accelerate_config zero2 --num_processes 4", (2, 1, 4)),
        ("trl sft --config recipe.yaml --accelerate_config=zero3", (3, 1, 8)),
        ("trl sft --config recipe.yaml --accelerate-config zero3 --num-processes 4", (3, 1, 4)),
        ("trl sft --config recipe.yaml --accelerate-config=fsdp1", (3, 1, 8)),
        ("trl sft --accelerate_config fsdp1 --config recipe.yaml", (3, 1, 8)),
        ("trl sft --accelerate_config fsdp.yaml --num_processes 2 --config recipe.yaml", (3, 1, 2)),
        ("trl sft --config recipe.yaml --accelerate_config multi_gpu", (0, 1, 8)),
        ("trl sft --config recipe.yaml --accelerate_config single_gpu", (0, 1, 1)),
    ],
)
def test_trl_is_started_by_accelerate(line: str, read: tuple[int, int, int]) -> None:
    found = started(line)
    assert machine(found) == read
    assert not {"accelerate_config", "num_processes"} & texts(found, "ignored").keys()


def test_a_recipe_of_trl_names_its_configuration() -> None:
    found = imported(f"{RECIPE}accelerate_config: zero3\nnum_processes: 4\n")
    assert machine(found) == (3, 1, 4)


SHIPPED = "examples/accelerate_configs"


@pytest.mark.parametrize(
    ("path", "read"),
    [
        (f"{SHIPPED}/deepspeed_zero3.yaml", (3, 1, 8)),
        (f"trl/{SHIPPED}/fsdp2.yaml", (3, 1, 8)),
        ("recipes/accelerate_configs/multi_gpu.yaml", (0, 1, 8)),
    ],
)
def test_configurations_of_trl_s_examples_need_not_be_there(
    path: str, read: tuple[int, int, int]
) -> None:
    found = started(f"accelerate launch --config_file {path} sft.py --config recipe.yaml")
    assert machine(found) == read
    assert f"{path} is not there: predicted with TRL's" in texts(found, "assumed")["config_file"]
    for name in ("zero3.yaml", f"{SHIPPED}/mine.yaml"):
        with pytest.raises(InputError, match=r"is Accelerate's configuration, but is not in"):
            started(f"accelerate launch --config_file {name} sft.py --config recipe.yaml")


@pytest.mark.parametrize(
    ("path", "level", "offloaded", "overlaps"),
    [
        ("examples/deepspeed/ds_z3_config.json", 3, (), False),
        ("ds_z2_offload_config.json", 2, ("gradients", "optimizer"), False),
        ("ds_z3_offload_config.json", 3, ("weights", "gradients", "optimizer"), False),
        ("deepspeed_configs/zero1.json", 1, (), True),
        # This file offloads, whatever its name says.
        ("deepspeed_configs/zero2.json", 2, ("gradients", "optimizer"), True),
        ("deepspeed_configs/zero3_bf16.json", 3, (), True),
        ("deepspeed_configs/zero3_bf16_cpuoffload_params.json", 3, ("weights",), True),
    ],
)
def test_configurations_in_tools_repositories_need_not_be_there(
    path: str, level: int, offloaded: tuple[str, ...], *, overlaps: bool
) -> None:
    found = imported(f"{FACTORY}deepspeed: {path}\n", gpus_per_node=8)
    (stage,) = found.job.plan.stages
    assert stage.zero == level
    assert tuple(name for name, share in to_mapping(stage.offload).items() if share) == offloaded
    assert offloaded or found.job.plan.overlap_communication == overlaps
    assert f"{path} is not there: predicted with" in texts(found, "assumed")["deepspeed"]
    # A file that is there is read.
    there = {path: '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'}
    read = imported(f"{FACTORY}deepspeed: {path}\n", files=there, gpus_per_node=8)
    assert read.job.plan.stages[0].zero == 2
    assert "deepspeed" not in texts(read, "assumed")


def test_a_missing_configuration_of_accelerate_is_refused() -> None:
    with pytest.raises(InputError, match=r"none\.yaml: is Accelerate's configuration, but is not"):
        started("accelerate launch --config_file none.yaml trl sft --config recipe.yaml")


@pytest.mark.parametrize(
    "line",
    [
        "llamafactory-cli train lf.yaml",
        "accelerate launch --num_processes 2 src/train.py lf.yaml",
        "accelerate launch --num_processes 2 -m llamafactory.cli train lf.yaml",
        "torchrun --nproc_per_node 2 src/train.py lf.yaml",
    ],
)
def test_llama_factory_s_file_has_its_defaults_under_every_launcher(line: str) -> None:
    assert format_of(started_source(line)).name == "llama-factory"
    found = started(line, nodes=1, gpus_per_node=2)
    (stage,) = found.job.plan.stages
    assert stage.checkpointed_layers == 32
    assert found.job.workload.adapter_targets == "all"
    assert found.job.cluster.num_gpus == 2


def started_source(line: str) -> Any:
    source = source_of(f"{line}\n", "run.sh")
    object.__setattr__(source, "beside", FILES.get)
    return source


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ("--nproc_per_node 4 lora_finetune_distributed", 4),
        ("--nnodes 1 --nproc_per_node=2 mine.py", 2),
        ("lora_finetune_single_device", 1),
    ],
)
def test_torchtune_is_started_by_tune_run(options: str, gpus: int) -> None:
    found = started(f"tune run {options} --config tt.yaml batch_size=1 tokenizer.max_seq_len=4096")
    assert found.job.cluster.num_gpus == gpus
    assert found.job.plan.stages[0].micro_batch == 1
    assert found.job.workload.sequence_length == 4096
    with pytest.raises(InputError, match=r"inside torchtune: copy it by tune cp llama3_1/8B_lora"):
        started(f"tune run {options} --config llama3_1/8B_lora")


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        (RECIPE, "trainer"),
        (f"{RECIPE}accelerate_config: fsdp2\n", "trainer"),
        (f"{RECIPE}accelerate_config: zero2\n", "deepspeed-trainer"),
        (f"{RECIPE}torch_compile: true\n", "fsdp-compiled"),
        (FACTORY, "trainer"),
        (f"{FACTORY}use_unsloth: true\n", "trainer-fused"),
        (TORCHTUNE, "trainer"),
        (f"{TORCHTUNE}compile: true\n", "fsdp-compiled"),
    ],
)
def test_engines_are_those_of_measured_runs(text: str, engine: str) -> None:
    found = imported(text, nodes=1, gpus_per_node=8)
    assert found.job.plan.engine == engine
    assert "engine" not in texts(found, "assumed")
