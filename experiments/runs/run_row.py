"""A row of a table of measured runs as typed columns: its texts are already interpreted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from experiments.runs.attention_kernels import AttentionKernel
from experiments.runs.runs_table import count_of, flag_of, text_of
from mistlab.engines.adapters import Base, Loss, States
from mistlab.engines.engine import Optimizer
from mistlab.plan.workload import AdapterTargets

# Kinds of recomputation: all blocks, half, some, or those with experts; per block every second
# product, or the attention core; only cheap operators; "selective" as torchtitan or Megatron define
# it; a recipe's; unknown; or empty.
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
# The pipeline stage whose memory peak was measured; "node" is the fullest of the first node,
# "fullest" that of all nodes.
PeakOf = Literal["first", "last", "node", "fullest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """Recomputation of a run: kind, number of blocks of each part, the row's own words, and the
    parts of a block that are ``redone`` besides.
    """

    way: Recomputed = ""
    blocks: int = 0
    text: str = ""
    redone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A row of a table: its text ``cells``, and the typed columns that dialect rules derive;
    defaults mean that the row does not give the value.

    Numbers and flags are read from cells when asked for. ``text`` is for messages, and for whether
    a cell says anything.
    """

    cells: Mapping[str, str]

    # The software that ran, and the engine that predicts it; ``sharded_engine`` predicts runs with
    # sharded weights where the software has no engine of its own.
    software: str = "other"
    engine: str = ""
    sharded_engine: str = "fsdp"
    date: str = ""
    year: int = 0
    month: int = 0

    # The variant of FSDP's engine; the variants of other engines, and the one for runs before a
    # date.
    variant: str = "fsdp"
    variant_before: tuple[str, str] = ("", "")
    rowwise: bool = False
    whole_logits: bool = False
    fused_loss: bool = False
    # Whether DeepSpeed's pipeline engine runs a model.
    by_pipeline_engine: bool = False
    adapters: bool = False
    targets: AdapterTargets = "all"
    # Whether adapters have dropout; and whether query, key and value projections are one GEMM.
    drops_adapter_inputs: bool = False
    fused_queries: bool = False
    # Whether experts stay in 16 bits although the base model has fewer bits; and the parameters of
    # frozen embedding tables that the model's shape does not have, such as one for each block.
    wide_experts: bool = False
    further_tables: int = 0
    # Whether the model returns its blocks' keys and values, as for generation.
    returns_keys: bool = False
    # Whether frozen weights are sharded in 32 bits, of which 16 are gathered.
    wide_shards: bool = False
    # Whether a loss outside of the sharded model gathers the head's weights for itself.
    gathers_head: bool = False
    base: Base = "16bit"
    moments: Optimizer = "adamw"
    moments_of_4_bits: bool = False
    loss: Loss = "whole"
    states: States = "mixed"
    # Token dispatcher of experts: "flex" (overlapped), "alltoall", or "" if not given.
    dispatcher: str = ""
    # Part of an iteration captured as a CUDA graph: "whole", "some" or "". Recipes for racks
    # capture the whole one from some release on; without a graph, hosts of these GPUs are late.
    graph: str = ""
    recipe: bool = False
    whole_graphs_from: tuple[int, int] = (0, 0)
    eager_on: tuple[str, ...] = ()
    drops_tokens: bool = False
    # TFLOP/s of matrix products of one machine by GPU, beside those of the hardware file.
    products_tflops_on: Mapping[str, tuple[float, float]] | None = None

    # The order of the pipeline's passes, as the engine's name or the notes give it.
    order: str = ""
    noted_order: str = ""
    overlaps: bool = True
    # The blocks on a pipeline's first and last stage; and the sequences of a rank in each fill of
    # the pipeline.
    first_blocks: int | None = None
    last_blocks: int | None = None
    short_ends: bool = False
    # Layers per stage, such as 7+9+9+9, counting embedding and head.
    stage_layers: str = ""
    local_batch: int | None = None
    data_ranks: int | None = None

    # The sharding of states: ZeRO level, its implementation, and the number of replicas, shards or
    # nodes.
    zero_level: int | None = None
    by_fsdp: bool = False
    by_megatron_fsdp: bool = False
    replicas: int | None = None
    shards: int | None = None
    shards_in_node: bool = False

    # Whether states are on the host, gradients are freed during the backward pass, and the
    # optimizer step is fused into the backward pass.
    weights_on_host: bool = False
    gradients_on_host: bool = False
    optimizer_on_host: bool = False
    activations_on_host: bool = False
    offloaded_blocks: int | None = None
    late_gradients: bool = False
    steps_in_backward: bool = False
    pages_optimizer: bool = False
    # Whether each GPU loads the whole weights; and whether gradients are whole until the last
    # micro-batch.
    loads_whole: bool = False
    whole_gradients: bool = False
    # How sequence lengths are known, in tables that say so: exactly, or otherwise.
    lengths: Lengths = ""
    # The longest sample of the data set, if it is a common one and a row gives only the length at
    # which samples are truncated.
    longest_sample: int | None = None
    # The values in a software's example files, used where a row gives none: tokens of a sequence,
    # sequences of a micro-batch, rank of adapters; and whether a step's batch may be several
    # micro-batches.
    usual_length: int | None = None
    usual_micro_batch: int | None = None
    usual_rank: int | None = None
    accumulates: bool = True

    precision: str = ""
    offload: bool | None = None
    states_stay: bool = False
    offload_text: str = ""
    # Settings of llmq on what a block keeps for its backward pass, and which of these tensors a run
    # does not keep.
    keeps_by_settings: bool = False
    redoes_norms: bool = False
    redoes_queries: bool = False
    redoes_attention: bool = False
    redoes_network: bool = False
    redoes_gates: bool = False
    redoes_latent: bool = False
    redoes_shared: bool = False
    offloads_residuals: bool = False
    recompute: Recomputed = ""
    recomputed_blocks: int = 0
    recompute_text: str = ""
    # The recomputation that a software's recipes use for models with more than this number of
    # parameters.
    recipe_recompute: Recomputed = ""
    recipe_recompute_above: float = 0.0

    # The model: its name in lower case; a hybrid model of the catalogue, or the sizes of a similar
    # one, with a note; a model built alike; and its family, by a word or the suffix of the name.
    model: str = ""
    hybrid: str = ""
    near_model: Mapping[str, Any] | None = None
    near_note: str = ""
    alike: str = ""
    # The billions of parameters, where the name gives nothing else; and whether each token uses
    # only some of them.
    billions: float | None = None
    millions: float | None = None
    has_experts: bool = False
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
    # Whether the notes list all arguments of Megatron that differ from its defaults; the dropout of
    # its models and of others; and how an engine's examples train a model.
    arguments: bool = False
    dropout: float | None = None
    noted_dropout: float | None = None
    usual_tied: bool | None = None
    # Whether embedding and head are tied as in the released model, for further training.
    tied_as_released: bool = False
    usual_vocab: int | None = None

    # The network rate in Gbit/s: of a node, of one of its links, or per GPU.
    node_gbits: float | None = None
    gpu_gbits: float | None = None
    node_links: float = 1.0

    # The attention kernel that the row names.
    attention_kernel: AttentionKernel = ""
    # Whether experts run as one batched GEMM, where each expert is padded to the tokens of the
    # busiest one.
    pads_experts: bool = False

    # The outcome: whether the run failed, whether it is a benchmark, and the stage whose memory
    # peak was measured.
    failed: bool = False
    doubted: bool = False
    benchmark: bool = True
    peak_of: PeakOf = "fullest"
    reserved: bool = False
    of_driver: bool = False
    rounded_up: bool = False
    # Whether memory is assigned before a run, as XLA does, and no allocator caches any.
    plans_buffers: bool = False

    def count(self, column: str) -> int | None:
        """The whole number in a typed column; None if the column is empty."""
        return count_of(self.cells, column)

    def flag(self, column: str) -> bool | None:
        """The yes or no in a typed column; None if the column is empty."""
        return flag_of(self.cells, column)

    def text(self, column: str) -> str:
        """The text of a column, as messages quote it."""
        return text_of(self.cells, column)
