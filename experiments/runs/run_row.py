"""A row of a table of measured runs as typed columns, in which its free texts are already
interpreted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from experiments.runs.attention_kernels import AttentionKernel
from experiments.runs.runs_table import count_of, flag_of, text_of
from mistlab.engines.adapters import Base, Loss, States
from mistlab.engines.engine import Optimizer
from mistlab.plan.workload import AdapterTargets

# The kinds of recomputation: of all blocks, half, some, or those with experts; of every second GEMM
# in a block, or of the attention core; of cheap operators only; "selective" as torchtitan or
# Megatron define it; that of a recipe; unknown; or empty.
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
# The pipeline stage whose memory peak was measured; "node" is the fullest stage of the first node,
# "fullest" that of all nodes.
PeakOf = Literal["first", "last", "node", "fullest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """The recomputation of a run: its kind, the number of blocks recomputed in each part, what the
    row says in its own words, and the parts of a block that are ``redone`` in addition.
    """

    way: Recomputed = ""
    blocks: int = 0
    text: str = ""
    redone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A row of a table: its text ``cells``, and the typed columns that rules derive from them. A
    column has its default if the row does not state the value.

    Numbers and flags are read from cells on demand. ``text`` is for messages, and shows whether a
    cell is filled.
    """

    cells: Mapping[str, str]

    # The software that ran the training.
    software: str = "other"
    # The engine that predicts runs of this software; empty if it has none of its own.
    engine: str = ""
    # The engine that predicts runs with sharded weights, if the software has none of its own.
    sharded_engine: str = "fsdp"
    date: str = ""
    year: int = 0
    month: int = 0

    # The variant of the engine for FSDP that predicts the run.
    variant: str = "fsdp"
    # A date, and the variant of the engine for FSDP that predicts runs before this date.
    variant_before: tuple[str, str] = ("", "")
    rowwise: bool = False
    whole_logits: bool = False
    fused_loss: bool = False
    # Whether DeepSpeed's pipeline engine runs the model.
    by_pipeline_engine: bool = False
    adapters: bool = False
    targets: AdapterTargets = "all"
    # What the software chooses for every stage, by the name of a plan's dimension.
    choices: Mapping[str, int] = field(default_factory=dict)
    # Whether the inputs of LoRA adapters pass through a dropout.
    drops_adapter_inputs: bool = False
    # Whether adapters scale the outputs of GEMMs, which are kept for the gradients of the scales.
    scales_outputs: bool = False
    # Whether the query, key and value projections are one GEMM.
    fused_queries: bool = False
    # Whether experts stay in 16 bits although the base model is stored in fewer bits.
    wide_experts: bool = False
    # Whether the scales of 4-bit weights have 32 bits, because they are not quantised themselves.
    wide_scales: bool = False
    # The parameters of frozen embedding tables that are not part of the model's shape, such as one
    # per block.
    further_tables: int = 0
    # Whether the model also returns the keys and values of its blocks, as it does for generating
    # text.
    returns_keys: bool = False
    # Whether attention takes keys and values of fewer heads than queries as they are, so that no
    # copies for every head of the queries are kept.
    groups_keys: bool = False
    # Whether a script's loop holds the model's outputs, so the logits, during the backward pass.
    keeps_outputs: bool = False
    # Whether frozen weights are sharded in 32 bits and gathered in 16 bits.
    wide_shards: bool = False
    # Whether the weights of the head are gathered once more, because the loss is computed outside
    # of the sharded model.
    gathers_head: bool = False
    # Whether embedding and head are sharded apart from the rest of the model, so that neither stays
    # gathered while blocks run, unless they share weights.
    shards_tables: bool = False
    base: Base = "16bit"
    moments: Optimizer = "adamw"
    moments_of_4_bits: bool = False
    # Whether the row or the software's files say that the optimizer keeps two moments of 16 bits or
    # more for each weight.
    keeps_moments: bool = False
    loss: Loss = "whole"
    states: States = "mixed"
    # How tokens are sent to experts: "flex" (overlapped), "alltoall", or "" if the row does not
    # say.
    dispatcher: str = ""
    # How much of an iteration is captured as a CUDA graph: "whole", "some", or "" for nothing. From
    # ``whole_graphs_from`` on (year, month), recipes for racks capture all of it, since the hosts
    # of racks issue kernels too late without a graph.
    graph: str = ""
    recipe: bool = False
    whole_graphs_from: tuple[int, int] = (0, 0)
    eager_on: tuple[str, ...] = ()
    drops_tokens: bool = False
    # The GEMM rates of one machine in TFLOP/s, by GPU: the measured rate, and that in the hardware
    # file.
    products_tflops_on: Mapping[str, tuple[float, float]] | None = None

    # The pipeline schedule that the name of the engine implies; empty if it implies none.
    order: str = ""
    # The pipeline schedule that the notes of the row name; empty if they name none.
    noted_order: str = ""
    overlaps: bool = True
    # The number of blocks on the first pipeline stage.
    first_blocks: int | None = None
    last_blocks: int | None = None
    short_ends: bool = False
    # The numbers of layers of the stages, such as 7+9+9+9, with embedding and head counted as
    # layers.
    stage_layers: str = ""
    # The sequences of a rank for which the pipeline is filled and drained once.
    local_batch: int | None = None
    data_ranks: int | None = None
    # The GPUs that the run's configuration file uses, for rows that state those of the machine.
    devices: int | None = None
    # The GPUs among which the run's script divides the blocks, one after another (``device_map`` of
    # Hugging Face's models).
    devices_in_turn: int | None = None

    # The ZeRO level at which model states are sharded.
    zero_level: int | None = None
    # Whether FSDP shards the model states.
    by_fsdp: bool = False
    by_megatron_fsdp: bool = False
    # The number of copies of the sharded states, in hybrid sharding.
    replicas: int | None = None
    shards: int | None = None
    shards_in_node: bool = False

    # Whether weights are kept on the host.
    weights_on_host: bool = False
    gradients_on_host: bool = False
    optimizer_on_host: bool = False
    activations_on_host: bool = False
    offloaded_blocks: int | None = None
    # Whether gradients are freed only after the optimizer step.
    late_gradients: bool = False
    # Whether the optimizer steps during the backward pass.
    steps_in_backward: bool = False
    pages_optimizer: bool = False
    # Whether each GPU loads all weights.
    loads_whole: bool = False
    # Whether gradients are kept unsharded until the last micro-batch.
    whole_gradients: bool = False
    # Whether frozen and trained weights of a block are one tensor for FSDP (``FlatParameter`` with
    # ``use_orig_params``), so that its gradient is as large as both.
    flat_gradients: bool = False
    # How exactly the sequence lengths of the row are known ("exact" or "other"), in tables that say
    # so.
    lengths: Lengths = ""
    # The tokens of the longest sample in a well-known data set, for rows that only state the length
    # at which samples are cut.
    longest_sample: int | None = None
    # The tokens within which tokens of packed sequences attend to each other, if attention stays
    # inside samples.
    attends_within: int | None = None
    # The thousands of tokens of a sequence in the run's script, for a row that has copied another
    # length.
    thousands: int | None = None
    # The sequence length in the software's example files, in tokens; it is used if the row states
    # none.
    usual_length: int | None = None
    # The sequences of a micro-batch in the software's example files.
    usual_micro_batch: int | None = None
    # The rank of LoRA adapters in the software's example files.
    usual_rank: int | None = None
    # Whether the batch of a step may be divided into several micro-batches.
    accumulates: bool = True

    precision: str = ""
    offload: bool | None = None
    states_stay: bool = False
    offload_text: str = ""
    # Whether the row has the settings of the software llmq that say what a block keeps for its
    # backward pass.
    keeps_by_settings: bool = False
    # Whether the outputs of normalisations are recomputed instead of kept.
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
    # The recomputation that the software's recipes use for models above a certain size.
    recipe_recompute: Recomputed = ""
    # The number of parameters above which the software's recipes recompute.
    recipe_recompute_above: float = 0.0

    # The name of the model in lower case.
    model: str = ""
    # Sizes of the model in the run's script, for a row whose table assumed others.
    script_sizes: Mapping[str, int] = field(default_factory=dict)
    # The name of the hybrid model of the catalogue that the run trains.
    hybrid: str = ""
    # Sizes of a similar model, for a model that is not known by name.
    near_model: Mapping[str, Any] | None = None
    near_note: str = ""
    # The name of a catalogue model whose blocks are built like those of the row's model.
    alike: str = ""
    # The billions of parameters, for a model of which the row states only the size.
    billions: float | None = None
    millions: float | None = None
    # Whether each token uses only some of the parameters.
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
    # Whether the notes list all arguments of Megatron that differ from its defaults.
    arguments: bool = False
    dropout: float | None = None
    noted_dropout: float | None = None
    usual_tied: bool | None = None
    # Whether embedding and head share weights as in the released model, for training that continues
    # from it.
    tied_as_released: bool = False
    usual_vocab: int | None = None

    # The network bandwidth of a node (or of one of its links) in Gbit/s.
    node_gbits: float | None = None
    # The network bandwidth per GPU in Gbit/s.
    gpu_gbits: float | None = None
    node_links: float = 1.0

    # The attention kernel that the row names; empty if it names none.
    attention_kernel: AttentionKernel = ""
    # Whether all experts run as one batched GEMM, in which each is padded to the tokens of the
    # busiest one.
    pads_experts: bool = False

    # Whether the run failed.
    failed: bool = False
    doubted: bool = False
    benchmark: bool = True
    # The pipeline stage whose memory peak was measured.
    peak_of: PeakOf = "fullest"
    reserved: bool = False
    of_driver: bool = False
    rounded_up: bool = False
    # Whether all memory is assigned before the run, as XLA does, so that no allocator caches any.
    plans_buffers: bool = False
    # Whether the run frees cached memory before the part of the step that needs most memory.
    empties_cache: bool = False

    def count(self, column: str) -> int | None:
        """The whole number in a typed column; None if the column is empty."""
        return count_of(self.cells, column)

    def flag(self, column: str) -> bool | None:
        """The yes or no in a typed column; None if the column is empty."""
        return flag_of(self.cells, column)

    def text(self, column: str) -> str:
        """The text of a column as messages quote it."""
        return text_of(self.cells, column)
