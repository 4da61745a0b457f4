"""Plans as the TOML configuration of torchtitan 0.2.

Any division of blocks can be said, by module names. States are sharded by FSDP2. Recomputed are
all blocks of a stage, or every n-th, or every second product of all. Models are chosen by a
flavour; one that torchtitan does not bring has to be added to its table under the plan's name.
"""

from collections.abc import Iterator
from dataclasses import replace

from mistlab.export.fsdp import (
    ENGINES,
    STATES,
    fewest_replicas,
    offloads,
    sharded,
    states_offloaded,
)
from mistlab.export.rules import among_orders, dropped, equal_meshes, equal_nodes
from mistlab.export.target import Row, Target
from mistlab.export.torchtitan_models import (
    BROUGHT,
    check_brought,
    divided_experts,
    has_to_shard,
    without_pipeline,
    words_of,
)
from mistlab.export.torchtitan_pipeline import SCHEDULES, pipeline_settings
from mistlab.export.torchtitan_read import read
from mistlab.export.with_parts import with_stages, with_values, with_workload
from mistlab.values.errors import refuse
from mistlab.values.job import Job
from mistlab.values.mesh import ranks_of


def _workload(job: Job) -> Job:
    model = job.workload.model
    if model.graph_file is not None:
        problem = "is traced from code of its own: export a plan of a model of the catalogue"
        refuse("workload.model", problem)
    check_brought(model)
    precision = "bf16" if job.workload.precision == "fp16" else job.workload.precision
    return with_workload(job, precision=precision, attention="flash")


def _recomputed(job: Job) -> Job:
    """All blocks, none, or every n-th: the rarest that recomputes as many as every stage wants. Or
    every second product of all blocks, if a stage recomputes products."""
    stages = job.plan.stages
    if _second_products(job):
        return with_stages(
            job,
            [
                replace(stage, checkpointed_layers=0, products_recomputed_layers=stage.layers)
                for stage in stages
            ],
        )
    every = _every(job)
    if not every:
        return job
    return with_stages(
        job,
        [stage.with_values({"checkpointed_layers": stage.layers // every}) for stage in stages],
    )


def _second_products(job: Job) -> bool:
    """Whether blocks recompute every second product."""
    return any(stage.products_recomputed_layers for stage in job.plan.stages)


def _every(job: Job) -> int:
    """How many blocks apart recomputed blocks are; none for 0."""
    pairs = [(stage.layers, stage.checkpointed_layers) for stage in job.plan.stages]
    if not any(count for _, count in pairs):
        return 0
    most = max(layers for layers, _ in pairs)
    return max(
        every
        for every in range(1, most + 1)
        if all(layers // every >= count for layers, count in pairs)
    )


def _sequence_parallel(job: Job) -> Job:
    """Sequence parallelism comes with tensor parallelism."""
    shares = job.plan.stages[0].tensor_parallel > 1
    return with_values(job, {"sequence_parallel": int(shares)})


def _zero(job: Job) -> Job:
    """FSDP2 also shards along the ranks that share sequences, whether replicas shard or not."""
    job = sharded(job)
    first = job.plan.stages[0]
    has_to = first.context_parallel > 1 or has_to_shard(first)
    return with_values(job, {"zero": 2}) if has_to and not first.zero else job


def _states(job: Job) -> Job:
    """FSDP2 offloads where it shards: with several ranks."""
    alone = ranks_of("gather", job.plan.stages[0].degree) == 1
    return dropped(*STATES)(job) if alone else states_offloaded(job)


ROWS = (
    Row(
        choices=("attention", "precision"),
        nearest=_workload,
        because="trains in bf16 or fp32, with fused attention",
    ),
    Row(
        choices=("data_parallel", "tensor_parallel", "micro_batch", "context_parallel"),
        nearest=equal_meshes,
        because="gives all stages the same degrees",
    ),
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
    Row(choices=(), nearest=equal_nodes, because="starts equally many processes on every node"),
    Row(
        choices=("order",),
        nearest=among_orders(SCHEDULES),
        because="runs 1F1B, GPipe, ZBVZeroBubble and DualPipeV",
    ),
    Row(
        choices=("sequence_parallel",),
        nearest=_sequence_parallel,
        because="splits sequences wherever it splits layers",
    ),
    Row(
        choices=("zero",),
        nearest=_zero,
        because="shards by FSDP2, ZeRO-2 or 3, alike on all stages, and always along sequences or "
        "where experts lie on several replicas",
    ),
    Row(
        choices=("state_replicas",),
        nearest=fewest_replicas,
        because="cuts all stages into as many replicas, where it shards",
    ),
    Row(
        choices=("layers", "checkpointed_layers", "products_recomputed_layers"),
        nearest=_recomputed,
        because="recomputes all blocks, or every n-th, or every second product of all",
    ),
    Row(
        choices=STATES,
        nearest=_states,
        because="offloads all states where FSDP2 shards them, or none",
    ),
    Row(
        choices=("offload_activations",),
        nearest=dropped("offload_activations"),
        because="keeps activations on the GPU",
    ),
)


def write(job: Job) -> str:
    """The configuration as TOML."""
    plan, stage, workload = job.plan, job.plan.stages[0], job.workload
    name, flavour = words_of(workload.model)
    dtype = "float32" if workload.precision == "fp32" else "bfloat16"
    batches = plan.micro_batches if plan.num_stages > 1 else 1
    every = _every(job)
    option = "op" if _second_products(job) else str(every) if every > 1 else ""
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


TORCHTITAN = Target(
    name="torchtitan",
    title="torchtitan",
    package="torchtitan==0.2.2",
    engines=ENGINES,
    rows=ROWS,
    write=write,
    read=read,
    notes=_notes,
    always_overlaps=True,
)
