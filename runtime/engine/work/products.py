"""Linear layers whose backward pass adds weight gradients directly to their sums.

Autograd would compute the gradient as a new tensor and then add it to the sum, which passes three
more times over the weight's bytes. Here the GEMM that computes the gradient adds it to the sum. If
the gradient of a layer's input is summed over tensor-parallel ranks, GEMMs of weight gradients are
deferred, to run during this sum. A stage with separate backward passes for weights keeps the GEMMs
for these passes; by then the sum may be elsewhere in memory. Under sequence parallelism such a pass
gathers again the sequences of which each rank keeps a part; gradients that were gathered stay whole
until then.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runtime.engine.streams.lanes import StreamedRanks
from runtime.models.grouped import Counts, ExpertMatrices
from runtime.models.latent_attention import Down
from runtime.models.parallel import (
    ColumnLinear,
    MultiplyGathered,
    RowLinear,
    parameters_of_own_tokens,
    product,
    shared_parameters,
    token_losses,
)
from runtime.models.ranks import bare
from runtime.models.transformer import Head

# The type of a scheduler for part of the backward work: it gets a function without arguments, and
# calls it now or later in the layer's backward pass.
RunBeside = Callable[[Callable[[], object]], None]


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices to an accumulator, which may be of a wider type; the product
    is not rounded first.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        # On a CPU a GEMM's result has the type of its operands, so these are converted to the wider
        # type first.
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


class _AddingLinear(torch.autograd.Function):
    """Autograd function of ``x @ weight.T + bias`` whose backward pass adds the weight's gradient
    to ``weight.grad``, and returns none to autograd.

    Tensors are flattened here, which takes the host less time than autograd's own views.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, schedule: RunBeside
    ) -> Tensor:
        # ``data`` has no autograd history, which would keep earlier tensors in memory until the
        # GEMM has run.
        flat = x.data.flatten(0, -2)
        ctx.save_for_backward(flat)
        # The backward pass reads the weight where its parameter points at that time; the gradient
        # sum is the parameter's ``grad``.
        ctx.parameter, ctx.has_bias, ctx.schedule, ctx.shape = (
            *(weight, bias is not None, schedule),
            x.shape,
        )
        return _shaped_like(x, nn.functional.linear(flat, weight, bias))

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, Tensor | None, None]:
        (x,), parameter = ctx.saved_tensors, ctx.parameter
        flat = gradient.flatten(0, -2)
        of_bias = flat.sum(0) if ctx.has_bias else None
        ctx.schedule(partial(_add_gradient, parameter, flat, x))
        return flat.mm(parameter).view(ctx.shape), None, of_bias, None


def _shaped_like(x: Tensor, rows: Tensor) -> Tensor:
    """A copy of ``rows`` with the leading dimensions of ``x``. It may be overwritten, since it is
    no view.
    """
    return rows if x.dim() == 2 else rows.view(*x.shape[:-1], -1).data


def _add_gradient(parameter: Tensor, gradient: Tensor, x: Tensor) -> None:
    """Add a matrix's gradient to its parameter's ``grad``, which may have moved since the forward
    pass.
    """
    total = parameter.grad
    assert total is not None
    add_product_(total, gradient.t(), x)


class _AddingOwnTokens(torch.autograd.Function):
    """Autograd function of ``x @ weight.T + bias`` for a matrix that each rank holds whole and
    applies to its own tokens. The gradient is reduced over the ranks before it is accumulated, so
    that all ranks' sums stay equal.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: StreamedRanks
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.parameter, ctx.has_bias, ctx.ranks = weight, bias is not None, ranks
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        of_bias = gradient.sum(0) if ctx.has_bias else None
        ranks, parameter, x = ctx.ranks, ctx.parameter, x.detach()

        def add() -> None:
            whole = torch.zeros_like(parameter.grad)
            add_product_(whole, gradient.t(), x)
            ranks.all_reduce_(whole)
            parameter.grad.add_(whole)

        ranks.do(add)
        return gradient.mm(parameter), None, of_bias, None


def adding_up_own(x: Tensor, weight: Tensor, bias: Tensor | None, ranks: StreamedRanks) -> Tensor:
    """``x @ weight.T + bias`` with a matrix that all ranks hold whole and apply to their own
    tokens; the backward pass adds the reduced gradient to ``weight.grad``.
    """
    return product(x, weight, bias, lambda *matrices: _AddingOwnTokens.apply(*matrices, ranks))


class _AddingGatheredLinear(torch.autograd.Function):
    """Autograd function of ``x @ weight.T + bias`` on sequences gathered from all ranks, whose
    backward pass adds the weight's gradient to ``weight.grad``. Each rank saves only its own
    tokens, and gathers the other ranks' tokens again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ranks: StreamedRanks,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.parameter, ctx.has_bias, ctx.ranks = weight, bias is not None, ranks
        return nn.functional.linear(ranks.gather_tokens(x).flatten(0, 1), weight, bias)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        of_bias = gradient.sum(0) if ctx.has_bias else None
        ranks, parameter, x = ctx.ranks, ctx.parameter, x.detach()

        def gathered() -> Tensor:
            whole: Tensor = ranks.gather_tokens(x, again=True)
            return whole.flatten(0, 1)

        if ranks.keeps_products:
            ranks.do(lambda: add_product_(parameter.grad, gradient.t(), gathered()))
        else:
            ranks.put_off(partial(_add_gradient, parameter, gradient, gathered()))
        batch, tokens, width = x.shape
        of_whole = gradient.mm(parameter).view(batch, ranks.size * tokens, width)
        return ranks.scatter_tokens(of_whole, of_input=True), None, of_bias, None


