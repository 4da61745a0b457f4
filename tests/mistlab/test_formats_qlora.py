"""Firefly's files and lines of ``qlora.py``: adapters on 4 bits where nothing says otherwise; names
that other programs give to the bits of a base and to the layers with adapters.
"""

import json
from typing import Any

import pytest

from mistlab.core.values import InputError
from mistlab.export.given import Imported
from mistlab.formats.file_formats import format_of
from tests.mistlab.launch_files import imported, source_of, texts

FIREFLY = {
    "model_name_or_path": "Qwen/Qwen3-8B",
    "train_file": "rows.jsonl",
    "template_name": "qwen",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 16,
    "max_seq_length": 1024,
    "gradient_checkpointing": True,
    "optim": "paged_adamw_32bit",
    "bf16": True,
}
QLORA = """
CUDA_VISIBLE_DEVICES=0 python qlora.py --model_name_or_path Qwen/Qwen3-8B --bf16 \\
  --source_max_len 512 --target_max_len 256 --per_device_train_batch_size 2
"""
LINE = """
torchrun --nproc_per_node 1 finetune.py --model_name_or_path Qwen/Qwen3-8B --bf16 \\
  --per_device_train_batch_size 1 --max_seq_length 512 --gradient_checkpointing --lora_rank 8
"""


def of_firefly(**changes: Any) -> Imported:
    return imported(json.dumps(FIREFLY | changes), "a.json", gpus_per_node=1)


def adapted(found: Imported) -> tuple[object, ...]:
    work = found.job.workload
    return (work.train, work.base, work.adapter_rank, work.adapter_targets)


def test_firefly_trains_adapters_on_4_bits_unless_told_otherwise() -> None:
    assert format_of(source_of(json.dumps(FIREFLY), "a.json")).name == "firefly"
    assert adapted(of_firefly()) == ("adapters", "4bit", 64, "all")
    assert adapted(of_firefly(train_mode="qlora", lora_rank=8)) == ("adapters", "4bit", 8, "all")
    assert adapted(of_firefly(train_mode="lora", lora_rank=8)) == ("adapters", "16bit", 8, "all")
    whole = of_firefly(train_mode="full", lora_rank=8).job.workload
    assert (whole.train, whole.base) == ("all", "16bit")


def test_firefly_is_told_of_nothing_strange_in_its_own_files() -> None:
    assert not texts(of_firefly(task_type="sft"), "ignored")


def test_firefly_by_preferences_is_refused() -> None:
    with pytest.raises(InputError, match=r"task_type: 'dpo'.*give pretrain or sft"):
        of_firefly(task_type="dpo")


def test_a_line_names_the_file_of_firefly() -> None:
    line = "torchrun --nproc_per_node 2 train.py --train_args_file args/a.json\n"
    files = {"args/a.json": json.dumps(FIREFLY)}
    found = imported(line, "a.sh", files=files)
    assert adapted(found) == ("adapters", "4bit", 64, "all")
    assert found.job.cluster.gpus_per_node == 2


def test_qlora_has_4_bits_64_ranks_and_16_steps() -> None:
    assert format_of(source_of(QLORA, "a.sh")).name == "qlora"
    found = imported(QLORA, "a.sh")
    work, (stage,) = found.job.workload, found.job.plan.stages
    assert adapted(found) == ("adapters", "4bit", 64, "all")
    assert (work.sequence_length, work.global_batch, stage.micro_batch) == (768, 32, 2)
    assert stage.checkpointed_layers == 36


def test_qlora_states_its_bits_and_whether_all_is_trained() -> None:
    def of(more: str) -> tuple[object, ...]:
        return adapted(imported(QLORA.replace("--bf16", f"--bf16 {more}"), "a.sh"))

    assert of("--bits 8 --lora_r 16") == ("adapters", "8bit", 16, "all")
    assert of("--bits 16") == ("adapters", "16bit", 64, "all")
    assert of("--bits 16 --full_finetune")[:2] == ("all", "16bit")
    with pytest.raises(InputError, match="freezes all weights in 4 bits"):
        of("--full_finetune")
    with pytest.raises(InputError, match="do_train: false trains nothing"):
        of("--do_train False")


@pytest.mark.parametrize(
    ("more", "base"),
    [
        ("", "16bit"),
        ("--load_in_kbits 16", "16bit"),
        ("--load_in_kbits 8", "8bit"),
        ("--load_in_kbits 4", "4bit"),
        ("--use_qlora 1", "4bit"),
        ("--use_qlora 1 --quant_bit 8", "8bit"),
        ("--use_qlora 0", "16bit"),
    ],
)
def test_bits_have_many_names(more: str, base: str) -> None:
    found = imported(LINE.replace("--bf16", f"--bf16 {more}"), "a.sh")
    assert found.job.workload.base == base
    assert not texts(found, "ignored")


def test_strange_bits_are_refused() -> None:
    with pytest.raises(InputError, match="load_in_kbits: 3 is not supported: give 4, 8 or 16"):
        imported(LINE.replace("--bf16", "--bf16 --load_in_kbits 3"), "a.sh")


def test_layers_with_adapters_may_be_called_trainable() -> None:
    wide = imported(LINE.replace("--bf16", "--bf16 --trainable q_proj,down_proj"), "a.sh")
    assert wide.job.workload.adapter_targets == "all"
    narrow = imported(LINE.replace("--bf16", "--bf16 --trainable q_proj,v_proj"), "a.sh")
    assert narrow.job.workload.adapter_targets == "attention"
    assert "q_proj v_proj" in texts(narrow, "assumed")["trainable"]
