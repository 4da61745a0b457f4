"""Exports plans to torchtitan's configurations: TOML up to version 0.2.2, a Python module since
0.3.

Any division of blocks can be said, by module names. States are sharded by FSDP2. Recomputed are
all blocks of a stage, or every n-th, or every second product of all. Models are chosen by a
flavour; one that torchtitan does not bring has to be added to its table under the plan's name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mistlab.export.nearest import ENGINES, TRAINS_ALL, WHOLE_LOSS, offloads
from mistlab.export.rules import EQUAL_MESHES, EQUAL_NODES, same, with_values
from mistlab.export.target import Row, Target
from mistlab.export.torchtitan_python import read_registry
from mistlab.export.torchtitan_read import read, toml_of
from mistlab.export.torchtitan_rules import (
    BROUGHT,
    BROUGHT_TODAY,
    OFFLOADED,
    ORDERED,
    SHARDED,
    blocks_apart,
    divided_experts,
    name_and_flavour,
    pipeline_settings,
    recomputed,
    recomputed_today,
    recomputes_products,
    sayable_workload,
    whole_experts_divided,
    with_sequences_split,
    without_pipeline,
    without_pipeline_today,
)
from mistlab.job.job import Job
from mistlab.plan.workload import ModelSpec
from mistlab.schedule.context_ways import GATHER, RING

ROWS_OF_TOML = (
    *TRAINS_ALL,
    WHOLE_LOSS,
    Row(
        choices=("attention", "precision"),
        nearest=sayable_workload,
        because="trains in bf16 or fp32, with fused attention",
    ),
    EQUAL_MESHES,
    Row(choices=(), nearest=without_pipeline, because="has no pipeline for this model"),
    Row(
        choices=("expert_parallel", "expert_tensor_parallel"),
        nearest=divided_experts,
        because="has one expert degree for all stages, and splits an expert not at all or as "
        "tensor parallelism splits layers",
    ),
    EQUAL_NODES,
    ORDERED,
    Row(
        choices=("sequence_parallel",),
        nearest=with_sequences_split,
        because="has sequence parallelism wherever it has tensor parallelism",
    ),
    *SHARDED,
    Row(
        choices=("layers", "checkpointed_layers", "products_recomputed_layers"),
        nearest=recomputed,
        because="recomputes all blocks, every n-th, or every second GEMM of all",
    ),
    *OFFLOADED,
)

_VERSION = "# For torchtitan up to 0.2.2 (later: --to torchtitan), on {} nodes of {} processes.\n"


def write_toml(job: Job) -> str:
    """Write the torchtitan configuration of a job as TOML."""
    name, flavour = name_and_flavour(job.workload.model)
    every = blocks_apart(job)
    option = "op" if recomputes_products(job) else str(every) if every > 1 else ""
    sections: dict[str, dict[str, object]] = {
        "model": {"name": name, "flavor": flavour},
        "training": _training(job),
        "parallelism": _parallelism_of_toml(job),
        "activation_checkpoint": {
            "mode": "selective" if option else "full" if every else "none",
            **({"selective_ac_option": option} if option else {}),
        },
    }
    cluster = job.cluster
    return _VERSION.format(cluster.nodes, cluster.gpus_per_node) + toml_of(sections)


def _training(job: Job) -> dict[str, object]:
    plan, stage, workload = job.plan, job.plan.stages[0], job.workload
    return {
        "local_batch_size": stage.micro_batch * (plan.micro_batches if plan.num_stages > 1 else 1),
        "global_batch_size": workload.global_batch,
        "seq_len": workload.sequence_length,
        "mixed_precision_param": "float32" if workload.precision == "fp32" else "bfloat16",
        "enable_cpu_offload": offloads(job),
        **({"mixed_precision_reduce": "bfloat16"} if workload.gradients == "16bit" else {}),
    }


def _sharding(job: Job) -> dict[str, object]:
    """Return the settings for how ranks share states and layers."""
    stage = job.plan.stages[0]
    replicas = stage.state_replicas if stage.zero else stage.data_parallel
    return {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": stage.data_parallel // replicas,
        "fsdp_reshard_after_forward": "always" if stage.zero == 3 else "never",
        "tensor_parallel_degree": stage.tensor_parallel,
    }


def _parallelism_of_toml(job: Job) -> dict[str, object]:
    """Return the settings for parallel degrees; those of experts only if experts are divided, as
    torchtitan requires.
    """
    stage = job.plan.stages[0]
    settings = {
        **_sharding(job),
        "pipeline_parallel_degree": job.plan.num_stages,
        "context_parallel_degree": stage.context_parallel,
    }
    if stage.expert_parallel > 1:
        settings["expert_parallel_degree"] = stage.expert_parallel
        settings["expert_tensor_parallel_degree"] = stage.expert_tensor_parallel
    return settings | pipeline_settings(job)


def _notes_of_toml(job: Job) -> Iterator[str]:
    if job.workload.model.name not in BROUGHT:
        yield from _flavour_notes(job.workload.model, "the models")


def _flavour_notes(model: ModelSpec, models: str) -> Iterator[str]:
    """Yield notes on what the user has to add to a model that torchtitan does not include."""
    yield (
        f"add the flavour {model.name or 'mine'!r} to {models}: dim={model.hidden}, "
        f"n_layers={model.layers}, n_heads={model.heads}, n_kv_heads={model.kv_heads}, "
        f"vocab_size={model.vocab}, feed-forward width {model.ffn}"
    )
    if model.family != "llama" or not model.has_plain_blocks:
        kind = f"a {model.family} model" if model.family != "llama" else "this one"
        yield f"a torchtitan flavour builds Llama's blocks; {kind} needs a model of its own"


TORCHTITAN_TOML = Target(
    name="torchtitan-toml",
    title="torchtitan",
    package="torchtitan==0.2.2",
    engines=ENGINES,
    rows=ROWS_OF_TOML,
    write=write_toml,
    says_sums=True,
    read=read,
    notes=_notes_of_toml,
    beside=("model", "nodes", "gpus_per_node"),
    always_overlaps=True,
)


# Exports plans to a Python module of torchtitan 0.3, whose function ``plan`` builds a
# configuration.
#
# Unlike the TOML of earlier versions, it supports pipelines for all models without tied embeddings,
# and tensor parallelism without sequence parallelism. Context-parallel ranks gather keys and
# values. All blocks are recomputed, or none, or every second GEMM of all blocks. CUDA graphs are
# disabled, since predictions do not model them.


def _keys_gathered(job: Job) -> Job:
    shares = job.plan.stages[0].context_parallel > 1
    return with_values(job, {"context_exchange": GATHER if shares else RING})


ROWS = (
    *TRAINS_ALL,
    Row(
        choices=("attention", "precision"),
        nearest=lambda job: sayable_workload(job, BROUGHT_TODAY),
        because="trains in bf16 or fp32, with fused attention",
    ),
    EQUAL_MESHES,
    Row(
        choices=(),
        nearest=without_pipeline_today,
        because="has no pipeline for a model with tied embeddings",
    ),
    Row(
        choices=("expert_parallel", "expert_tensor_parallel"),
        nearest=whole_experts_divided,
        because="has one expert degree for all stages: it divides the experts among ranks, or "
        "splits each as layers",
    ),
    EQUAL_NODES,
    ORDERED,
    Row(
        choices=("sequence_parallel",),
        nearest=same("sequence_parallel"),
        because="has one switch for all stages",
    ),
    Row(
        choices=("context_exchange",),
        nearest=_keys_gathered,
        because="always gathers the keys of context-parallel ranks",
    ),
    *SHARDED,
    Row(
        choices=("layers", "checkpointed_layers", "products_recomputed_layers"),
        nearest=recomputed_today,
        because="recomputes all blocks, or every second GEMM of all",
    ),
    *OFFLOADED,
)

_TEXT = '''\
"""A configuration for torchtitan 0.3.0 (0.2.2 and before take export --to torchtitan-toml).

