"""Counts the floating-point operations and the bytes of traced operators, including scans over a
sequence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from mistlab.graph.graph import Kind, Phase
from runtime.models.ranks import Size, value_of

# The cost of scans over a sequence: their GEMMs, and the states that pass between chunks.
#
# Kernels process a sequence in chunks (Dao and Gu 2024, section 6). In a chunk of Q tokens, each
# group multiplies its keys with its queries, each head multiplies these scores with its values, and
# each head updates and queries a state. The mask is causal, so half of the scores are counted.
#
# The gated delta rule (Yang et al. 2024, section 3.3) adds per head the GEMMs that remove a state's
# previous values: keys with keys, and their inverse with keys and values.


# The tokens in a chunk of a scan, as in Nemotron's configurations and in kernels of the delta rule.
CHUNK, CHUNK_OF_DELTA_RULE = 128, 64
# How often kernels read and write the states of all chunks, in 32 bits. Forward, states are
# computed, passed on (read and written) and queried. Backward, the same happens again, and
# gradients are read twice.
READ: dict[Phase, int] = {"forward": 2, "backward": 5}
WRITTEN: dict[Phase, int] = {"forward": 2, "backward": 4}
# The number of GEMMs in a pass, for each GEMM of the forward pass. Backward, the forward GEMM runs
# again, and two gradients are computed.
PRODUCTS: dict[Phase, int] = {"forward": 1, "backward": 3}


def scan_flop(
    tokens: Size, heads: Size, sizes: list[Size], phase: Phase, *, by_delta_rule: bool
) -> Size:
    """The floating-point operations of a scan over tokens, for all heads; ``sizes`` are groups,
    channels and states.

    The backward pass includes a second computation of the forward GEMMs.
    """
    groups, channels, states = sizes
    if by_delta_rule:
        inside = CHUNK_OF_DELTA_RULE * heads * (3 * states + 2 * channels)
        through = 6 * heads * channels * states
    else:
        inside = CHUNK * (groups * states + heads * channels)
        through = 4 * heads * channels * states
    return PRODUCTS[phase] * tokens * (inside + through)


def state_bytes(tokens: Size, heads: Size, sizes: list[Size], *, by_delta_rule: bool) -> Size:
    """The bytes of a scan's states after all chunks, in 32 bits."""
    _, channels, states = sizes
    chunk = CHUNK_OF_DELTA_RULE if by_delta_rule else CHUNK
    return 4 * tokens * heads * channels * states // chunk


# Counts the cost of each traced operator: its kind, its floating-point operations, and the bytes
# that it moves.


