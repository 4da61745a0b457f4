"""A measured run's configuration: what a row of a table says, and what is assumed otherwise.

Nothing that was measured is read. From the column ``notes`` only these phrases are: "tied
embeddings" and "untie-embeddings", "dropout on", "first and last stage have one layer less",
"unfused attention" and "attention-backend=unfused", "swiglu=1", "non-overlap launch", "tokendrop",
"schedule ZBV", "torch.compile", "kernels TE", "LBS N",
those about parts of models (``experiments.runs.run_shapes``), and the network, as "1600 Gbps
node-node" or "400 Gb/s RDMA a GPU".
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from experiments.runs.run_arguments import (
    are_arguments,
    batches_at_once,
    data_parallel_of,
    ends_of,
    fsdp_of,
    fuses_loss,
    recompute_of,
    recompute_said,
    unsaid_of,
    writes_attention_out,
)
from experiments.runs.run_words import (
    USUAL_OF_ENGINE,
    Gpus,
    Usual,
    dispatcher_of,
    engine_of,
    exchange_of,
    gpus_of,
    network_of,
    order_of,
    precision_of,
    replicas_of,
    software_of,
    zero_of,
)
from experiments.runs.runs_table import TableRow, count_of, flag_of, text_of
from experiments.runs.shapes import Shape, replicated, shape_of
from mistlab.core.values import refuse, shown
from mistlab.cost.confidence import BITS, Blocks, RunKind
from mistlab.engines.engine import ENGINES, Precision
from mistlab.plan.workload import Attention

# Micro-batches of a step where a table does not say the batch.
MICRO_BATCHES = 8
# GPUs of a node where neither the table nor the hardware is known to differ.
GPUS_OF_A_NODE = 8
# Systems that split sequences among tensor-parallel ranks where a row does not say.
SEQUENCE_PARALLEL = ("nanotron", "fsdp", "megatron", "megatron-core", "megatron-bridge")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One run's configuration; equal configurations are predicted once.

    ``otherwise`` is the engine that takes the place of ``engine`` where memory is short or no
    host gets ahead of its GPU; empty for none. A step fills and drains its pipeline ``fillings``
    times, each with ``micro_batches``. ``recompute`` is what a row says; with ``saves_unsaid`` it
    says nothing, and ``recompute`` is what recipes say. ``notes`` are the assumptions; the fastest
    choice of what is ``unsaid`` counts (``experiments.runs.run_jobs``).
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
    recompute: str
    saves_unsaid: bool
    precision: Precision
    attention: Attention
    short_ends: bool
    ends: tuple[int, int] | None
    drops_tokens: bool
    node_gbytes_per_s: float | None
    notes: tuple[str, ...]
    kind: RunKind
    unsaid: tuple[str, ...] = ()

    @property
    def global_batch(self) -> int:
        """Sequences for which a pipeline fills."""
        return self.micro_batch * self.micro_batches * self.data_parallel


def configuration_of(row: TableRow, hardware: str = "") -> Configuration:
    """The configuration of a row; refuses a row that contradicts itself or says too little.

    ``hardware`` is the name of a hardware file of the caller's, if there is one."""
    cells = row.cells
    notes: list[str] = []
    remarks = text_of(cells, "notes").casefold()
    zero_text = text_of(cells, "zero")
    engine, note = engine_of(text_of(cells, "engine"), zero_text)
    notes.append(note)
    is_assumed = bool(note)
    gpus = gpus_of(text_of(cells, "hardware"), software_of(text_of(cells, "engine")), hardware)
    notes.append(gpus.note)
    usual = USUAL_OF_ENGINE.get(engine)
    order, engine, note = order_of(text_of(cells, "engine"), engine, remarks)
    notes.append(note)
    shape, found = shape_of(cells, remarks, usual)
    notes += found
    shape, note = replicated(shape, count_of(cells, "tp") or 1)
    notes.append(note)
    if engine == "megatron-bridge" and experts_of(shape, cells):
        engine, note = exchange_of(
            text_of(cells, "dispatcher") or dispatcher_of(text_of(cells, "model")),
            remarks,
            gpus,
            text_of(cells, "engine"),
            joined=shape.model.is_hybrid or bool(text_of(cells, "offload")),
        )
        notes.append(note)
    precision, note = precision_of(text_of(cells, "precision"), engine)
    notes.append(note)
    if engine == "megatron" and precision not in ENGINES[engine].memory:
        notes.append(f"engine megatron has no {precision}: predicted as engine megatron-core")
        engine = "megatron-core"
    engine = _variant(engine, cells, remarks)
    zero, note = zero_of(zero_text, engine)
    notes.append(note)
    degrees = {name: _degree(cells, name, notes) for name in ("tp", "pp", "cp")}
    _check_offload(cells, notes)
    experts, parts = _expert_degrees(cells, experts_of(shape, cells), degrees["tp"], engine)
    num_gpus, data = _ranks(cells, degrees, experts * parts, remarks, notes)
    experts = _divisor(experts, degrees["tp"] * degrees["cp"] * data, parts, notes)
    micro_batch, sequence_length = _sequences(cells, notes)
    of_step = _micro_batches(cells, micro_batch, data, notes)
    at_once = batches_at_once(cells, remarks, micro_batch, of_step, degrees["pp"])
    recompute = recompute_of(cells, shape.model, notes)
    gpus_per_node = count_of(cells, "gpus_per_node")
    replicas, note = replicas_of(zero_text, data, degrees["cp"], gpus_per_node or GPUS_OF_A_NODE)
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
        overlaps="non-overlap launch" not in remarks,
        chunks=count_of(cells, "vpp") or 1,
        order=order,
        zero=zero,
        state_replicas=replicas,
        sequence_parallel=_sequence_parallel(cells, engine, degrees["tp"], notes),
        recompute=recompute or "none",
        saves_unsaid=not recompute_said(cells),
        precision=precision,
        attention=_attention(remarks, text_of(cells, "source"), shape, usual),
        drops_tokens="tokendrop" in remarks and ENGINES[engine].drops_tokens,
        node_gbytes_per_s=network_of(remarks, gpus_per_node or GPUS_OF_A_NODE),
        short_ends="first and last stage have one layer less" in remarks,
        ends=ends_of(remarks),
        notes=tuple(note for note in notes if note),
        kind=_kind(cells, remarks, shape, gpus, precision, "" if is_assumed else engine),
        unsaid=() if is_assumed or order else unsaid_of(cells, remarks, engine, degrees["pp"]),
    )


