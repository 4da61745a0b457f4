"""Imports DeepSpeed's JSON configurations, and exports plans to them.

The file holds batch sizes, precision, ZeRO, offloading, activation checkpointing, tensor and
sequence parallelism and the pipeline; the model and its sequences are the training script's. Left
out keys take DeepSpeed's defaults (deepspeed/runtime/config.py and zero/config.py of 0.19).
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from mistlab.core.values import reject
from mistlab.engines.engine import Precision
from mistlab.export.found import Found, Section, checked_whole, harmless_names, parse_json
from mistlab.export.given import Given, Imported, ask_for
from mistlab.export.nearest import canonical, notes_on_training
from mistlab.export.rules import (
    EQUAL_NODES,
    INPUTS_OFFLOADED,
    among_orders,
    equal_meshes,
    even_layers,
    highest,
    none_or_all_blocks,
    with_values,
    without_tensor_parallel,
)
from mistlab.export.target import OFFLOADED_STEP, Row, Target
from mistlab.job.job import Job
from mistlab.plan.dimensions import ranks_of
from mistlab.plan.workload import ModelSpec
from mistlab.schedule.context_ways import HEADS
from mistlab.schedule.orders import DEFAULT_ORDER

ENGINES = ("deepspeed", "mistlab")
HALVES = ("fp16", "bf16")
# DeepSpeed's settings that do not affect the predicted cost of a step.
HARMLESS = harmless_names("deepspeed")
# DeepSpeed's settings that affect the cost of a step but that plans cannot express, each with what
# the prediction assumes instead.
UNSAID: Mapping[str, str] = {
    "sparse_attention": "attention is predicted as dense",
    "compression_training": "weights are predicted as uncompressed, in 16 bits",
    "progressive_layer_drop": "all blocks are predicted to run",
    "curriculum_learning": "all sequences are predicted at full length",
    "data_efficiency": "all sequences are predicted at full length",
    "quantize_training": "weights are predicted as unquantised, in 16 bits",
    "torch_autocast": "GEMMs are predicted in the precision of section fp16 or bf16",
}
ZERO_UNSAID: Mapping[str, str] = {
    "zero_quantized_weights": "weights are predicted as gathered in 16 bits",
    "zero_quantized_nontrainable_weights": "weights are predicted as gathered in 16 bits",
    "zero_quantized_gradients": "gradients are predicted as reduced in 16 bits",
    "mics_shard_size": "states are predicted as sharded over all ranks",
    "mics_hierarchical_params_gather": "weights are predicted as gathered in one collective",
    "zenflow": "the optimizer is predicted to step all weights after the last backward pass",
    "super_offload": "the optimizer is predicted with plain offloading",
    "stage3_leaf_module": "weights are predicted as gathered layer by layer",
}
_PARTS = {"optimizer": "optimizer", "weights": "param"}
_ADAMS = ("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam", "torch_adam")


def read(text: str, given: Given) -> Imported:
    """Import a DeepSpeed configuration as a job; it holds neither model nor sequence length, so the
    user gives these.
    """
    draft = Found(keys={"micro_batch": "train_micro_batch_size_per_gpu"})
    top = Section(parse_json(text), "", draft)
    read_configuration(top, draft, given, given.model)
    top.tell_of_rest(HARMLESS)
    return draft.job(given, ENGINES)


def read_configuration(top: Section, draft: Found, given: Given, model: ModelSpec | None) -> None:
    """Read a DeepSpeed configuration into ``draft``, whether it stands alone or inside another
    framework's file.
    """
    draft.precision = _precision(top, given)
    _sums(top, draft)
    draft.values["tensor_parallel"] = (
        top.section("tensor_parallel").whole("autotp_size", minimum=0) or 1
    )
    sequences = top.whole("sequence_parallel_size", minimum=0) or 1
    if sequences > 1:
        draft.values |= {"context_parallel": sequences, "context_exchange": HEADS}
    pipeline = top.section("pipeline")
    stages = pipeline.get("stages")
    if stages not in (None, "auto"):
        draft.num_stages = checked_whole("pipeline.stages", stages)
    _activations(top, pipeline, draft, model.layers if model else 0)
    read_states(top.section("zero_optimization"), draft)
    _optimizer(top.section("optimizer"), draft)
    top.unsaid(UNSAID)
    _batch(top, draft, given)


def _precision(top: Section, given: Given) -> Precision:
    """Return the precision of GEMMs in a DeepSpeed configuration; if it says "auto", the user has
    to give it.
    """
    sections = {name: top.section(name) for name in HALVES}
    if "bfloat16" in top.content:
        sections["bf16"] = top.section("bfloat16")
    enabled = [name for name in HALVES if sections[name].switch("enabled")]
    automatic = [name for name in HALVES if sections[name].content.get("enabled") == "auto"]
    if automatic and not enabled:
        if given.precision is None:
            text = "auto leaves the precision to the training script"
            ask_for(
                "precision",
                f"{automatic[0]}.enabled: {text}: give --precision bf16, fp16 or fp32",
            )
        return given.precision
    if top.section("amp").switch("enabled"):
        top.found.remark("assumed", "amp", "apex's mixed precision is predicted as fp16")
        enabled.append("fp16")
    if "fp16" in enabled and "bf16" in enabled:
        text = "fp16 and bf16 are both enabled: bf16 is used"
        top.found.remark("contradicting", "precision", text)
    return "bf16" if "bf16" in enabled else "fp16" if enabled else "fp32"


def _sums(top: Section, draft: Found) -> None:
    """Read in how many bits DeepSpeed accumulates gradients over micro-batches and reduces them
    over ranks.
    """
    summed = top.section("data_types").text("grad_accum_dtype", "")
    reduced = top.text("communication_data_type", "")
    if draft.precision == "fp32" or "fp32" not in (summed, reduced):
        return
    if summed == reduced:
        draft.gradients = "32bit"
    else:
        text = (
            f"gradients are accumulated in {summed or 'the usual precision'} but reduced in "
            f"{reduced or 'the usual precision'}: both are predicted in 16 bits"
        )
        draft.remark("ignored", "data_types.grad_accum_dtype", text)


def _batch(top: Section, draft: Found, given: Given) -> None:
    batch, micro_batch, steps = (
        top.whole(name)
        for name in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
    )
    if batch and micro_batch and steps:
        data, rest = divmod(batch, micro_batch * steps)
        if rest or not data:
            reject(
                f"train_batch_size: {batch} is not a multiple of train_micro_batch_size_per_gpu "
                f"{micro_batch} x gradient_accumulation_steps {steps}: give a multiple of "
                f"{micro_batch * steps}, or change the other two"
            )
        draft.data_parallel = data
    elif batch and not micro_batch and given.nodes and given.gpus_per_node:
        micro_batch = _derived(batch, steps or 1, draft, given.nodes * given.gpus_per_node)
    draft.global_batch, draft.micro_batch, draft.micro_batches = batch, micro_batch, steps


def _derived(batch: int, steps: int, draft: Found, ranks: int) -> int:
    """Return the micro-batch size that DeepSpeed computes from the batch and the number of
    ranks.
    """
    data = max(ranks // draft.ranks_of_replica, 1)
    micro_batch, rest = divmod(batch, steps * data)
    if rest or not micro_batch:
        reject(
            f"train_batch_size: {batch} is not a multiple of {data} replicas x "
            f"gradient_accumulation_steps {steps}: give a multiple of {steps * data}, or "
            "--micro-batch"
        )
    return micro_batch


def _activations(top: Section, pipeline: Section, draft: Found, layers: int) -> None:
    section = top.section("activation_checkpointing")
    interval = pipeline.whole("activation_checkpoint_interval", minimum=0) or 0
    count = section.whole("number_checkpoints", minimum=0) or 0
    if interval:
        count = layers
    if interval > 1:
        text = (
            f"activation_checkpoint_interval {interval} is predicted as blocks recomputed one by "
            "one"
        )
        draft.remark("assumed", "checkpointed_layers", text)
    if count:
        draft.values["checkpointed_layers"] = count
    elif section.content:
        text = "0, because number_checkpoints is not given"
        draft.remark("assumed", "checkpointed_layers", text)
    section.unsaid({"partition_activations": "every rank is predicted to keep whole inputs"})
    if section.switch("cpu_checkpointing"):
        draft.values["offload_activations"] = 1.0


def read_states(section: Section, draft: Found) -> None:
    """Read the ZeRO level of a DeepSpeed configuration, whether its communication overlaps
    computation, and what it offloads.
    """
    level = section.whole("stage", minimum=0) or 0
    if level > 3:
        reject(f"zero_optimization.stage: {level} is unknown: give 0, 1, 2 or 3")
    draft.values["zero"] = level
    draft.overlaps = section.switch("overlap_comm", default=level == 3)
    offloaded = {name: _is_offloaded(section, key) for name, key in _PARTS.items()}
    offload_states(section, level, **offloaded)
    section.unsaid(ZERO_UNSAID)
    if (section.whole("zero_hpz_partition_size") or 1) > 1:
        text = "each pass is predicted to gather weights from all ranks"
        draft.remark("ignored", "zero_optimization.zero_hpz_partition_size", text)


def offload_states(section: Section, level: int, *, optimizer: bool, weights: bool) -> None:
    """Read from the ZeRO section whether optimizer states and weights are offloaded."""
    draft = section.found
    if optimizer:
        ratio = section.section("offload_optimizer").number("ratio", 1.0)
        if ratio < 1 and level < 3:
            text = (
                f"offload_optimizer.ratio {ratio:g} has effect with ZeRO-3 only, but "
                f"zero_optimization.stage is {level}: predicted with ratio 1, as DeepSpeed runs it"
            )
            draft.remark("contradicting", "offload.optimizer", text)
            ratio = 1.0
        draft.values["offload_optimizer"] = draft.values["offload_gradients"] = ratio
    if weights and level == 3:
        draft.values["offload_weights"] = 1.0
    elif weights:
        text = (
            "offload_param has effect with ZeRO-3 only, but zero_optimization.stage is "
            f"{level}: predicted with weights on the GPU"
        )
        draft.remark("contradicting", "offload.weights", text)


def _is_offloaded(section: Section, part: str) -> bool:
    older = {"optimizer": "cpu_offload", "param": "cpu_offload_params"}[part]
    if section.switch(older):
        return True
    inner = section.section(f"offload_{part}")
    device = inner.text("device", "none").lower()
    if device == "nvme":
        section.found.remark("assumed", f"{inner.name}.device", "nvme is predicted as host memory")
    return device in ("cpu", "nvme")


def _optimizer(section: Section, draft: Found) -> None:
    kind = section.text("type", "AdamW")
    if kind.lower() not in _ADAMS:
        draft.remark("ignored", "optimizer.type", f"{kind} is predicted as AdamW")


# Exports plans to the JSON configuration of DeepSpeed 0.19.
#
# The file holds batch sizes, precision, ZeRO, offloading, activation checkpointing, tensor
# parallelism and the pipeline; the model and its sequence length belong to the training script.
# Offloading the optimizer also offloads gradients. Only ZeRO-3 offloads weights, or a fraction of
# the optimizer (twin-flow). Inputs that recomputed blocks keep can be offloaded, all or none. A
# pipeline shards optimizer states only.


def _meshes(job: Job) -> Job:
    """Give all stages of a job equal parallel degrees; in a pipeline, tensor-parallel ranks become
    stages or replicas, since this export combines no tensor parallelism with a pipeline.
    """
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
    """Whether a job uses ZeRO-3, or could without any change because no two ranks share the same
    states.
    """
    first = job.plan.stages[0]
    return job.plan.num_stages == 1 and (first.zero == 3 or ranks_of("gather", first.degree) == 1)


ROWS = (
    Row(choices=("order",), nearest=among_orders((DEFAULT_ORDER,)), because="runs 1F1B"),
    Row(
        choices=("data_parallel", "tensor_parallel", "micro_batch"),
        nearest=_meshes,
        because="gives all stages the same degrees, and leaves tensor parallelism in a pipeline to "
        "the model: tensor-parallel ranks become stages, or replicas",
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
        because="has one ZeRO level for all stages, at most 1 in a pipeline, and shards every "
        "optimizer that it offloads",
    ),
    Row(
        choices=("offload_optimizer", "offload_gradients", "offload_weights"),
        nearest=_states_offloaded,
        because="offloads gradients with the optimizer; weights, and fractions, with ZeRO-3 only",
    ),
    INPUTS_OFFLOADED,
)


def write(job: Job) -> str:
    """Write the DeepSpeed configuration of a job as JSON."""
    plan, stage, workload = job.plan, job.plan.stages[0], job.workload
    content: dict[str, Any] = {
        "train_batch_size": workload.global_batch,
        "train_micro_batch_size_per_gpu": stage.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
    }
    if workload.precision in HALVES:
        content[workload.precision] = {"enabled": True}
        if workload.gradients == "32bit":
            content["data_types"] = {"grad_accum_dtype": "fp32"}
            content["communication_data_type"] = "fp32"
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
    section: dict[str, Any] = {"stage": level, "overlap_comm": job.plan.overlap_communication}
    if ratio:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if level == 3:
            section["offload_optimizer"]["ratio"] = ratio
    if weights:
        section["offload_param"] = {"device": "cpu", "pin_memory": True}
    return section


def _notes(job: Job) -> Iterator[str]:
    yield "the training script has to choose the model, its sequence length and fused attention"
    yield from notes_on_training(job)
    cluster, stage = job.cluster, job.plan.stages[0]
    yield (
        f"the file does not give the number of processes: start {cluster.gpus_per_node} on each of "
        f"{cluster.nodes} nodes, since train_batch_size fits no other number"
    )
    if stage.tensor_parallel > 1:
        yield (
            "the script has to give deepspeed.initialize an mpu with the tensor-parallel groups: "
            "without one DeepSpeed counts these ranks as replicas and refuses train_batch_size"
        )
    if job.plan.num_stages > 1:
        yield (
            "the script has to make a PipelineModule of as many stages, with checkpoint interval "
            "1 or 0"
        )
    elif stage.checkpointed_layers:
        yield "the script has to call deepspeed.checkpointing.checkpoint on every block"
    if stage.offload.optimizer:
        yield OFFLOADED_STEP


DEEPSPEED = Target(
    name="deepspeed",
    title="DeepSpeed",
    package="deepspeed==0.19.8",
    engines=ENGINES,
    rows=ROWS,
    says_sums=True,
    write=write,
    read=read,
    notes=_notes,
    beside=("model", "nodes", "gpus_per_node", "sequence_length", "attention"),
)
