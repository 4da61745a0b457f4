"""OpenRLHF's supervised fine-tuning: options with and without sections, and its defaults."""

import pytest

from mistlab.core.values import InputError
from mistlab.formats.file_formats import format_of
from tests.mistlab.launch_files import imported, source_of, texts

NEW = """
read -r -d '' words <<EOF
openrlhf.cli.train_sft --data.max_len 4096 --data.dataset rows --train.batch_size 64 \\
  --train.micro_batch_size 2 --model.model_name_or_path Qwen/Qwen3-8B --ds.zero_stage 3 \\
  --ds.param_dtype bf16 --model.gradient_checkpointing_enable --ds.packing_samples --adam.lr 1e-5
EOF
deepspeed --num_gpus 8 --module $words
"""
OLD = """
deepspeed --num_gpus 8 --module openrlhf.cli.train_sft --max_len 1024 --pretrain Qwen/Qwen3-8B \\
  --train_batch_size 128 --micro_train_batch_size 4 --zero_stage 2 --bf16 --adam_offload --l2 0
"""


def test_options_with_sections_are_read() -> None:
    assert format_of(source_of(NEW, "a.sh")).name == "openrlhf"
    found = imported(NEW, "a.sh")
    work, (stage,) = found.job.workload, found.job.plan.stages
    assert (work.model.name, work.sequence_length, work.global_batch) == ("qwen3-8b", 4096, 64)
    assert (work.precision, work.train, work.states) == ("bf16", "all", "mixed")
    assert (stage.zero, stage.micro_batch, found.job.plan.micro_batches) == (3, 2, 4)
    assert stage.checkpointed_layers == 36
    assert "sequences" not in texts(found, "assumed")
    assert not texts(found, "ignored")
    assert not texts(found, "contradicting")


def test_options_without_sections_are_read() -> None:
    found = imported(OLD, "a.sh")
    (stage,) = found.job.plan.stages
    assert (found.job.workload.global_batch, stage.micro_batch, stage.zero) == (128, 4, 2)
    assert (stage.offload.optimizer, stage.checkpointed_layers) == (1, 0)
    assert "sequences" in texts(found, "assumed")
    bare = imported(OLD.replace("--train_batch_size 128 --micro_train_batch_size 4", ""), "a.sh")
    assert (bare.job.workload.global_batch, bare.job.plan.stages[0].micro_batch) == (128, 8)


def test_adapters_have_a_rank_above_0() -> None:
    more = "--adam.lr 1e-5 --ds.lora.rank 64 --ds.lora.alpha 64 --ds.load_in_4bit"
    work = imported(NEW.replace("--adam.lr 1e-5", more), "a.sh").job.workload
    assert (work.train, work.adapter_rank, work.adapter_targets) == ("adapters", 64, "all")
    assert work.base == "4bit"
    none = imported(NEW.replace("--adam.lr 1e-5", "--ds.lora.rank 0"), "a.sh")
    assert none.job.workload.train == "all"


@pytest.mark.parametrize("name", ["ring_attn_size", "tensor_parallel_size"])
def test_other_degrees_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"{name}: 2 is not supported here"):
        imported(NEW.replace("--adam.lr 1e-5", f"--ds.{name} 2"), "a.sh")
