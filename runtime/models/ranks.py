"""Sizes of a model as numbers or symbols, and the ranks that split it."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from inspect import signature
from typing import Any, NoReturn, ParamSpec, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

# Sizes of a model: numbers, or symbols while a model is traced.
#
# The module that makes symbols (``runtime.tracing.symbolic_sizes``) takes seconds to import, and is
# not imported here, so that training processes start quickly.


# PyTorch accepts a torch.SymInt wherever it takes an int, and annotates both as int; so does this
# project.
Size = int


@runtime_checkable
class Space(Protocol):
    """Makes the symbols of one trace; implemented by
    ``runtime.tracing.symbolic_sizes.SizeSpace``.
    """

    fake_mode: Any

    def size(self, name: str, value: int) -> Size:
        """A new symbol ``name`` that stands for ``value`` wherever code needs a number."""

    def refuse_fixed(self, culprit: str, where: str = "") -> None:
        """Raise if traced code has fixed a symbol to a number, or to another symbol."""


def space_of(sizes: Iterable[object]) -> Space | None:
    """The maker of the symbols among ``sizes``; None if all sizes are numbers."""
    symbols = (size for size in sizes if isinstance(size, torch.SymInt))
    spaces = (symbol.node.shape_env for symbol in symbols)
    return next((space for space in spaces if isinstance(space, Space)), None)


def construction(sizes: Iterable[object]) -> AbstractContextManager[object]:
    """The context in which to build a module of these sizes: that of fake tensors if a size is a
    symbol, otherwise an empty one.
    """
    space = space_of(sizes)
    return nullcontext() if space is None else space.fake_mode


def value_of(size: Size) -> int:
    """The number that a size is or, if it is a symbol, the number that it stands for."""
    return size if isinstance(size, int) else int(size.node.hint)


# Operators that a trace records as one node. Among them are collectives over simulated ranks, which
# are never run.


Arguments = ParamSpec("Arguments")
Results = TypeVar("Results")


def operator(
    *like: str, changes: Sequence[str] = ()
) -> Callable[[Callable[Arguments, Results]], Callable[Arguments, Results]]:
    """A decorator that registers a function as the operator ``mistlab::NAME``, which writes to the
    arguments named in ``changes``.

    The operator's results are contiguous, with the sizes and types of the arguments named in
    ``like``.
    """

    def made_of(function: Callable[Arguments, Results]) -> Callable[Arguments, Results]:
        name = f"mistlab::{function.__name__}"
        made = torch.library.custom_op(name, function, mutates_args=changes)
        names = [*signature(function).parameters]
        places = [names.index(one) for one in like]

        @made.register_fake
        def _(*arguments: Any) -> Any:
            results = tuple(arguments[at].new_empty(arguments[at].shape) for at in places)
            return results[0] if len(like) == 1 else results or None

        return direct(made, function)

    return made_of


# The default dispatch of tensors, which observers and tensor stand-ins override.
_OWN_DISPATCH = Tensor.__torch_dispatch__
_observers = torch._C._len_torch_dispatch_stack


def is_watched(tensor: Tensor) -> bool:
    """Whether operators on a tensor must pass torch's dispatcher: a trace or a check observes them,
    or the tensor is a stand-in without values.
    """
    return _observers() > 0 or type(tensor).__torch_dispatch__ is not _OWN_DISPATCH


def direct(
    made: Callable[Arguments, Results], function: Callable[Arguments, Results]
) -> Callable[Arguments, Results]:
    """A function that calls the operator ``made`` while a trace or a check observes operators, and
    otherwise directly the ``function`` that the operator wraps: torch's dispatcher takes longer
    than a small kernel.
    """

    @wraps(function)
    def called(*arguments: Arguments.args, **named: Arguments.kwargs) -> Results:
        first = arguments[0]
        assert isinstance(first, Tensor)
        return (made if is_watched(first) else function)(*arguments, **named)

    called.operator = made  # type: ignore[attr-defined]
    return called


def counted(
    name: str, result: Callable[..., Any], remedy: str, *, changes: Sequence[str] = ()
) -> Callable[..., Any]:
    """The operator ``mistlab::NAME``, which a trace records, with the arguments and result of the
    function ``result``.

    It writes to the arguments named in ``changes``. Outside a trace a call raises an error with the
    ``remedy``.
    """

    def never_run(*_: object) -> NoReturn:
        message = f"a counted rank cannot run {name}: {remedy}"
        raise RuntimeError(message)

    schema = torch.library.infer_schema(result, mutates_args=changes)
    made = torch.library.custom_op(
        f"mistlab::{name}", never_run, mutates_args=changes, schema=schema
    )
    made.register_fake(result)
    return made


# Linear maps of tensors over ranks, such as gathers, whose gradients take the transposed map.


def bare(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without support for torch.func transforms, whose overhead exceeds the time
    of a small kernel.
    """
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