# The kind of each operator's kernel, by the operator's name without overload. Other pointwise
# operators are recognised by their tag.
KIND_OF_OPERATOR: Mapping[str, Kind] = {
    "aten.mm": "matmul",
    "aten.addmm": "matmul",
    "aten.bmm": "matmul",
    "aten.baddbmm": "matmul",
    "aten._grouped_mm": "matmul",
    "mistlab.grouped_product": "matmul",
    "mistlab.grouped_product_of_rows": "matmul",
    "mistlab.grouped_product_of_weight": "matmul",
    "mistlab.attention": "attention",
    "mistlab.attention_backward": "attention",
    "aten._scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "aten._scaled_dot_product_flash_attention": "attention",
    "aten._scaled_dot_product_flash_attention_backward": "attention",
    "aten.native_layer_norm": "normalization",
    "aten.native_layer_norm_backward": "normalization",
    "mistlab.rms_norm": "normalization",
    "mistlab.rms_norm_backward": "normalization",
    "aten.sum": "reduction",
    "aten.mean": "reduction",
    "aten.amax": "reduction",
    "aten.max": "reduction",
    "aten.logsumexp": "reduction",
    "mistlab.causal_softmax": "softmax",
    "mistlab.causal_softmax_backward": "softmax",
    "aten._softmax": "softmax",
    "aten._softmax_backward_data": "softmax",
    "aten._log_softmax": "softmax",
    "aten._log_softmax_backward_data": "softmax",
    "aten.native_dropout": "elementwise",
    "aten.native_dropout_backward": "elementwise",
    "aten.masked_fill": "elementwise",
    "aten.masked_fill_": "elementwise",
    "aten.triu_": "elementwise",
    "aten.triu": "elementwise",
    "aten.tril": "elementwise",
    "mistlab.swiglu": "elementwise",
    "mistlab.swiglu_backward": "elementwise",
    "mistlab.rotate_": "elementwise",
    "mistlab.weighted_swiglu": "elementwise",
    "mistlab.weighted_swiglu_backward": "elementwise",
    "mistlab.add_by_group": "elementwise",
    "mistlab.sum_by_group": "reduction",
    "mistlab.sinks_backward": "reduction",
    "mistlab.short_convolution": "elementwise",
    "mistlab.short_convolution_backward": "elementwise",
    "mistlab.chunk_scan": "scan",
    "mistlab.chunk_scan_backward": "scan",
    "mistlab.delta_rule": "scan",
    "mistlab.delta_rule_backward": "scan",
    "mistlab.gated_norm": "normalization",
    "mistlab.gated_norm_backward": "normalization",
    "mistlab.squared_relu": "elementwise",
    "mistlab.squared_relu_backward": "elementwise",
    "mistlab.lean_gelu": "elementwise",
    "mistlab.lean_gelu_backward": "elementwise",
    "mistlab.lean_layer_norm": "normalization",
    "mistlab.lean_layer_norm_backward": "normalization",
    "mistlab.route": "softmax",
    "mistlab.route_backward": "softmax",
    "mistlab.permute": "gather",
    "mistlab.unpermute": "gather",
    "mistlab.copies": "gather",
    "mistlab.weights_in_place": "gather",
    "mistlab.keys_and_values": "copy",
    "mistlab.keys_and_values_backward": "copy",
    "aten.embedding": "gather",
    "aten.embedding_dense_backward": "gather",
    "aten.gather": "gather",
    "aten.scatter": "gather",
    "aten.scatter_": "gather",
    "aten.index": "gather",
    "aten.index_put": "gather",
    "aten.nll_loss_forward": "gather",
    "aten.nll_loss_backward": "gather",
    "aten.clone": "copy",
    "aten.copy_": "copy",
    "aten.cat": "copy",
    "aten._to_copy": "copy",
    "aten.slice_backward": "copy",
    "aten.select_backward": "copy",
    "aten.constant_pad_nd": "copy",
    "aten.bernoulli_": "elementwise",
    "aten._safe_softmax": "softmax",
    "aten.zeros": "fill",
    "aten.zeros_like": "fill",
    "aten.new_zeros": "fill",
    "aten.zero_": "fill",
    "aten.ones": "fill",
    "aten.ones_like": "fill",
    "aten.new_ones": "fill",
    "aten.scalar_tensor": "fill",
    "aten.full": "fill",
    "aten.full_like": "fill",
    "aten.fill_": "fill",
    "aten.arange": "fill",
    "mistlab.all_reduce_": "collective",
    "mistlab.all_gather": "collective",
    "mistlab.gather_tokens": "collective",
    "mistlab.gather_again": "collective",
    "mistlab.scatter_tokens": "collective",
    "mistlab.scatter_gradient": "collective",
    "mistlab.all_to_all": "collective",
    "mistlab.gather_rows": "collective",
    "mistlab.scatter_rows": "collective",
}

# Operators that do no work: they only allocate memory or make views.
IDLE = {
    "aten.empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.new_empty",
    "aten.new_empty_strided",
    "aten.lift_fresh",
    "aten._local_scalar_dense",
}

# Operators that look up rows of a table, each with the name of its table argument.
ROWS_OF = {
    "aten.embedding": "weight",
    "aten.gather": "self",
    "aten.index": "self",
    "aten.nll_loss_forward": "self",
}

# Collectives whose message is as large as their result; ``read_bytes`` counts the result.
GATHERS = {"mistlab.gather_tokens", "mistlab.gather_again", "mistlab.gather_rows"}

# Operators that read only scores of past positions, half of all scores.
READ_HALVES = {"mistlab.causal_softmax", "mistlab.causal_softmax_backward"}

