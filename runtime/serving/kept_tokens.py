"""Paged key-value caches: on a rank's device for the requests of its replica, and in host memory
for waiting requests.

Axes: N sequences of a pass, Q new tokens of each, C cached tokens of each, H query heads, K heads
of keys and values, D channels of a head; T new tokens of all sequences of a pass.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.models.attention import PartedAttention


class BlockPool:
    """Memory of a paged key-value cache (blocks, layers, 2, tokens per block, K, D), and the blocks
    that are free.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.free = list(range(memory.shape[0]))
        self.tables: dict[int, list[int]] = {}

    @property
    def block(self) -> int:
        """The number of tokens in a cache block."""
        return self.memory.shape[3]

    def _needed(self, request: int, tokens: int) -> int:
        return -(-tokens // self.block) - len(self.tables.get(request, ()))

    def lacks(self, request: int, tokens: int) -> bool:
        """Whether too few blocks are free for a request to grow to this many tokens."""
        return self._needed(request, tokens) > len(self.free)

    def grow(self, request: int, tokens: int) -> None:
        """Allocate the blocks that a request needs to grow to this many tokens."""
        needed = self._needed(request, tokens)
        if self.lacks(request, tokens):
            message = f"{needed} blocks for request {request}, but {len(self.free)} are free"
            raise MemoryError(message)
        table = self.tables.setdefault(request, [])
        for _ in range(needed):
            table.append(self.free.pop(0))

    def release(self, request: int) -> None:
        """Free all cache blocks of a request."""
        self.free += self.tables.pop(request)


def read_tokens(memory: Tensor, table: Sequence[int], tokens: int) -> Tensor:
    """Copy a request's keys and values (tokens, layers, 2, K, D) out of cache blocks."""
    return memory[torch.tensor(table)].movedim(3, 1).flatten(0, 1)[:tokens]


def write_tokens(memory: Tensor, table: Sequence[int], values: Tensor) -> None:
    """Copy a request's keys and values (tokens, layers, 2, K, D) into cache blocks."""
    positions = torch.arange(values.shape[0])
    blocks, rows = torch.tensor(table)[positions // memory.shape[3]], positions % memory.shape[3]
    memory[blocks, :, :, rows] = values


class CopyLane:
    """A thread that makes copies between device and host, one after another, while the rank
    computes.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._copies: list[Future[None]] = []

    def submit(self, copy: Callable[[], None]) -> "Future[None]":
        """Start a copy between device and host, after the copies submitted before."""
        started = self._thread.submit(copy)
        self._copies.append(started)
        return started

    def wait(self) -> None:
        """Wait until all submitted copies have ended."""
        for copy in self._copies:
            copy.result()
        self._copies.clear()

    def close(self) -> None:
        """End the thread, after its copies."""
        self._thread.shutdown(cancel_futures=True)


@dataclass(slots=True, eq=False)
class KeptPass:
    """The tokens of one pass: for each sequence its cache blocks, its number of cached tokens, and
    its number of new tokens.
    """

    tables: Sequence[Sequence[int]]
    before: Sequence[int]
    new: Sequence[int]

    def places(self) -> Tensor:
        """The position of each new token (T) in its sequence."""
        pairs = zip(self.before, self.new, strict=True)
        return torch.cat([torch.arange(begin, begin + count) for begin, count in pairs])

    def slots(self, block: int) -> tuple[Tensor, Tensor]:
        """For each new token (T) its cache block, and its index in the block."""
        places = self.places()
        blocks = [
            torch.tensor(table)[torch.arange(begin, begin + count) // block]
            for table, begin, count in zip(self.tables, self.before, self.new, strict=True)
        ]
        return torch.cat(blocks), places % block

    def padded_tables(self) -> Tensor:
        """The cache blocks of all sequences as one array (N, most blocks); shorter rows are padded
        by repeating a block.
        """
        longest = max(map(len, self.tables))
        return torch.tensor([[*one, *[one[0]] * (longest - len(one))] for one in self.tables])


class KeptAttention:
    """The attention of a transformer block on a rank's paged cache; implements ``KeptKeys``."""

    def __init__(self, of: torch.nn.Module, pool: BlockPool, layer: int) -> None:
        sees = isinstance(of, PartedAttention) and of.sees_window
        self.window = int(of.config.window) if sees else 0  # type: ignore[union-attr, arg-type]
        self.pool, self.layer = pool, layer
        self.tokens: KeptPass | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the new keys and values (1, T, K, D) to the cache, and return the attention of the
        queries (1, T, H, D) to the cached tokens.
        """
        assert self.tokens is not None
        blocks, rows = self.tokens.slots(self.pool.block)
        memory = self.pool.memory[:, self.layer]
        memory[blocks, 0, rows], memory[blocks, 1, rows] = key[0], value[0]
        kept = memory[self.tokens.padded_tables()]
        keys, values = kept.movedim(2, 0).flatten(2, 3).unbind(0)
        return self._mixed(query[0], keys, values)[None]

    def _mixed(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The output of attention (T, H, D) to cached keys and values (N, C, K, D)."""
        assert self.tokens is not None
        new = torch.tensor(self.tokens.new)
        group = query.shape[1] // keys.shape[2]
        padded = torch.nn.utils.rnn.pad_sequence(
            list(query.split(list(self.tokens.new))), batch_first=True
        ).unflatten(2, (keys.shape[2], group))
        scores = torch.einsum("nqkgd,nckd->nkgqc", padded.float(), keys.float())
        scores = scores / math.sqrt(query.shape[-1])
        positions = torch.tensor(self.tokens.before)[:, None] + torch.arange(padded.shape[1])
        behind = positions[:, :, None] - torch.arange(keys.shape[1])
        hidden = behind < 0
        if self.window:
            hidden |= behind >= self.window
        scores.masked_fill_(hidden[:, None, None], -math.inf)
        shares = scores.softmax(-1)
        mixed = torch.einsum("nkgqc,nckd->nqkgd", shares, values.float())
        is_token = torch.arange(padded.shape[1])[None] < new[:, None]
        return mixed.flatten(2, 3)[is_token].to(query.dtype)
