"""Checks an exported file with the target framework's own classes, which accept its configuration
or raise an error.
"""

import importlib
import json
import logging
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from mistlab.core.values import InputError
from mistlab.export.targets import TARGETS
from mistlab.export.torchtitan_rules import BROUGHT_TODAY
from mistlab.job.job import Job
from runtime.baselines.builds import check_installed


def check_accepted(target: str, text: str, job: Job, *, checkout: Path | None = None) -> None:
    """Raise an error if the framework, at the version known here, does not accept an exported file.
    With a ``checkout`` of Megatron-LM, its option parser must accept a launch line too.
    """
    row = TARGETS[target]
    check_installed(row.package)
    try:
        _CHECKS[target](text, job)
        if checkout is not None and target == "megatron":
            _parsed(text, job, checkout)
    except InputError:
        raise
    except ImportError as error:
        message = (
            f"{row.title} needs {error.name}, which is not installed: pip install {error.name}"
        )
        raise InputError(message) from error
    except (AssertionError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        message = (
            f"{row.title} refuses the exported file: {error}: change this value of the plan, or "
            "leave --check out"
        )
        raise InputError(message) from error


def _megatron(text: str, job: Job) -> None:
    from runtime.baselines.megatron_configs import configs_of  # noqa: PLC0415 (its package)

    with _with_transformer_engine():
        configs = configs_of(text)
    made, others, plan = configs.transformer, configs.others, job.plan
    _same("ranks", others["world_size"], plan.num_gpus)
    _same("batch", others["global_batch"], job.workload.global_batch)
    _same("blocks of stages", _blocks_of(made, text), [stage.layers for stage in plan.stages])
    _same("ffn", made.ffn_hidden_size, job.workload.model.ffn)
    _same("head_dim", _channels(made), job.workload.model.head_dim)
    _same_experts(made, job)
    _same(
        "vocabulary",
        others["vocab"],
        job.workload.model.padded_vocab(made.tensor_model_parallel_size),
    )


def _parsed(text: str, job: Job, checkout: Path) -> None:
    from runtime.baselines.megatron_configs import arguments_of  # noqa: PLC0415 (its package)

    with _with_transformer_engine():
        made = arguments_of(text, job, checkout)
    _same("replicas", made.data_parallel_size, job.plan.stages[0].data_parallel)


def _blocks_of(made: Any, text: str) -> list[int]:
    """How many blocks each stage has, read from a configuration of Megatron-core or from the
    pattern of a hybrid model.
    """
    from megatron.core.transformer.enums import LayerType  # noqa: PLC0415 (its package)

    stages, layout = made.pipeline_model_parallel_size, made.pipeline_model_parallel_layout
    if layout is not None:
        return [
            sum(part.count(LayerType.decoder) for part in layout.layout[rank])
            for rank in range(stages)
        ]
    segments = re.findall(r'--hybrid-layer-pattern "([^"]+)"', text)
    if segments:
        sizes = [len(segment) for segment in segments[0].split("|")]
        return [sum(sizes[stage::stages]) for stage in range(stages)]
    first = made.num_layers_in_first_pipeline_stage
    if first is None:
        return [made.num_layers // stages] * stages
    last = made.num_layers_in_last_pipeline_stage
    inner = stages - 2
    middle = [(made.num_layers - first - last) // inner] * inner if inner else []
    return [first, *middle, last]


def _channels(made: Any) -> int:
    """The number of channels of a head's queries and keys, by a configuration of Megatron-core."""
    if made.multi_latent_attention:
        return int(made.qk_head_dim + made.qk_pos_emb_head_dim)
    return int(made.kv_channels)


def _same_experts(made: Any, job: Job) -> None:
    experts, stage = job.workload.model.experts, job.plan.stages[0]
    if experts is None:
        _same("experts", made.num_moe_experts, None)
        return
    _same("experts", made.num_moe_experts, experts.count)
    _same("experts' width", made.moe_ffn_hidden_size, experts.ffn)
    _same("ranks of experts", made.expert_model_parallel_size, stage.expert_parallel)
    _same("parts of experts", made.expert_tensor_parallel_size, stage.expert_tensor_parallel)


@contextmanager
def _with_transformer_engine() -> Iterator[None]:
    """Within the ``with`` block, Megatron-core treats TransformerEngine, which needs a GPU, as
    installed.
    """
    from megatron.core import utils  # noqa: PLC0415 (its package)
    from packaging.version import Version  # noqa: PLC0415

    before, utils._te_version = utils._te_version, Version("2.9.0")
    stands = ModuleType("transformer_engine.pytorch.optimizers")
    stands.FusedAdam = _FusedAdam  # type: ignore[attr-defined]
    try:
        with patch.dict(sys.modules, {stands.__name__: stands}):
            yield
    finally:
        utils._te_version = before


class _FusedAdam:
    """A stand-in for TransformerEngine's optimizer, with the attributes that Megatron-core
    checks.
    """

    def __init__(
        self,
        master_weight_dtype: object,
        exp_avg_dtype: object,
        exp_avg_sq_dtype: object,
        use_decoupled_grad: object,
    ) -> None: ...


def _deepspeed(text: str, job: Job) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig  # noqa: PLC0415 (its package)

    stage, content = job.plan.stages[0], json.loads(text)
    ranks = content.get("tensor_parallel", {}).get("autotp_size", 1)
    ranks *= content.get("pipeline", {}).get("stages", 1)
    replicas, rest = divmod(job.cluster.num_gpus, ranks)
    _same("processes beyond whole replicas", rest, 0)
    # DeepSpeed checks the batch against the number of processes, so pretend that a run's processes
    # exist.
    with patch("deepspeed.runtime.config.dist.get_rank", return_value=0):
        config = DeepSpeedConfig(content, mpu=_Ranks(replicas))
    _same("batch", config.train_batch_size, job.workload.global_batch)
    if not (stage.offload.optimizer or stage.offload.weights):
        # DeepSpeed shards the states that it offloads, even on a single rank.
        _same("ZeRO level", int(config.zero_config.stage), stage.zero)
    offload = config.zero_config.offload_optimizer
    ratio = 0.0 if offload is None else offload.ratio
    _same("offloaded share of the optimizer", ratio, stage.offload.optimizer)
    _same("micro-batches", config.gradient_accumulation_steps, job.plan.micro_batches)
    _same(
        "recomputed blocks",
        bool(config.activation_checkpointing_config.number_checkpoints),
        bool(stage.checkpointed_layers),
    )


class _Ranks:
    """A stand-in for a script's groups of ranks, from which DeepSpeed reads the number of
    replicas.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    def get_data_parallel_world_size(self) -> int:
        return self._replicas


def _torchtitan(text: str, job: Job) -> None:
    from torchtitan.config import ConfigManager  # noqa: PLC0415 (its package)
    from torchtitan.distributed.parallel_dims import ParallelDims  # noqa: PLC0415

    # At the usual log level torchtitan warns that there is no tokenizer.
    logging.getLogger().setLevel(logging.ERROR)
    with _as_module(text) as name:
        _with_flavour(text)
        config = ConfigManager().parse_args(["--module", name, "--config", "plan"])
    shape = config.model_spec.model
    shape.update_from_config(config=config)
    parallelism, training = config.parallelism, config.training
    dims = ParallelDims.from_config(parallelism, job.cluster.num_gpus)
    _same("replicas", dims.dp_replicate * dims.dp_shard, job.plan.stages[0].data_parallel)
    _same("batch", training.global_batch_size, job.workload.global_batch)
    per_step = training.local_batch_size * job.plan.stages[0].data_parallel
    _same("sequences beyond whole steps", training.global_batch_size % per_step, 0)
    _same_blocks(parallelism.module_fqns_per_model_part, job, "lm_head")
    model = job.workload.model
    if model.name in BROUGHT_TODAY:
        shapes = (shape.dim, len(shape.layers), shape.vocab_size)
        _same("shape", shapes, (model.hidden, model.layers, model.vocab))


@contextmanager
def _as_module(text: str) -> Iterator[str]:
    """Make a text of Python code importable as a module within the ``with`` block; gives the
    module's name.
    """
    name = "exported_plan"
    with tempfile.TemporaryDirectory() as folder, patch.object(sys, "path", [folder, *sys.path]):
        (Path(folder) / f"{name}.py").write_text(text, encoding="utf-8")
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        yield name
        sys.modules.pop(name, None)


def _with_flavour(text: str) -> None:
    """Register the model flavour that a text defines with torchtitan, as a user would have to
    do.
    """
    from torchtitan.models.llama3 import llama3_configs  # noqa: PLC0415 (its package)

    (flavour,) = re.findall(r"model_registry\('([^']+)'\)", text)
    if ".llama3 import model_registry" in text:
        llama3_configs.setdefault(flavour, llama3_configs["8B"])


def _same_blocks(parts: list[list[str]] | None, job: Job, head: str) -> None:
    """Raise an error if the model parts of a configuration have other blocks than the plan's
    stages, or lack the embedding or the head.
    """
    if parts is None:
        _same("stages", job.plan.num_stages, 1)
        return
    blocks = [sum(name.startswith("layers.") for name in part) for part in parts]
    _same("blocks", sum(blocks), job.plan.layers)
    _same("ends", (parts[0][0], parts[-1][-1]), ("tok_embeddings", head))
    if len(parts) == job.plan.num_stages:
        _same("blocks of stages", blocks, [stage.layers for stage in job.plan.stages])


def _torchtitan_toml(text: str, job: Job) -> None:
    from torchtitan.config import ConfigManager  # noqa: PLC0415 (its package)
    from torchtitan.distributed import ParallelDims  # noqa: PLC0415

    # At the usual log level torchtitan warns that there is no tokenizer.
    logging.getLogger().setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(text, encoding="utf-8")
        config = ConfigManager().parse_args([f"--job.config_file={path}"])
    parallelism, stage = config.parallelism, job.plan.stages[0]
    dims = ParallelDims(
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        etp=parallelism.expert_tensor_parallel_degree,
        world_size=job.cluster.num_gpus,
    )
    _same("replicas", dims.dp_replicate * dims.dp_shard, stage.data_parallel)
    _same("batch", config.training.global_batch_size, job.workload.global_batch)
    _same_blocks(parallelism.module_fqns_per_model_part, job, "output")


def _accelerate(text: str, job: Job) -> None:
    from accelerate.commands.config.config_args import ClusterConfig  # noqa: PLC0415 (its package)
    from accelerate.parallelism_config import ParallelismConfig  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(text, encoding="utf-8")
        config = ClusterConfig.from_yaml_file(path)
    _same("processes", config.num_processes, job.plan.num_gpus)
    sizes = {
        name.removeprefix("parallelism_config_"): size
        for name, size in config.parallelism_config.items()
    }
    if sizes:
        _same("ranks", ParallelismConfig(**sizes).total_size, job.plan.num_gpus)


def _same(what: str, actual: object, wanted: object) -> None:
    if actual != wanted:
        message = f"it reads {what} {actual}, but the plan has {wanted}"
        raise ValueError(message)


_CHECKS: Mapping[str, Callable[[str, Job], None]] = {
    "megatron": _megatron,
    "deepspeed": _deepspeed,
    "torchtitan": _torchtitan,
    "torchtitan-toml": _torchtitan_toml,
    "accelerate": _accelerate,
}
