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

from mistlab.export.found import Found, checked_whole
from mistlab.export.given import Given, Imported
from mistlab.export.nearest import canonical
from mistlab.export.rank_rules import without_tensor_parallel
from mistlab.export.rules import (
    activations_of_recomputed,
    among_orders,
    equal_meshes,
    equal_nodes,
    even_layers,
    highest,
    none_or_all_blocks,
)
from mistlab.export.sections import Section, content_of
from mistlab.export.target import Row, Target
from mistlab.export.with_parts import with_values
from mistlab.export.words import names_in
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.values.errors import InputError
from mistlab.values.job import Job
from mistlab.values.mesh import ranks_of

ENGINES = ("deepspeed", "mistlab")
_HALVES = ("fp16", "bf16")
# Settings without effect on the cost of a step that a plan could tell.
HARMLESS = names_in(
    """
    optimizer scheduler gradient_clipping steps_per_print wall_clock_breakdown dump_state
    prescale_gradients gradient_predivide_factor tensorboard wandb csv_monitor comet
    comms_logger flops_profiler checkpoint data_types communication_data_type
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    seq_parallel_communication_data_type memory_breakdown
    disable_allgather graceful_exit load_universal_checkpoint use_data_before_expert_parallel
    """
)


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
    Row(choices=(), nearest=equal_nodes, because="starts equally many processes on every node"),
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
    Row(
        choices=("offload_activations",),
        nearest=activations_of_recomputed,
        because="offloads the kept inputs of recomputed blocks, all or none",
    ),
)


def write(job: Job) -> str:
    """The configuration as JSON."""
    plan, stage, workload = job.plan, job.plan.stages[0], job.workload
    content: dict[str, Any] = {
        "train_batch_size": workload.global_batch,
        "train_micro_batch_size_per_gpu": stage.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
    }
    if workload.precision in _HALVES:
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


def read(text: str, given: Given) -> Imported:
    """The job of a configuration; the model and its sequences are given beside it."""
    found = Found()
    top = Section(content_of(text), "", found)
    _batch(top, found)
    halves = [name for name in _HALVES if top.section(name).switch("enabled")]
    if len(halves) > 1:
        found.remark("contradicting", "precision", "fp16 and bf16 are both enabled: took bf16")
    found.precision = "bf16" if "bf16" in halves else "fp16" if halves else "fp32"
    found.values["tensor_parallel"] = (
        top.section("tensor_parallel").whole("autotp_size", minimum=0) or 1
    )
    pipeline = top.section("pipeline")
    stages = pipeline.get("stages")
    if stages not in (None, "auto"):
        found.num_stages = checked_whole("pipeline.stages", stages)
    layers = given.model.layers if given.model else 0
    _activations(top, pipeline, found, layers)
    _states(top.section("zero_optimization"), found)
    top.tell_of_rest(HARMLESS)
    return found.job(given, ENGINES)


def _batch(top: Section, found: Found) -> None:
    batch, micro_batch, steps = (
        top.whole(name)
        for name in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
    )
    found.global_batch, found.micro_batch, found.micro_batches = batch, micro_batch, steps
    if batch and micro_batch and steps:
        data, rest = divmod(batch, micro_batch * steps)
        if rest or not data:
            message = (
                f"train_batch_size: {batch} is no multiple of train_micro_batch_size_per_gpu "
                f"{micro_batch} x gradient_accumulation_steps {steps}: correct one of them"
            )
            raise InputError(message)
        found.data_parallel = data


def _activations(top: Section, pipeline: Section, found: Found, layers: int) -> None:
    section = top.section("activation_checkpointing")
    interval = pipeline.whole("activation_checkpoint_interval", minimum=0) or 0
    count = section.whole("number_checkpoints", minimum=0) or 0
    if interval:
        count = layers
    if interval > 1:
        text = f"activation_checkpoint_interval {interval}: taken as blocks recomputed one by one"
        found.remark("assumed", "checkpointed_layers", text)
    if count:
        found.values["checkpointed_layers"] = count
    elif section.content:
        text = "0, for number_checkpoints is not given"
        found.remark("assumed", "checkpointed_layers", text)
    if section.switch("cpu_checkpointing"):
        found.values["offload_activations"] = 1.0


def _states(section: Section, found: Found) -> None:
    level = section.whole("stage", minimum=0) or 0
    if level > 3:
        message = f"zero_optimization.stage: {level} is unknown: give 0 to 3"
        raise InputError(message)
    found.values["zero"] = level
    overlaps = section.get("overlap_comm")
    found.overlaps = level == 3 if overlaps is None else overlaps is True
    optimizer, weights = section.section("offload_optimizer"), section.section("offload_param")
    if _is_offloaded(optimizer, found):
        ratio = optimizer.number("ratio", 1.0)
        if ratio < 1 and level < 3:
            text = f"offload_optimizer.ratio {ratio:g} counts under ZeRO-3 alone: taken as 1"
            found.remark("contradicting", "offload.optimizer", text)
            ratio = 1.0
        found.values["offload_optimizer"] = found.values["offload_gradients"] = ratio
    if _is_offloaded(weights, found):
        if level == 3:
            found.values["offload_weights"] = 1.0
        else:
            text = f"offload_param counts under ZeRO-3 alone, stage is {level}: ignored"
            found.remark("contradicting", "offload.weights", text)


def _is_offloaded(section: Section, found: Found) -> bool:
    device = section.get("device", "none")
    if device == "nvme":
        found.remark("assumed", f"{section.name}.device", "nvme: taken as host memory")
    return device in ("cpu", "nvme")


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
