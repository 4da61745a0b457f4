"""Measures operators of blocks; their floating-point operations and bytes are counted as in layer
graphs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.functional import gelu, layer_norm
from torch.utils._python_dispatch import TorchDispatchMode

from mistlab.engines.engine import Precision
from runtime.models.attention import fused
from runtime.models.config import TYPE_OF_PRECISION
from runtime.models.operators import CausalSoftmax
from runtime.models.parallel import product
from runtime.profiling.timing import Clock, Timing
from runtime.tracing.traced_operators import TracedCall, flop_of, read_bytes, written_bytes

# Counts the floating-point operations and bytes of operators as they run, as layer graphs count
# them.


class WorkCounter(TorchDispatchMode):
    """A dispatch mode that sums the floating-point operations, and the bytes read and written, of
    all operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flop = 0
        self.moved_bytes = 0

    def __torch_dispatch__(
        self,
        operator: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, and count it unless it only makes a view."""
        result = operator(*args, **(kwargs or {}))
        call = TracedCall(operator, args, kwargs or {}, result)
        if call.works:
            self.flop += flop_of(call)
            self.moved_bytes += read_bytes(call) + written_bytes(call)
        return result


# Measures the best rates of a device: of GEMMs, and of its memory.


def product_flop_per_s(precision: Precision, size: int, clock: Clock, repetitions: int) -> float:
    """The floating-point operations per second of a GEMM of two square random matrices."""
    dtype = TYPE_OF_PRECISION[precision]
    left, right = (torch.randn(size, size, device=clock.device).to(dtype) for _ in range(2))
    result = torch.empty_like(left)
    samples = clock.samples_s(lambda: torch.mm(left, right, out=result), repetitions)
    return float(2 * size**3 / Timing.of(samples).median_s)


def memory_bytes_per_s(size_bytes: int, clock: Clock, repetitions: int) -> float:
    """The bytes per second, read and written, of a copy within the device's memory."""
    source = torch.randint(0, 100, (size_bytes,), dtype=torch.int8, device=clock.device)
    target = torch.empty_like(source)
    samples = clock.samples_s(lambda: target.copy_(source), repetitions)
    return 2 * size_bytes / Timing.of(samples).median_s


# Measures each operator of a GPT block separately, forward and backward.
#
# The operators are those of this package's blocks, on random values. An operator is named by its
# position in the block, as in the documented tables. Linear layers have no bias here, so that only
# the GEMM is timed.


DROPOUT = 0.1
STEP = "optimizer-step"
# The magnitude of random values, small enough that sums of a few thousand products are finite in 16
# bits.
SCALE = 0.1

Shape = tuple[int, ...]
OperatorCall = tuple[Callable[..., Tensor], tuple[Shape, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """The sizes of a block, and of the micro-batch that it computes."""

    hidden: int
    ffn: int
    heads: int
    sequence_length: int
    vocab: int
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """The sizes of fused causal attention."""

    micro_batch: int
    sequence_length: int
    heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTiming:
    """The measured times of an operator's forward and backward pass, and the operations and bytes
    of both.
    """

    forward: Timing
    backward: Timing
    flop: int
    moved_bytes: int


def block_operator(
    operator: OperatorCall, precision: Precision, clock: Clock, repetitions: int
) -> OperatorTiming:
    """Time the operator at one position of a block, forward and backward."""
    function, shapes = operator
    return _timed(function, shapes, precision, clock, repetitions)


def optimizer_step(parameters: int, precision: Precision, clock: Clock, repetitions: int) -> Timing:
    """Time the optimizer step of this many parameters as the executor runs it: copy gradients to 32
    bits, update master weights and moments, then update weights.
    """
    device, dtype = clock.device, TYPE_OF_PRECISION[precision]
    master, first, second = (torch.zeros(parameters, device=device) for _ in range(3))
    weights, gradients = (
        torch.randn(parameters, device=device).mul_(SCALE).to(dtype) for _ in range(2)
    )
    number = torch.ones((), device=device)

    def step() -> None:
        torch._fused_adamw_(
            *([master], [gradients.float()], [first], [second], [], [number]),
            lr=1e-3,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        weights.copy_(master)

    return Timing.of(clock.samples_s(step, repetitions))


def fused_attention(
    sizes: AttentionSizes, precision: Precision, clock: Clock, repetitions: int
) -> OperatorTiming:
    """Time fused causal attention, forward and backward."""
    shape = (sizes.micro_batch, sizes.sequence_length, sizes.heads, sizes.head_dim)

    def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return fused(query, key, value, 0.0)

    return _timed(attended, (shape,) * 3, precision, clock, repetitions)


def places_of(block: BlockSizes, device: str) -> Mapping[str, OperatorCall]:
    """For each position in a block, the operator's function and the shapes of its operands.

    On a CPU there is no dropout: drawing random numbers would take longer than the operators, and
    the models of the catalogue have none.
    """
    drops = device != "cpu"
    batch, sequence, hidden = block.micro_batch, block.sequence_length, block.hidden
    of_heads = batch * block.heads
    tokens, wide = (batch, sequence, hidden), (batch, sequence, block.ffn)
    scores, heads = (of_heads, sequence, sequence), (of_heads, sequence, hidden // block.heads)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return layer_norm(x, (hidden,), weight, bias, 1e-5)

    def softmax(x: Tensor) -> Tensor:
        shares: Tensor = CausalSoftmax.apply(x, sequence)
        return shares

    vectors = (hidden,), (hidden,)
    completed = _completed if drops else torch.add
    dropout = {"enc-attention-dropout": (_dropped, (scores,))} if drops else {}
    return {
        "enc-1st-layernorm": (norm, (tokens, *vectors)),
        "enc-attention-qkv": (_linear, (tokens, (3 * hidden, hidden))),
        "enc-attention-score": (_scores, (heads, heads)),
        "enc-attention-softmax": (softmax, (scores,)),
        **dropout,
        "enc-attention-context": (torch.bmm, (scores, heads)),
        "enc-attention-dense": (_linear, (tokens, (hidden, hidden))),
        "enc-post-attention-dropout": (completed, (tokens, tokens)),
        "enc-2nd-layernorm": (norm, (tokens, *vectors)),
        "enc-MLP-GEMM-1": (_linear, (tokens, (block.ffn, hidden))),
        "enc-MLP-gelu": (_activated, (wide,)),
        "enc-MLP-GEMM-2": (_linear, (wide, (hidden, block.ffn))),
        "enc-post-MLP-dropout": (completed, (tokens, tokens)),
    }


def _timed(
    function: Callable[..., Tensor],
    shapes: tuple[Shape, ...],
    precision: Precision,
    clock: Clock,
    repetitions: int,
) -> OperatorTiming:
    dtype = TYPE_OF_PRECISION[precision]
    operands = [torch.randn(s, device=clock.device).mul_(SCALE).to(dtype) for s in shapes]
    for operand in operands:
        operand.requires_grad_()
    gradient = torch.randn_like(function(*operands))
    with WorkCounter() as counter:
        torch.autograd.grad(function(*operands), operands, gradient)
    forward = clock.samples_s(lambda: function(*operands), repetitions)
    result = function(*operands)

    def differentiate() -> object:
        return torch.autograd.grad(result, operands, gradient, retain_graph=True)

    return OperatorTiming(
        forward=Timing.of(forward),
        backward=Timing.of(clock.samples_s(differentiate, repetitions)),
        flop=counter.flop,
        moved_bytes=counter.moved_bytes,
    )


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return product(x, weight, None)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    return torch.bmm(query, key.transpose(1, 2))


def _dropped(x: Tensor) -> Tensor:
    return torch.native_dropout(x, DROPOUT, True)[0]


def _completed(x: Tensor, part: Tensor) -> Tensor:
    return x + _dropped(part)


def _activated(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")