# Operators that overwrite an argument without reading it, each with the name of the argument.
OVERWRITES = {
    "aten.copy_": "self",
    "aten.scatter_": "self",
    "mistlab.short_convolution_backward": "of_x",
    "mistlab.chunk_scan_backward": "of_steps",
    "mistlab.delta_rule_backward": "of_steps",
    "mistlab.gated_norm_backward": "of_gate",
}


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call of an operator, with its arguments and its result."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any

    @property
    def name(self) -> str:
        """The operator's name without overload, such as ``aten.mm``."""
        namespace, name = self.operator._schema.name.split("::")
        return f"{namespace}.{name}"

    def argument(self, name: str) -> Any:
        """The value of an argument, by its name in the operator's schema; its default if it was not
        passed.
        """
        for index, schema in enumerate(self.operator._schema.arguments):
            if schema.name == name:
                given = self.args[index] if index < len(self.args) else schema.default_value
                return self.kwargs.get(name, given)
        raise KeyError(name)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the call's arguments."""
        return tensors_in((self.args, self.kwargs))

    @property
    def outputs(self) -> list[Tensor]:
        """The tensors that the call created or changed."""
        return self.changed or tensors_in(self.result)

    @property
    def changed(self) -> list[Tensor]:
        """The arguments to which the call writes."""
        return tensors_in([self.argument(name) for name in _written_by(self.operator)])

    @property
    def works(self) -> bool:
        """Whether the operator computes or moves data, and does not only make views."""
        given = {key_of(tensor) for tensor in self.inputs}
        is_view = not self.changed and all(key_of(tensor) in given for tensor in self.outputs)
        return not is_view and self.name not in IDLE


@cache
def _written_by(operator: OpOverload) -> tuple[str, ...]:
    """The names of the arguments to which an operator writes; torch takes long to tell them."""
    return tuple(
        schema.name
        for schema in operator._schema.arguments
        if schema.alias_info is not None and schema.alias_info.is_write
    )


def key_of(tensor: Tensor) -> int:
    """A key that is the same for all tensors that share a storage."""
    return tensor.untyped_storage()._cdata


def kind_of(call: TracedCall) -> Kind:
    """The kind of kernel that runs the operator."""
    if kind := KIND_OF_OPERATOR.get(call.name):
        return kind
    if call.operator.overloadpacket in flop_registry:
        return "matmul"
    return "elementwise" if torch.Tag.pointwise in call.operator.tags else "other"


def flop_of(call: TracedCall) -> Size:
    """The floating-point operations of a call: by PyTorch's formulas for GEMMs, otherwise one per
    element.
    """
    kind = kind_of(call)
    if call.name in _FLOP:
        return _FLOP[call.name](call)
    if kind == "matmul":
        formula = flop_registry[call.operator.overloadpacket]
        count: Size = formula(*call.args, **call.kwargs, out_val=call.result)
        return count
    if kind == "attention":
        return _attention_flop(call)
    if kind in {"collective", "copy", "fill", "gather"}:
        return 0
    sizes = [tensor.numel() for tensor in (*call.inputs, *call.outputs)]
    return max(sizes, key=value_of, default=0)


def read_bytes(call: TracedCall) -> Size:
    """The bytes that a call reads: each input once; of a table only the rows that are looked up."""
    if kind_of(call) == "fill":
        return 0
    if call.name in GATHERS:
        return sum(map(size_bytes, tensors_in(call.result)))
    if call.name in ROWS_OF:
        fetched = sum(map(size_bytes, tensors_in(call.result)))
        table = call.argument(ROWS_OF[call.name])
        return fetched + sum(size_bytes(x) for x in call.inputs if x is not table)
    if call.name in READ_HALVES:
        return sum(map(size_bytes, call.inputs)) // 2
    overwritten = call.argument(OVERWRITES[call.name]) if call.name in OVERWRITES else None
    of_inputs = sum(size_bytes(x) for x in call.inputs if x is not overwritten)
    return of_inputs + _state_bytes(call, READ)


def written_bytes(call: TracedCall) -> Size:
    """The bytes that a call writes: each output once, new or changed in place."""
    if call.name == "aten.scatter_":
        return size_bytes(call.argument("src"))
    if call.name in READ_HALVES:
        return size_bytes(call.result)
    of_outputs = sum(map(size_bytes, call.outputs))
    if call.changed and call.name.startswith("mistlab."):
        of_outputs = of_outputs + sum(map(size_bytes, tensors_in(call.result)))
    return of_outputs + _state_bytes(call, WRITTEN)


def tensors_in(values: object) -> list[Tensor]:
    """All tensors in nested values, each once."""
    leaves = torch.utils._pytree.tree_leaves(values)
    return list({id(x): x for x in leaves if isinstance(x, Tensor)}.values())