def _variant(engine: str, cells: Mapping[str, str], remarks: str) -> str:
    """The variant of an engine that a row's precision and remarks ask for."""
    if engine == "fsdp":
        rowwise = "-rowwise" if "rowwise" in text_of(cells, "precision").casefold() else ""
        engine = f"{fsdp_of(cells, remarks)}{rowwise}"
    if engine == "megatron-core" and fuses_loss(remarks):
        return "megatron-core-fused-loss"
    if not _is_adapted(cells, remarks):
        return engine
    # Of Megatron-Bridge's variants one trains adapters.
    is_bridge = ENGINES[engine].system == "megatron-bridge"
    adapters = f"{'megatron-bridge' if is_bridge else engine}-adapters"
    return adapters if adapters in ENGINES else engine


def _is_adapted(cells: Mapping[str, str], remarks: str) -> bool:
    """Whether a run trains adapters alone."""
    is_said = any(word in remarks for word in ("lora", "phase peft"))
    return is_said or "lora" in text_of(cells, "zero").casefold()


def _kind(
    cells: Mapping[str, str],
    remarks: str,
    shape: Shape,
    gpus: Gpus,
    precision: Precision,
    engine: str,
) -> RunKind:
    """What bounds depend on: of remarks, phrases about adapters and about a phase of training. An
    engine that is only assumed is empty."""
    blocks: Blocks = "experts" if experts_of(shape, cells) > 1 else "dense"
    if shape.model.is_hybrid:
        blocks = "hybrid"
    return RunKind(
        software=software_of(text_of(cells, "engine")),
        engine=engine and ENGINES[engine].family,
        hardware=gpus.hardware,
        blocks="adapters" if _is_adapted(cells, remarks) else blocks,
        bits=BITS[precision],
        is_benchmark="phase " not in remarks,
    )


def _at_first(engine: str, degrees: Mapping[str, int]) -> str:
    """The engine that a run takes if memory allows it, and if its host gets ahead."""
    splits = degrees["tp"] > 1
    return "nanotron-whole-inputs" if engine == "nanotron" and splits else engine


def _attention(remarks: str, source: str, shape: Shape, usual: Usual | None) -> Attention:
    is_windowed = any(name in _FUSED_ONLY and part for name, part in shape.parts)
    written_out = writes_attention_out(remarks, source) or (
        usual is not None and usual.attention == "math"
    )
    return "math" if written_out and not is_windowed else "flash"


# Parts of models with which attention is never written out.
_FUSED_ONLY = {"window", "sinks"}


# What offloads are told by: what lies in host memory, or whose memory it is.
OFFLOADED = ("act", "optim", "weight", "param", "grad", "cpu")


def _degree(cells: Mapping[str, str], name: str, notes: list[str]) -> int:
    found = count_of(cells, name)
    if found is None and name != "cp":
        notes.append(f"{name} is empty: 1 assumed")
    return found or 1


def _check_offload(cells: Mapping[str, str], notes: list[str]) -> None:
    """Note what no plan of these engines can say: activations or states in host memory."""
    offload = text_of(cells, "offload").casefold()
    if offload in ("", "none", "no", "0", "0.0", "false", "off"):
        return
    if not any(word in offload for word in OFFLOADED):
        refuse("offload", f"{shown(offload)} cannot be read: give none, or activations")
    notes.append(f"predicted without offload ({offload})")


def _sequences(cells: Mapping[str, str], notes: list[str]) -> tuple[int, int]:
    """The sequences of a micro-batch, and the tokens of a sequence."""
    micro_batch, sequence_length = (
        count_of(cells, "micro_batch"),
        count_of(cells, "sequence_length"),
    )
    if sequence_length is None:
        refuse("sequence_length", "is empty: give the tokens of a sequence")
    if micro_batch is None:
        notes.append("micro_batch is empty: 1 assumed")
    return micro_batch or 1, sequence_length


