"""Rules that fine-tuning recipes share: parallel degrees that a recipe cannot express are refused;
memory savings take the nearest value that it can.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from mistlab.core.values import refuse
from mistlab.engines.engine import SINGLE
from mistlab.export.accelerate import Sharing
from mistlab.export.nearest import (
    OFFLOADED,
    SHARDED,
    WHOLLY_SHARDED,
    sharded,
    wholly_sharded,
)
from mistlab.export.rules import (
    EQUAL_MESHES,
    EQUAL_NODES,
    INPUTS_OFFLOADED,
    RECOMPUTED,
    Rule,
    among_orders,
    with_workload,
)
from mistlab.export.target import Row
from mistlab.job.job import Job
from mistlab.plan.dimensions import DIMENSIONS, dimensions_of_axes
from mistlab.plan.workload import Workload
from mistlab.schedule.orders import DEFAULT_ORDER

# The framework that remedies name where a recipe cannot express a plan with pipeline stages.
_WITH_PIPELINES = "megatron-bridge"
# The parallel degrees that every recipe leaves to its launcher, by symbol.
REPLICAS = ("dp",)


def one_mesh(title: str, known: Collection[str] = REPLICAS) -> Row:
    """Make a rule that refuses pipelines, and all parallel degrees except those with the symbols in
    ``known``.
    """
    axes = dimensions_of_axes()
    sayable = [name for name, row in DIMENSIONS.items() if row.symbol in known]
    others = [name for name in axes if name not in sayable]

    def rule(job: Job) -> Job:
        if (stages := job.plan.num_stages) > 1:
            refuse(
                "plan.stages",
                f"{stages} stages, but recipes of {title} have no pipelines: give one stage, or "
                f"export to {_WITH_PIPELINES}",
            )
        (stage,) = job.plan.stages
        for name in others:
            if (degree := stage.degree(name)) > 1:
                refuse(
                    f"plan.stages[0].{name}",
                    f"{degree}, which this export to {title} cannot express: give {name}: 1, "
                    "and more data_parallel ranks instead",
                )
        return job

    choices = ("layers", *axes, *sayable, *EQUAL_MESHES.choices)
    return Row(choices=choices, nearest=rule, because="has no pipelines")


ORDER_AND_NODES = (
    Row(choices=("order",), nearest=among_orders((DEFAULT_ORDER,)), because="has no pipelines"),
    EQUAL_NODES,
)


def _remedied(row: Row, remedy: str) -> Row:
    return replace(row, because=f"{row.because}: give {remedy}")


ALL_RECOMPUTED = _remedied(RECOMPUTED, "all blocks, or 0")
ALWAYS_SHARDED = _remedied(WHOLLY_SHARDED, "zero: 2 or 3")
ALL_OFFLOADED = _remedied(OFFLOADED, "1 or 0")
ALL_INPUTS_OFFLOADED = _remedied(INPUTS_OFFLOADED, "1 or 0")
SAVINGS = (
    *(ALL_RECOMPUTED, _remedied(SHARDED, "zero: 2 or 3")),
    *(ALL_OFFLOADED, ALL_INPUTS_OFFLOADED),
)


def _sharded_with_axes(job: Job) -> Job:
    job = sharded(job)
    degrees = Sharing.of(job).degrees.values()
    return wholly_sharded(job) if max(degrees) > 1 else job


SHARDED_WITH_AXES = replace(
    SHARDED,
    nearest=_sharded_with_axes,
    because="shards by FSDP2, which offloading and tensor parallelism need: give zero: 2 or 3",
)


def _rank_said(job: Job) -> Job:
    adapts = job.workload.train == "adapters"
    return with_workload(job, adapter_rank=job.workload.rank) if adapts else job


RANK = Row(choices=("adapter_rank",), nearest=_rank_said, because="needs the rank in its file")


def workload_row(choice: str, value: str, because: str, *, where: Rule | None = None) -> Row:
    """Make a rule for a framework that supports only a single value of one of the workload's
    fields.
    """
    return Row(
        choices=(choice,),
        nearest=where or (lambda job: with_workload(job, **{choice: value})),
        because=because,
    )


def unsharded_bases(title: str, bits: Collection[str]) -> Row:
    """Make a rule that refuses frozen weights of ``base`` bits if states are sharded or
    offloaded.
    """

    def rule(job: Job) -> Job:
        base, sharing = job.workload.base, Sharing.of(job)
        if base in bits and sharing.shards:
            refuse(
                "workload.base",
                f"{base}, but states are sharded or offloaded (zero: {sharing.level}), which "
                f"{title} cannot do with such weights: give base: 4bit, or zero: 0 without "
                "offloading",
            )
        return job

    return Row(choices=("base",), nearest=rule, because="does not shard such weights")


# The names of attention's linear layers in Hugging Face's Llama and in the models built like it;
# other families have other names.
_LLAMAS = ("q_proj", "k_proj", "v_proj", "o_proj")
_OF_ATTENTION: Mapping[str, tuple[str, ...]] = {
    "falcon": ("query_key_value", "dense"),
    "gpt": ("c_attn",),
}


def attention_layers(job: Job) -> list[str]:
    """Return the names of attention's linear layers in the Hugging Face implementation of the job's
    model.
    """
    return [*_OF_ATTENTION.get(job.workload.model.family, _LLAMAS)]


def bits_of_base(workload: Workload) -> dict[str, Any]:
    """Return the key of Hugging Face's programs that loads frozen weights in 4 or 8 bits; nothing
    for weights of 16 bits.
    """
    return {} if workload.base == "16bit" else {f"load_in_{workload.base}": True}


def fused_kernel(job: Job, name: str) -> str:
    """Return the attention kernel for a job's recipe: FlashAttention, which its tool calls
    ``name``, if the GPUs run it in the job's precision, else PyTorch's ``sdpa``.

    FlashAttention computes in 16 bits, in which attention stays if only GEMMs are in fp8 or fp4. Of
    NVIDIA's GPUs it needs Ampere or a later one, which are those with bf16.
    """
    runs = all(cluster.hardware.gpu.has("bf16") for cluster in job.cluster.of_groups)
    return name if runs and job.workload.precision not in SINGLE else "sdpa"


def header(missing: Collection[str], start: str) -> str:
    """Write the comment at the head of a recipe: what the user has to add, and how to start it."""
    return f"# Add {', '.join(missing)}, which no plan has.\n# Start: {start}\n"


def of_switches(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the settings that are neither off nor empty."""
    return {name: value for name, value in values.items() if value not in (False, None, [])}
