"""Pinned memory of the host: pinned for whoever asks, or kept by the process for the next run.

Pinning is slow, since every page is touched and registered, and a report pins for dozens of runs: a
process that runs plan after plan keeps what it has pinned (``kept``), and lends it again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from torch import Tensor

from runtime.devices.driver import Driver

# Where parts of one block begin: at pages, as blocks themselves do.
PAGE_BYTES = 4096


@dataclass(slots=True, kw_only=True, eq=False)
class _Block:
    """Memory that was pinned at once; parts before ``used_bytes`` are lent, or were.

    ``written_bytes`` may hold what earlier runs have left.
    """

    memory: Tensor
    driver: Driver
    used_bytes: int = 0
    written_bytes: int = 0
    lent: int = 0

    @property
    def left_bytes(self) -> int:
        """What can be lent still."""
        return self.memory.numel() - self.used_bytes

    def take(self, size_bytes: int) -> Tensor:
        """The next part, as zeros."""
        begin, end = self.used_bytes, self.used_bytes + size_bytes
        self.memory[begin : min(end, max(begin, self.written_bytes))].zero_()
        self.used_bytes = min(self.memory.numel(), -(-end // PAGE_BYTES) * PAGE_BYTES)
        self.written_bytes = max(self.written_bytes, end)
        self.lent += 1
        return self.memory[begin:end]

    def give_back(self) -> None:
        """One part less; when all are back, the block begins anew."""
        self.lent -= 1
        if not self.lent:
            self.used_bytes = 0

    def unpin(self) -> None:
        """Before the memory goes."""
        self.driver.unpin(self.memory)


@dataclass(slots=True, kw_only=True, eq=False)
class Lent:
    """Zeros of the host, pinned until they are given back."""

    memory: Tensor
    _block: _Block
    _keeper: "_Keeper | None"

    def give_back(self) -> None:
        """Nothing uses the memory any more."""
        if self._keeper is None:
            self._block.unpin()
        else:
            self._keeper.give_back(self._block)


@dataclass(slots=True, kw_only=True, eq=False)
class _Keeper:
    """The blocks of a process, lent to one run after another."""

    _blocks: list[_Block] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def lend(self, size_bytes: int, driver: Driver) -> Lent:
        """A part of the block that it fills most; if none has room, of a new one, for which those
        go that nobody uses, so that no more is pinned than a run needs and was left of others."""
        with self._lock:
            with_room = [
                block
                for block in self._blocks
                if block.driver is driver and block.left_bytes >= size_bytes
            ]
            block = min(with_room, key=lambda block: block.left_bytes, default=None)
            if block is None:
                self._drop([block for block in self._blocks if not block.lent])
                block = _pinned(size_bytes, driver)
                self._blocks.append(block)
            return Lent(memory=block.take(size_bytes), _block=block, _keeper=self)

    def give_back(self, block: _Block) -> None:
        """One part less of a block; it stays pinned."""
        with self._lock:
            block.give_back()

    def end(self) -> None:
        """Unpin everything."""
        with self._lock:
            self._drop([*self._blocks])

    def _drop(self, blocks: list[_Block]) -> None:
        for block in blocks:
            block.unpin()
            self._blocks.remove(block)


_keeper: _Keeper | None = None


@contextmanager
def kept() -> Iterator[None]:
    """Within the block, let this process keep what it pins for later runs; unpin it at the end."""
    global _keeper  # noqa: PLW0603 (pinned memory is of the process)
    assert _keeper is None, "the process keeps its pinned memory already"
    keeper = _keeper = _Keeper()
    try:
        yield
    finally:
        _keeper = None
        keeper.end()


def lend(size_bytes: int, driver: Driver) -> Lent:
    """Pinned zeros; raises ``MemoryError`` where they cannot be pinned."""
    if _keeper is not None:
        return _keeper.lend(size_bytes, driver)
    block = _pinned(size_bytes, driver)
    return Lent(memory=block.memory, _block=block, _keeper=None)


def _pinned(size_bytes: int, driver: Driver) -> _Block:
    memory = driver.host_zeros(size_bytes)
    status = driver.pin(memory)
    if status != 0:
        message = (
            f"{size_bytes / 2**30:.2f} GiB of host memory cannot be pinned (error {status}): raise "
            "the limit of locked memory (ulimit -l), or offload less"
        )
        raise MemoryError(message)
    return _Block(memory=memory, driver=driver)
