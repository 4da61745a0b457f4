"""The configuration of a measured run: the settings that its row of a table states, and those that
are assumed.

Measured columns are never read. The texts of a table are interpreted by its dialect
(``experiments.runs.dialects``), so rows have typed columns here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from experiments.runs.attention_kernels import AttentionKernel
from experiments.runs.dialects.dialect import row_of
from experiments.runs.dialects.gpu_names import Gpus, gpus_of
from experiments.runs.kept_elsewhere import ALL_KEPT, KeptElsewhere
from experiments.runs.named_recomputation import redone_of
from experiments.runs.run_row import Recomputation, RunRow
from experiments.runs.runs_table import TableRow, counts_of
from experiments.runs.sequences import batches_at_once, sequences_of, tokens_of
from experiments.runs.shapes import Shape, replicated, shape_of, within_samples
from mistlab import catalog
from mistlab.core.values import FieldError, refuse, shown
from mistlab.cost.confidence import BITS, Blocks, Purpose, RunKind
from mistlab.engines.adapters import Base, Loss, States, Train
from mistlab.engines.engine import ENGINES, Optimizer, Precision
from mistlab.plan.workload import AdapterTargets, Attention, ModelSpec
from mistlab.schedule.orders import DEFAULT_ORDER, INTERLEAVED

# The number of micro-batches in a step that is assumed if a table does not state the batch size.
MICRO_BATCHES = 8
# The number of GPUs in a node that is assumed if neither the table nor the hardware file states it.
GPUS_OF_A_NODE = 8
# The ZeRO level at which weights are sharded, too.
WHOLE_SHARDED = 3
# The training systems that use sequence parallelism by default.
SEQUENCE_PARALLEL = ("nanotron", "fsdp", "megatron", "megatron-core", "megatron-bridge")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The configuration of a measured run; runs with equal configurations are predicted once.

    ``otherwise`` is the engine that replaces ``engine`` if memory is short or the host does not run
    ahead of its GPU; it may be empty. In a step the pipeline fills and drains ``fillings`` times,
    each time with ``micro_batches``. ``recompute`` is the recomputation that the row states or,
    with ``saves_unsaid``, that of the software's recipes. ``notes`` are assumptions. ``unsaid`` are
    settings that the row leaves open: the fastest values count (``experiments.runs.run_jobs``).
    """

    shape: Shape
    engine: str
    otherwise: str
    gpus: Gpus
    num_gpus: int
    gpus_per_node: int
    sequence_length: int
    micro_batch: int
    micro_batches: int
    fillings: int
    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    expert_parallel: int
    expert_tensor_parallel: int
    overlaps: bool
    chunks: int
    order: str
    zero: int
    state_replicas: int
    sequence_parallel: bool
    recompute: Recomputation
    saves_unsaid: bool
    states_stay: bool
    precision: Precision
    attention: Attention
    short_ends: bool
    ends: tuple[int, int] | None
    stages: tuple[int, ...]
    drops_tokens: bool
    node_gbytes_per_s: float | None
    attention_kernel: AttentionKernel
    notes: tuple[str, ...]
    kind: RunKind
    train: Train = "all"
    adapter_rank: int | None = None
    adapter_targets: AdapterTargets = "all"
    base: Base = "16bit"
    loss: Loss = "whole"
    states: States = "mixed"
    optimizer: Optimizer = "adamw"
    choices: tuple[tuple[str, int], ...] = ()
    unsaid: tuple[str, ...] = ()
    elsewhere: KeptElsewhere = ALL_KEPT

    @property
    def global_batch(self) -> int:
        """The sequences of a batch with which the pipeline is filled and drained once; a step may
        consist of several such batches.
        """
        return self.micro_batch * self.micro_batches * self.data_parallel

    def leaves_open(self, column: str) -> bool:
        """Whether a row leaves a setting open; such a run is predicted as the fastest choice."""
        return column in self.unsaid


