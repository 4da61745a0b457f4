"""Exports plans to a launch line of Megatron-LM at core 0.16.

All stages have the same degrees (those of experts included), ZeRO level and number of recomputed
blocks; how many blocks a stage has is free, by the option for a layout. The host steps the part of
the optimizer state that is offloaded. Activations of whole blocks can be offloaded in plans without
recomputation and without a pipeline. In plans without a pipeline, Megatron-FSDP can shard gradients
and weights as well.
"""

import math
from collections.abc import Iterator
from typing import get_args

from mistlab.engines.engine import Optimizer
from mistlab.export.megatron.megatron_model import model_options, sayable_model
from mistlab.export.megatron.megatron_parts import (
    hybrid_notes,
    hybrid_options,
    program_of,
    segment_sizes,
)
from mistlab.export.megatron.megatron_plan import (
    PRECISION_AWARE,
    STRATEGIES,
    expert_options,
    moment_options,
    precision_options,
    sum_options,
)
from mistlab.export.megatron.megatron_read import (
    ENGINES,
    ENGINES_OF_TODAY,
    EXCHANGES,
    engine_line,
    engines_for,
    read,
)
from mistlab.export.megatron.megatron_routers import router_notes
from mistlab.export.nearest import TRAINS_ALL, WHOLE_LOSS, under_any_engine, with_engine
from mistlab.export.rules import (
    EQUAL_MESHES,
    EQUAL_NODES,
    among_orders,
    dropped,
    equal_blocks,
    highest,
    none_or_all_blocks,
    same,
    same_experts,
    split_sequences,
    whole_experts,
    with_values,
)
from mistlab.export.target import NARROW, OFFLOADED_STEP, Row, Target
from mistlab.job.job import Job
from mistlab.plan.workload import Workload
from mistlab.schedule.orders import DEFAULT_ORDER, INTERLEAVED

_OF_BRIDGE = tuple(f"megatron-bridge{variant}" for variant in ("", "-alltoall", "-eager", "-graph"))


def _zero(job: Job) -> Job:
    most = 1 if job.plan.num_stages > 1 else 3
    level = int(min(highest(job, "zero"), most))
    if highest(job, "offload_optimizer") or job.workload.optimizer != "adamw":
        level = max(level, 1)
    return with_values(job, {"zero": level})


def _experts(job: Job) -> Job:
    """Divide experts over equally many ranks on all stages of a job; experts with biases are not
    split.
    """
    job, model = same_experts(job), job.workload.model
    return whole_experts(job) if model.experts is not None and model.biases else job


def _sequence_parallel(job: Job) -> Job:
    return split_sequences(same("sequence_parallel")(job))


def _core_recomputed(job: Job) -> Job:
    """Make a job recompute the attention core in all blocks or in none; in none if it recomputes
    whole blocks.
    """
    if highest(job, "checkpointed_layers"):
        return dropped("core_recomputed_layers")(job)
    return none_or_all_blocks("core_recomputed_layers")(job)


def _activations_offloaded(job: Job) -> Job:
    """Offload activations of whole blocks only in a job that has no pipeline and recomputes no
    block.
    """
    layers, ratio = job.workload.model.layers, highest(job, "offload_activations")
    recomputes = any(highest(job, f"{what}_layers") for what in ("checkpointed", "core_recomputed"))
    keeps = job.plan.num_stages > 1 or recomputes
    blocks = 0 if keeps else min(math.ceil(ratio * layers), layers - 1)
    return with_values(job, {"offload_activations": blocks / layers})


