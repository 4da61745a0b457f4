"""Communication of context-parallel ranks inside attention, on the lanes (queues of work) of the
executor.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from runtime.comm.group import Group
from runtime.engine.streams.lanes import Streams
from runtime.models.context import chunks_of


class StreamedContext:
    """The context-parallel ranks that share each sequence; they exchange keys and values by ring,
    gather or all-to-all (``way``).

    Ring messages run on the stream of collectives inside layers, while the compute stream attends.
    """

    def __init__(self, group: Group, streams: Streams, way: int) -> None:
        self._group, self._streams = group, streams
        self.size, self.rank, self.way = group.size, group.rank, way

    def own_tokens(self, whole: Tensor) -> Tensor:
        """This rank's tokens (B, S) of whole sequences, as one contiguous tensor."""
        if self.size == 1:
            return whole
        chunks = whole.chunk(2 * self.size, 1)
        return torch.cat([chunks[one] for one in chunks_of(self.rank, self.size)], 1)

    def pass_on(
        self, given: Sequence[Tensor], taken: Sequence[Tensor], work: Callable[[], object]
    ) -> None:
        """Send tensors to the next rank of the ring and receive from the previous rank, overlapped
        with ``work``.
        """
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        sends = [(one, after) for one in given]
        receives = [(one, before) for one in taken]
        self._streams.beside(lambda: self._group.exchange(sends, receives), work)

    def gather(self, flat: Tensor) -> Tensor:
        """All-gather flat tensors of the context-parallel ranks, as one row per rank."""
        whole = flat.new_empty(self.size * flat.numel())
        self._streams.settle(self._group.all_gather(whole, flat))
        return whole.view(self.size, -1)

    def scatter(self, whole: Tensor) -> Tensor:
        """Reduce-scatter of ``whole``, which has a row per rank: this rank's row, summed over the
        ranks.
        """
        flat = whole.flatten()
        self._streams.settle(self._group.reduce_scatter(flat))
        # A copy, because a view would keep the whole tensor in memory.
        return flat.view(self.size, -1)[self.rank].clone()

    def trade(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        """All-to-all: send each rank its row of all tensors, and receive this rank's row from
        each.
        """
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [(one[rank], rank) for one in given for rank in others]
        receives = [(one[rank], rank) for one in taken for rank in others]
        for rows_given, other in zip(given, taken, strict=True):
            other[self.rank].copy_(rows_given[self.rank])
        self._streams.settle(self._group.exchange(sends, receives))