def configuration_of(table_row: TableRow, hardware: str = "") -> Configuration:
    """The configuration that a row describes; refuses contradictory and incomplete rows.

    ``hardware`` is the name of a hardware file that the caller gives, if there is one.
    """
    row = row_of(table_row.cells)
    notes: list[str] = []
    engine, note = engine_of(row)
    notes.append(note)
    is_assumed = bool(note)
    gpus = gpus_of(row.text("hardware"), hardware, row.products_tflops_on)
    notes.append(gpus.note)
    order, engine, note = order_of(row, engine)
    notes.append(note)
    shape, assumed = shape_of(row)
    notes += assumed
    shape, note = replicated(
        within_samples(shape, row.attends_within), row.count("tp") or row.count("sp_ulysses") or 1
    )
    notes.append(note)
    if engine == "megatron-bridge" and experts_of(shape, row):
        engine, note = exchange_of(row, gpus, is_hybrid=shape.model.is_hybrid)
        notes.append(note)
    precision, note = precision_of(row, engine)
    notes.append(note)
    if engine == "megatron" and precision not in ENGINES[engine].memory:
        notes.append(f"engine megatron has no {precision}: predicted as engine megatron-core")
        engine = "megatron-core"
    engine = variant_of(row, engine)
    zero, note = zero_of(row, engine)
    notes.append(note)
    degrees = {name: _degree(row, name, notes) for name in ("tp", "pp", "cp")}
    _check_offload(row, notes)
    experts, parts = _expert_degrees(row, experts_of(shape, row), degrees["tp"], engine)
    num_gpus, data = _ranks(row, degrees, experts * parts, notes)
    ranks = degrees["tp"] * degrees["cp"] * data
    if not row.count("etp") and ranks % (experts * parts):
        # Expert parallelism uses all of these ranks, so none are left to split a single expert.
        parts = 1
    experts = _divisor(experts, ranks, parts, notes)
    micro_batch, sequence_length = (
        sequences_of(row, row.count("micro_batch"), data, notes),
        tokens_of(row, degrees["cp"], notes),
    )
    of_step = _micro_batches(row, micro_batch, data, notes)
    at_once = batches_at_once(row, micro_batch, of_step, degrees["pp"])
    recompute = recomputation_of(row, shape.model, notes)
    gpus_per_node = row.count("gpus_per_node")
    replicas, note = replicas_of(row, data, degrees["cp"], gpus_per_node or GPUS_OF_A_NODE)
    notes.append(note)
    return Configuration(
        shape=shape,
        engine=_at_first(engine, degrees),
        otherwise=engine if _at_first(engine, degrees) != engine else "",
        gpus=gpus,
        num_gpus=num_gpus,
        gpus_per_node=gpus_per_node or 0,
        sequence_length=sequence_length,
        micro_batch=micro_batch,
        micro_batches=at_once,
        fillings=of_step // at_once,
        data_parallel=data,
        tensor_parallel=degrees["tp"],
        pipeline_parallel=degrees["pp"],
        context_parallel=degrees["cp"],
        expert_parallel=experts,
        expert_tensor_parallel=parts,
        overlaps=row.overlaps,
        chunks=row.count("vpp") or 1,
        order=order,
        zero=zero,
        state_replicas=replicas,
        sequence_parallel=_sequence_parallel(row, engine, degrees["tp"], notes),
        recompute=recompute,
        saves_unsaid=not row.recompute,
        states_stay=row.states_stay,
        precision=precision,
        attention=_attention(row, shape),
        drops_tokens=row.drops_tokens and ENGINES[engine].drops_tokens,
        node_gbytes_per_s=network_of(row, gpus_per_node or GPUS_OF_A_NODE),
        attention_kernel=row.attention_kernel,
        short_ends=row.short_ends,
        ends=_ends(row),
        stages=_stages(row, shape.layers, degrees["pp"], notes),
        notes=tuple(note for note in notes if note),
        kind=_kind(row, shape, gpus, precision, "" if is_assumed else engine),
        train="adapters" if row.adapters else "all",
        adapter_rank=_rank(row, shape),
        adapter_targets=row.targets if row.adapters else "all",
        base=row.base if row.adapters else "16bit",
        loss=row.loss,
        states=row.states,
        optimizer=_optimizer(row, engine),
        choices=tuple(row.choices.items()),
        elsewhere=KeptElsewhere.of_row(
            row,
            of_step,
            _shards(data * degrees["cp"], replicas, zero),
            shape.model,
            recompute,
            micro_batch * sequence_length // degrees["cp"],
            ENGINES[engine].memory.get(precision),
        ),
        unsaid=() if is_assumed or order else unsaid_of(row, engine, degrees["pp"]),
    )


