"""Moments of 8 bits: a code for each value, and a 32-bit scale for each block of 256 values.

A code stands for one of 256 shares of its block's scale, those of dynamic quantisation (Dettmers et
al. 2021, arXiv 2110.02861): ever more of them in each decade from 1e-7 to 1. The scale is the
block's value of largest magnitude, with its sign, which has a code of its own. So this value is
kept as it is, and dequantised values have the same codes again. Byte 0 stands for 0: memory of
zeros holds moments of zeros.

Axes: N blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from mistlab.engines.engine import SCALED_TOGETHER

BLOCK, CODES = SCALED_TOGETHER, torch.uint8
_COUNT, _DECADES = 256, 7


def shares_of_codes(*, signed: bool) -> list[float]:
    """The shares of a block's scale that codes stand for, in ascending order.

    >>> len(shares_of_codes(signed=True)), shares_of_codes(signed=False)[:2]
    (256, [0.0, 3.25e-07])
    """
    shares = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2**decade * (1 if signed else 2)
        top = 10.0 ** (decade + 1 - _DECADES)
        middles = [top * (0.1 + 0.9 * (at + 0.5) / count) for at in range(count)]
        shares += middles
        shares += [-middle for middle in middles] if signed else []
    return sorted(shares)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Code:
    """The shares that 8-bit codes stand for, by code, and the middles between neighbouring shares,
    in ascending order; ``begin`` is the place of 0 in this order.
    """

    shares: Tensor
    middles: Tensor
    begin: int

    @classmethod
    def of(cls, device: torch.device, *, signed: bool) -> Self:
        """The code of values of both signs, or of values that are not negative."""
        ascending = shares_of_codes(signed=signed)
        begin = ascending.index(0.0)
        middles = [(low + high) / 2 for low, high in pairwise(ascending)]
        return cls(
            shares=torch.tensor(ascending[begin:] + ascending[:begin], device=device),
            middles=torch.tensor(middles, device=device),
            begin=begin,
        )

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The dequantised values of whole blocks."""
        return self.shares[codes.int()].view(-1, BLOCK).mul_(scales[:, None]).view(-1)

    def write(self, codes: Tensor, scales: Tensor, values: Tensor) -> None:
        """Quantise values of whole blocks, which are lost."""
        blocks = values.view(-1, BLOCK)
        scales.copy_(largest_of(*blocks.aminmax(dim=1)))
        codes.copy_(self.nearest(blocks, scales[:, None]).view(-1))

    def nearest(self, values: Tensor, scales: Tensor) -> Tensor:
        """The codes of values, which are divided by their scales in place."""
        values.div_(scales.masked_fill(scales == 0, 1.0))
        places = torch.bucketize(values, self.middles, out_int32=True)
        return places.add_(_COUNT - self.begin).bitwise_and_(_COUNT - 1).to(CODES)


def largest_of(least: Tensor, most: Tensor) -> Tensor:
    """The values of largest magnitude, with their signs, of blocks with these extremes (N)."""
    return torch.where(most >= -least, most, least)


@cache
def moment_codes(device: torch.device) -> tuple[Code, Code]:
    """The codes of the first moment and of the second on a device."""
    return Code.of(device, signed=True), Code.of(device, signed=False)


def read_moments(kept: Sequence[Tensor]) -> list[Tensor]:
    """Both moments in 32 bits, dequantised from their codes and scales."""
    first, second, *scales = kept
    kinds = moment_codes(first.device)
    return [kinds[0].read(first, scales[0]), kinds[1].read(second, scales[1])]


def write_moments(kept: Sequence[Tensor], wide: Sequence[Tensor]) -> None:
    """Quantise both moments into their codes and scales."""
    first, second, *scales = kept
    kinds = moment_codes(first.device)
    kinds[0].write(first, scales[0], wide[0])
    kinds[1].write(second, scales[1], wide[1])


# A rectangular slice of a tensor's moments, as checkpoints read and write them in 32 bits.
#
# A block may have elements in several slices, which are read one after another: first scales are
# taken from all of them, then codes.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodedSlice:
    """The codes of a slice of a moment, and the scales of the blocks that it has elements of; its
    elements begin at element ``first`` of the first block.
    """

    codes: Tensor
    scales: Tensor
    first: int
    signed: bool

    def values(self) -> Tensor:
        """The dequantised values, on the host."""
        shares = self._code.shares[self.codes.cpu().int()]
        return shares.mul_(self._scales_of_elements())

    def widen_scales(self, offsets: Sequence[int], values: Tensor) -> None:
        """Let scales cover some values of the slice too, which begin at ``offsets`` in it."""
        elements = torch.zeros(len(self.scales) * BLOCK)
        narrowed(self._elements(elements), offsets, values.shape).copy_(values)
        least, most = elements.view(-1, BLOCK).aminmax(dim=1)
        known = self.scales.cpu()
        self.scales.copy_(largest_of(torch.minimum(least, known), torch.maximum(most, known)))

    def set_codes(self, offsets: Sequence[int], values: Tensor) -> None:
        """Quantise some values of the slice, which begin at ``offsets`` in it and are lost."""
        scales = narrowed(self._scales_of_elements(), offsets, values.shape)
        narrowed(self.codes, offsets, values.shape).copy_(self._code.nearest(values, scales))

    @property
    def _code(self) -> Code:
        return moment_codes(torch.device("cpu"))[0 if self.signed else 1]

    def _scales_of_elements(self) -> Tensor:
        return self._elements(self.scales.cpu().repeat_interleave(BLOCK))

    def _elements(self, of_blocks: Tensor) -> Tensor:
        """The slice's elements of whole blocks, in its shape."""
        return of_blocks[self.first :][: self.codes.numel()].view(self.codes.shape)


def narrowed(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The rectangular part of a tensor that begins at ``offsets``."""
    for axis, (begin, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(axis, begin, size)
    return tensor
