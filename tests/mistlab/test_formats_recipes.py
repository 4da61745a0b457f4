"""Megatron-Bridge's recipes: lines that start run_recipe.py, and defaults that recipes have."""

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.given import MissingError
from mistlab.formats.file_formats import format_of
from tests.mistlab.launch_files import imported, source_of, texts

STARTED = """
torchrun --nproc_per_node 8 scripts/training/run_recipe.py \\
  --recipe llama3_8b_pretrain_config --dataset mock -sl 8192 -mb 1 --global_batch_size 128 \\
  -tp 2 model.sequence_parallel=true checkpoint.save=$SAVE_FOLDER
"""


def test_a_recipe_s_options_and_changes_are_read() -> None:
    assert format_of(source_of(STARTED, "a.sh")).name == "megatron-bridge"
    found = imported(STARTED, "a.sh")
    job, (stage,) = found.job, found.job.plan.stages
    assert job.workload.model == catalog.model("llama3-8b")
    assert (job.workload.sequence_length, job.workload.global_batch) == (8192, 128)
    assert (job.cluster.num_gpus, stage.micro_batch) == (8, 1)
    assert (stage.tensor_parallel, stage.sequence_parallel, stage.data_parallel) == (2, 1, 4)
    assert texts(found, "assumed")["model"] == "llama3-8b, by the recipe's name"


def test_what_recipes_have_in_common_is_assumed() -> None:
    found = imported(STARTED, "a.sh")
    assert (found.job.workload.precision, found.job.plan.stages[0].zero) == ("bf16", 1)
    assert {"precision", "ddp.use_distributed_optimizer"} <= texts(found, "assumed").keys()
    more = " mixed_precision=bf16_with_mxfp8_mixed ddp.use_distributed_optimizer=false\n"
    changed = imported(STARTED.rstrip() + more, "a.sh")
    assert (changed.job.workload.precision, changed.job.plan.stages[0].zero) == ("fp8", 0)
    assert not {"precision", "ddp.use_distributed_optimizer"} & texts(changed, "assumed").keys()


def test_adapters_are_known_by_the_mode_or_the_recipe() -> None:
    by_mode = STARTED.replace("--dataset", "--mode lora --dataset")
    for text in (by_mode, STARTED.replace("_pretrain_", "_peft_")):
        work = imported(text.rstrip() + " peft.dim=16\n", "a.sh").job.workload
        assert (work.train, work.adapter_rank) == ("adapters", 16)
    with pytest.raises(InputError, match="peft: trains by dora, which is not supported"):
        imported(STARTED.replace("--dataset", "--mode dora --dataset"), "a.sh")


def test_other_recipes_are_refused_or_asked_for() -> None:
    with pytest.raises(InputError, match="recipe: qwen3_vl_8b_sft_config trains vl, which is not"):
        imported(STARTED.replace("llama3_8b_pretrain", "qwen3_vl_8b_sft"), "a.sh")
    with pytest.raises(MissingError, match=r"changes the recipe mine_config: .* by --model"):
        imported(STARTED.replace("llama3_8b_pretrain_config", "mine_config"), "a.sh")


def test_data_types_of_moments_may_be_torch_s() -> None:
    moments = "optimizer.exp_avg_dtype=torch.bfloat16 optimizer.exp_avg_sq_dtype=torch.bfloat16"
    aware = "optimizer.use_precision_aware_optimizer=true"
    found = imported(f"{STARTED.rstrip()} {moments} {aware}\n", "a.sh")
    assert found.job.workload.optimizer == "adamw-bf16"
