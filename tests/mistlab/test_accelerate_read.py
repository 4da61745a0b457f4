"""Accelerate's YAML and DeepSpeed's JSON: keys that cost, and what is refused."""

from typing import Any

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.given import Imported
from mistlab.schedule.context_ways import GATHER, HEADS
from tests.mistlab.launch_files import imported, texts

GIVEN: dict[str, Any] = {
    "model": catalog.model("llama3-8b"),
    "sequence_length": 4096,
    "micro_batch": 1,
}


def accelerated(more: str, kind: str = "FSDP", **given: Any) -> Imported:
    head = f"distributed_type: {kind}\nmixed_precision: bf16\n"
    ranks = "num_machines: 2\nnum_processes: 16\n"
    return imported(head + ranks + more, **{**GIVEN, **given})


@pytest.mark.parametrize(
    ("strategy", "level", "replicas"),
    [
        ("FULL_SHARD", 3, 1),
        ("SHARD_GRAD_OP", 2, 1),
        ("NO_SHARD", 0, 1),
        ("HYBRID_SHARD", 3, 2),
        ("HYBRID_SHARD_ZERO2", 2, 2),
        ("_HYBRID_SHARD_ZERO2", 2, 2),
        *(
            (str(number), level, 1 + (number > 3))
            for number, level in enumerate((3, 2, 0, 3, 2), 1)
        ),
    ],
)
def test_each_sharding_strategy_has_its_level_and_replicas(
    strategy: str, level: int, replicas: int
) -> None:
    found = accelerated(f"fsdp_config: {{fsdp_sharding_strategy: {strategy}}}")
    (stage,) = found.job.plan.stages
    assert (stage.zero, stage.state_replicas, stage.data_parallel) == (level, replicas, 16)


def test_fsdp_without_a_strategy_shards_all_and_names_the_place_of_a_wrong_one() -> None:
    assert accelerated("fsdp_config: {}").job.plan.stages[0].zero == 3
    older = "fsdp_config: {fsdp_reshard_after_forward: SHARD_GRAD_OP}"
    assert accelerated(older).job.plan.stages[0].zero == 2
    with pytest.raises(InputError, match=r"fsdp_config.fsdp_sharding_strategy: 'ALL' is unknown"):
        accelerated("fsdp_config: {fsdp_sharding_strategy: ALL}")


def test_fsdp2_reshards_recomputes_and_offloads() -> None:
    found = accelerated(
        "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, "
        "fsdp_activation_checkpointing: true, fsdp_offload_params: true}"
    )
    (stage,) = found.job.plan.stages
    assert (stage.zero, stage.checkpointed_layers, stage.offload.weights) == (2, 32, 1)


def test_degrees_of_parallelism_are_read() -> None:
    found = accelerated(
        "fsdp_config: {fsdp_version: 2}\n"
        "parallelism_config: {parallelism_config_dp_replicate_size: 2, "
        "parallelism_config_dp_shard_size: 2, parallelism_config_tp_size: 2, "
        "parallelism_config_cp_size: 2}"
    )
    (stage,) = found.job.plan.stages
    assert (stage.tensor_parallel, stage.context_parallel, stage.data_parallel) == (2, 2, 4)
    assert (stage.state_replicas, stage.degree("context_exchange")) == (2, GATHER)
    wrong = "parallelism_config: {parallelism_config_tp_size: 2}"
    assert "num_processes is 16" in texts(accelerated(wrong), "contradicting")["parallelism_config"]