class Carried(torch.autograd.Function):
    """Autograd function of a linear map ``there``; gradients take the transposed map ``back``."""

    @staticmethod
    def forward(ctx: Any, there: Callable[..., Any], back: Callable[..., Any], *x: Tensor) -> Any:
        """The result of a linear map (such as a gather over ranks) of tensors."""
        ctx.back = back
        return there(*x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """The gradients of a linear map's operands: the transposed map of the results'
        gradients.
        """
        given = ctx.back(*gradients)
        return None, None, *((given,) if isinstance(given, Tensor) else given)


_carry = bare(Carried)


def carried(
    x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
) -> Tensor:
    """The result of the linear map ``there`` of a tensor, whose gradient takes the transposed map
    ``back``.
    """
    made: Tensor = _carry(there, back, x)
    return made


# Tensor-parallel ranks as a model sees them: one rank, or ranks that a trace only counts.


class TensorParallel(Protocol):
    """The tensor-parallel ranks that share each layer of a model."""

    @property
    def size(self) -> Size:
        """The number of tensor-parallel ranks."""

    @property
    def rank(self) -> int:
        """The index of this rank among the tensor-parallel ranks."""

    @property
    def splits_tokens(self) -> bool:
        """Whether each rank has only its part of each sequence outside GEMMs (sequence
        parallelism).
        """

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        """Reduce ``tensor`` over the ranks, in place; ``operation`` is ``sum`` or ``max``."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the ranks' tensors along the last dimension."""

    def gather_tokens(self, tensor: Tensor, *, again: bool = False) -> Tensor:
        """Gather the ranks' parts of sequences (batch, tokens, ..). ``again`` says that the tensor
        was gathered in the forward pass already.
        """

    def scatter_tokens(self, tensor: Tensor, *, of_input: bool = False) -> Tensor:
        """Reduce-scatter of whole sequences over the ranks. ``of_input`` says that the tensor is
        the gradient of a GEMM's input.
        """


class OneRank:
    """The ranks of a model that is not split."""

    size = 1
    rank = 0
    splits_tokens = False

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        """All-reduce in a model that is not split: does nothing, since there is one rank."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensor itself, since there is one rank."""
        return tensor

    def gather_tokens(self, tensor: Tensor, *, again: bool = False) -> Tensor:
        """The tensor itself, since the one rank has all tokens."""
        return tensor

    def scatter_tokens(self, tensor: Tensor, *, of_input: bool = False) -> Tensor:
        """The tensor itself, since the one rank has all tokens."""
        return tensor


class CountedRanks:
    """Tensor-parallel ranks of a traced model: collectives are recorded as operators, never run."""

    rank = 0

    def __init__(self, size: Size, *, splits_tokens: bool = False) -> None:
        self.size = size
        self.splits_tokens = splits_tokens

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        """Record an all-reduce of the traced model."""
        _all_reduce_(tensor, operation)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Record an all-gather of the traced model."""
        gathered: Tensor = _all_gather(tensor, self.size)
        return gathered

    def gather_tokens(self, tensor: Tensor, *, again: bool = False) -> Tensor:
        """Record an all-gather of sequences, for the first time or ``again``."""
        gather = _gather_again if again else _gather_tokens
        gathered: Tensor = gather(tensor, self.size)
        return gathered

    def scatter_tokens(self, tensor: Tensor, *, of_input: bool = False) -> Tensor:
        """Record a reduce-scatter of sequences of the traced model."""
        scatter = _scatter_gradient if of_input else _scatter_tokens
        scattered: Tensor = scatter(tensor, self.size)
        return scattered


_REMEDY = "give the model ranks that run"


def _reduced(tensor: Tensor, operation: str) -> None:
    return None


def _concatenated(tensor: Tensor, ranks: int) -> Tensor:
    *leading, last = tensor.shape
    return tensor.new_empty((*leading, last * ranks))


def _gathered(tensor: Tensor, ranks: int) -> Tensor:
    batch, tokens, width = tensor.shape
    return tensor.new_empty(batch, tokens * ranks, width)


def _scattered(tensor: Tensor, ranks: int) -> Tensor:
    batch, tokens, width = tensor.shape
    return tensor.new_empty(batch, tokens // ranks, width)


_all_reduce_ = counted("all_reduce_", _reduced, _REMEDY, changes=["tensor"])
_all_gather = counted("all_gather", _concatenated, _REMEDY)
_gather_tokens = counted("gather_tokens", _gathered, _REMEDY)
_gather_again = counted("gather_again", _gathered, _REMEDY)
_scatter_tokens = counted("scatter_tokens", _scattered, _REMEDY)
_scatter_gradient = counted("scatter_gradient", _scattered, _REMEDY)
