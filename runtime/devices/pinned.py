"""Lends pinned host memory, and can keep it pinned from one run of a process to the next.

Pinning is slow, because every page is touched and registered. A process that runs plan after plan
therefore keeps its pinned memory within ``kept()``, and lends it again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from torch import Tensor

from runtime.devices.driver import Driver

# Parts of a block begin at pages, as blocks do.
PAGE_BYTES = 4096


@dataclass(slots=True, kw_only=True, eq=False)
class _Block:
    """One piece of pinned memory, lent in parts from its beginning up to ``used_bytes``.

    ``lent`` counts the parts that are not given back yet. The first ``written_bytes`` may hold
    values of earlier runs.
    """

    memory: Tensor
    driver: Driver
    used_bytes: int = 0
    written_bytes: int = 0
    lent: int = 0

    @property
    def left_bytes(self) -> int:
        """Bytes that can still be lent."""
        return self.memory.numel() - self.used_bytes

    def take(self, size_bytes: int) -> Tensor:
        """Lend the next part, filled with zeros."""
        begin, end = self.used_bytes, self.used_bytes + size_bytes
        self.memory[begin : min(end, max(begin, self.written_bytes))].zero_()
        self.used_bytes = min(self.memory.numel(), -(-end // PAGE_BYTES) * PAGE_BYTES)
        self.written_bytes = max(self.written_bytes, end)
        self.lent += 1
        return self.memory[begin:end]

    def give_back(self) -> None:
        """Take one part back; when all parts are back, the whole block can be lent again."""
        self.lent -= 1
        if not self.lent:
            self.used_bytes = 0

    def unpin(self) -> None:
        """Unpin the block, before its memory is freed."""
        self.driver.unpin(self.memory)


@dataclass(slots=True, kw_only=True, eq=False)
class Lent:
    """Pinned host memory that somebody has borrowed; zeros at first."""

    memory: Tensor
    _block: _Block
    _keeper: "_Keeper | None"

    def give_back(self) -> None:
        """Say that nothing uses the memory any more."""
        if self._keeper is None:
            self._block.unpin()
        else:
            self._keeper.give_back(self._block)


@dataclass(slots=True, kw_only=True, eq=False)
class _Keeper:
    """The pinned blocks of a process, lent to one run after another."""

    _blocks: list[_Block] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def lend(self, size_bytes: int, driver: Driver) -> Lent:
        """Lend a part of the block with the least room that suffices, else of a new block.

        Before a new block is pinned, all blocks that nobody uses are unpinned, so that little is
        pinned beyond the need of the current run.
        """
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
        """Take one part of a block back; the block stays pinned."""
        with self._lock:
            block.give_back()

    def end(self) -> None:
        """Unpin all blocks."""
        with self._lock:
            self._drop([*self._blocks])

    def _drop(self, blocks: list[_Block]) -> None:
        for block in blocks:
            block.unpin()
            self._blocks.remove(block)


_keeper: _Keeper | None = None


@contextmanager
def kept() -> Iterator[None]:
    """Within the ``with`` block, keep memory pinned for later runs; unpin all of it at the end."""
    global _keeper  # noqa: PLW0603 (pinned memory is of the process)
    assert _keeper is None, "the process keeps its pinned memory already"
    keeper = _keeper = _Keeper()
    try:
        yield
    finally:
        _keeper = None
        keeper.end()


def lend(size_bytes: int, driver: Driver) -> Lent:
    """Lend pinned zeros; raises ``MemoryError`` if the memory cannot be pinned."""
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
