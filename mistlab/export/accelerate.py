"""Plans as the YAML configuration of Hugging Face Accelerate 1.15, which trains by FSDP2 or DDP.

There are no pipelines. Batch sizes are the training script's, so the file says them in comments
alone. FSDP2 recomputes all blocks or none, and can take their kept inputs to the host.
"""

from collections.abc import Iterator
from typing import Any

from mistlab.core.files import format_yaml
from mistlab.export.accelerate_read import read
from mistlab.export.fsdp import ENGINES, STATES, offloads, sharded, states_offloaded
from mistlab.export.nearest import canonical
from mistlab.export.rules import (
    EQUAL_NODES,
    INPUTS_OFFLOADED,
    among_orders,
    none_or_all_blocks,
    one_stage,
)
from mistlab.export.target import Row, Target
from mistlab.export.with_parts import with_values
from mistlab.job.job import Job
from mistlab.schedule.orders import DEFAULT_ORDER


def _zero(job: Job) -> Job:
    """FSDP2 also where blocks are recomputed, and where ranks share layers."""
    job = sharded(job)
    first = job.plan.stages[0]
    needs = first.checkpointed_layers > 0 or first.tensor_parallel > 1
    job = with_values(job, {"zero": 2}) if needs and first.zero == 0 else job
    return canonical(job, shares_experts=False)


ROWS = (
    Row(
        choices=("order",),
        nearest=among_orders((DEFAULT_ORDER,)),
        because="has no pipelines",
    ),
    Row(
        choices=("layers", "data_parallel", "tensor_parallel", "micro_batch"),
        nearest=one_stage,
        because="has no pipelines",
    ),
    EQUAL_NODES,
    Row(
        choices=("checkpointed_layers",),
        nearest=none_or_all_blocks("checkpointed_layers"),
        because="recomputes all blocks or none",
    ),
    Row(
        choices=("zero",),
        nearest=_zero,
        because="shards by FSDP2, ZeRO-2 or 3, which offloading, recomputation and tensor "
        "parallelism need",
    ),
    Row(choices=STATES, nearest=states_offloaded, because="offloads all states, or none"),
    INPUTS_OFFLOADED,
)


def write(job: Job) -> str:
    """The configuration as YAML, with the training script's own numbers in comments."""
    cluster, stage, workload = job.cluster, job.plan.stages[0], job.workload
    recomputes = stage.checkpointed_layers > 0
    uses_fsdp = stage.zero > 0 or recomputes or offloads(job) or stage.tensor_parallel > 1
    kind = "FSDP" if uses_fsdp else "MULTI_GPU" if job.plan.num_gpus > 1 else "NO"
    content: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": "no" if workload.precision == "fp32" else workload.precision,
        "num_machines": cluster.nodes,
        "num_processes": job.plan.num_gpus,
        "machine_rank": 0,
        "use_cpu": False,
    }
    if uses_fsdp:
        content["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": stage.zero == 3,
            "fsdp_offload_params": offloads(job),
            "fsdp_activation_checkpointing": recomputes,
            "fsdp_activation_checkpointing_offload": stage.offload.activations > 0,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        content["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": 1,
            "parallelism_config_dp_shard_size": stage.data_parallel,
            "parallelism_config_tp_size": stage.tensor_parallel,
            "parallelism_config_cp_size": 1,
        }
    return (
        f"# In the training script: {stage.micro_batch} sequences of "
        f"{workload.sequence_length} tokens a batch,\n"
        f"# Accelerator(gradient_accumulation_steps={job.plan.micro_batches})\n"
        f"{format_yaml(content)}"
    )


def _notes(job: Job) -> Iterator[str]:
    yield "the model, its sequences, batch and gradient accumulation are the training script's"
    if job.plan.stages[0].tensor_parallel > 1:
        yield "tensor parallelism needs a model with a plan for it (tp_plan)"


ACCELERATE = Target(
    name="accelerate",
    title="Accelerate",
    package="accelerate==1.15.0",
    engines=ENGINES,
    rows=ROWS,
    write=write,
    read=read,
    notes=_notes,
    beside=("model", "sequence_length", "attention", "global_batch", "micro_batch"),
    always_overlaps=True,
)
