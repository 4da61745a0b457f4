"""Engines that predict the software of measured runs, and what rows leave to their recipes."""

from experiments.runs.dialects.gpu_names import Gpus
from experiments.runs.run_row import Recomputation, RunRow
from mistlab import catalog
from mistlab.core.values import FieldError, refuse, shown
from mistlab.engines.engine import ENGINES, Precision
from mistlab.plan.workload import ModelSpec
from mistlab.schedule.orders import DEFAULT_ORDER, INTERLEAVED

# Megatron's engines, whose sharded weights are those of FSDP.
MEGATRON = ("megatron", "megatron-core")
# The engine whose runs in the order ZB-V others' are predicted as.
ENGINE_OF_ZB_V = "zero-bubble"
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp8", "fp4", "fp32")


def engine_of(row: RunRow) -> tuple[str, str]:
    """The engine that predicts a row's software, and a note where it is assumed."""
    is_megatron = row.engine in MEGATRON
    if is_megatron and row.by_megatron_fsdp:
        return "megatron-fsdp", ""
    if row.engine and not (is_megatron and row.by_fsdp):
        return row.engine, ""
    # Sharded weights, and gradients, are FSDP's, whatever runs it.
    shards = row.by_fsdp or (not row.engine and (row.zero_level or 0) > 1)
    assumed = row.sharded_engine if shards else "megatron"
    if row.engine:
        return assumed, f"zero {row.text('zero')} is sharded as by engine {assumed}"
    text = row.text("engine")
    what = f"engine {shown(text)} is unknown" if text else "engine is empty"
    return assumed, f"{what}: predicted as engine {assumed}"


def order_of(row: RunRow, engine: str) -> tuple[str, str, str]:
    """The order of passes that a row's engine names, or else its notes; the engine that runs it;
    and a note if this is not the row's own engine. The order is empty if nothing names it."""
    if row.order:
        return row.order, engine, ""
    if engine == "zero-bubble":
        return "", "zero-bubble-waiting", ""
    order = row.noted_order
    if not order or not ENGINES[engine].order_problem(order, default=DEFAULT_ORDER):
        return order, engine, ""
    return order, ENGINE_OF_ZB_V, f"{order} is predicted as engine {ENGINE_OF_ZB_V} runs it"


def exchange_of(row: RunRow, gpus: Gpus, *, is_hybrid: bool) -> tuple[str, str]:
    """The engine of Megatron-Bridge that exchanges experts' tokens by a dispatcher, and a note
    where the dispatcher or the graph is assumed."""
    if row.drops_tokens:
        return "megatron-bridge", "tokens are dropped: no exchange waits for its host"
    if row.graph == "whole":
        return "megatron-bridge-graph", ""
    is_rack = catalog.hardware(gpus.hardware).node.is_rack
    has_graphs = is_rack and (row.year, row.month) >= row.whole_graphs_from
    # A row that has its recipe's settings would say that there is a graph.
    if has_graphs and row.recipe and not is_hybrid and not row.offload_text:
        return "megatron-bridge-graph", "one CUDA graph assumed, as recipes of this release have it"
    is_assumed = not row.dispatcher
    if row.dispatcher == "alltoall" or (is_assumed and not is_rack):
        note = "dispatcher is empty: alltoall assumed" if is_assumed else ""
        return "megatron-bridge-alltoall", note
    note = "dispatcher is empty: hybridep assumed, as recipes have it here" if is_assumed else ""
    is_eager = not row.graph and gpus.hardware in row.eager_on
    return "megatron-bridge-eager" if is_eager else "megatron-bridge", note


def variant_of(row: RunRow, engine: str) -> str:
    """The variant of an engine that a row's kernels and precision ask for."""
    if engine == "fsdp":
        before, earlier = row.variant_before
        variant = earlier if row.date and row.date < before else row.variant
        engine = f"{variant}-rowwise" if row.rowwise else variant
    if engine == "megatron-core" and row.fused_loss:
        return "megatron-core-fused-loss"
    # Of Megatron-Bridge's variants one was seen to train adapters.
    is_bridge = ENGINES[engine].system == "megatron-bridge"
    return "megatron-bridge" if row.adapters and is_bridge else engine


