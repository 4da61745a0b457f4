"""Plans as the TOML configuration of torchtitan up to 0.2.2.

Any division of blocks can be said, by module names. States are sharded by FSDP2. Recomputed are
all blocks of a stage, or every n-th, or every second product of all. Models are chosen by a
flavour; one that torchtitan does not bring has to be added to its table under the plan's name.
"""

from collections.abc import Iterator, Mapping

from mistlab.export.fsdp import (
    ENGINES,
    offloads,
)
from mistlab.export.rules import EQUAL_MESHES, EQUAL_NODES
from mistlab.export.target import Row, Target
from mistlab.export.torchtitan_models import (
    BROUGHT,
    divided_experts,
    without_pipeline,
    words_of,
)
from mistlab.export.torchtitan_pipeline import pipeline_settings
from mistlab.export.torchtitan_read import read
from mistlab.export.torchtitan_rules import (
    OFFLOADED,
    ORDERED,
    SHARDED,
    blocks_apart,
    recomputed,
    recomputes_products,
    sayable_workload,
    with_sequences_split,
)
from mistlab.job.job import Job

ROWS = (
    Row(
        choices=("attention", "precision"),
        nearest=sayable_workload,
        because="trains in bf16 or fp32, with fused attention",
    ),
    EQUAL_MESHES,
    Row(
        choices=(),
        nearest=without_pipeline,
        because="has no pipeline for this model",
    ),
    Row(
        choices=("expert_parallel", "expert_tensor_parallel"),
        nearest=divided_experts,
        because="divides experts alike on all stages, each whole or in as many parts as layers",
    ),
    EQUAL_NODES,
    ORDERED,
    Row(
        choices=("sequence_parallel",),
        nearest=with_sequences_split,
        because="splits sequences wherever it splits layers",
    ),
    *SHARDED,
    Row(
        choices=("layers", "checkpointed_layers", "products_recomputed_layers"),
        nearest=recomputed,
        because="recomputes all blocks, or every n-th, or every second product of all",
    ),
    *OFFLOADED,
)

_VERSION = "# For torchtitan up to 0.2.2 (later: --to torchtitan), on {} nodes of {} processes.\n"


def write(job: Job) -> str:
    """The configuration as TOML."""
    plan, stage, workload = job.plan, job.plan.stages[0], job.workload
    name, flavour = words_of(workload.model)
    dtype = "float32" if workload.precision == "fp32" else "bfloat16"
    batches = plan.micro_batches if plan.num_stages > 1 else 1
    every = blocks_apart(job)
    option = "op" if recomputes_products(job) else str(every) if every > 1 else ""
    sections: dict[str, dict[str, object]] = {
        "model": {"name": name, "flavor": flavour},
        "training": {
            "local_batch_size": stage.micro_batch * batches,
            "global_batch_size": workload.global_batch,
            "seq_len": workload.sequence_length,
            "mixed_precision_param": dtype,
            "enable_cpu_offload": offloads(job),
        },
        "parallelism": {**_degrees(job), **_expert_degrees(job), **pipeline_settings(job)},
        "activation_checkpoint": {
            "mode": "selective" if option else "full" if every else "none",
            **({"selective_ac_option": option} if option else {}),
        },
    }
    cluster = job.cluster
    return _VERSION.format(cluster.nodes, cluster.gpus_per_node) + toml_of(sections)


def toml_of(sections: Mapping[str, Mapping[str, object]]) -> str:
    """Sections of settings as TOML."""
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in section.items())
        for name, section in sections.items()
    )


def _degrees(job: Job) -> dict[str, object]:
    stage = job.plan.stages[0]
    replicas = stage.state_replicas if stage.zero else stage.data_parallel
    return {
        "data_parallel_replicate_degree": replicas,
        "data_parallel_shard_degree": stage.data_parallel // replicas,
        "fsdp_reshard_after_forward": "always" if stage.zero == 3 else "never",
        "tensor_parallel_degree": stage.tensor_parallel,
        "pipeline_parallel_degree": job.plan.num_stages,
        "context_parallel_degree": stage.context_parallel,
    }


def _expert_degrees(job: Job) -> dict[str, object]:
    """The degrees of experts where they are divided; otherwise torchtitan reads none."""
    stage = job.plan.stages[0]
    if stage.expert_parallel == 1:
        return {}
    return {
        "expert_parallel_degree": stage.expert_parallel,
        "expert_tensor_parallel_degree": stage.expert_tensor_parallel,
    }


def _toml(value: object) -> str:
    """A value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _notes(job: Job) -> Iterator[str]:
    model = job.workload.model
    if model.name in BROUGHT:
        return
    yield (
        f"add the flavour {model.name or 'mine'!r} to the models: dim={model.hidden}, "
        f"n_layers={model.layers}, n_heads={model.heads}, n_kv_heads={model.kv_heads}, "
        f"vocab_size={model.vocab}, feed-forward width {model.ffn}"
    )
    if model.family != "llama" or not model.has_plain_blocks:
        kind = f"a {model.family} model" if model.family != "llama" else "this one"
        yield f"its models are Llama's; {kind} needs a specification of its own"


TORCHTITAN_TOML = Target(
    name="torchtitan-toml",
    title="torchtitan",
    package="torchtitan==0.2.2",
    engines=ENGINES,
    rows=ROWS,
    write=write,
    read=read,
    notes=_notes,
    beside=("model", "nodes", "gpus_per_node"),
    always_overlaps=True,
)