As plan.py in a folder of PYTHONPATH:
torchrun --nnodes {nodes} --nproc-per-node {gpus} -m torchtitan.train --module plan --config plan
"""

from torchtitan.components.loss import {losses}
from torchtitan.config import ParallelismConfig, TrainingConfig
{recomputation}\
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{name} import model_registry
from torchtitan.trainer import Trainer


def plan() -> Trainer.Config:
    model_spec = model_registry({flavour!r})
    vocab = decoder_vocab_size(model_spec)
    return Trainer.Config(
        model_spec=model_spec,
        loss={loss},
        training=TrainingConfig(
{training}        ),
        parallelism=ParallelismConfig(
{parallelism}        ),
        activation_checkpoint={checkpoint},
    )
'''
_LOSS = "CrossEntropyLoss.Config(global_vocab_size=vocab)"
_IMPORT = "from torchtitan.distributed.activation_checkpoint import {}\n"


def write(job: Job) -> str:
    """Write the torchtitan configuration of a job as a Python module."""
    name, flavour = name_and_flavour(job.workload.model, BROUGHT_TODAY)
    kind, chunks = _recomputation(job), job.workload.loss == "chunked"
    return _TEXT.format(
        losses="ChunkedLossWrapper, CrossEntropyLoss" if chunks else "CrossEntropyLoss",
        loss=f"ChunkedLossWrapper.Config(loss_fn={_LOSS})" if chunks else _LOSS,
        nodes=job.cluster.nodes,
        gpus=job.cluster.gpus_per_node,
        name=name,
        flavour=flavour,
        training=_lines({**_training(job), "disable_cuda_graphs": True}),
        parallelism=_lines(_parallelism(job)),
        recomputation=_IMPORT.format(kind) if kind else "",
        checkpoint=f"{kind}.Config()" if kind else None,
    )


def _lines(settings: Mapping[str, object]) -> str:
    return "".join(f"            {key}={value!r},\n" for key, value in settings.items())


def _recomputation(job: Job) -> str:
    """Return the torchtitan class for the job's recomputation, or an empty text if it recomputes
    nothing.
    """
    if recomputes_products(job):
        return "SelectiveAC"
    return "FullAC" if job.plan.stages[0].checkpointed_layers else ""


def _parallelism(job: Job) -> dict[str, object]:
    stage = job.plan.stages[0]
    return {
        **_sharding(job),
        "enable_sequence_parallel": stage.sequence_parallel > 0,
        "context_parallel_degree": stage.context_parallel,
        "expert_parallel_degree": stage.expert_parallel,
        "pipeline_parallel_degree": job.plan.num_stages,
        **pipeline_settings(job, head="lm_head"),
    }


def _notes(job: Job) -> Iterator[str]:
    yield "the file has torchtitan's defaults for learning rate, data and checkpoints: add yours"
    if job.workload.model.name not in BROUGHT_TODAY:
        yield from _flavour_notes(job.workload.model, "torchtitan.models.llama3.llama3_configs")


TORCHTITAN = replace(
    TORCHTITAN_TOML,
    name="torchtitan",
    package="torchtitan==0.3.0",
    rows=ROWS,
    write=write,
    read=read_registry,
    notes=_notes,
)