def size_bytes(tensor: Tensor) -> Size:
    """The bytes of a tensor's distinct values; a broadcast dimension counts as 1."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    sizes = [size for size, stride in pairs if not (isinstance(stride, int) and stride == 0)]
    return prod(sizes) * tensor.element_size()


def _grouped_flop(call: TracedCall) -> Size:
    """The floating-point operations of a grouped GEMM.

    The sizes of the groups do not matter, since together they have all rows.
    """
    left, right = call.argument("self").shape, call.argument("mat2").shape
    each = 2 * left[-2] * left[-1] * right[-1]
    # If both arguments have three dimensions, the groups are their first dimension and are equally
    # large.
    return left[0] * each if len(left) == len(right) == 3 else each


def _grouped_product_flop(call: TracedCall) -> Size:
    """The floating-point operations of ``mistlab::grouped_product`` and of its gradients."""
    first, second, *_ = call.inputs
    inner: Size = prod(second.shape[1:])
    # For the gradient of the matrices both operands have rows: it sums over the rows, for each pair
    # of a column of the first and a column of the second operand.
    return 2 * first.shape[0] * inner * (1 if second.dim() == 3 else first.shape[1])


def _names(call: TracedCall) -> list[str]:
    return [argument.name for argument in call.operator._schema.arguments]


def _wide_attention_flop(call: TracedCall) -> Size:
    """The floating-point operations of ``mistlab::attention`` and of its gradient, for the pairs of
    tokens that are not masked.
    """
    batch, sequence, heads, channels = call.argument("query").shape
    values, window = call.argument("value").shape[-1], call.argument("window")
    # Forward, attention has GEMMs for scores and output. Backward, it has GEMMs for scores again,
    # and for the gradients of probabilities, values, queries and keys.
    products = 3 * channels + 2 * values if "gradient" in _names(call) else channels + values
    pairs = 2 * sequence * window - window * window if _is_given(window) else sequence * sequence
    return products * batch * heads * pairs


def _phase(call: TracedCall) -> Phase:
    return "backward" if "gradient" in _names(call) else "forward"


def _of_scan(call: TracedCall) -> tuple[Size, Size, list[Size], bool]:
    """The tokens, heads and sizes of a scan, and whether it follows the gated delta rule."""
    mixed, heads = call.argument("mixed").shape, call.argument("shift").shape[0]
    by_delta_rule = call.name.startswith("mistlab.delta_rule")
    return mixed[0] * mixed[1], heads, call.argument("sizes"), by_delta_rule


def _scan_flop(call: TracedCall) -> Size:
    tokens, heads, sizes, by_delta_rule = _of_scan(call)
    return scan_flop(tokens, heads, sizes, _phase(call), by_delta_rule=by_delta_rule)


def _state_bytes(call: TracedCall, passes: Mapping[Phase, int]) -> Size:
    """The bytes of the states that a scan passes between chunks; 0 for other operators."""
    if kind_of(call) != "scan":
        return 0
    tokens, heads, sizes, by_delta_rule = _of_scan(call)
    return passes[_phase(call)] * state_bytes(tokens, heads, sizes, by_delta_rule=by_delta_rule)


def _is_given(window: Size) -> bool:
    return not isinstance(window, int) or window > 0


_FLOP: Mapping[str, Callable[[TracedCall], Size]] = {
    "aten._grouped_mm": _grouped_flop,
    "mistlab.grouped_product": _grouped_product_flop,
    "mistlab.grouped_product_of_rows": _grouped_product_flop,
    "mistlab.grouped_product_of_weight": _grouped_product_flop,
    "mistlab.chunk_scan": _scan_flop,
    "mistlab.chunk_scan_backward": _scan_flop,
    "mistlab.delta_rule": _scan_flop,
    "mistlab.delta_rule_backward": _scan_flop,
    "mistlab.attention": _wide_attention_flop,
    "mistlab.attention_backward": _wide_attention_flop,
}


def _attention_flop(call: TracedCall) -> Size:
    backward = call.name.endswith("_backward")
    batch, heads, rows, channels = call.argument("query").shape
    columns = call.argument("key").shape[2]
    # Forward, fused attention has GEMMs for scores and output. Backward, it has GEMMs for scores
    # again, and for the gradients of probabilities, values, queries and keys.
    products = 5 if backward else 2
    multiply_adds = products * batch * heads * rows * columns * channels
    # Under a causal mask half of the scores are not computed.
    return multiply_adds if call.argument("is_causal") else 2 * multiply_adds
