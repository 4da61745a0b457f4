"""A measured run's configuration: what a row of a table says, and what is assumed otherwise.

Nothing that was measured is read. From the column ``notes`` only these phrases are: "tied
embeddings" and "untie-embeddings", "first and last stage have one layer less", "unfused attention"
and "attention-backend=unfused", "swiglu=1", "non-overlap launch", "tokendrop", those about parts of
models (``mistlab.runs.parts``), and the network, as "1600 Gbps node-node" or "400 Gb/s RDMA a GPU".
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mistlab.engines.table import ENGINES
from mistlab.runs.cells import count_of, flag_of, text_of
from mistlab.runs.shapes import Shape, shape_of
from mistlab.runs.table import TableRow
from mistlab.runs.words import (
    Gpus,
    engine_of,
    exchange_of,
    gpus_of,
    network_of,
    precision_of,
    zero_of,
)
from mistlab.values.errors import refuse
from mistlab.values.field_checks import shown

# Micro-batches of a step where a table does not say the batch.
MICRO_BATCHES = 8
# GPUs of a node where neither the table nor the hardware is known to differ.
GPUS_OF_A_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One run's configuration; equal configurations are predicted once.

    ``recompute`` is what a row says, ``notes`` are the assumptions.
    """

    shape: Shape
    engine: str
    gpus: Gpus
    num_gpus: int
    gpus_per_node: int
    sequence_length: int
    micro_batch: int
    micro_batches: int
    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    expert_parallel: int
    expert_tensor_parallel: int
    overlaps: bool
    chunks: int
    zero: int
    sequence_parallel: bool
    recompute: str
    precision: str
    attention: str
    short_ends: bool
    node_gbytes_per_s: float | None
    notes: tuple[str, ...]

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.micro_batch * self.micro_batches * self.data_parallel


def configuration_of(row: TableRow) -> Configuration:
    """The configuration of a row; refuses a row that contradicts itself or says too little."""
    cells = row.cells
    notes: list[str] = []
    remarks = text_of(cells, "notes").casefold()
    zero_text = text_of(cells, "zero")
    engine, note = engine_of(text_of(cells, "engine"), zero_text)
    notes.append(note)
    gpus = gpus_of(text_of(cells, "hardware"))
    notes.append(gpus.note)
    shape, found = shape_of(cells, remarks)
    notes += found
    if engine == "megatron-bridge" and count_of(cells, "experts"):
        engine, note = exchange_of(text_of(cells, "dispatcher"), remarks, gpus)
        notes.append(note)
    precision, note = precision_of(text_of(cells, "precision"))
    notes.append(note)
    if engine == "megatron" and precision not in ENGINES[engine].memory:
        notes.append(f"engine megatron has no {precision}: predicted as engine megatron-core")
        engine = "megatron-core"
    zero, note = zero_of(zero_text, engine)
    notes.append(note)
    degrees = {name: _degree(cells, name, notes) for name in ("tp", "pp", "cp")}
    _check_offload(cells, notes)
    experts, parts = _expert_degrees(cells, degrees["tp"], engine)
    num_gpus, data = _ranks(cells, degrees, experts * parts, notes)
    micro_batch = count_of(cells, "micro_batch")
    if micro_batch is None:
        refuse("micro_batch", "is empty: give the sequences of a rank's micro-batch")
    sequence_length = count_of(cells, "sequence_length")
    if sequence_length is None:
        refuse("sequence_length", "is empty: give the tokens of a sequence")
    recompute = text_of(cells, "recompute").casefold()
    if not recompute or recompute.startswith(("not stated", "none (not stated")):
        notes.append("recompute is not said: none assumed")
        recompute = "none"
    gpus_per_node = count_of(cells, "gpus_per_node")
    return Configuration(
        shape=shape,
        engine=engine,
        gpus=gpus,
        num_gpus=num_gpus,
        gpus_per_node=gpus_per_node or 0,
        sequence_length=sequence_length,
        micro_batch=micro_batch,
        micro_batches=_micro_batches(cells, micro_batch, data, notes),
        data_parallel=data,
        tensor_parallel=degrees["tp"],
        pipeline_parallel=degrees["pp"],
        context_parallel=degrees["cp"],
        expert_parallel=experts,
        expert_tensor_parallel=parts,
        overlaps="non-overlap launch" not in remarks,
        chunks=count_of(cells, "vpp") or 1,
        zero=zero,
        sequence_parallel=_sequence_parallel(cells, engine, degrees["tp"], notes),
        recompute=recompute,
        precision=precision,
        attention=_attention(remarks, shape),
        node_gbytes_per_s=network_of(remarks, gpus_per_node or GPUS_OF_A_NODE),
        short_ends="first and last stage have one layer less" in remarks,
        notes=tuple(note for note in notes if note),
    )


