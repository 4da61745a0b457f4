"""Ranks that are threads of one process, so that any plan runs without a launcher.

A rank leaves a copy of its tensor for the others, and takes all copies when every rank has left
one. One rank computes at a time, until it must wait: ranks that computed at once would spend a
tenth of their seconds passing Python's lock to one another, with every operator of torch.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from runtime.comm.group import RankLostError, own_part

Result = TypeVar("Result")
# How long a rank sleeps at most before it looks again whether other ranks have come.
MOMENT_S = 0.02
Key = tuple[object, ...]


@dataclass(slots=True, eq=False)
class Meeting:
    """Where ranks leave tensors for one another: ``left`` by collective and by rank. The rank that
    computes holds the lock of ``changed``."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    left: dict[Key, dict[int, Tensor]] = field(default_factory=dict)
    taken: dict[Key, int] = field(default_factory=dict)
    failed: bool = False

    def leave(self, key: Key, rank: int, tensor: Tensor, count: int = 1) -> None:
        """Leave a copy of a tensor for the collective ``key``; the last of ``count`` wakes all."""
        with self.changed:
            left = self.left.setdefault(key, {})
            left[rank] = tensor.clone()
            if len(left) >= count:
                self.changed.notify_all()

    def has(self, key: Key, count: int) -> bool:
        """Whether ``count`` ranks have left a tensor for the collective ``key``."""
        if self.failed:
            message = "another rank has failed"
            raise RankLostError(message)
        return len(self.left.get(key, ())) == count

    def take(self, key: Key, takers: int) -> list[Tensor]:
        """The tensors left for ``key`` in order of rank; forgotten when the last taker has them."""
        with self.changed:
            parts = [part for _, part in sorted(self.left[key].items())]
            self.taken[key] = self.taken.get(key, 0) + 1
            if self.taken[key] == takers:
                del self.left[key], self.taken[key]
            return parts

    def fail(self) -> None:
        """Tell all ranks that one has failed, and wake those that sleep."""
        with self.changed:
            self.failed = True
            self.changed.notify_all()


@dataclass(slots=True, kw_only=True)
class _Gathering:
    """A started collective: when all tensors are left, ``receive`` makes this rank's result."""

    meeting: Meeting
    keys: Sequence[Key]
    counts: Sequence[int]
    takers: int
    receive: Callable[[list[list[Tensor]]], object]

    def is_ready(self) -> bool:
        """Whether all ranks have left their tensors."""
        pairs = zip(self.keys, self.counts, strict=True)
        return all(self.meeting.has(key, count) for key, count in pairs)

    def wait_a_moment(self) -> None:
        """Sleep until all tensors of some collective are left, or until a moment has passed. Other
        ranks compute meanwhile."""
        with self.meeting.changed:
            if not self.is_ready():
                self.meeting.changed.wait(MOMENT_S)

    def finish(self) -> None:
        """Take the tensors that all ranks have left, and make the result."""
        self.receive([self.meeting.take(key, self.takers) for key in self.keys])


class ThreadGroup:
    """A group of some of the threads; ``ranks`` are their numbers among all threads."""

    def __init__(self, meeting: Meeting, name: str, ranks: Sequence[int], world_rank: int) -> None:
        self._meeting = meeting
        self._name = (name, *ranks)
        self.size = len(ranks)
        self.rank = list(ranks).index(world_rank)
        self._calls = 0
        self._messages: dict[tuple[int, int], int] = {}

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> "_Gathering":
        """Reduce in order of rank, so that all ranks get the same bits."""

        def receive(parts: list[Tensor]) -> None:
            stacked = torch.stack(parts)
            tensor.copy_(stacked.sum(0) if operation == "sum" else stacked.amax(0))

        return self._gather(tensor, receive)

    def all_gather(self, whole: Tensor, own: Tensor) -> "_Gathering":
        """Fill ``whole`` with every rank's part in order of rank."""
        return self._gather(own, lambda parts: whole.copy_(torch.cat(parts)))

    def reduce_scatter(self, whole: Tensor, into: Tensor | None = None) -> "_Gathering":
        """Sum everybody's tensor; keep this rank's part of it."""
        own = own_part(whole, self) if into is None else into

        def receive(parts: list[Tensor]) -> None:
            own.copy_(torch.stack([own_part(p, self) for p in parts]).sum(0))

        return self._gather(whole, receive)

    def all_to_all(
        self, received: Tensor, sent: Tensor, from_each: Sequence[int], to_each: Sequence[int]
    ) -> "_Gathering":
        """Leave rows for each rank, and take the rows of each."""
        self._calls += 1
        call = (*self._name, self._calls)
        for peer, rows in enumerate(sent.split(list(to_each))):
            self._meeting.leave((*call, self.rank, peer), 0, rows)

        def receive(messages: list[list[Tensor]]) -> None:
            # Unlike sizes raise, as they must.
            places = received.split(list(from_each))
            for place, (rows,) in zip(places, messages, strict=True):
                assert place.shape == rows.shape, "a rank expects other rows than it is sent"
                place.copy_(rows)

        return _Gathering(
            meeting=self._meeting,
            keys=[(*call, peer, self.rank) for peer in range(self.size)],
            counts=[1] * self.size,
            takers=1,
            receive=receive,
        )

    def exchange(
        self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]
    ) -> "_Gathering":
        """Leave messages for some ranks, and wait for messages of others."""
        for tensor, peer in sends:
            self._meeting.leave(self._message(self.rank, peer), 0, tensor)

        def receive(messages: list[list[Tensor]]) -> None:
            for (tensor, _), (message,) in zip(receives, messages, strict=True):
                tensor.copy_(message)

        return _Gathering(
            meeting=self._meeting,
            keys=[self._message(peer, self.rank) for _, peer in receives],
            counts=[1] * len(receives),
            takers=1,
            receive=receive,
        )

    def _message(self, sender: int, receiver: int) -> Key:
        number = self._messages.get((sender, receiver), 0)
        self._messages[sender, receiver] = number + 1
        return (*self._name, "message", sender, receiver, number)

    def _gather(self, tensor: Tensor, receive: Callable[[list[Tensor]], object]) -> _Gathering:
        self._calls += 1
        key = (*self._name, self._calls)
        self._meeting.leave(key, self.rank, tensor, self.size)
        return _Gathering(
            meeting=self._meeting,
            keys=[key],
            counts=[self.size],
            takers=self.size,
            receive=lambda gathered: receive(gathered[0]),
        )


def run_threads(ranks: int, work: Callable[[int, Meeting], Result]) -> list[Result]:
    """Call ``work(rank, meeting)`` in a thread for each rank; return all results in order of rank.

    The first error of a rank is raised.
    """
    meeting = Meeting()
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with meeting.changed:
                results[rank] = work(rank, meeting)
        except BaseException as error:
            if not isinstance(error, RankLostError):
                errors.append(error)
            meeting.fail()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(ranks)]
