"""Groups with only one real rank, whose collectives compute with this rank's values alone.

As with NCCL, a collective is in the order of the current stream, so nobody waits for it.
"""

from torch import Tensor

from runtime.comm.group import GroupMaker, own_groups, own_part


class LoopGroup:
    """A group of ``size`` ranks; the others have the same values as this rank."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> None:
        """Reduce over equal values, in place."""
        tensor.mul_(self.size if operation == "sum" else 1)

    def all_gather(self, whole: Tensor, own: Tensor) -> None:
        """Fill ``whole`` with copies of ``own``, which may be a part of ``whole``."""
        size = own.numel()
        whole[: self.rank * size].view(-1, size).copy_(own)
        whole[(self.rank + 1) * size :].view(-1, size).copy_(own)
        mine = own_part(whole, self)
        # A part that lies in its place already is only read.
        if mine.data_ptr() == own.data_ptr():
            own.sum()
        else:
            mine.copy_(own)

    def reduce_scatter(self, whole: Tensor) -> None:
        """Sum equal values in this rank's part; read all of ``whole``."""
        own_part(whole, self).copy_(whole.view(self.size, -1).sum(0))

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        """Read all tensors to send, and fill all tensors to receive with random values."""
        for tensor, _ in sends:
            tensor.sum()
        for tensor, _ in receives:
            tensor.normal_(std=0.02)


def loops(rank: int) -> GroupMaker:
    """A function that makes the groups of one rank."""
    return own_groups(rank, lambda _, ranks: LoopGroup(len(ranks), ranks.index(rank)))
