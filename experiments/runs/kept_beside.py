"""The bytes that a measured run keeps on the GPU but its plan does not account for."""

from experiments.runs.run_row import Recomputation, RunRow
from experiments.runs.sized_models import parameters_of
from mistlab.engines.adapters import BASE_BYTES, BLOCK, COPYING_KEYS
from mistlab.engines.engine import MOMENTS_BYTES, EngineMemory
from mistlab.plan.workload import ModelSpec

# The bytes per value of the mask that torch's dropout keeps, and of the 16-bit copy of its input.
MASK_BYTES, COPY_BYTES = 1, 2
# The bytes per weight of 4-bit weights whose scales, one for every block of weights, have 32 bits.
WIDE_SCALES = 0.5 + 4 / BLOCK
# The bytes per weight of torchao's 4-bit AdamW: two moments of half a byte, each with a 32-bit
# scale for every 128 values (torchao/optim/subclass_4bit.py).
FOUR_BITS = 2 * (0.5 + 4 / 128)


def beside_bytes(
    row: RunRow,
    model: ModelSpec,
    recompute: Recomputation,
    tokens: int,
    memory: EngineMemory | None,
    shards: int = 1,
) -> int:
    """The bytes that a run keeps beyond its plan, for a micro-batch of ``tokens`` tokens and
    weights in ``shards``. If blocks are recomputed whole, the bytes of only one block count.

    Less than none if the plan, by the ``memory`` of its engine, counts tensors that the run lacks.
    """
    blocks = 1 if recompute.way == "full" else model.layers
    dropped = _of_dropped(row, model) if row.adapters and row.drops_adapter_inputs else 0
    keys = 2 * COPY_BYTES * model.kv_heads * model.head_dim * model.layers
    wide = _of_wide_experts(model, row) if row.adapters and row.wide_experts else 0
    wide += COPY_BYTES * row.further_tables
    if row.wide_scales and row.adapters and row.base == "4bit":
        saved = WIDE_SCALES - BASE_BYTES["4bit"]
        wide += int(saved * (parameters_of(model) - _of_tables(model)))
    if row.wide_shards and row.adapters:
        wide += COPY_BYTES * parameters_of(model) // shards
    if row.moments_of_4_bits and not row.adapters:
        saved = MOMENTS_BYTES["adamw-8bit"] - FOUR_BITS
        wide -= int(saved * parameters_of(model) / shards)
    if row.gathers_head:
        # The weights of embedding and head in full precision, and their gradient.
        wide += 2 * COPY_BYTES * model.vocab * model.hidden
    scaled = _of_scaled(model) if row.adapters and row.scales_outputs else 0
    of_token = (dropped + scaled) * blocks + (keys if row.returns_keys else 0)
    if memory is not None:
        of_token -= _of_copied_keys(row, model, memory) * blocks
        wide -= _of_gathered_tables(row, model, memory) if shards > 1 else 0
    if row.keeps_outputs and row.loss == "whole":
        of_token += COPY_BYTES * model.vocab
    return tokens * of_token + wide


def flat_gradients_bytes(row: RunRow, model: ModelSpec) -> int:
    """The bytes of the gradients of all blocks, with those of frozen weights, where FSDP keeps both
    kinds of weights in one tensor.
    """
    if not row.adapters or not row.flat_gradients:
        return 0
    return COPY_BYTES * (parameters_of(model) - _of_tables(model))


def _of_tables(model: ModelSpec) -> int:
    """The parameters of a model's embedding and head."""
    return (1 if model.tied_embeddings else 2) * model.vocab * model.hidden


def _of_copied_keys(row: RunRow, model: ModelSpec, memory: EngineMemory) -> int:
    """The bytes per token of a block's copies of keys and values for every head of the queries, if
    the plan counts them but the run's attention needs none.
    """
    if not row.groups_keys or memory.kept_by not in COPYING_KEYS:
        return 0
    return 2 * COPY_BYTES * (model.heads - model.kv_heads) * model.head_dim