def _attention(remarks: str, shape: Shape) -> str:
    unfused = "unfused attention" in remarks or "attention-backend=unfused" in remarks
    is_plain = {name for name, part in shape.parts if part} <= _WRITTEN_OUT
    return "math" if unfused and is_plain else "flash"


# Parts of models with which attention may be written out.
_WRITTEN_OUT = {"experts", "head_dim", "rotary_fraction", "position_embedding"}


def _degree(cells: Mapping[str, str], name: str, notes: list[str]) -> int:
    found = count_of(cells, name)
    if found is None and name != "cp":
        notes.append(f"{name} is empty: 1 assumed")
    return found or 1


def _check_offload(cells: Mapping[str, str], notes: list[str]) -> None:
    """Note what no plan of these engines can say: activations in host memory."""
    offload = text_of(cells, "offload").casefold()
    if offload in ("", "none"):
        return
    if "activations" not in offload and "act" not in offload:
        refuse("offload", f"{shown(offload)} cannot be read: give none, or activations")
    notes.append(f"predicted without offload ({offload})")


def _expert_degrees(cells: Mapping[str, str], tensor: int, engine: str) -> tuple[int, int]:
    """The ranks that share a block's experts, and those that share an expert."""
    experts = count_of(cells, "experts") or 1
    if experts == 1:
        return 1, 1
    ranks = count_of(cells, "ep") or 1
    if experts % ranks:
        refuse("ep", f"{ranks} does not divide experts {experts}: give a divisor")
    # Megatron's own default divides experts as it divides other weights; recipes do not.
    own = 1 if engine.startswith("megatron-bridge") else tensor
    return ranks, count_of(cells, "etp") or own


def _ranks(
    cells: Mapping[str, str], degrees: Mapping[str, int], of_experts: int, notes: list[str]
) -> tuple[int, int]:
    """The number of GPUs, and the degree of data parallelism; refuses unlike ones.

    Where neither is said there are as many as the experts need.
    """
    split = degrees["tp"] * degrees["pp"] * degrees["cp"]
    product = f"tp {degrees['tp']} x pp {degrees['pp']} x cp {degrees['cp']}"
    gpus, data = count_of(cells, "gpus"), count_of(cells, "dp")
    if gpus is None:
        named = "tp x pp x cp" if data is None else "tp x pp x cp x dp"
        if data is None and of_experts > degrees["tp"] * degrees["cp"]:
            data = -(-of_experts // (degrees["tp"] * degrees["cp"]))
            named = "tp x pp x cp, as often as the experts need"
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
    if degrees["tp"] * degrees["cp"] * data % of_experts:
        refuse("ep", f"ep x etp {of_experts} does not divide tp x cp x dp: correct one of them")
    return gpus, data


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
        notes.append(f"global_batch {batch} is no multiple of micro_batch x dp: rounded up")
    return -(-batch // at_once)


def _sequence_parallel(
    cells: Mapping[str, str], engine: str, tensor: int, notes: list[str]
) -> bool:
    found = flag_of(cells, "sequence_parallel")
    if found is None and tensor > 1:
        found = engine in ("nanotron", "fsdp") or engine.startswith("megatron")
        notes.append(f"sequence_parallel is empty: {'on' if found else 'off'} assumed")
    return bool(found) and tensor > 1
