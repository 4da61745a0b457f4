"""Dropout whose masks are hashes of seed, step, layer and token position.

A token gets the same mask in every plan and in any order of computation. The backward pass and
recomputation compute the mask again, so no mask is saved. A model without ``Draws``, as in a trace,
uses torch's dropout, whose saved mask takes a byte per value.

Axes: B batch, S tokens of this rank, T tokens of a sequence, H this rank's query heads.
"""

from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from runtime.models.context import ContextRanks, own_positions
from runtime.models.operators import kernels_for
from runtime.models.ranks import TensorParallel, carried

# Multipliers of a 32-bit hash (lowbias32 of C. Wellons), and the initial values for the two halves
# of a key.
MIXERS = (0x7FEB352D, 0x846CA68B)
BEGINNINGS = (0x9E3779B1, 0x85EBCA77)
BITS_32 = 0xFFFFFFFF
# The number of values whose 64-bit hashes a CPU computes at once.
AT_ONCE = 2**14
# Numbers of a layer's three dropout masks: of its first and second residual addition, and of its
# attention probabilities (here called shares).
FIRST_HALF, SECOND_HALF, SHARES = range(3)
# The key of a dropout mask: a 32-bit number for its rows, and one for its columns.
Key = tuple[int, int]
Number = TypeVar("Number", int, Tensor)


def key_of(*numbers: int) -> Key:
    """The key of a dropout mask, a hash of the numbers that identify the mask."""
    rows, columns = BEGINNINGS
    for number in numbers:
        rows = mixed(rows ^ number & BITS_32)
        columns = mixed(columns ^ number & BITS_32)
    return rows, columns


def mixed(x: Number) -> Number:
    """The hash of a 32-bit integer, or of each integer in a tensor."""
    for shift, mixer in zip((16, 15), MIXERS, strict=True):
        x = (x ^ (x >> shift)) * mixer & BITS_32
    return x ^ (x >> 16)


def kept_by_position(rows: Tensor, columns: int, share: float, key: Key) -> Tensor:
    """Which values dropout with probability ``share`` keeps: booleans (rows, columns).

    The result depends only on the key, the number of each row (up to 63 bits) and the column.
    """
    of_column = torch.arange(columns, device=rows.device, dtype=torch.int64)
    hashes = mixed(hashes_of_rows(rows, key).unsqueeze(-1) ^ mixed(of_column ^ key[1]))
    return hashes >= threshold_of(share)


def hashes_of_rows(rows: Tensor, key: Key) -> Tensor:
    """The hash of each row number under a mask's key."""
    rows = rows.to(torch.int64)
    return mixed(mixed(rows >> 32 ^ key[0]) ^ rows & BITS_32)


def threshold_of(share: float) -> int:
    """The smallest hash with which a value is kept, for dropout with probability ``share``."""
    return int(share * (BITS_32 + 1))


