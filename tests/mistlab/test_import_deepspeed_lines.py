"""Launch lines of Megatron-DeepSpeed: ZeRO, offloading, experts and sequence parallelism."""

import json
from typing import Any

import pytest

from mistlab.core.values import InputError
from mistlab.export.given import Given, Imported
from mistlab.export.megatron.megatron_read import read_launch
from mistlab.plan.model_parts import Experts
from mistlab.shell.session import LaunchFile
from tests.mistlab.launched import H100, LINE, RUN, SHAPE, imported, launch, texts, word

CONFIG: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1},
    "gradient_clipping": 1.0,
}
DEEPSPEED = "--deepspeed --deepspeed_config ds.json --no-pipeline-parallel"


def with_config(more: str = "", config: Any = None, **others: Any) -> Imported:
    written = {"./ds.json": json.dumps({**CONFIG, **(config or {})})}
    return imported(f"{DEEPSPEED} {more}", written=written, **others)


def test_the_file_s_level_counts_and_the_option_s_is_told() -> None:
    found = with_config("--zero-stage 1")
    assert (found.job.plan.engine, found.job.plan.stages[0].zero) == ("deepspeed", 2)
    said = texts(found, "contradicting")["zero"]
    file = f"ds.json (line {LINE})"
    assert said == f"--zero-stage 1, but {file} has zero_optimization.stage 2: the file is used"


@pytest.mark.parametrize("stage", range(4))
def test_each_level_of_zero_is_read(stage: int) -> None:
    found = with_config(config={"zero_optimization": {"stage": stage}})
    assert found.job.plan.stages[0].zero == stage
    assert [one.choice for one in found.remarks if one.choice != "settings"] == []


def test_a_file_beside_the_script_is_read() -> None:
    beside = {"ds.json": json.dumps({"zero_optimization": {"stage": 3}})}
    found = imported(DEEPSPEED, source=LaunchFile(text="", beside=beside.get))
    assert found.job.plan.stages[0].zero == 3


def test_settings_without_effect_are_counted_one_by_one() -> None:
    names = (
        *("pin_memory", "nvme_path", "fast_init", "buffer_size", "buffer_count"),
        *("profile", "hysteresis", "aio", "autotuning", "elasticity"),
    )
    few, many = (
        texts(with_config("", config), "noted")["settings"]
        for config in (None, dict.fromkeys(names, 7))
    )
    assert int(many.split()[0]) - int(few.split()[0]) == len(names), many


def test_offloading_of_the_file_is_read() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    stage = with_config("--cpu-optimizer", {"zero_optimization": zero}).job.plan.stages[0]
    assert (stage.offload.optimizer, stage.offload.weights, stage.offload.gradients) == (1, 1, 1)


def test_an_optimizer_on_the_host_is_offloaded() -> None:
    found = with_config("--cpu-optimizer")
    assert found.job.plan.stages[0].offload.optimizer == 1
    assert "predicted as offloaded" in texts(found, "contradicting")["offload.optimizer"]
    weights = with_config("--remote-device cpu", {"zero_optimization": {"stage": 3}})
    assert weights.job.plan.stages[0].offload.weights == 1


