"""Groups of which one rank alone exists; the others would have the same values."""

from collections.abc import Callable, Sequence

from torch import Tensor

from runtime.comm.group import Alone, Group, GroupMaker, own_part


class LoneGroup:
    """A group of ``size`` ranks; only ``rank`` exists."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> None:
        """Reduce over equal values, in place."""
        tensor.mul_(self.size if operation == "sum" else 1)

    def all_gather(self, whole: Tensor, own: Tensor) -> None:
        """Fill ``whole`` with copies of ``own``."""
        whole.view(self.size, -1).copy_(own.clone())

    def reduce_scatter(self, whole: Tensor, into: Tensor | None = None) -> None:
        """Sum equal values in this rank's part."""
        own = own_part(whole, self) if into is None else into
        own.copy_(whole.view(self.size, -1).sum(0))

    def all_to_all(
        self, received: Tensor, sent: Tensor, from_each: Sequence[int], to_each: Sequence[int]
    ) -> None:
        """Fill with what goes to this rank itself, where as much comes of another."""
        own = sent.split(list(to_each))[self.rank]
        for place in received.split(list(from_each)):
            place.copy_(own) if place.shape == own.shape else place.fill_(0.02)

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        """Fill all tensors to receive."""
        del sends
        for tensor, _ in receives:
            tensor.fill_(0.02)


def own_groups(rank: int, join: Callable[[str, Sequence[int]], Group]) -> GroupMaker:
    """A function that makes the groups of one rank; ``join`` makes those that have other ranks."""

    def make(name: str, ranks: Sequence[int]) -> Group | None:
        if rank not in ranks:
            return None
        return Alone() if len(ranks) == 1 else join(name, ranks)

    return make


def lone(rank: int) -> GroupMaker:
    """A function that makes the groups of one rank."""
    return own_groups(rank, lambda _, ranks: LoneGroup(len(ranks), ranks.index(rank)))