ROWS = (
    *TRAINS_ALL,
    WHOLE_LOSS,
    Row(
        choices=("model",),
        nearest=sayable_model,
        because="has no parallel blocks, only GELU, squared ReLU or SwiGLU, and only whole numbers "
        "as rotary base",
    ),
    EQUAL_MESHES,
    Row(
        choices=("expert_parallel", "expert_tensor_parallel"),
        nearest=_experts,
        because="has one expert degree for all stages, and does not divide experts with biases",
    ),
    EQUAL_NODES,
    Row(
        choices=("order",),
        nearest=among_orders((DEFAULT_ORDER, *INTERLEAVED)),
        because="runs plain or interleaved 1F1B only",
    ),
    Row(
        choices=("zero",),
        nearest=_zero,
        because="has one ZeRO level for all stages, at most 1 in a pipeline, and at least 1 for an "
        "optimizer that is offloaded or has moments below 32 bits",
    ),
    Row(
        choices=("layers", "checkpointed_layers"),
        nearest=equal_blocks("checkpointed_layers"),
        because="recomputes equally many blocks on every stage",
    ),
    Row(
        choices=("core_recomputed_layers",),
        nearest=_core_recomputed,
        because="recomputes core attention in all blocks or none, and then nothing else",
    ),
    Row(
        choices=("sequence_parallel",),
        nearest=_sequence_parallel,
        because="has one switch for all stages, which tensor parallelism with experts needs",
    ),
    Row(
        choices=("context_exchange",),
        nearest=same("context_exchange"),
        because="has one way to exchange keys for all stages",
    ),
    Row(
        choices=("offload_optimizer",),
        nearest=same("offload_optimizer"),
        because="has one fraction for all stages",
    ),
    Row(
        choices=("offload_weights", "offload_gradients"),
        nearest=dropped("offload_weights", "offload_gradients"),
        because="keeps weights and gradients on the GPU",
    ),
    Row(
        choices=("offload_activations",),
        nearest=_activations_offloaded,
        because="offloads activations of whole blocks only, without pipeline or recomputation",
    ),
)


def write(job: Job) -> str:
    """Write a job as a launch line of Megatron-LM, one option per line."""
    cluster = job.cluster
    started = f"--nnodes {cluster.nodes} --nproc-per-node {cluster.gpus_per_node}"
    lines = [
        f"torchrun {started} {program_of(job.workload.model)}",
        *run_options(job),
        *model_options(job.workload.model, job.plan.stages[0].tensor_parallel),
        *hybrid_options(job),
    ]
    return " \\\n  ".join(lines) + "\n" + engine_comment(job)


def run_options(job: Job) -> Iterator[str]:
    """List the options for what a plan decides: degrees, batch, precision, states, activations and
    expert parallelism.
    """
    yield from _degrees(job)
    yield from _batch(job)
    yield from _states(job)
    yield from _activations(job)
    yield from expert_options(job)


def engine_comment(job: Job) -> str:
    """Return a comment that names the plan's engine, if an import of the launch line would choose
    another engine.
    """
    workload, plan = job.workload, job.plan
    engines = engines_for(workload.model, workload.precision)
    taken = with_engine(
        under_any_engine(job),
        engines,
        overlaps=plan.overlap_communication,
        precision=workload.precision,
    )
    return "" if taken.plan.engine == plan.engine else engine_line(plan.engine)


def _degrees(job: Job) -> Iterator[str]:
    plan, first = job.plan, job.plan.stages[0]
    yield f"--tensor-model-parallel-size {first.tensor_parallel}"
    yield f"--pipeline-model-parallel-size {plan.num_stages}"
    if first.context_parallel > 1:
        yield f"--context-parallel-size {first.context_parallel}"
    if first.context_exchange:
        words_of_ways = {way: word for word, way in EXCHANGES.items()}
        yield f"--cp-comm-type {words_of_ways[first.context_exchange]}"
    if first.sequence_parallel:
        yield "--sequence-parallel"
    if job.workload.model.pattern:
        return
    chunks, sizes = INTERLEAVED.get(plan.order, 1), segment_sizes(plan)
    if len(set(sizes)) > 1:
        blocks, further = "|".join("t" * size for size in sizes), job.workload.model.further_tokens
        yield f'--pipeline-model-parallel-layout "E{blocks}{"m" * further}L"'
    elif chunks > 1:
        yield f"--num-virtual-stages-per-pipeline-rank {chunks}"


