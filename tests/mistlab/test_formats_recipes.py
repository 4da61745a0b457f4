"""Megatron-Bridge's recipes: lines that start run_recipe.py, and defaults that recipes have."""

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.given import Imported, MissingError
from mistlab.formats.file_formats import format_of
from tests.mistlab.launch_files import imported, source_of, texts

STARTED = """
torchrun --nproc_per_node 8 scripts/training/run_recipe.py \\
  --recipe llama3_8b_pretrain_config --dataset mock -sl 8192 -mb 1 --global_batch_size 128 \\
  -tp 2 model.sequence_parallel=true checkpoint.save=$SAVE_FOLDER
"""


def changed_by(more: str, text: str = STARTED) -> Imported:
    return imported(f"{text.rstrip()} {more}\n", "a.sh")


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
    changed = changed_by(
        "mixed_precision=bf16_with_mxfp8_mixed ddp.use_distributed_optimizer=false "
        "optimizer.use_distributed_optimizer=false"
    )
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
    with pytest.raises(InputError, match="recipe: glm_45v_sft_config trains 45v, which is not"):
        imported(STARTED.replace("llama3_8b_pretrain", "glm_45v_sft"), "a.sh")
    with pytest.raises(MissingError, match=r"changes the recipe mine_config: .* by --model"):
        imported(STARTED.replace("llama3_8b_pretrain_config", "mine_config"), "a.sh")


def test_data_types_of_moments_may_be_torch_s() -> None:
    moments = "optimizer.exp_avg_dtype=torch.bfloat16 optimizer.exp_avg_sq_dtype=torch.bfloat16"
    aware = "optimizer.use_precision_aware_optimizer=true"
    found = imported(f"{STARTED.rstrip()} {moments} {aware}\n", "a.sh")
    assert found.job.workload.optimizer == "adamw-bf16"


@pytest.mark.parametrize("switch", ["--deterministic", "--dry-run", "--dump_env", "--nsys"])
def test_an_option_without_a_value_does_not_take_the_next_change(switch: str) -> None:
    text = STARTED.replace("-tp 2", f"{switch} model.tensor_model_parallel_size=4")
    assert imported(text, "a.sh").job.plan.stages[0].tensor_parallel == 4
    text = STARTED.replace("--dataset", f"--peft_scheme lora {switch} +peft.dim=64 --dataset")
    assert imported(text, "a.sh").job.workload.adapter_rank == 64


def test_what_no_one_reads_is_named() -> None:
    more = " --deterministic ~model.masks=1 comm_overlap.tp=true train.train_iters=9"
    calm = " dist.distributed_timeout_minutes=9 --lr 1e-4\n"
    ignored = texts(imported(STARTED.rstrip() + more + calm, "a.sh"), "ignored")
    assert "--deterministic ~model.masks comm_overlap.tp" in ignored


@pytest.mark.parametrize(
    ("word", "precision"), [("bf16", "bf16"), ("fp8cs", "fp8"), ("fp8mx", "fp8"), ("mxfp8", "fp8")]
)
def test_flat_names_tell_the_precision(word: str, precision: str) -> None:
    text = STARTED.replace("pretrain_config", f"pretrain_2gpu_h100_{word}_config")
    found = imported(text, "a.sh")
    assert found.job.workload.precision == precision
    assert "by the recipe's name" in texts(found, "assumed")["precision"]
    stated = imported(text.rstrip() + " mixed_precision=bf16_mixed\n", "a.sh")
    assert stated.job.workload.precision == "bf16"


def test_four_bits_that_the_gpu_lacks_are_told() -> None:
    text = STARTED.replace("pretrain_config", "pretrain_2gpu_h100_nvfp4_config")
    found = imported(text, "a.sh")
    assert texts(found, "assumed")["precision"] == "bf16_with_nvfp4_mixed, by the recipe's name"
    assert any("no rate of fp4" in remark.text for remark in found.remarks)


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        ("llama31_8b_pretrain_config", "llama3-8b"),
        ("llama32_1b_pretrain_1gpu_h100_bf16_config", "llama3.2-1b"),
        ("llama3_8b_16k_pretrain_config", "llama3-8b"),
        ("qwen25_7b_sft_2gpu_h100_bf16_config", "qwen2.5-7b"),
        ("qwen3_600m_sft_config", "qwen3-0.6b"),
    ],
)
def test_names_without_points_are_known(recipe: str, model: str) -> None:
    text = STARTED.replace("llama3_8b_pretrain_config", recipe)
    text = text.replace("model.sequence_parallel=true", "")
    assert imported(text, "a.sh").job.workload.model == catalog.model(model)


@pytest.mark.parametrize(
    ("recipe", "layers"),
    [
        ("qwen25_500m_pretrain_config", 24),
        ("qwen2_1p5b_peft_config", 28),
        ("gemma2_2b_sft_1gpu_h100_bf16_config", 26),
    ],
)
def test_sizes_below_the_catalogue_are_known(recipe: str, layers: int) -> None:
    text = STARTED.replace("llama3_8b_pretrain_config", recipe)
    text = text.replace("-tp 2 model.sequence_parallel=true", "")
    assert imported(text, "a.sh").job.workload.model.layers == layers