def _shards(ranks: int, replicas: int, zero: int) -> int:
    """The number of ranks among which a weight is sharded: one, unless the run uses ZeRO-3."""
    return ranks // replicas if zero >= WHOLE_SHARDED else 1


def _rank(row: RunRow, shape: Shape) -> int | None:
    """The rank of a run's LoRA adapters, at most the width of the model; None if the run trains no
    adapters.
    """
    rank = (row.count("adapter_rank") or row.usual_rank) if row.adapters else None
    return rank and min(rank, shape.hidden)


def _optimizer(row: RunRow, engine: str) -> Optimizer:
    """The optimizer of a run, if the engine that predicts the run supports it."""
    known = row.moments in ENGINES[engine].optimizers
    return row.moments if known else "adamw"


def _kind(row: RunRow, shape: Shape, gpus: Gpus, precision: Precision, engine: str) -> RunKind:
    """The kind of run, which determines error bounds; it does not name an engine that was only
    assumed.
    """
    blocks: Blocks = "experts" if experts_of(shape, row) > 1 else "dense"
    if shape.model.is_hybrid:
        blocks = "hybrid"
    return RunKind(
        software=row.software,
        engine=engine and ENGINES[engine].family,
        hardware=gpus.hardware,
        blocks="adapters" if row.adapters else blocks,
        bits=BITS[precision],
        purpose=_purpose(row),
    )


def _purpose(row: RunRow) -> Purpose:
    """The purpose of a row's run: a functional test, if the row lists all arguments of Megatron."""
    if row.arguments:
        return "functional test"
    return "benchmark" if row.benchmark else "training"


def _at_first(engine: str, degrees: Mapping[str, int]) -> str:
    """The engine that is tried first for a run; another one is tried if the run does not fit in
    memory, or if its host does not run ahead of its GPU.
    """
    splits = degrees["tp"] > 1
    return "nanotron-whole-inputs" if engine == "nanotron" and splits else engine


def _attention(row: RunRow, shape: Shape) -> Attention:
    is_windowed = any(name in _FUSED_ONLY and part for name, part in shape.parts)
    return "math" if row.attention == "math" and not is_windowed else "flash"


# Features of a model for which attention must be fused.
_FUSED_ONLY = {"window", "sinks"}


def _ends(row: RunRow) -> tuple[int, int] | None:
    """The numbers of blocks on the first and on the last pipeline stage, if a row states both."""
    first, last = row.first_blocks, row.last_blocks
    return None if first is None or last is None else (first, last)


def _stages(row: RunRow, layers: int, stages: int, notes: list[str]) -> tuple[int, ...]:
    """The number of blocks of each stage, for a row that counts embedding and head as layers. Empty
    for other rows, and if the counts do not add up to the model's blocks.
    """
    if not row.stage_layers:
        return ()
    blocks = counts_of(row.stage_layers)
    blocks[0] -= 1
    blocks[-1] -= 1
    if len(blocks) == stages and sum(blocks) == layers and min(blocks) > 0:
        return tuple(blocks)
    notes.append(f"stages of {row.stage_layers} layers are not {layers} blocks on pp {stages}")
    return ()


def _degree(row: RunRow, name: str, notes: list[str]) -> int:
    degree = row.devices_in_turn if name == "pp" else None
    degree = degree or row.count(name)
    if name == "cp" and (over_heads := row.count("sp_ulysses")):
        degree = (degree or 1) * over_heads
    if degree is None and name != "cp":
        notes.append(f"{name} is empty: 1 assumed")
    return degree or 1


def _check_offload(row: RunRow, notes: list[str]) -> None:
    """Note that copies of optimizer states to and from the host are not predicted."""
    if row.offload:
        notes.append(f"times are predicted without offload ({row.offload_text})")
    elif row.offload_text and row.offload is None:
        refuse(
            "offload",
            f"{shown(row.offload_text)} is unknown: give none, optimizer, weights or activations",
        )


def experts_of(shape: Shape, row: RunRow) -> int:
    """The number of experts in each block, as in the model's shape; 0 without experts."""
    experts = dict(shape.parts).get("experts")
    return experts.count if experts is not None else row.count("experts") or 0


