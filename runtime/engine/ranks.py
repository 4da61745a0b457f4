"""Tensor-parallel ranks for models: collectives inside a layer's own computing."""

import torch
from torch import Tensor

from runtime.comm.group import Group
from runtime.engine.streams import Streams


class StreamedRanks:
    """A group whose collectives a layer waits for, while other lanes go on."""

    def __init__(self, group: Group, streams: Streams) -> None:
        self._group, self._streams = group, streams
        self.size, self.rank = group.size, group.rank

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        """Reduce over the group, in place."""
        if self.size > 1:
            self._streams.settle(self._group.all_reduce(tensor, operation))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the group's tensors along the last dimension."""
        if self.size == 1:
            return tensor
        parts = tensor.new_empty(self.size * tensor.numel())
        self._streams.settle(self._group.all_gather(parts, tensor.contiguous().flatten()))
        return torch.cat(parts.view(self.size, *tensor.shape).unbind(), -1)