def test_recipes_for_adapters_have_no_distributed_optimizer() -> None:
    found = imported(STARTED.replace("_pretrain_", "_peft_"), "a.sh")
    assert found.job.plan.stages[0].zero == 0
    assert "peft.dim" in texts(found, "assumed")["adapter_rank"]
    assert texts(found, "assumed")["ddp.use_distributed_optimizer"].startswith("false")
    assert imported(STARTED, "a.sh").job.plan.engine == "megatron-bridge"
    others = STARTED.replace("llama3_8b_pretrain", "qwen25_7b_peft")
    found = imported(others, "a.sh")
    assert (found.job.workload.train, found.job.plan.stages[0].zero) == ("adapters", 1)


@pytest.mark.parametrize("part", ["ddp", "optimizer"])
def test_the_optimizer_is_sharded_unless_both_sections_say_no(part: str) -> None:
    found = changed_by(f"{part}.use_distributed_optimizer=false")
    assert found.job.plan.stages[0].zero == 1
    text = texts(found, "ignored")[f"{part}.use_distributed_optimizer"]
    assert "give false for both" in text
    adapted = changed_by(
        f"{part}.use_distributed_optimizer=false", STARTED.replace("_pretrain_", "_peft_")
    )
    assert adapted.job.plan.stages[0].zero == 0


def test_overlaps_that_are_turned_off_stay_off() -> None:
    off = "ddp.overlap_grad_reduce=false ddp.overlap_param_gather=false"
    found = imported(f"{STARTED.rstrip()} {off}\n", "a.sh", engine="megatron-core")
    plan = found.job.plan
    assert not plan.overlap_communication
    assert plan.stages[0].zero == 1
    assert imported(STARTED, "a.sh", engine="megatron-core").job.plan.overlap_communication
    assert not any("ddp.overlap" in choice for choice in texts(found, "ignored"))
    half = changed_by("ddp.overlap_param_gather=false ddp.use_distributed_optimizer=true")
    assert half.job.plan.overlap_communication
    assert "with overlap" in texts(half, "ignored")["ddp.overlap_param_gather"]


@pytest.mark.parametrize("word", ["~ddp.use_megatron_fsdp", "~ddp.use_megatron_fsdp=true"])
def test_a_deleted_setting_is_not_set(word: str) -> None:
    found = changed_by(word, STARTED.replace("-tp 2 model.sequence_parallel=true", ""))
    assert found.job.plan.stages[0].zero == 1
    assert "~ddp.use_megatron_fsdp" in texts(found, "ignored")


FIELD = "mixed_precision.grad_reduce_in_fp32=true"


@pytest.mark.parametrize(
    ("recipe", "more", "precision"),
    [
        ("pretrain_config", FIELD, "bf16"),
        ("pretrain_2gpu_h100_fp8cs_config", FIELD, "fp8"),
        ("pretrain_2gpu_h100_fp8cs_config", "mixed_precision.bf16=true", "bf16"),
        ("pretrain_config", f"{FIELD} mixed_precision=bf16_with_mxfp8_mixed", "fp8"),
        ("pretrain_config", f"mixed_precision=bf16_with_mxfp8_mixed {FIELD}", "fp8"),
        ("pretrain_config", "mixed_precision.fp8=hybrid", "fp8"),
        ("pretrain_2gpu_h100_fp8cs_config", "mixed_precision=null", "bf16"),
    ],
)
def test_a_field_of_the_precision_changes_the_recipe_s(
    recipe: str, more: str, precision: str
) -> None:
    found = changed_by(more, STARTED.replace("pretrain_config", recipe))
    assert found.job.workload.precision == precision


@pytest.mark.parametrize("value", ["{grad_reduce_in_fp32: true}", "null"], ids=["field", "nothing"])
def test_a_file_of_changes_is_never_in_32_bits_in_silence(value: str) -> None:
    text = f"recipe: a\nmixed_precision: {value}\ntrain: {{micro_batch_size: 1}}\n"
    given = {"model": catalog.model("llama3-8b"), "nodes": 1, "gpus_per_node": 8}
    found = imported(text, **given, sequence_length=4096, global_batch=8)
    assert found.job.workload.precision == "bf16"
    assert ("null" in texts(found, "assumed")["precision"]) == (value == "null")


def test_fsdp_of_a_recipe_shards_all_states() -> None:
    more = STARTED.replace("-tp 2 model.sequence_parallel=true", "ddp.use_megatron_fsdp=true")
    assert imported(more, "a.sh").job.plan.stages[0].zero == 3


def test_recipes_do_not_divide_experts_over_tensor_parallel_ranks() -> None:
    more = STARTED.replace("llama3_8b", "qwen3_30b_a3b").replace("-tp 2", "-tp 2 -ep 4")
    found = imported(more, "a.sh")
    (stage,) = found.job.plan.stages
    assert (stage.tensor_parallel, stage.expert_parallel, stage.expert_tensor_parallel) == (2, 4, 1)
    assert texts(found, "assumed")["model.expert_tensor_parallel_size"].startswith("1, as in most")
    assert not {"model.moe_token_dispatcher_type"} & texts(found, "ignored").keys()
    changed = imported(more.replace("-ep 4", "-ep 4 -etp 2"), "a.sh")
    assert changed.job.plan.stages[0].expert_tensor_parallel == 2