def dropped(x: Tensor, rows: Tensor, share: float, key: Key) -> Tensor:
    """``x`` (..., columns) after dropout, with kept values rescaled; ``rows`` (...) are row
    numbers.
    """
    columns = x.shape[-1]
    flat, numbers = x.contiguous().view(-1, columns), rows.reshape(-1)
    if kernels := kernels_for(x):
        hashes = hashes_of_rows(numbers, key)
        made = kernels.dropped(flat, hashes, key[1], threshold_of(share), 1 / (1 - share))
        return made.view(x.shape)
    made = torch.empty_like(flat)
    count = max(1, AT_ONCE // columns)
    for part, rows_of_part, result in zip(
        *(one.split(count) for one in (flat, numbers, made)), strict=True
    ):
        torch.mul(part, kept_by_position(rows_of_part, columns, share, key), out=result)
    return made.mul_(1 / (1 - share)).view(x.shape)


# Positions of the tokens in the micro-batch that a rank's layers compute.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaskRows:
    """The rows of a dropout mask: one per token, or one per token and head.

    ``sequence`` is the number of the micro-batch's first sequence in its step, ``length`` the
    number of tokens of a whole sequence, and ``positions`` the positions of the rank's tokens.
    ``heads`` are the numbers of this rank's heads among ``all_heads``; if it is empty, rows are per
    token.
    """

    key: Key
    sequence: int
    length: int
    positions: Tensor
    heads: range = range(0)
    all_heads: int = 1

    def numbers(self, batch: int) -> Tensor:
        """The number of each token's row (B, S), or of each token's row in each head (B, H, S)."""
        device = self.positions.device
        row = torch.arange(self.sequence, self.sequence + batch, device=device)[:, None]
        if self.heads:
            first, last = self.heads.start, self.heads.stop
            row = (row * self.all_heads + torch.arange(first, last, device=device))[..., None]
        return row * self.length + self.positions


@dataclass(slots=True, kw_only=True, eq=False)
class Draws:
    """The numbers from which a rank's dropout masks follow (the layer aside): seed, step, sequence
    and token positions.

    Sequence parallelism divides the positions into ``parts``, of which the rank has number
    ``part``.

    The micro-batch being computed begins with sequence number ``sequence`` of the ``step``. The
    rank has the tokens at ``positions``. Between GEMMs, sequence parallelism leaves the rank only
    the tokens at ``own``.
    """

    seed: int
    length: int
    positions: Tensor
    own: Tensor
    step: int = 0
    sequence: int = 0
    parts: int = 1
    part: int = 0

    @classmethod
    def of(
        cls,
        seed: int,
        length: int,
        ranks: TensorParallel,
        context: ContextRanks,
        device: torch.device,
    ) -> Self:
        """The numbers from which the masks follow, on a rank that has its part of sequences of
        ``length`` tokens.
        """
        if context.size > 1:
            positions = own_positions(length, context.rank, context.size).to(device)
        else:
            positions = torch.arange(length, device=device)
        parts = ranks.size if ranks.splits_tokens else 1
        of_rank = positions.chunk(parts)[ranks.rank if parts > 1 else 0]
        draws = cls(seed=seed, length=length, positions=positions, own=of_rank)
        draws.parts, draws.part = parts, ranks.rank if parts > 1 else 0
        return draws

    def cover(self, tokens: int) -> None:
        """Set the positions for a micro-batch whose sequences have this many tokens."""
        if tokens != len(self.positions):
            self.positions = torch.arange(tokens, device=self.positions.device)
            self.own = self.positions.chunk(self.parts)[self.part]

    def rows_of(self, layer: int, mask: int) -> MaskRows:
        """The mask rows of the current micro-batch's tokens in a layer."""
        return MaskRows(
            key=key_of(self.seed, self.step, layer, mask),
            sequence=self.sequence,
            length=self.length,
            positions=self.own,
        )

    def rows_of_shares(self, layer: int, heads: range, all_heads: int) -> MaskRows:
        """The mask rows of a layer's attention probabilities in some of its heads."""
        rows = self.rows_of(layer, SHARES)
        return replace(rows, positions=self.positions, heads=heads, all_heads=all_heads)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerDraws:
    """The numbers from which the dropout masks of one layer follow."""

    draws: Draws
    layer: int

    def of_tokens(self, mask: int) -> MaskRows:
        """The row numbers of the dropout mask for the layer's tokens."""
        return self.draws.rows_of(self.layer, mask)

    def of_shares(self, heads: range, all_heads: int) -> MaskRows:
        """The mask rows of this layer's attention probabilities in some of its heads."""
        return self.draws.rows_of_shares(self.layer, heads, all_heads)


# The autograd functions and the module of dropout.


def drop(x: Tensor, rows: MaskRows, share: float) -> Tensor:
    """``x`` (B, S, columns) after dropout with probability ``share``; the mask is regenerated in
    the backward pass.
    """

    def masked(x: Tensor) -> Tensor:
        return dropped(x, rows.numbers(x.shape[0]), share, rows.key)

    return carried(x, masked, masked)


class MixedByDropped(torch.autograd.Function):
    """Autograd function that multiplies values by attention probabilities after dropout; saves the
    probabilities before dropout, which softmax saves anyway.
    """

    @staticmethod
    def forward(ctx: Any, shares: Tensor, value: Tensor, rows: MaskRows, share: float) -> Tensor:
        """The product of attention probabilities (B K, H/K S, T), after dropout, with values (B K,
        T, D).
        """
        ctx.rows, ctx.share = rows, share
        ctx.save_for_backward(shares, value)
        return torch.bmm(dropped_shares(shares, rows, share), value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The gradients of attention probabilities and of values."""
        shares, value = ctx.saved_tensors
        of_value = torch.bmm(dropped_shares(shares, ctx.rows, ctx.share).mT, gradients[0])
        of_shares = torch.bmm(gradients[0], value.mT)
        return dropped_shares(of_shares, ctx.rows, ctx.share), of_value, None, None


def dropped_shares(shares: Tensor, rows: MaskRows, share: float) -> Tensor:
    """The attention probabilities ``shares`` after dropout; their shape may be any that keeps the
    heads in order.
    """
    queries, keys = rows.positions.shape[0], shares.shape[-1]
    by_head = shares.view(-1, len(rows.heads), queries, keys)
    return dropped(by_head, rows.numbers(by_head.shape[0]), share, rows.key).view(shares.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drop:
    """Dropout of a branch (B, S, columns) with probability ``share``, by a mask that depends on the
    position of each row.
    """

    rows: MaskRows
    share: float

    def of(self, x: Tensor) -> Tensor:
        """A branch's output, or its gradient, after dropout."""
        return dropped(x, self.rows.numbers(x.shape[0]), self.share, self.rows.key)


class Dropout(nn.Module):
    """Dropout in the embedding's output and in a block's residual additions."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.draws: LayerDraws | None = None

    @property
    def drops(self) -> bool:
        """Whether dropout is active: the model trains, with a dropout probability above zero."""
        return self.training and self.probability != 0.0

    @property
    def is_drawn(self) -> bool:
        """Whether dropout masks depend on position, or dropout is inactive."""
        return not self.drops or self.draws is not None

    def drawn(self, mask: int) -> Drop | None:
        """Dropout with a mask that depends on position; None if dropout is inactive."""
        if not self.drops:
            return None
        assert self.draws is not None
        return Drop(rows=self.draws.of_tokens(mask), share=self.probability)

    def forward(self, x: Tensor, mask: int = FIRST_HALF) -> Tensor:
        """Apply dropout to a tensor while the model trains."""
        if not self.drops:
            return x
        if self.draws is None:
            return torch.native_dropout(x, self.probability, True)[0]
        return drop(x, self.draws.of_tokens(mask), self.probability)
