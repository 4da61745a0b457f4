"""A row of a table of measured runs as typed columns, which need no test of free text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from experiments.runs.attention_kernels import AttentionKernel
from experiments.runs.runs_table import count_of, flag_of, text_of
from mistlab.engines.adapters import Base, Loss, States
from mistlab.engines.engine import Optimizer
from mistlab.plan.workload import AdapterTargets

# Ways to recompute: of blocks whole, half of them, some or those with experts; of each block every
# second product or attention's core; what takes hardly any time; as torchtitan or Megatron mean
# "selective", and as a recipe does; a way that nobody knows; nothing said.
Recomputed = Literal[
    "none",
    "full",
    "half",
    "blocks",
    "experts",
    "selective op",
    "core",
    "cheap",
    "selective",
    "recipe",
    "unknown",
    "",
]
Lengths = Literal["exact", "other", ""]
# The stage whose peak of memory was measured.
PeakOf = Literal["first", "last", "fullest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """What a run recomputes: a way, with how many blocks of each part, and a row's own words."""

    way: Recomputed = ""
    blocks: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A row's ``cells``, and what dialects make of its text; defaults say nothing.

    Numbers and flags are read from cells when asked for. ``text`` is for messages, and for whether
    a cell says anything.
    """

    cells: Mapping[str, str]

    # Software. ``software`` is what ran, ``engine`` the model that predicts it. Without an
    # engine of its own, ``sharded_engine`` predicts runs with sharded weights.
    software: str = "other"
    engine: str = ""
    sharded_engine: str = "fsdp"
    date: str = ""
    year: int = 0
    month: int = 0

    # Variants of engines: ``variant`` of FSDP; before a date another one.
    variant: str = "fsdp"
    variant_before: tuple[str, str] = ("", "")
    rowwise: bool = False
    whole_logits: bool = False
    fused_loss: bool = False
    adapters: bool = False
    targets: AdapterTargets = "all"
    base: Base = "16bit"
    moments: Optimizer = "adamw"
    loss: Loss = "whole"
    states: States = "mixed"
    # What dispatches experts' tokens: "flex" beside other work, "alltoall", or "".
    dispatcher: str = ""
    # The part of an iteration that is a CUDA graph: "whole", "some" or "". Recipes of racks make
    # the whole one from a release, hosts of these GPUs are late without one.
    graph: str = ""
    recipe: bool = False
    whole_graphs_from: tuple[int, int] = (0, 0)
    eager_on: tuple[str, ...] = ()
    drops_tokens: bool = False
    # TFLOP/s of products that one machine reaches on GPUs, and those of their hardware file.
    products_tflops_on: Mapping[str, tuple[float, float]] | None = None

    # The order of passes, by the engine's name or by the notes.
    order: str = ""
    noted_order: str = ""
    overlaps: bool = True
    # A pipeline's ends; the sequences of a rank for which it fills once.
    first_blocks: int | None = None
    last_blocks: int | None = None
    short_ends: bool = False
    local_batch: int | None = None
    data_ranks: int | None = None

    # Shards of states: the ZeRO level, whose sharding it is, and replicas or shards or nodes.
    zero_level: int | None = None
    by_fsdp: bool = False
    by_megatron_fsdp: bool = False
    replicas: int | None = None
    shards: int | None = None
    shards_in_node: bool = False

    # What lies on the host; gradients that come with the backward pass; a step that is in it.
    weights_on_host: bool = False
    gradients_on_host: bool = False
    optimizer_on_host: bool = False
    activations_on_host: bool = False
    offloaded_blocks: int | None = None
    late_gradients: bool = False
    steps_in_backward: bool = False
    pages_optimizer: bool = False
    # Weights that are whole on each GPU as they are read, and gradients until the last micro-batch.
    loads_whole: bool = False
    whole_gradients: bool = False
    # How lengths are known, in tables that tell it: exactly, or otherwise.
    lengths: Lengths = ""
    # The longest sample of usual data sets, where a row tells only what lengths are cut off at.
    longest_sample: int | None = None

    precision: str = ""
    offload: bool | None = None
    offload_text: str = ""
    recompute: Recomputed = ""
    recomputed_blocks: int = 0
    recompute_text: str = ""
    # What recipes recompute of models with more parameters than this.
    recipe_recompute: Recomputed = ""
    recipe_recompute_above: float = 0.0

    # The model: a name in small letters; a hybrid model of the catalogue, or the sizes of one that
    # is near to it with a note; the model that is built alike; the family by a word of the name, or
    # by its end.
    model: str = ""
    hybrid: str = ""
    near_model: Mapping[str, Any] | None = None
    near_note: str = ""
    alike: str = ""
    family: str = ""
    end: str = ""
    family_by_end: str = ""
    shares_as_gpt: bool = False
    tied: bool | None = None
    gated: bool = False
    pattern: str = ""
    head_channels: int | None = None
    vocab_multiple: int | None = None
    further_tokens: int = 0
    shared_ffn: int | None = None
    dense_blocks: int | None = None
    attention: str = ""
    # Whether the notes hold all of Megatron's arguments that are no defaults; its dropout; that of
    # others, and how an engine's own examples train a model.
    arguments: bool = False
    dropout: float | None = None
    noted_dropout: float | None = None
    usual_tied: bool | None = None
    # Of a released model that is trained further.
    tied_as_released: bool = False
    usual_vocab: int | None = None

    # Gbit/s of the network of a node, or of one of its links, or of one GPU.
    node_gbits: float | None = None
    gpu_gbits: float | None = None
    node_links: float = 1.0

    # The kernel of attention, where it is named.
    attention_kernel: AttentionKernel = ""
    # Whether experts are products of one batch, each padded to the tokens of the busiest.
    pads_experts: bool = False

    # What was measured: whether it failed, as a benchmark, and whose peak of memory.
    failed: bool = False
    benchmark: bool = True
    peak_of: PeakOf = "fullest"
    reserved: bool = False
    of_driver: bool = False

    def count(self, column: str) -> int | None:
        """The whole number in a column; None for nothing."""
        return count_of(self.cells, column)

    def flag(self, column: str) -> bool | None:
        """Whether a column says yes or no; None for nothing."""
        return flag_of(self.cells, column)

    def text(self, column: str) -> str:
        """A column's own words, for messages."""
        return text_of(self.cells, column)
