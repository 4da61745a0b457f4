"""Moments of the optimizer in 8 bits: a code for each value, and a 32-bit scale per 256 values.

A code stands for one of 256 fractions of its block's scale, the fractions of dynamic quantisation
(Dettmers et al. 2021, arXiv 2110.02861): the larger the decade between 1e-7 and 1, the more
fractions it has. The scale is the block's value of largest magnitude, with its sign. This value has
a code of its own, so it is kept exactly, and quantising dequantised values gives the same codes.
Byte 0 stands for 0, so zeroed memory holds moments of zero.

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
    """The fractions of a block's scale that codes stand for, in ascending order.

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
    """An 8-bit code: the fraction of the scale that each code stands for, and the midpoints between
    neighbouring fractions in ascending order; ``begin`` is the index of 0 in this order.
    """

    shares: Tensor
    middles: Tensor
    begin: int

    @classmethod
    def of(cls, device: torch.device, *, signed: bool) -> Self:
        """The code for values of both signs (``signed``), or for values that are not negative."""
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
        """Quantise the values of whole blocks; ``values`` is overwritten."""
        blocks = values.view(-1, BLOCK)
        scales.copy_(largest_of(*blocks.aminmax(dim=1)))
        codes.copy_(self.nearest(blocks, scales[:, None]).view(-1))

    def nearest(self, values: Tensor, scales: Tensor) -> Tensor:
        """The nearest code of each value; ``values`` is divided by its scales in place."""
        values.div_(scales.masked_fill(scales == 0, 1.0))
        places = torch.bucketize(values, self.middles, out_int32=True)
        return places.add_(_COUNT - self.begin).bitwise_and_(_COUNT - 1).to(CODES)


def largest_of(least: Tensor, most: Tensor) -> Tensor:
    """The value of largest magnitude, with its sign, of each block (N), from the smallest and the
    largest values of the blocks.
    """
    return torch.where(most >= -least, most, least)


@cache
def moment_codes(device: torch.device) -> tuple[Code, Code]:
    """The codes of the first moments and of the second moments."""
    return Code.of(device, signed=True), Code.of(device, signed=False)


def read_moments(kept: Sequence[Tensor]) -> list[Tensor]:
    """Both moments in 32 bits, dequantised from codes and scales."""
    first, second, *scales = kept
    kinds = moment_codes(first.device)
    return [kinds[0].read(first, scales[0]), kinds[1].read(second, scales[1])]


def write_moments(kept: Sequence[Tensor], wide: Sequence[Tensor]) -> None:
    """Quantise both moments into the codes and scales ``kept``."""
    first, second, *scales = kept
    kinds = moment_codes(first.device)
    kinds[0].write(first, scales[0], wide[0])
    kinds[1].write(second, scales[1], wide[1])


# A rectangular slice of a tensor's quantised moments, which checkpoints read and write in 32 bits.
#
# A block may have elements in several slices, which a checkpoint reads one after another: first all
# slices extend the scales, then all are quantised.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodedSlice:
    """The codes of a slice of a moment, and the scales of the blocks that have elements in the
    slice; the slice begins at element ``first`` of the first block.
    """

    codes: Tensor
    scales: Tensor
    first: int
    signed: bool

    def values(self) -> Tensor:
        """The dequantised values of the slice, in host memory."""
        shares = self._code.shares[self.codes.cpu().int()]
        return shares.mul_(self._scales_of_elements())

    def widen_scales(self, offsets: Sequence[int], values: Tensor) -> None:
        """Extend the scales to cover ``values``, a part of the slice that begins at ``offsets``."""
        elements = torch.zeros(len(self.scales) * BLOCK)
        narrowed(self._elements(elements), offsets, values.shape).copy_(values)
        least, most = elements.view(-1, BLOCK).aminmax(dim=1)
        known = self.scales.cpu()
        self.scales.copy_(largest_of(torch.minimum(least, known), torch.maximum(most, known)))

    def set_codes(self, offsets: Sequence[int], values: Tensor) -> None:
        """Quantise ``values``, a part of the slice that begins at ``offsets``; ``values`` is
        overwritten.
        """
        scales = narrowed(self._scales_of_elements(), offsets, values.shape)
        narrowed(self.codes, offsets, values.shape).copy_(self._code.nearest(values, scales))

    @property
    def _code(self) -> Code:
        return moment_codes(torch.device("cpu"))[0 if self.signed else 1]

    def _scales_of_elements(self) -> Tensor:
        return self._elements(self.scales.cpu().repeat_interleave(BLOCK))

    def _elements(self, of_blocks: Tensor) -> Tensor:
        """The elements of the slice, in its shape, from a tensor of whole blocks."""
        return of_blocks[self.first :][: self.codes.numel()].view(self.codes.shape)


def narrowed(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """The rectangular part of a tensor that begins at ``offsets`` and has ``sizes``."""
    for axis, (begin, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(axis, begin, size)
    return tensor
