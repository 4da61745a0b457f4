"""verl: supervised fine-tuning by each of its engines, and what is refused."""

import pytest

from mistlab.core.values import InputError
from mistlab.export.given import MissingError
from mistlab.formats.file_formats import format_of
from tests.mistlab.launch_files import imported, source_of, texts

STARTED = "torchrun --nnodes 2 --nproc_per_node 8 -m verl.trainer."
NEW = f"""
{STARTED}sft_trainer \\
  data.train_files=$HOME/rows.parquet data.train_batch_size=128 \\
  data.max_length=2048 data.max_token_len_per_gpu=8192 \\
  model.path=$HOME/models/Qwen/Qwen3-8B \\
  optim.lr=1e-5 engine=fsdp trainer.logger=console"""
OLD = f"""
{STARTED}fsdp_sft_trainer \\
  data.max_length=4096 data.micro_batch_size_per_gpu=2 \\
  model.partial_pretrain=Qwen/Qwen3-8B"""


def test_the_trainer_with_engines_fills_micro_batches_by_tokens() -> None:
    assert format_of(source_of(NEW, "a.sh")).name == "verl"
    found = imported(NEW, "a.sh")
    work, (stage,) = found.job.workload, found.job.plan.stages
    assert (work.model.name, work.sequence_length, work.global_batch) == ("qwen3-8b", 2048, 128)
    assert (work.precision, work.states, work.train) == ("bf16", "mixed", "all")
    assert (found.job.cluster.nodes, found.job.cluster.gpus_per_node) == (2, 8)
    assert (stage.zero, stage.micro_batch, found.job.plan.micro_batches) == (3, 4, 2)
    assert stage.checkpointed_layers == 36
    assert "up to 8192 tokens" in texts(found, "assumed")["data.use_dynamic_bsz"]
    assert not texts(found, "ignored")
    fixed = imported(
        f"{NEW} data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=8"
        " model.enable_gradient_checkpointing=False",
        "a.sh",
    )
    (stage,) = fixed.job.plan.stages
    assert (stage.micro_batch, stage.checkpointed_layers) == (8, 0)
    assert "data.use_dynamic_bsz" not in texts(fixed, "assumed")


def test_a_micro_batch_is_no_larger_than_a_replica_s_share() -> None:
    found = imported(f"{NEW} data.max_token_len_per_gpu=65536", "a.sh")
    assert found.job.plan.stages[0].micro_batch == 8
    uneven = imported(f"{NEW} data.max_token_len_per_gpu=6144", "a.sh")
    assert uneven.job.plan.stages[0].micro_batch == 2


def test_ranks_share_sequences_and_states_as_the_engine_says() -> None:
    more = " engine.ulysses_sequence_parallel_size=4 engine.fsdp_size=8 engine.model_dtype=bf16"
    found = imported(f"{NEW}{more} engine.reshard_after_forward=False", "a.sh")
    (stage,) = found.job.plan.stages
    assert (stage.context_parallel, stage.context_exchange, stage.data_parallel) == (4, 2, 4)
    assert (stage.state_replicas, stage.zero, found.job.workload.states) == (2, 2, "16bit")
    stays = texts(imported(f"{NEW} engine.param_offload=True", "a.sh"), "ignored")
    assert "return to the GPU for each step" in stays["engine.param_offload"]
    leaves = imported(f"{NEW} engine.offload_policy=True", "a.sh").job.plan.stages[0]
    assert (leaves.offload.weights, leaves.offload.optimizer) == (1, 1)


def test_the_older_trainer_has_a_fixed_micro_batch() -> None:
    found = imported(OLD, "a.sh")
    work, (stage,) = found.job.workload, found.job.plan.stages
    assert (work.global_batch, work.sequence_length) == (256, 4096)
    assert (stage.micro_batch, stage.zero, found.job.plan.micro_batches) == (2, 3, 8)
    assert "padded" in texts(found, "assumed")["sequences"]
    more = " ulysses_sequence_parallel_size=2 use_remove_padding=true data.micro_batch_size=4"
    split = imported(OLD.replace("data.micro_batch_size_per_gpu=2", "") + more, "a.sh")
    (stage,) = split.job.plan.stages
    assert (stage.context_parallel, stage.micro_batch) == (2, 4)
    assert "sequences" not in texts(split, "assumed")


@pytest.mark.parametrize("script", [OLD, NEW])
def test_a_rank_above_0_means_adapters(script: str) -> None:
    none = imported(f"{script} model.lora_rank=0", "a.sh")
    assert none.job.workload.train == "all"
    found = imported(f"{script} model.lora_rank=32 model.target_modules=all-linear", "a.sh")
    work = found.job.workload
    assert (work.train, work.adapter_rank, work.adapter_targets) == ("adapters", 32, "all")
    assert any("frozen weights in 32 bits" in text for text in texts(found, "ignored").values())


def test_ray_starts_the_ranks_that_settings_count() -> None:
    script = NEW.replace(f"{STARTED}sft_trainer", "python3 -m verl.trainer.sft_trainer_ray")
    cluster = imported(f"{script} trainer.nnodes=4 trainer.n_gpus_per_node=2", "a.sh").job.cluster
    assert (cluster.nodes, cluster.gpus_per_node) == (4, 2)


MEGATRON = f"""{NEW.replace("engine=fsdp", "engine=megatron")} \\
  engine.tensor_model_parallel_size=4 engine.pipeline_model_parallel_size=2 \\
  engine.virtual_pipeline_model_parallel_size=null \\
  +engine.override_transformer_config.recompute_granularity=full \\
  +engine.override_transformer_config.recompute_method=uniform \\
  +engine.override_transformer_config.recompute_num_layers=1"""


def test_its_megatron_engine_is_read_as_megatron_lm() -> None:
    found = imported(MEGATRON, "a.sh")
    plan = found.job.plan
    first = plan.stages[0]
    assert (plan.engine, plan.num_stages, first.tensor_parallel) == ("megatron-core", 2, 4)
    assert (first.sequence_parallel, first.zero, first.data_parallel) == (1, 1, 2)
    assert (first.micro_batch, first.checkpointed_layers, plan.micro_batches) == (4, 18, 16)
    assert not texts(found, "ignored")
    split = imported(f"{MEGATRON} engine.use_megatron_fsdp=True", "a.sh").job.plan
    assert (split.engine, split.stages[0].zero) == ("megatron-fsdp", 3)


def test_what_verl_trains_otherwise_is_refused() -> None:
    with pytest.raises(InputError, match="main_ppo: generates text between training steps"):
        imported("python3 -m verl.trainer.main_ppo data.train_batch_size=64\n", "a.sh")
    with pytest.raises(InputError, match="engine: veomni is not supported: give engine=fsdp"):
        imported(NEW.replace("engine=fsdp", "engine=veomni"), "a.sh")
    with pytest.raises(InputError, match=r"engine\.dtype: 'int8' is unknown"):
        imported(f"{NEW} engine.dtype=int8", "a.sh")
    with pytest.raises(MissingError, match=r"data\.max_length: .*WINDOW"):
        imported(f"{NEW} data.max_length=$WINDOW", "a.sh")
