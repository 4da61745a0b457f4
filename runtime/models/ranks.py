"""Sizes of a model on ranks that split it: numbers, or symbols while a model is traced."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor, distributed

# Sizes of a model: numbers, or symbols while a model is traced.
#
# The module that makes symbols (``runtime.tracing.symbolic_sizes``) takes seconds to import.
# Nothing here imports it, so that processes that train start quickly.


# A torch.SymInt passes for an int everywhere; PyTorch's own annotations say int.
Size = int


@runtime_checkable
class Space(Protocol):
    """Makes the symbols of one trace; ``runtime.tracing.symbolic_sizes.SizeSpace`` does."""

    fake_mode: Any

    def size(self, name: str, value: int) -> Size:
        """A new symbol ``name``; ``value`` stands for it where code needs a number."""

    def refuse_fixed(self, culprit: str, place: str = "") -> None:
        """Raise if traced code has fixed a symbol to a number, or to another symbol."""


def space_of(sizes: Iterable[object]) -> Space | None:
    """The space of the symbols among ``sizes``; None if all sizes are numbers."""
    symbols = (size for size in sizes if isinstance(size, torch.SymInt))
    spaces = (symbol.node.shape_env for symbol in symbols)
    return next((space for space in spaces if isinstance(space, Space)), None)


def construction(sizes: Iterable[object]) -> AbstractContextManager[object]:
    """The context in which to build a module of these sizes.

    It is a fake-tensor mode if a size is a symbol, and changes nothing otherwise.
    """
    space = space_of(sizes)
    return nullcontext() if space is None else space.fake_mode


def value_of(size: Size) -> int:
    """The number that a size is or, as a symbol, stands for."""
    return size if isinstance(size, int) else int(size.node.hint)


# Operators that a trace records and nobody runs: collectives of ranks that are only counted.


def counted(
    name: str, result: Callable[..., Any], remedy: str, *, changes: Sequence[str] = ()
) -> Callable[..., Any]:
    """The operator ``mistlab::name``, with the arguments and the result of a function.

    It writes to the arguments ``changes``. Outside of a trace it is refused, with a remedy.
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


# Tensor-parallel ranks as a model sees them: a process group, one rank, or counted ranks.


class TensorParallel(Protocol):
    """The ranks that share each layer of a model."""

    @property
    def size(self) -> Size:
        """Number of ranks."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def splits_tokens(self) -> bool:
        """Whether each rank has only its part of each sequence, outside products (sequence
        parallelism)."""

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        """Reduce ``tensor`` over the ranks, in place; ``operation`` is ``sum`` or ``max``."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the ranks' tensors along the last dimension."""

    def gather_tokens(self, tensor: Tensor, *, again: bool = False) -> Tensor:
        """Concatenate the ranks' parts of sequences (batch, tokens, ..); ``again`` marks a tensor
        that was gathered in the forward pass already."""

    def scatter_tokens(self, tensor: Tensor, *, of_input: bool = False) -> Tensor:
        """Sum whole sequences over the ranks, and keep this rank's part; ``of_input`` marks the
        gradient of a product's input."""


class OneRank:
    """The ranks of a model that is not split."""

    size = 1
    rank = 0
    splits_tokens = False

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        """Nothing to do."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def gather_tokens(self, tensor: Tensor, *, again: bool = False) -> Tensor:
        """The tensor itself."""
        return tensor

    def scatter_tokens(self, tensor: Tensor, *, of_input: bool = False) -> Tensor:
        """The tensor itself."""
        return tensor


class GroupRanks:
    """Ranks that are the processes of a torch.distributed group."""

    def __init__(self, group: distributed.ProcessGroup, *, splits_tokens: bool = False) -> None:
        self._group = group
        self.splits_tokens = splits_tokens
        self.size = group.size()
        self.rank = group.rank()

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        """Reduce over the group, in place."""
        reductions = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}
        distributed.all_reduce(tensor, reductions[operation], self._group)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the group's tensors along the last dimension."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(parts, tensor, self._group)
        return torch.cat(parts, -1)

    def gather_tokens(self, tensor: Tensor, *, again: bool = False) -> Tensor:
        """Concatenate the group's parts of sequences."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(parts, tensor, self._group)
        return torch.cat(parts, 1)

    def scatter_tokens(self, tensor: Tensor, *, of_input: bool = False) -> Tensor:
        """Sum over the group, and cut this rank's part out."""
        whole = tensor.contiguous()
        distributed.all_reduce(whole, group=self._group)
        return whole.chunk(self.size, 1)[self.rank].clone()


class CountedRanks:
    """Ranks of a model that is traced: collectives are recorded as operators, never run."""

    rank = 0

    def __init__(self, size: Size, *, splits_tokens: bool = False) -> None:
        self.size = size
        self.splits_tokens = splits_tokens

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        """Let the trace record a reduction."""
        _all_reduce_(tensor, operation)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Let the trace record a concatenation."""
        gathered: Tensor = _all_gather(tensor, self.size)
        return gathered

    def gather_tokens(self, tensor: Tensor, *, again: bool = False) -> Tensor:
        """Let the trace record that sequences are gathered, for the first time or again."""
        gather = _gather_again if again else _gather_tokens
        gathered: Tensor = gather(tensor, self.size)
        return gathered

    def scatter_tokens(self, tensor: Tensor, *, of_input: bool = False) -> Tensor:
        """Let the trace record that sequences are summed and scattered."""
        scatter = _scatter_gradient if of_input else _scatter_tokens
        scattered: Tensor = scatter(tensor, self.size)
        return scattered


_REMEDY = "give the model a process group"


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