def zero_of(row: RunRow, engine: str) -> tuple[int, str]:
    """The ZeRO level of a row, and a note where it is assumed."""
    if row.zero_level is not None:
        return row.zero_level, ""
    column = "zero"
    if text := row.text(column):
        raise FieldError(column, f"{shown(text)} is no ZeRO level: give 0, 1, 2 or 3, or nothing")
    level = 3 if ENGINES[engine].system == "fsdp" else 1
    return level, f"zero is empty: level {level} assumed"


def replicas_of(row: RunRow, data: int, context: int, gpus_per_node: int) -> tuple[int, str]:
    """The replicas of a row's shards, and a note where they are assumed; 1 if it says none."""
    ranks, replicas, note = data * context, 1, ""
    if row.replicas is not None:
        replicas = row.replicas
    elif row.shards is not None:
        replicas = ranks // row.shards if row.shards > 1 and ranks % row.shards == 0 else 1
    elif row.shards_in_node:
        replicas = max(1, ranks // gpus_per_node)
        note = f"shards lie inside a node: {replicas} replicas assumed"
    if data % replicas:
        text = shown(row.text("zero"))
        refuse("zero", f"{text}: {replicas} replicas do not divide dp {data}: correct one")
    return replicas, note


def precision_of(row: RunRow, engine: str) -> tuple[Precision, str]:
    """The precision of a row, and a note where it is assumed."""
    column = "precision"
    text = row.text(column)
    if not text and engine == "deepspeed":
        return "fp32", "precision is empty: fp32 assumed, which is Megatron-DeepSpeed's default"
    if not text:
        return "bf16", "precision is empty: bf16 assumed"
    if row.precision == "fp4" and engine == "fsdp":
        return "fp8", f"{text} is predicted as fp8"
    for name in PRECISIONS:
        if name == row.precision:
            return name, ""
    raise FieldError(
        column, f"{shown(text)} is unknown: give bf16, fp16, fp8, fp4 or fp32, or nothing"
    )


def network_of(row: RunRow, gpus_per_node: int) -> float | None:
    """The rate of a node's network in GB/s; None if a row does not name it."""
    if row.node_gbits is not None:
        return row.node_gbits / 8
    return None if row.gpu_gbits is None else row.gpu_gbits / 8 * gpus_per_node


# What a row does not say of a run that its users chose for speed, or left to a recipe.


def unsaid_of(row: RunRow, engine: str, stages: int) -> tuple[str, ...]:
    """The columns of a benchmark's row that are empty though its batch is said: the micro-batch,
    and the chunks of stages that may have several. Megatron's arguments have defaults instead, and
    training as users do it is not tuned."""
    if row.arguments or not row.benchmark or row.count("global_batch") is None:
        return ()
    has_chunks = stages > 1 and set(INTERLEAVED) <= set(ENGINES[engine].orders)
    asked = {"micro_batch": row.count("grad_accumulation") is None, "vpp": has_chunks}
    return tuple(name for name, is_open in asked.items() if is_open and not row.count(name))


def recomputation_of(row: RunRow, model: ModelSpec, notes: list[str]) -> Recomputation:
    """What a row recomputes, or else its software's recipes."""
    if row.recompute:
        text = row.recompute_text if row.recompute == "unknown" else ""
        return Recomputation(way=row.recompute, blocks=row.recomputed_blocks, text=text)
    is_large = _weights(model) > row.recipe_recompute_above
    way = row.recipe_recompute if is_large else ""
    as_recipes = f"{way} assumed, as recipes have it" if way else "none assumed"
    notes.append(f"recompute is not said: {as_recipes}")
    return Recomputation(way=way or "none")


def _weights(model: ModelSpec) -> float:
    """About how many parameters a model's blocks have."""
    experts, pattern = model.experts, model.pattern
    networks, width = (experts.count, experts.ffn) if experts else (1, model.ffn)
    share = sum(letter in "EGA" for letter in pattern) / len(pattern) if pattern else 1.0
    return model.layers * model.hidden * (4 * model.hidden + 3 * share * networks * width)


def batches_at_once(row: RunRow, micro_batch: int, of_step: int, stages: int) -> int:
    """The micro-batches for which a pipeline fills and drains, of all ``of_step``: in AutoModel
    those of a rank's local batch."""
    if row.local_batch is None or stages == 1:
        return of_step
    at_once = max(1, row.local_batch // micro_batch)
    if of_step % at_once:
        problem = f"LBS {row.local_batch} does not divide the batch of a rank: correct one of them"
        refuse("notes", problem)
    return at_once
