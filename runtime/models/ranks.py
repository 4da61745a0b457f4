"""Tensor-parallel ranks as a model sees them: a process group, one rank, or counted ranks."""

from typing import Protocol

import torch
from torch import Tensor, distributed

from runtime.models.sizes import Size


class TensorParallel(Protocol):
    """The ranks that share each layer of a model."""

    @property
    def size(self) -> Size:
        """Number of ranks."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        """Reduce ``tensor`` over the ranks, in place; ``operation`` is ``sum`` or ``max``."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the ranks' tensors along the last dimension."""


class OneRank:
    """The ranks of a model that is not split."""

    size = 1
    rank = 0

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        """Nothing to do."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor


class GroupRanks:
    """Ranks that are the processes of a torch.distributed group."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
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


class CountedRanks:
    """Ranks of a model that is traced: collectives are recorded as operators, never run."""

    rank = 0

    def __init__(self, size: Size) -> None:
        self.size = size

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        """Let the trace record a reduction."""
        _all_reduce_(tensor, operation)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Let the trace record a concatenation."""
        gathered: Tensor = _all_gather(tensor, self.size)
        return gathered


@torch.library.custom_op("mistlab::all_reduce_", mutates_args=("tensor",))
def _all_reduce_(tensor: Tensor, operation: str) -> None:
    message = f"a counted rank cannot run all_reduce ({operation}): give the model a process group"
    raise RuntimeError(message)


@_all_reduce_.register_fake
def _(tensor: Tensor, operation: str) -> None:
    return None


@torch.library.custom_op("mistlab::all_gather", mutates_args=())
def _all_gather(tensor: Tensor, ranks: int) -> Tensor:
    message = f"a counted rank cannot gather from {ranks}: give the model a process group"
    raise RuntimeError(message)


@_all_gather.register_fake
def _(tensor: Tensor, ranks: int) -> Tensor:
    *leading, last = tensor.shape
    return tensor.new_empty((*leading, last * ranks))
