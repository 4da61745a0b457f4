"""Masks of dropout by their formula, in NumPy's numbers of 32 bits, apart from the runtime's.

A value is kept where its hash is no less than the share of 2^32. The hash is that of its row's hash
and its column's, which begin with a key: the hash, number by number, of seed, step, layer and mask.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint32]
# Masks of a layer.
FIRST, SECOND, OF_SHARES = range(3)


def hashed(x: Words) -> Words:
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


def words(numbers: NDArray[np.int64]) -> Words:
    return (numbers & 0xFFFFFFFF).astype(np.uint32)


def key(begin: int, *numbers: int) -> Words:
    found = words(np.array([begin]))
    for number in numbers:
        found = hashed(found ^ words(np.array([number])))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """The masks of a step."""

    seed: int
    step: int
    # Tokens of a sequence.
    length: int
    # The number of the batch's first sequence.
    first: int = 0

    def keeps(
        self, layer: int, mask: int, rows: NDArray[np.int64], columns: int, share: float
    ) -> NDArray[np.bool_]:
        """Which values (rows, columns) are kept."""
        numbers = (self.seed, self.step, layer, mask)
        of_rows, of_columns = key(0x9E3779B1, *numbers), key(0x85EBCA77, *numbers)
        row = hashed(hashed(words(rows >> 32) ^ of_rows) ^ words(rows))
        column = hashed(words(np.arange(columns)) ^ of_columns)
        return hashed(row[..., None] ^ column) >= share * 2**32

    def of_tokens(self, x: Tensor, layer: int, mask: int, share: float) -> Tensor:
        """What is left of ``x`` (B, S, columns), larger by what is lost."""
        batch, tokens, columns = x.shape
        sequence = np.arange(self.first, self.first + batch)[:, None]
        rows = sequence * self.length + np.arange(tokens)
        kept = self.keeps(layer, mask, rows, columns, share)
        return x * torch.from_numpy(kept) / (1 - share)

    def of_shares(self, shares: Tensor, layer: int, share: float) -> Tensor:
        """What is left of attention's shares (B, H, S, S)."""
        batch, heads, tokens, _ = shares.shape
        sequence = np.arange(self.first, self.first + batch)[:, None, None]
        head = sequence * heads + np.arange(heads)[:, None]
        rows = head * self.length + np.arange(tokens)
        kept = self.keeps(layer, OF_SHARES, rows, tokens, share)
        return shares * torch.from_numpy(kept) / (1 - share)
