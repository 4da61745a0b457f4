"""Tensor-parallel ranks for models: collectives inside a layer's own computing."""

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.comm.group import Group
from runtime.engine.streams.lanes import Streams


class StreamedRanks:
    """A group whose collectives a layer waits for, while other lanes go on.

    Backward, products whose results nobody in the layer waits for are put off: they are done beside
    the next reduction, which is that of the gradient of their layer's input.
    """

    def __init__(self, group: Group, streams: Streams) -> None:
        self._group, self._streams = group, streams
        self.size, self.rank = group.size, group.rank
        self._put_off: list[Callable[[], object]] = []

    def put_off(self, product: Callable[[], object]) -> None:
        """Do a product beside the next reduction; now, where there is none."""
        if self.size > 1:
            self._put_off.append(product)
        else:
            product()

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        """Reduce over the group, in place, beside what has been put off."""
        if self._put_off:
            self._streams.beside(lambda: self._group.all_reduce(tensor, operation), self._catch_up)
        elif self.size > 1:
            self._streams.settle(self._group.all_reduce(tensor, operation))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the group's tensors along the last dimension."""
        if self.size == 1:
            return tensor
        parts = tensor.new_empty(self.size * tensor.numel())
        self._streams.settle(self._group.all_gather(parts, tensor.contiguous().flatten()))
        return torch.cat(parts.view(self.size, *tensor.shape).unbind(), -1)

    def _catch_up(self) -> None:
        products, self._put_off = self._put_off, []
        while products:
            # What a product holds goes when it is done.
            products.pop(0)()
