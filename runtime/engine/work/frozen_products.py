"""GEMMs with frozen weights: the backward pass computes only the input's gradient, and saves
nothing for it.

A frozen weight is stored plainly, or packed in few bits. The backward pass reads it where its
parameter points then, since it may have moved since the forward pass.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mistlab.engines.adapters import Base
from runtime.engine.storage.packing import Packing
from runtime.engine.streams.lanes import StreamedRanks
from runtime.models.families import frozen_products
from runtime.models.parallel import ColumnLinear, MultiplyGathered, RowLinear, product

# A function that dequantises a GEMM's weight from its packed parameter.
Dense = Callable[[Tensor], Tensor]


class _Frozen(torch.autograd.Function):
    """Autograd function of ``x @ weight.T + bias`` with a frozen weight; saves neither input nor
    weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dense: Dense) -> Tensor:
        ctx.parameter, ctx.dense = weight, dense
        return nn.functional.linear(x, dense(weight), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return gradient.mm(ctx.dense(ctx.parameter)), None, None, None


class _FrozenGathered(torch.autograd.Function):
    """Autograd function of ``x @ weight.T + bias`` with a frozen weight, on sequences gathered from
    the ranks' parts; saves neither input nor weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dense: Dense,
        ranks: StreamedRanks,
    ) -> Tensor:
        ctx.parameter, ctx.dense, ctx.ranks, ctx.batch = weight, dense, ranks, x.shape[0]
        whole = ranks.gather_tokens(x).flatten(0, 1)
        return nn.functional.linear(whole, dense(weight), bias)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        of_whole = gradient.mm(ctx.dense(ctx.parameter))
        of_whole = of_whole.view(ctx.batch, -1, of_whole.shape[-1])
        return ctx.ranks.scatter_tokens(of_whole, of_input=True), None, None, None, None


def frozen(x: Tensor, weight: Tensor, bias: Tensor | None, dense: Dense) -> Tensor:
    """``x @ weight.T + bias`` with a frozen weight, for which nothing is saved."""
    return product(x, weight, bias, lambda *matrices: _Frozen.apply(*matrices, dense))


def _gathered_by(dense: Dense, ranks: StreamedRanks) -> MultiplyGathered:
    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, _: object) -> Tensor:
        made: Tensor = _FrozenGathered.apply(x, weight, bias, dense, ranks)
        return made

    return multiply


def multiply_frozen(
    layer: nn.Module, packings: Mapping[str, Packing], ranks: StreamedRanks
) -> None:
    """Replace a layer's GEMMs with frozen weights by GEMMs that save nothing, and that dequantise
    packed weights.
    """
    for name, linear in frozen_products(layer):
        packing = packings.get(f"{name}.weight")
        dense = _as_it_is if packing is None else partial(_unpacked, packing, linear.weight.dtype)
        linear.multiply = partial(frozen, dense=dense)
        if isinstance(linear, ColumnLinear):
            linear.multiply_gathered = _gathered_by(dense, ranks)


def packings_of(block: nn.Module, base: Base) -> dict[str, Packing]:
    """How each frozen weight of a block is quantised and packed, by name."""
    if base == "16bit":
        return {}
    return {
        f"{name}.weight": Packing(
            base=base,
            shape=(linear.weight.shape[0], linear.weight.shape[1]),
            by_columns=isinstance(linear, RowLinear),
        )
        for name, linear in frozen_products(block)
        if isinstance(linear, ColumnLinear | RowLinear)
    }


def _as_it_is(weight: Tensor) -> Tensor:
    return weight.detach()


def _unpacked(packing: Packing, dtype: torch.dtype, weight: Tensor) -> Tensor:
    return packing.unpack(weight.detach().view(torch.uint8)[: packing.size_bytes], dtype)
