"""Quantised frozen weights: packed once, and dequantised before each GEMM.

Weights are quantised in blocks of 64 neighbouring inputs of a row. Blocks are in row order where
tensor-parallel ranks split rows, else in column order, so that a rank's part has the same bytes in
all plans. With 4 bits (NF4, Dettmers et al. 2023, arXiv 2305.14314, appendix E) each block has an
8-bit scale, and 256 of these scales share a 32-bit scale (double quantisation). With 8 bits 64
blocks (4,096 weights) share a 32-bit scale.

Axes: N blocks, G groups of blocks.
"""

from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from mistlab.engines.adapters import BLOCK, BLOCKS_A_SCALE, Base

_SCALE_BYTES = 4
# The number of quantisation steps of an 8-bit scale, and the largest signed 8-bit integer.
_STEPS, _MOST = 255, 127
# The values of the 16 codes of NF4 (4-bit NormalFloat): quantiles of a normal distribution.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How a rank's weight matrix (outputs, inputs) is quantised and packed; ``by_columns`` says
    that tensor parallelism splits its columns.
    """

    base: Base
    shape: tuple[int, int]
    by_columns: bool

    @property
    def blocks(self) -> int:
        """The number of quantisation blocks, each with one scale."""
        return prod(self.shape) // BLOCK

    @property
    def size_bytes(self) -> int:
        """The bytes of a quantised matrix, with its scales."""
        values = self.blocks * BLOCK
        small = values // 2 + self.blocks if self.base == "4bit" else values
        return _SCALE_BYTES * self._groups + small

    def pack(self, matrix: Tensor) -> Tensor:
        """Quantise a matrix and pack it into bytes."""
        blocks = self._blocks(matrix.float())
        largest = blocks.abs().amax(1)
        shared = self._padded(largest).amax(1)
        if self.base == "8bit":
            units = self._each(_divisor(shared / _MOST))
            codes = (blocks / units[:, None]).round().to(torch.int8)
            return torch.cat([_bytes(shared), _bytes(codes)])
        # The scale in 8 bits is at least 1: a scale of 0 would set all weights of the block to
        # zero.
        units = self._each(_divisor(shared / _STEPS))
        steps = (largest / units).round().clamp(min=1)
        table = _table(matrix.device)
        middles = (table[1:] + table[:-1]) / 2
        codes = torch.bucketize(blocks / _divisor(largest)[:, None], middles).to(torch.uint8)
        pairs = codes.view(-1, 2)
        return torch.cat([_bytes(shared), steps.to(torch.uint8), pairs[:, 0] * 16 + pairs[:, 1]])

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantise a matrix from its packed bytes."""
        at = _SCALE_BYTES * self._groups
        shared = packed[:at].view(torch.float32)
        if self.base == "8bit":
            codes = packed[at : at + self.blocks * BLOCK].view(torch.int8).view(-1, BLOCK)
            values = codes * self._each(shared / _MOST)[:, None]
        else:
            end = at + self.blocks
            scales = packed[at:end] * self._each(shared / _STEPS)
            pairs = packed[end : end + self.blocks * BLOCK // 2]
            codes = torch.stack([pairs >> 4, pairs & 15], 1).view(-1, BLOCK)
            values = _table(packed.device)[codes.int()] * scales[:, None]
        return self._matrix(values.to(dtype))

    @property
    def _groups(self) -> int:
        return -(-self.blocks // BLOCKS_A_SCALE[self.base])

    def _blocks(self, matrix: Tensor) -> Tensor:
        """A matrix's quantisation blocks of 64 elements (N, 64), in the order in which they are
        packed.
        """
        parts = matrix.view(self.shape[0], -1, BLOCK)
        return (parts.transpose(0, 1) if self.by_columns else parts).reshape(-1, BLOCK)

    def _matrix(self, blocks: Tensor) -> Tensor:
        rows, columns = self.shape
        if not self.by_columns:
            return blocks.view(rows, columns)
        return blocks.view(-1, rows, BLOCK).transpose(0, 1).reshape(rows, columns)

    def _padded(self, scales: Tensor) -> Tensor:
        """Block scales (N) as groups (G, blocks per group), padded; the scales of a group are
        quantised together.
        """
        size = BLOCKS_A_SCALE[self.base]
        return pad(scales, (0, self._groups * size - len(scales))).view(-1, size)

    def _each(self, shared: Tensor) -> Tensor:
        """The value of each group (G), repeated for each of the group's blocks (N)."""
        return shared.repeat_interleave(BLOCKS_A_SCALE[self.base])[: self.blocks]


@cache
def _table(device: torch.device) -> Tensor:
    return torch.tensor(NF4, device=device)


def _divisor(scales: Tensor) -> Tensor:
    """Quantisation scales to divide by: 0, the scale of blocks of zeros, becomes 1."""
    return scales.masked_fill(scales == 0, 1.0)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8).flatten()