def adding_up_gathered(
    x: Tensor, weight: Tensor, bias: Tensor | None, ranks: StreamedRanks
) -> Tensor:
    """``x @ weight.T + bias`` on the tokens of all ranks, gathered from each rank's ``x``; the
    backward pass adds the weight's gradient to ``weight.grad``.
    """
    made: Tensor = _AddingGatheredLinear.apply(x, weight, bias, ranks)
    return made


_add_linear = bare(_AddingLinear)


def adding_up(x: Tensor, weight: Tensor, bias: Tensor | None, schedule: RunBeside) -> Tensor:
    """torch's ``linear``, except that the backward pass adds the weight's gradient to
    ``weight.grad``, which must exist.
    """
    made: Tensor = _add_linear(x, weight, bias, schedule)
    return made


class _AddingRows(torch.autograd.Function):
    """Autograd function of a table lookup whose backward pass adds the table's gradient to
    ``grad``, and returns none to autograd.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, schedule: RunBeside) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.parameter, ctx.schedule = weight, schedule
        return nn.functional.embedding(tokens, weight)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[None, None, None]:
        (tokens,), parameter = ctx.saved_tensors, ctx.parameter

        def add() -> None:
            rows = gradient.flatten(0, 1).to(parameter.grad.dtype)
            parameter.grad.index_add_(0, tokens.flatten(), rows)

        ctx.schedule(add)
        return None, None, None


def adding_up_rows(tokens: Tensor, weight: Tensor, schedule: RunBeside) -> Tensor:
    """torch's ``embedding``, except that the backward pass adds the table's gradient to
    ``weight.grad``, which must exist.
    """
    made: Tensor = _AddingRows.apply(tokens, weight, schedule)
    return made


class _AddingGroups(torch.autograd.Function):
    """Autograd function of a grouped GEMM whose backward pass adds the matrices' gradients to
    ``grad``, and returns none to autograd.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, counts: tuple[int, ...], schedule: RunBeside
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.parameter, ctx.counts, ctx.schedule = weight, counts, schedule
        return _by_groups(rows, weight.mT, counts)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None, None]:
        rows, weight = ctx.saved_tensors
        parameter, counts, rows = ctx.parameter, ctx.counts, rows.detach()

        def add() -> None:
            groups = zip(gradient.split(counts), rows.split(counts), strict=True)
            for total, (of_group, group) in zip(parameter.grad, groups, strict=True):
                add_product_(total, of_group.t(), group)

        ctx.schedule(add)
        return _by_groups(gradient, weight, counts), None, None, None


def _by_groups(rows: Tensor, matrices: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Each group of rows times the group's matrix; a group may have no rows."""
    made = rows.new_empty((len(rows), matrices.shape[2]))
    groups = zip(rows.split(counts), matrices, made.split(counts), strict=True)
    for group, matrix, output in groups:
        torch.mm(group, matrix, out=output)
    return made


def adding_up_groups(rows: Tensor, weight: Tensor, counts: Counts, schedule: RunBeside) -> Tensor:
    """A grouped GEMM whose backward pass adds the matrices' gradients to ``weight.grad``, which
    must exist; the host must know the counts.
    """
    made: Tensor = _AddingGroups.apply(rows, weight, counts, schedule)
    return made


def _gathered_by(ranks: StreamedRanks) -> MultiplyGathered:
    """The function ``adding_up_gathered`` with these ``ranks``, whichever ranks the layer passes to
    it.
    """
    return lambda x, weight, bias, _: adding_up_gathered(x, weight, bias, ranks)


def add_up_inside(module: nn.Module, ranks: StreamedRanks) -> None:
    """Make the GEMMs, tables and experts of a module add their weight gradients to the gradient
    sums in their backward passes.

    Layers whose rows are split over ranks do so while their input's gradient is summed over ranks.
    """
    for layer in module.modules():
        if isinstance(layer, ColumnLinear | RowLinear | Down) and not layer.weight.requires_grad:
            # A frozen layer has no weight gradient.
            continue
        if isinstance(layer, ColumnLinear):
            layer.multiply = partial(adding_up, schedule=ranks.put_off)
            layer.multiply_gathered = _gathered_by(ranks)
        elif isinstance(layer, Down) and ranks.splits_tokens:
            layer.multiply = partial(adding_up_own, ranks=ranks)
        elif isinstance(layer, RowLinear | Down):
            layer.multiply = partial(adding_up, schedule=ranks.do)
        elif isinstance(layer, Head):
            layer.look_up = partial(adding_up_rows, schedule=ranks.do)
            layer.loss = token_losses
        elif isinstance(layer, ExpertMatrices):
            layer.multiply = partial(adding_up_groups, schedule=ranks.do)


def add_up_shared(module: nn.Module, ranks: StreamedRanks) -> None:
    """Make backward passes reduce the gradients of matrices that all ranks hold whole, where each
    rank has only its own tokens. Gradients of vectors are reduced elsewhere, after accumulation
    (``SharedVectors``).
    """

    def summed(gradient: Tensor) -> Tensor:
        whole = gradient.contiguous()
        ranks.all_reduce_(whole)
        return whole

    if ranks.splits_tokens:
        small = {id(one) for one in parameters_of_own_tokens(module, splits_tokens=False)}
        small |= {id(one.weight) for one in module.modules() if isinstance(one, Down)}
        for parameter in shared_parameters(module):
            if id(parameter) not in small and parameter.dim() > 1 and parameter.requires_grad:
                parameter.register_hook(summed)