def experts_of(shape: Shape, cells: Mapping[str, str]) -> int:
    """How many experts a model has: none, or as many as its shape says."""
    own = dict(shape.parts).get("experts")
    return own.count if own is not None else count_of(cells, "experts") or 0


def _expert_degrees(
    cells: Mapping[str, str], experts: int, tensor: int, engine: str
) -> tuple[int, int]:
    """The ranks that share a block's experts, and those that share an expert."""
    if experts <= 1:
        return 1, 1
    ranks = count_of(cells, "ep") or 1
    if experts % ranks:
        refuse("ep", f"{ranks} does not divide experts {experts}: give a divisor")
    # Megatron's own default divides experts as it divides other weights; recipes do not.
    own = 1 if ENGINES[engine].system == "megatron-bridge" else tensor
    return ranks, count_of(cells, "etp") or own


def _divisor(experts: int, ranks: int, parts: int, notes: list[str]) -> int:
    """The ranks that share experts, as far as there are so many in a stage."""
    own = math.gcd(experts, ranks // parts) if ranks % parts == 0 else 0
    if not own:
        refuse("etp", f"{parts} does not divide tp x cp x dp {ranks}: correct one of them")
    if own != experts:
        notes.append(f"ep {experts} does not divide tp x cp x dp: {own} assumed")
    return own


def _ranks(
    cells: Mapping[str, str],
    degrees: Mapping[str, int],
    of_experts: int,
    remarks: str,
    notes: list[str],
) -> tuple[int, int]:
    """The number of GPUs, and the degree of data parallelism; refuses unlike ones.

    Where neither is said there are as many as the experts need, for Megatron's own tests a node at
    least.
    """
    split = degrees["tp"] * degrees["pp"] * degrees["cp"]
    product = f"tp {degrees['tp']} x pp {degrees['pp']} x cp {degrees['cp']}"
    gpus, data = count_of(cells, "gpus"), count_of(cells, "dp")
    if gpus is None and data is None:
        data = data_parallel_of(remarks) or _data_of_batch(cells, notes)
    if gpus is None:
        named = "tp x pp x cp" if data is None else "tp x pp x cp x dp"
        if data is None and of_experts > degrees["tp"] * degrees["cp"]:
            data = -(-of_experts // (degrees["tp"] * degrees["cp"]))
            named = "tp x pp x cp, as often as the experts need"
        if (
            (data or 1) * split < GPUS_OF_A_NODE
            and are_arguments(remarks)
            and GPUS_OF_A_NODE % split == 0
        ):
            data, named = GPUS_OF_A_NODE // split, "a whole node"
        gpus = split * (data or 1)
        notes.append(f"gpus is empty: {gpus} assumed ({named})")
    if data is None:
        if gpus % split:
            refuse("gpus", f"{gpus} is no multiple of {product} = {split}: correct one of them")
        data = gpus // split
        notes.append(f"dp is empty: {data} assumed (gpus / (tp pp cp))")
    if split * data != gpus:
        refuse(
            "dp",
            f"{product} x dp {data} = {split * data}, but gpus is {gpus}: correct one of them",
        )
    return gpus, data


def _data_of_batch(cells: Mapping[str, str], notes: list[str]) -> int | None:
    """The degree of data parallelism that a row's batches say together; None if they say none."""
    batch, given = count_of(cells, "global_batch"), count_of(cells, "grad_accumulation")
    at_once = (given or 1) * (count_of(cells, "micro_batch") or 1)
    if batch is None or given is None or batch % at_once:
        return None
    notes.append(f"dp is empty: {batch // at_once} assumed (global_batch / micro-batches)")
    return batch // at_once


def _micro_batches(cells: Mapping[str, str], micro_batch: int, data: int, notes: list[str]) -> int:
    """The micro-batches of a step; a last micro-batch that is not full counts as one."""
    batch, at_once = count_of(cells, "global_batch"), micro_batch * data
    given = count_of(cells, "grad_accumulation")
    if batch is None:
        micro_batches = given or MICRO_BATCHES
        sequences = micro_batches * at_once
        notes.append(f"global_batch is empty: {sequences} assumed ({micro_batches} micro-batches)")
        return micro_batches
    if given is not None and given * at_once != batch:
        refuse(
            "global_batch",
            f"{batch} is not micro_batch {micro_batch} x dp {data} x grad_accumulation {given}: "
            "correct one of them",
        )
    if batch % at_once:
        notes.append(
            f"global_batch {batch} is no multiple of micro_batch x dp = {at_once}: predicted as "
            f"{-(-batch // at_once) * at_once}"
        )
    return -(-batch // at_once)


def _sequence_parallel(
    cells: Mapping[str, str], engine: str, tensor: int, notes: list[str]
) -> bool:
    found = flag_of(cells, "sequence_parallel")
    if found is None and tensor > 1:
        found = ENGINES[engine].system in SEQUENCE_PARALLEL
        notes.append(f"sequence_parallel is empty: {'on' if found else 'off'} assumed")
    return bool(found) and tensor > 1
