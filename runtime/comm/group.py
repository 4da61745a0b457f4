"""What the ranks of a group do together, and when it is done.

A collective that has been started may return a ``Pending``; what returns None is either done, or in
the order of the CUDA stream that it was started on.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class RankLostError(RuntimeError):
    """Another rank is gone, or has not come in time."""


class Pending(Protocol):
    """A collective that has been started."""

    def is_ready(self) -> bool:
        """Whether ``finish`` would not wait."""

    def wait_a_moment(self) -> None:
        """Wait until it may be ready, or until a moment has passed."""

    def finish(self) -> None:
        """Bring the result to its place; called once, when it is ready."""


class Channel(Protocol):
    """Ranks of neighbouring stages."""

    def exchange(
        self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]
    ) -> Pending | None:
        """Send tensors to ranks, and receive tensors from some."""


class Group(Channel, Protocol):
    """Ranks that communicate; every rank calls the same collectives in the same order."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def rank(self) -> int:
        """This rank."""

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Pending | None:
        """Reduce over the ranks, in place; ``operation`` is ``sum`` or ``max``."""

    def all_gather(self, whole: Tensor, own: Tensor) -> Pending | None:
        """Fill ``whole`` with the ranks' ``own`` parts, which may lie in it at their places."""

    def reduce_scatter(self, whole: Tensor) -> Pending | None:
        """Sum over the ranks, of which each gets its part of ``whole``, in its place."""


class Alone:
    """The group of one rank."""

    size = 1
    rank = 0

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> None:
        """Nothing to do."""

    def all_gather(self, whole: Tensor, own: Tensor) -> None:
        """Copy what is not in its place."""
        if own.data_ptr() != whole.data_ptr():
            whole.copy_(own)

    def reduce_scatter(self, whole: Tensor) -> None:
        """Nothing to do."""

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        """Refuse: there is nobody else."""
        assert not sends
        assert not receives


def own_part(whole: Tensor, group: Group) -> Tensor:
    """This rank's equal part of a flat tensor."""
    return whole.chunk(group.size)[group.rank]


class Then:
    """A collective with something to do when it has ended."""

    def __init__(self, pending: Pending, follow: Callable[[], object]) -> None:
        self._pending = pending
        self._follow = follow

    def is_ready(self) -> bool:
        """Whether the collective is."""
        return self._pending.is_ready()

    def wait_a_moment(self) -> None:
        """Wait for the collective."""
        self._pending.wait_a_moment()

    def finish(self) -> None:
        """Finish it, and do the rest."""
        self._pending.finish()
        self._follow()


def finished(pending: Pending | None) -> None:
    """Wait for a collective, if streams do not see to the order."""
    if pending is not None:
        while not pending.is_ready():
            pending.wait_a_moment()
        pending.finish()


def then(pending: Pending | None, follow: Callable[[], object]) -> Pending | None:
    """Do something when a collective has ended; now, if streams see to the order."""
    if pending is None:
        follow()
        return None
    return Then(pending, follow)
