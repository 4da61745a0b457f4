"""Tensor-parallel ranks of a model that the executor runs: collectives inside a layer."""

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.comm.group import Group
from runtime.engine.streams.lanes import Streams


class StreamedRanks:
    """A group whose collectives run inside a layer, while other lanes go on.

    In the backward pass some products give results that the layer itself does not need. They are
    put off, and done beside the layer's next reduction, that of its input's gradient.
    """

    def __init__(self, group: Group, streams: Streams) -> None:
        self._group, self._streams = group, streams
        self.size, self.rank = group.size, group.rank
        self._put_off: list[Callable[[], object]] = []

    def put_off(self, product: Callable[[], object]) -> None:
        """Do a product beside the next reduction; do it now if there is only one rank."""
        if self.size > 1:
            self._put_off.append(product)
        else:
            product()

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        """Reduce over the group, in place, beside the products that were put off."""
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
            # A product's tensors are freed as soon as it is done.
            products.pop(0)()
