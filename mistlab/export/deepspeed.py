"""Plans as the JSON configuration of DeepSpeed 0.19.

The file holds batch sizes, precision, ZeRO, offloading, activation checkpointing, tensor
parallelism and the pipeline; the model and its sequences are the training script's. Offloading the
optimizer takes its gradients along. Only ZeRO-3 offloads a fraction of the optimizer (twin-flow),
and weights. Kept inputs of recomputed blocks can go to the host, all of them. A pipeline shards
optimizer state alone.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from mistlab.export.deepspeed_read import ENGINES, HALVES, read
from mistlab.export.nearest import canonical
from mistlab.export.rank_rules import without_tensor_parallel
from mistlab.export.rules import (
    EQUAL_NODES,
    INPUTS_OFFLOADED,
    among_orders,
    equal_meshes,
    even_layers,
    highest,
    none_or_all_blocks,
)
from mistlab.export.target import Row, Target
from mistlab.export.with_parts import with_values
from mistlab.job.job import Job
from mistlab.plan.dimensions import ranks_of
from mistlab.schedule.orders import DEFAULT_ORDER


def _meshes(job: Job) -> Job:
    """Equal degrees, and in a pipeline stages or replicas in place of tensor-parallel ranks."""
    job = equal_meshes(job)
    is_plain = job.plan.num_stages == 1 or job.plan.stages[0].tensor_parallel == 1
    return job if is_plain else without_tensor_parallel(job)


def _zero(job: Job) -> Job:
    level = min(highest(job, "zero"), 1 if job.plan.num_stages > 1 else 3)
    if highest(job, "offload_optimizer"):
        level = max(level, 1)
    return canonical(with_values(job, {"zero": int(level)}), shares_experts=False)


def _states_offloaded(job: Job) -> Job:
    fraction = highest(job, "offload_optimizer")
    if not _can_shard_weights(job):
        fraction = math.ceil(fraction)
    weights = highest(job, "offload_weights") > 0 and _can_shard_weights(job)
    return with_values(
        job,
        {
            "offload_optimizer": fraction,
            "offload_gradients": fraction,
            "offload_weights": float(weights),
        },
    )


def _can_shard_weights(job: Job) -> bool:
    """Whether a job has ZeRO-3, or may have it because a single rank shards with nobody."""
    first = job.plan.stages[0]
    return job.plan.num_stages == 1 and (first.zero == 3 or ranks_of("gather", first.degree) == 1)


ROWS = (
    Row(
        choices=("order",),
        nearest=among_orders((DEFAULT_ORDER,)),
        because="runs 1F1B",
    ),
    Row(
        choices=("data_parallel", "tensor_parallel", "micro_batch"),
        nearest=_meshes,
        because="gives all stages the same degrees, and leaves tensor parallelism in a pipeline to "
        "the model: such ranks become stages, or replicas",
    ),
    EQUAL_NODES,
    Row(
        choices=("layers", "checkpointed_layers"),
        nearest=lambda job: none_or_all_blocks("checkpointed_layers")(even_layers(job)),
        because="divides blocks evenly, and recomputes all of them or none",
    ),
    Row(
        choices=("zero",),
        nearest=_zero,
        because="shards alike on all stages, optimizer state alone in a pipeline, and offloads no "
        "optimizer without sharding it",
    ),
    Row(
        choices=("offload_optimizer", "offload_gradients", "offload_weights"),
        nearest=_states_offloaded,
        because="offloads gradients with the optimizer, and fractions and weights under ZeRO-3",
    ),
    INPUTS_OFFLOADED,
)


def write(job: Job) -> str:
    """The configuration as JSON."""
    plan, stage, workload = job.plan, job.plan.stages[0], job.workload
    content: dict[str, Any] = {
        "train_batch_size": workload.global_batch,
        "train_micro_batch_size_per_gpu": stage.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
    }
    if workload.precision in HALVES:
        content[workload.precision] = {"enabled": True}
    content["zero_optimization"] = _zero_section(job)
    if stage.checkpointed_layers:
        content["activation_checkpointing"] = {
            "number_checkpoints": workload.model.layers,
            "cpu_checkpointing": stage.offload.activations > 0,
        }
    if stage.tensor_parallel > 1:
        content["tensor_parallel"] = {"autotp_size": stage.tensor_parallel}
    if plan.num_stages > 1:
        interval = 1 if stage.checkpointed_layers else 0
        content["pipeline"] = {
            "stages": plan.num_stages,
            "activation_checkpoint_interval": interval,
        }
    return json.dumps(content, indent=2) + "\n"


def _zero_section(job: Job) -> Mapping[str, Any]:
    stage = job.plan.stages[0]
    ratio, weights = stage.offload.optimizer, stage.offload.weights
    level = stage.zero
    if weights or 0 < ratio < 1:
        level = 3
    elif ratio:
        level = max(level, 1)
    section: dict[str, Any] = {
        "stage": level,
        "overlap_comm": job.plan.overlap_communication,
    }
    if ratio:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if level == 3:
            section["offload_optimizer"]["ratio"] = ratio
    if weights:
        section["offload_param"] = {"device": "cpu", "pin_memory": True}
    return section


def _notes(job: Job) -> Iterator[str]:
    yield "the model, its sequences and fused attention are the training script's"
    cluster, stage = job.cluster, job.plan.stages[0]
    yield (
        f"the file does not say how many processes: start {cluster.gpus_per_node} on each of "
        f"{cluster.nodes} nodes, or train_batch_size does not come out"
    )
    if stage.tensor_parallel > 1:
        yield (
            "the script gives deepspeed.initialize an mpu with the groups of tensor parallelism: "
            "without one DeepSpeed counts these ranks as replicas and refuses train_batch_size"
        )
    if job.plan.num_stages > 1:
        yield "the script makes a PipelineModule of as many stages, with checkpoint interval 1 or 0"
    elif stage.checkpointed_layers:
        yield "the script calls deepspeed.checkpointing.checkpoint on every block"
    if stage.offload.optimizer:
        yield "the host steps what is offloaded of the optimizer; the prediction swaps it instead"


DEEPSPEED = Target(
    name="deepspeed",
    title="DeepSpeed",
    package="deepspeed==0.19.8",
    engines=ENGINES,
    rows=ROWS,
    write=write,
    read=read,
    notes=_notes,
    beside=("model", "nodes", "gpus_per_node", "sequence_length", "attention"),
)