def _of_gathered_tables(row: RunRow, model: ModelSpec, memory: EngineMemory) -> int:
    """The bytes of embedding and head that the plan keeps gathered while blocks run, and of their
    whole gradients if they are trained, if the run shards both apart.
    """
    if not row.shards_tables or model.tied_embeddings or not memory.gathered_blocks:
        return 0
    width = COPY_BYTES if row.states == "16bit" else memory.weight
    return (1 if row.adapters else 2) * width * _of_tables(model)


def streamed_bytes(row: RunRow, model: ModelSpec, memory: EngineMemory | None, shards: int) -> int:
    """The bytes of weights that are fetched from the host at the same time, for a run on one GPU;
    on several GPUs the plan already counts gathered weights.

    DeepSpeed keeps ``stage3_max_live_parameters`` weights on the GPU, and in addition the embedding
    tables that are used last (``partitioned_param_coordinator.py`` releases no weight in use).
    """
    if memory is None or not row.weights_on_host or shards > 1 or not memory.gathered_elements:
        return 0
    largest = model.vocab * model.hidden
    return memory.weight * max(largest, min(parameters_of(model), memory.gathered_elements))


def bucket_bytes(row: RunRow, memory: EngineMemory | None) -> int:
    """The bytes of the bucket in which DeepSpeed's ZeRO reduces gradients, on one GPU, where a plan
    has no ZeRO.
    """
    is_zero = row.zero_level or row.weights_on_host or row.optimizer_on_host
    if memory is None or row.count("gpus") != 1 or not is_zero:
        return 0
    return memory.bucket_bytes


def stepped_bytes(row: RunRow, model: ModelSpec) -> int:
    """The bytes of the gradients that exist at once where an optimizer steps in the backward pass
    and frees the gradient of each weight (torch's ``register_post_accumulate_grad_hook``).

    That is the gradient of the largest weight. The gradient of a table that embedding and head
    share is complete after the embedding's backward pass, so it lasts for all blocks' passes. A
    loss in chunks adds the gradient of each chunk to the sum of those before it.
    """
    if not row.steps_in_backward:
        return 0
    table = model.vocab * model.hidden
    sums = 2 if row.loss == "chunked" else 1
    return COPY_BYTES * max(sums * table, model.hidden * model.ffn)


def _of_wide_experts(model: ModelSpec, row: RunRow) -> int:
    """By how many bytes experts in 16 bits exceed experts in the fewer bits of the base model."""
    experts = model.experts
    if experts is None:
        return 0
    blocks = sum(map(model.has_experts_in, range(model.layers)))
    matrices = 3 if model.mlp_type == "gated_mlp" else 2
    weights = blocks * experts.count * matrices * experts.ffn * model.hidden
    return int(weights * (BASE_BYTES["16bit"] - BASE_BYTES[row.base]))


def _of_scaled(model: ModelSpec) -> int:
    """The bytes per token of the outputs of a block's GEMMs."""
    inner = (model.heads + 2 * model.kv_heads) * model.head_dim
    widths = inner + 2 * model.hidden + (2 if model.mlp_type == "gated_mlp" else 1) * model.ffn
    return COPY_BYTES * widths


def _of_dropped(row: RunRow, model: ModelSpec) -> int:
    """The bytes per token of a block's dropout masks, and of the copies of adapters' inputs that
    dropout makes necessary.

    Each GEMM of an adapter has a dropout of its own on its input. Frozen GEMMs in 16 bits keep no
    copy of their input; those in fewer bits do.
    """
    inner = model.heads * model.head_dim
    queries = 1 if row.fused_queries else 2 if row.targets == "attention" else 3
    inputs = [(model.hidden, queries)]
    if row.targets == "all":
        inputs += [(inner, 1), (model.hidden, 2 if model.mlp_type == "gated_mlp" else 1)]
        inputs += [(model.ffn, 1)]
    shared = 1 if row.base == "16bit" else 0
    return sum(
        width * (copies * MASK_BYTES + (copies - shared) * COPY_BYTES) for width, copies in inputs
    )
