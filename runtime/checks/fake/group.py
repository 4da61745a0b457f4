"""Groups with only one real rank, which check tensors as NCCL does.

A collective is in the order of the current stream, so nobody waits for it. It leaves tensors as
they are, because tensors without memory have no values.
"""

from typing import final

from torch import Tensor

from runtime.checks.fake.watch import Watch
from runtime.comm.group import GroupMaker, own_groups


@final
class FakeGroup:
    """A group of ``size`` ranks; only ``rank`` exists."""

    def __init__(self, size: int, rank: int, watch: Watch) -> None:
        self.size, self.rank = size, rank
        self._watch = watch

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> None:
        """Only check the tensor."""
        self._check("all_reduce", tensor)

    def all_gather(self, whole: Tensor, own: Tensor) -> None:
        """Only check the tensors and their sizes."""
        self._check("all_gather", whole, own)
        self._check_parts("all_gather", whole, own.numel())

    def reduce_scatter(self, whole: Tensor) -> None:
        """Only check the tensor and its size."""
        self._check("reduce_scatter", whole)
        self._check_parts("reduce_scatter", whole, whole.numel() // self.size)

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        """Only check the tensors and the ranks."""
        for tensor, peer in (*sends, *receives):
            self._check("exchange", tensor)
            if not 0 <= peer < self.size or peer == self.rank:
                self._watch.note("collective", "exchange", f"there is no other rank {peer}")

    def _check(self, name: str, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type == "cpu":
                self._watch.note("collective", name, "a tensor is on the CPU")
            if not tensor.is_contiguous():
                self._watch.note("collective", name, "a tensor is not in one piece")

    def _check_parts(self, name: str, whole: Tensor, part: int) -> None:
        if whole.numel() != self.size * part:
            said = f"{whole.numel()} elements are not {self.size} ranks' {part}"
            self._watch.note("collective", name, said)


def fake_maker(rank: int, watch: Watch) -> GroupMaker:
    """A function that makes the groups of one rank."""
    return own_groups(rank, lambda _, ranks: FakeGroup(len(ranks), ranks.index(rank), watch))