def _expert_degrees(row: RunRow, experts: int, tensor: int, engine: str) -> tuple[int, int]:
    """The expert-parallel degree of a run, and the tensor-parallel degree inside an expert."""
    if experts <= 1:
        return 1, 1
    ranks = row.count("ep") or 1
    if experts % ranks:
        refuse("ep", f"{ranks} does not divide experts {experts}: give a divisor of {experts}")
    # Megatron by default splits experts as other weights; Megatron-Bridge's recipes do not.
    default = 1 if ENGINES[engine].system == "megatron-bridge" else tensor
    return ranks, row.count("etp") or default


def _divisor(experts: int, ranks: int, parts: int, notes: list[str]) -> int:
    """The expert-parallel degree, reduced until it divides the number of ranks of a stage."""
    shared = math.gcd(experts, ranks // parts) if ranks % parts == 0 else 0
    if not shared:
        refuse("etp", f"{parts} does not divide tp x cp x dp = {ranks}: give a divisor of {ranks}")
    if shared != experts:
        notes.append(f"ep {experts} does not divide tp x cp x dp: {shared} assumed")
    return shared


def _ranks(
    row: RunRow, degrees: Mapping[str, int], of_experts: int, notes: list[str]
) -> tuple[int, int]:
    """The number of GPUs of a run and its data-parallel degree; refuses contradictory rows.

    If the row states neither, the run has as many GPUs as its experts need; Megatron's own tests
    have at least one node.
    """
    split = degrees["tp"] * degrees["pp"] * degrees["cp"]
    product = f"tp {degrees['tp']} x pp {degrees['pp']} x cp {degrees['cp']}"
    gpus, data = row.devices or row.count("gpus"), row.count("dp")
    if row.devices is not None and row.devices != row.count("gpus"):
        notes.append(f"gpus {row.count('gpus')} are those of the machine: the run uses {gpus}")
    if gpus is None and data is None:
        data = row.data_ranks or _data_of_batch(row, notes)
    if gpus is None:
        named = "tp x pp x cp" if data is None else "tp x pp x cp x dp"
        if data is None and of_experts > degrees["tp"] * degrees["cp"]:
            data = -(-of_experts // (degrees["tp"] * degrees["cp"]))
            named = "tp x pp x cp, as often as the experts need"
        if (data or 1) * split < GPUS_OF_A_NODE and row.arguments and GPUS_OF_A_NODE % split == 0:
            data, named = GPUS_OF_A_NODE // split, "a whole node"
        gpus = split * (data or 1)
        notes.append(f"gpus is empty: {gpus} assumed ({named})")
    if data is None:
        if gpus % split:
            refuse("gpus", f"{gpus} is not a multiple of {product} = {split}: give a multiple")
        data = gpus // split
        notes.append(f"dp is empty: {data} assumed (gpus / (tp pp cp))")
    if split * data != gpus:
        refuse(
            "dp",
            f"{product} x dp {data} = {split * data}, but gpus is {gpus}: give degrees whose "
            f"product is {gpus}, or gpus {split * data}",
        )
    return gpus, data


def _data_of_batch(row: RunRow, notes: list[str]) -> int | None:
    """The data-parallel degree that follows from a row's batch sizes; None if none follows."""
    batch, given = row.count("global_batch"), row.count("grad_accumulation")
    at_once = (given or 1) * (row.count("micro_batch") or 1)
    if batch is None or given is None or batch % at_once:
        return None
    notes.append(f"dp is empty: {batch // at_once} assumed (global_batch / micro-batches)")
    return batch // at_once


def _micro_batches(row: RunRow, micro_batch: int, data: int, notes: list[str]) -> int:
    """The number of micro-batches in a step; a last micro-batch that is not full counts as one."""
    batch, at_once = row.count("global_batch"), micro_batch * data
    given = row.count("grad_accumulation")
    if batch is None:
        micro_batches = given or MICRO_BATCHES
        sequences = micro_batches * at_once
        notes.append(f"global_batch is empty: {sequences} assumed ({micro_batches} micro-batches)")
        return micro_batches
    if given is not None and given * at_once != batch:
        product = f"micro_batch {micro_batch} x dp {data} x grad_accumulation {given}"
        wanted = f"{given * at_once}, or leave grad_accumulation empty"
        refuse("global_batch", f"{batch} is not {product}: give {wanted}")
    if batch % at_once:
        notes.append(
            f"global_batch {batch} is not a multiple of micro_batch x dp = {at_once}: predicted as "
            f"{-(-batch // at_once) * at_once}"
        )
    return -(-batch // at_once)


def _sequence_parallel(row: RunRow, engine: str, tensor: int, notes: list[str]) -> bool:
    splits = row.flag("sequence_parallel")
    if splits is None and tensor > 1:
        splits = ENGINES[engine].system in SEQUENCE_PARALLEL
        notes.append(f"sequence_parallel is empty: {'on' if splits else 'off'} assumed")
    return bool(splits) and tensor > 1


# Which engines predict the software of measured runs, and the defaults of its recipes.


# The engines for Megatron; a run with sharded weights is predicted as FSDP instead.
MEGATRON = ("megatron", "megatron-core")
# The engine for runs whose pipeline schedule is ZB-V, whatever their software.
ENGINE_OF_ZB_V = "zero-bubble"
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp8", "fp4", "fp32", "tf32")


def engine_of(row: RunRow) -> tuple[str, str]:
    """The engine that predicts the software of a row, and a note if the engine is an assumption."""
    is_megatron = row.engine in MEGATRON
    if is_megatron and row.by_megatron_fsdp:
        return "megatron-fsdp", ""
    if row.engine and not (is_megatron and row.by_fsdp):
        return row.engine, ""
    # A run that shards weights or gradients is predicted as FSDP, whatever its software.
    shards = row.by_fsdp or (not row.engine and (row.zero_level or 0) > 1)
    assumed = row.sharded_engine if shards else "megatron"
    if row.engine:
        return assumed, f"zero {row.text('zero')} is sharded as by engine {assumed}"
    text = row.text("engine")
    what = f"engine {shown(text)} is unknown" if text else "engine is empty"
    return assumed, f"{what}: predicted as engine {assumed}"


def order_of(row: RunRow, engine: str) -> tuple[str, str, str]:
    """The pipeline schedule that a row's engine or notes name, the engine that predicts it, and a
    note if that is not the row's own engine. Empty if no schedule is named.
    """
    if row.order:
        return row.order, engine, ""
    if engine == "zero-bubble":
        return "", "zero-bubble-waiting", ""
    order = row.noted_order
    if not order or not ENGINES[engine].order_problem(order, default=DEFAULT_ORDER):
        return order, engine, ""
    return order, ENGINE_OF_ZB_V, f"{order} is predicted as engine {ENGINE_OF_ZB_V} runs it"


def exchange_of(row: RunRow, gpus: Gpus, *, is_hybrid: bool) -> tuple[str, str]:
    """The variant of Megatron-Bridge's engine for a row's dispatcher, by which its run sends tokens
    to experts; and a note if the dispatcher or a CUDA graph is assumed.
    """
    if row.drops_tokens:
        return "megatron-bridge", "tokens are dropped: no exchange waits for its host"
    if row.graph == "whole":
        return "megatron-bridge-graph", ""
    is_rack = catalog.hardware(gpus.hardware).node.is_rack
    has_graphs = is_rack and (row.year, row.month) >= row.whole_graphs_from
    # From ``whole_graphs_from`` on, recipes for racks run an iteration as one CUDA graph, so rows
    # that follow a recipe are assumed to do so.
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
    """The variant of an engine that has the kernels and the precision of a row."""
    if engine == "fsdp":
        before, earlier = row.variant_before
        variant = earlier if row.date and row.date < before else row.variant
        engine = f"{variant}-rowwise" if row.rowwise else variant
        if row.whole_logits and not row.rowwise and (row.count("tp") or 1) > 1:
            base = "fsdp-eager" if variant == "fsdp" else variant
            engine = f"{base}-whole-logits"
    if engine == "megatron-core" and row.fused_loss:
        return "megatron-core-fused-loss"
    if engine == "deepspeed" and row.by_pipeline_engine:
        return "deepspeed-pipe"
    # Only one variant of Megatron-Bridge's engine is known to train adapters.
    is_bridge = ENGINES[engine].system == "megatron-bridge"
    return "megatron-bridge" if row.adapters and is_bridge else engine


def zero_of(row: RunRow, engine: str) -> tuple[int, str]:
    """The ZeRO level of a run, and a note if it is assumed."""
    if row.zero_level is not None:
        return row.zero_level, ""
    column = "zero"
    if text := row.text(column):
        raise FieldError(
            column,
            f"{shown(text)} is not a ZeRO level: give 0 to 3, or leave it empty",
        )
    level = 3 if ENGINES[engine].system == "fsdp" else 1
    return level, f"zero is empty: level {level} assumed"


def replicas_of(row: RunRow, data: int, context: int, gpus_per_node: int) -> tuple[int, str]:
    """How many copies of the sharded states a run has (more than one in hybrid sharding), and a
    note if the number is assumed.
    """
    ranks, replicas, note = data * context, 1, ""
    if row.replicas is not None:
        replicas = row.replicas
    elif row.shards is not None:
        replicas = ranks // row.shards if row.shards > 1 and ranks % row.shards == 0 else 1
    elif row.shards_in_node:
        replicas = max(1, ranks // gpus_per_node)
        note = f"shards lie inside a node: {replicas} replicas assumed"
    if data % replicas:
        problem = f"{shown(row.text('zero'))} means {replicas} replicas of the sharded states"
        refuse("zero", f"{problem}, which do not divide dp {data}: give a divisor of {data}")
    return replicas, note


def precision_of(row: RunRow, engine: str) -> tuple[Precision, str]:
    """The precision of a run, and a note if it is assumed."""
    column = "precision"
    text = row.text(column)
    if not text and not row.precision and engine in ("deepspeed", "deepspeed-pipe"):
        return "fp32", "precision is empty: fp32 assumed, which is Megatron-DeepSpeed's default"
    if not text and not row.precision:
        return "bf16", "precision is empty: bf16 assumed"
    for name in PRECISIONS:
        if name == row.precision:
            return name, "" if text else f"precision is empty: {name} assumed, as examples have it"
    known = ", ".join(PRECISIONS)
    raise FieldError(column, f"{shown(text)} is unknown: give one of {known}, or leave it empty")


def network_of(row: RunRow, gpus_per_node: int) -> float | None:
    """The bandwidth of a node's network in GB/s; None if a row does not state it."""
    if row.node_gbits is not None:
        return row.node_links * row.node_gbits / 8
    return None if row.gpu_gbits is None else row.gpu_gbits / 8 * gpus_per_node


# Finds the settings that a row leaves out because its authors tuned them or left them to a recipe.


def unsaid_of(row: RunRow, engine: str, stages: int) -> tuple[str, ...]:
    """The settings that a row leaves open because its benchmark was tuned: the micro-batch size,
    and the model chunks per stage if the engine can have several. A row that does not state its
    batch size leaves none open, nor do Megatron's arguments, which have defaults, and ordinary
    training runs, which are not tuned.
    """
    if row.arguments or not row.benchmark or row.count("global_batch") is None:
        return ()
    has_chunks = stages > 1 and set(INTERLEAVED) <= set(ENGINES[engine].orders)
    asked = {"micro_batch": row.count("grad_accumulation") is None, "vpp": has_chunks}
    return tuple(name for name, is_open in asked.items() if is_open and not row.count(name))


def recomputation_of(row: RunRow, model: ModelSpec, notes: list[str]) -> Recomputation:
    """The recomputation that a row states; without one, that of its software's recipes."""
    if row.recompute:
        text = row.recompute_text if row.recompute == "unknown" else ""
        way, blocks = row.recompute, row.recomputed_blocks
        return Recomputation(way=way, blocks=blocks, text=text, redone=redone_of(row))
    is_large = _weights(model) > row.recipe_recompute_above
    usual = row.recipe_recompute if is_large else ""
    as_recipes = f"{usual} assumed, as recipes have it" if usual else "none assumed"
    notes.append(f"recompute is empty: {as_recipes}")
    return Recomputation(way=usual or "none")


def _weights(model: ModelSpec) -> float:
    """The approximate number of parameters in the model's blocks."""
    experts, pattern = model.experts, model.pattern
    networks, width = (experts.count, experts.ffn) if experts else (1, model.ffn)
    share = sum(letter in "EGA" for letter in pattern) / len(pattern) if pattern else 1.0
    return model.layers * model.hidden * (4 * model.hidden + 3 * share * networks * width)