def test_without_the_file_the_option_s_level_is_told_as_assumed() -> None:
    found = imported("--deepspeed --deepspeed_config gone.json --zero-stage 1")
    assert found.job.plan.stages[0].zero == 1
    text = texts(found, "assumed")["--deepspeed-config"]
    assert text.startswith(
        "predicted with --zero-stage 1 and nothing offloaded, because gone.json (line 40)"
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--deepspeed --deepspeed_config gone.json", r"gone.json \(line 40\) was not found"),
        ("--deepspeed", "--deepspeed-config: the option is not given, so ZeRO's level"),
        ("--deepspeed --zero-stage 4", "--zero-stage: line 40: 4 is unknown: give 0, 1, 2 or 3"),
        ("--deepspeed --zero-stage $Z", r"--zero-stage: line 40: \$Z is set nowhere"),
    ],
)
def test_without_file_and_option_a_line_is_refused(more: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(more)


def test_a_broken_file_is_refused_by_its_name() -> None:
    with pytest.raises(InputError, match=r"--deepspeed-config: ds.json \(line 40\): line 1"):
        imported(DEEPSPEED, written={"ds.json": "{"})


def test_what_is_unknown_of_a_written_file_is_told() -> None:
    command = launch(
        f"{SHAPE} {RUN} --deepspeed --deepspeed_config ds.json",
        written={"ds.json": '{"zero_optimization": {"stage": $STAGE}}'},
        unknown_in={"./ds.json": word("$STAGE").unknown},
    )
    told = r"--deepspeed-config: line 40: \$STAGE is set nowhere: give --set"
    with pytest.raises(InputError, match=told):
        read_launch(command, LaunchFile(text=""), Given(hardware=H100))


def test_sharded_gradients_in_a_pipeline_are_told() -> None:
    found = with_config("--pipeline-model-parallel-size 2")
    assert "DeepSpeed refuses ZeRO-2" in texts(found, "contradicting")["zero"]


def test_addresses_of_a_script_are_no_matter() -> None:
    notes = ("line 2: MASTER_ADDR is taken as localhost", "line 3: MP_VP is taken as not set")
    command = launch(f"{SHAPE} {RUN}", notes=notes)
    found = read_launch(command, LaunchFile(text=""), Given(hardware=H100))
    assert [one.text for one in found.remarks] == [notes[1]]


def test_batches_and_precision_of_the_file_fill_the_line_or_contradict_it() -> None:
    bare = with_config(run="--use-flash-attn").job
    assert (bare.workload.global_batch, bare.workload.precision) == (16, "bf16")
    other = with_config(config={"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2})
    said = texts(other, "contradicting")
    assert other.job.workload.global_batch == 16
    assert "has train_batch_size 32: the option is used" in said["global_batch"]
    assert "has train_micro_batch_size_per_gpu 2" in said["micro_batch"]
    halves = with_config(config={"bf16": {"enabled": False}, "fp16": {"enabled": True}})
    assert halves.job.workload.precision == "fp16"
    assert "enables fp16: the file is used" in texts(halves, "contradicting")["precision"]


def test_steps_of_accumulation_that_make_another_batch_are_told() -> None:
    steps = {"train_batch_size": None, "gradient_accumulation_steps": 4}
    told = texts(with_config(config=steps), "contradicting")["global_batch"]
    assert told == (
        "16, but 4 gradient_accumulation_steps x micro_batch 1 x data_parallel 8 are 32: 16 is used"
    )
    fitting = with_config(config={**steps, "gradient_accumulation_steps": 2})
    assert not texts(fitting, "contradicting")
    filled = with_config(config=steps, run="--bf16 --use-flash-attn")
    assert (filled.job.workload.global_batch, texts(filled, "contradicting")) == (32, {})


def test_without_deepspeed_s_engine_the_file_says_nothing() -> None:
    found = imported("--deepspeed_config ds.json --zero-stage 3")
    assert (found.job.plan.engine, found.job.plan.stages[0].zero) == ("megatron", 0)
    assert "without --deepspeed" in texts(found, "contradicting")["zero"]


def test_attention_is_written_out_unless_a_line_asks_for_flash() -> None:
    slow = with_config(run=RUN.replace("--use-flash-attn", ""))
    assert slow.job.workload.attention == "math"
    for name in ("--use-flash-attn-v2", "--use-flash-attn-triton", "--use-flash-attn-v1"):
        run = RUN.replace("--use-flash-attn", name)
        assert with_config(run=run).job.workload.attention == "flash"


def test_blocks_are_recomputed_by_deepspeed_s_switch() -> None:
    stage = with_config("--checkpoint-activations").job.plan.stages[0]
    assert stage.checkpointed_layers == 8
    both = "--checkpoint-activations --deepspeed-activation-checkpointing --checkpoint-in-cpu"
    assert with_config(both).job.plan.stages[0].offload.activations == 1
    # How to recompute is no word on what is recomputed.
    alone = with_config("--deepspeed-activation-checkpointing --checkpoint-num-layers 1")
    assert alone.job.plan.stages[0].checkpointed_layers == 0


def test_ranks_that_exchange_heads_are_context_parallel() -> None:
    (stage,) = with_config("--ds-sequence-parallel-size 4").job.plan.stages
    assert (stage.context_parallel, stage.context_exchange, stage.data_parallel) == (4, 2, 2)


def test_experts_of_deepspeed_stand_in_every_second_block() -> None:
    found = with_config("--num-experts 16 --moe-expert-parallel-size 4")
    workload, (stage,) = found.job.workload, found.job.plan.stages
    assert workload.model.pattern == "DA"
    assert workload.model.experts == Experts(count=16, active=1, ffn=5440)
    assert (stage.expert_parallel, stage.expert_tensor_parallel) == (4, 1)
    assert (workload.expert_capacity, workload.expert_padding) == (1.0, True)


def test_experts_of_deepspeed_have_options_of_their_own() -> None:
    found = with_config(
        "--num-experts 16 --expert-interval 1 --topk 2 --mlp-type residual "
        "--disable-moe-token-dropping --tensor-model-parallel-size 2 "
        "--enable-expert-tensor-parallelism --create-moe-param-group"
    )
    workload, (stage,) = found.job.workload, found.job.plan.stages
    assert workload.model.pattern == ""
    assert workload.model.experts == Experts(count=16, active=2, ffn=5440, shared_ffn=5440)
    assert (workload.expert_capacity, stage.expert_tensor_parallel) == (None, 2)
    # Unlike Megatron-LM, DeepSpeed does not need split sequences for it.
    assert (stage.tensor_parallel, stage.sequence_parallel) == (2, 0)


def test_a_single_expert_is_a_dense_model() -> None:
    assert with_config("--num-experts 1").job.workload.model.experts is None
    assert with_config("--num-experts 1 1 1 1").job.workload.model.experts is None
    found = imported("--num-experts 1")
    assert found.job.workload.model.experts is None
    assert "without a router" in texts(found, "assumed")["--num-experts 1"]


def test_blocks_with_unlike_numbers_of_experts_are_refused() -> None:
    with pytest.raises(InputError, match=r"--num-experts: line 40: 64 64 128 128: blocks with"):
        with_config("--num-experts 64 64 128 128 --moe-expert-parallel-size 8")


def test_heads_of_keys_have_deepspeed_s_name() -> None:
    assert with_config("--num-key-value-heads 4").job.workload.model.kv_heads == 4


def test_students_are_refused() -> None:
    with pytest.raises(InputError, match="--mos: line 40: belongs to distillation"):
        with_config("--mos --kd-alpha-ce 1")


def test_a_shape_is_needed_all_the_same() -> None:
    with pytest.raises(InputError, match="--num-attention-heads: is missing"):
        with_config(shape=SHAPE.replace("--num-attention-heads 16", ""))