def test_deepspeed_inside_accelerate_is_read_inline_or_from_its_file() -> None:
    inline = (
        "deepspeed_config: {zero_stage: 2, gradient_accumulation_steps: 4, "
        "offload_optimizer_device: cpu}"
    )
    job = accelerated(inline, "DEEPSPEED").job
    (stage,) = job.plan.stages
    assert (stage.zero, stage.offload.optimizer, job.plan.micro_batches) == (2, 1, 4)
    default = accelerated("deepspeed_config: {}", "DEEPSPEED").job
    assert (default.plan.stages[0].zero, default.plan.engine) == (2, "deepspeed")
    named = "deepspeed_config: {deepspeed_config_file: ds.json}"
    content = '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}'
    found = accelerated(named, "DEEPSPEED", files={"ds__json": content})
    assert found.job.plan.stages[0].zero == 3
    assert found.job.workload.precision == "bf16"
    with pytest.raises(InputError, match=r"deepspeed_config.deepspeed_config_file: ds.json is not"):
        accelerated(named, "DEEPSPEED")


def test_the_megatron_plugin_and_all_processes_are_read() -> None:
    found = accelerated(
        "megatron_lm_config: {megatron_lm_tp_degree: 4, megatron_lm_pp_degree: 2, "
        "megatron_lm_sequence_parallelism: true, megatron_lm_num_micro_batches: 2, "
        "megatron_lm_recompute_activations: true, megatron_lm_use_distributed_optimizer: true}",
        "MEGATRON_LM",
    )
    job, (first, _) = found.job, found.job.plan.stages
    assert (first.tensor_parallel, first.data_parallel, first.zero) == (4, 2, 1)
    assert (first.core_recomputed_layers, job.plan.micro_batches, job.plan.engine) == (
        16,
        2,
        "megatron",
    )
    assert (job.cluster.nodes, job.cluster.gpus_per_node) == (2, 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("distributed_type: XLA\n", "distributed_type: 'XLA' is not supported"),
        ("distributed_type: FSDP\nuse_cpu: true\n", "use_cpu: true trains without GPUs"),
        ("distributed_type: FSDP\n", "gpus_per_node: is missing in the file"),
        ("distributed_type: FSDP\nnum_machines: 3\nnum_processes: 8\n", "num_processes: 8 is no"),
        ("distributed_type: FSDP\nnum_processes: 8\nmixed_precision: fp4\n", "mixed_precision"),
    ],
)
def test_what_accelerate_cannot_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        imported(text, **GIVEN)


def test_compiled_models_have_an_engine_of_their_own() -> None:
    text = "fsdp_config: {fsdp_version: 2}\ndynamo_config: {dynamo_backend: INDUCTOR}"
    assert accelerated(text).job.plan.engine == "fsdp-compiled"


DEEPSPEED = '{"train_batch_size": 32, "zero_optimization": {"stage": 1}, %s}'


def test_automatic_values_of_deepspeed_are_asked_for_by_name() -> None:
    given = {"model": catalog.model("llama3-8b"), "sequence_length": 4096}
    with pytest.raises(InputError, match=r"bf16.enabled: auto leaves .* give --precision"):
        imported(DEEPSPEED % '"bf16": {"enabled": "auto"}', "ds.json", **given)
    with pytest.raises(InputError, match="give --micro-batch"):
        imported(
            '{"bf16": {"enabled": true}, "zero_optimization": {}}',
            "ds.json",
            **given,
            gpus_per_node=8,
        )


def test_deepspeed_derives_a_micro_batch_and_reads_what_it_shares_sequences_by() -> None:
    given = {
        "model": catalog.model("llama3-8b"),
        "sequence_length": 4096,
        "nodes": 1,
        "gpus_per_node": 8,
    }
    found = imported(
        DEEPSPEED % '"bf16": {"enabled": true}, "gradient_accumulation_steps": 2, '
        '"sequence_parallel_size": 2, "optimizer": {"type": "Lion"}',
        "ds.json",
        **given,
    )
    (stage,) = found.job.plan.stages
    assert (stage.data_parallel, stage.micro_batch, found.job.plan.micro_batches) == (4, 4, 2)
    assert (stage.context_parallel, stage.degree("context_exchange")) == (2, HEADS)
    assert texts(found, "ignored")["optimizer.type"] == "Lion is predicted as AdamW"