def _batch(job: Job) -> Iterator[str]:
    workload = job.workload
    yield f"--micro-batch-size {job.plan.stages[0].micro_batch}"
    yield f"--global-batch-size {workload.global_batch}"
    yield f"--seq-length {workload.sequence_length}"
    yield f"--max-position-embeddings {workload.sequence_length}"
    yield f"--attention-backend {_backend(workload)}"
    yield from precision_options(workload, job.cluster.hardware)
    yield from sum_options(workload)


def _backend(workload: Workload) -> str:
    """Return the option for the attention library. FlashAttention supports neither attention sinks
    nor values wider than keys; Transformer Engine's fused attention supports both.
    """
    if workload.attention != "flash":
        return "unfused"
    model = workload.model
    return "fused" if model.sinks or model.latent is not None else "flash"


def _states(job: Job) -> Iterator[str]:
    stage, overlaps = job.plan.stages[0], job.plan.overlap_communication
    fraction = stage.offload.optimizer
    level = max(stage.zero, 1 if fraction else 0)
    if level or job.workload.optimizer != "adamw":
        yield "--use-distributed-optimizer"
    if level > 1:
        yield f"--use-megatron-fsdp --data-parallel-sharding-strategy {STRATEGIES[level]}"
        yield "--ckpt-format fsdp_dtensor"
    if overlaps:
        yield "--overlap-grad-reduce --overlap-param-gather" if level else "--overlap-grad-reduce"
    if fraction:
        yield (
            f"--optimizer-cpu-offload {PRECISION_AWARE} --optimizer-offload-fraction {fraction!r}"
        )
    yield from moment_options(job.workload.optimizer)


def _activations(job: Job) -> Iterator[str]:
    stages = job.plan.stages
    most = max(stage.checkpointed_layers for stage in stages)
    if most and all(stage.checkpointed_layers == stage.layers for stage in stages):
        yield "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    elif most:
        yield (
            f"--recompute-granularity full --recompute-method block --recompute-num-layers {most}"
        )
    elif stages[0].value("core_recomputed_layers"):
        yield "--recompute-granularity selective --recompute-modules core_attn"
    ratio = stages[0].offload.activations
    if ratio:
        yield f"--cpu-offloading-num-layers {round(ratio * job.workload.model.layers)}"


def _notes(job: Job) -> Iterator[str]:
    yield "add the options that a plan does not have: data, tokenizer, learning rate, iterations"
    stage = job.plan.stages[0]
    if stage.offload.optimizer:
        yield OFFLOADED_STEP
    if stage.offload.activations:
        yield "offloading activations needs TransformerEngine"
    if job.workload.precision == "fp4" and job.workload.model.experts is not None:
        yield "Megatron-LM runs the experts' GEMMs in 4 bits too; the prediction has them in 8"
    yield from router_notes(job.workload.model.experts)
    if stage.zero > 1:
        yield "add --no-gradient-accumulation-fusion if Megatron-FSDP refuses to start without it"
        yield "unset CUDA_DEVICE_MAX_CONNECTIONS: Megatron-FSDP refuses to start if it is 1"
    elif stage.tensor_parallel > 1 or stage.context_parallel > 1:
        yield (
            "set CUDA_DEVICE_MAX_CONNECTIONS to 1: on GPUs before Blackwell Megatron-LM refuses "
            "other values"
        )
    yield from hybrid_notes(job)


MEGATRON = Target(
    name="megatron",
    title="Megatron-LM",
    package="megatron-core==0.16.1",
    engines=ENGINES,
    rows=ROWS,
    says_sums=True,
    write=write,
    read=read,
    notes=_notes,
    own_engines={
        **{name: name for name in ("megatron-core", "megatron-core-fused-loss", "megatron-fsdp")},
        **dict.fromkeys(_OF_BRIDGE, "megatron-core"),
    },
    engines_of_today=ENGINES_OF_TODAY,
    precisions=("fp16", "bf16", "fp32", *NARROW),
    optimizers=get_args(Optimizer),
    drops_tokens=True,
)
