"""Compressed gradients as messages: encodes a vector into bytes, and decodes it.

A message has exactly the bytes that ``Compressor.sent_bytes`` counts.
"""

import torch
from torch import Tensor

from mistlab.reduction.compression import SCALE_BYTES, Compressor, matrix_shape

# How many codes are packed at once: a multiple of eight, so that they fill whole bytes.
CODES_AT_ONCE = 2**20


def message_of(how: Compressor, vector: Tensor, draw: torch.Generator) -> Tensor:
    """Encode a flat vector of 32-bit numbers as a message (bytes)."""
    if how.kind == "top_k":
        places = vector.abs().topk(how.kept(vector.numel()), sorted=False).indices
        return torch.cat([_bytes(vector[places]), _bytes(places.to(torch.int32))])
    if how.kind == "sign":
        return torch.cat([_bytes(vector.abs().mean()[None]), packed((vector < 0).long(), 1)])
    if how.kind == "qsgd":
        scale = torch.linalg.vector_norm(vector)
        return torch.cat(
            [_bytes(scale[None]), packed(_steps(how, vector, scale, draw), _bits(how))]
        )
    if how.kind == "power":
        matrix = as_matrix(vector)
        left = orthogonal(matrix @ first_factor(how, vector, draw))
        return _bytes(torch.cat([left.flatten(), (matrix.T @ left).flatten()]))
    return _bytes(vector)


def vector_of(how: Compressor, message: Tensor, size: int) -> Tensor:
    """Decode a compressed message into a flat vector of gradients."""
    if how.kind == "top_k":
        values, places = message.view(2, -1).unbind()
        vector = torch.zeros(size, device=message.device)
        return vector.scatter_(0, _numbers(places, torch.int32).long(), _numbers(values))
    if how.kind == "none":
        return _numbers(message)
    if how.kind == "power":
        rows, columns = matrix_shape(size)
        rank = min(how.rank, rows, columns)
        left, right = _numbers(message).split([rows * rank, columns * rank])
        return (left.view(rows, rank) @ right.view(columns, rank).T).flatten()[:size]
    scale = _numbers(message[:SCALE_BYTES])
    if how.kind == "sign":
        return scale * (1 - 2 * unpacked(message[SCALE_BYTES:], 1, size)).float()
    steps = how.levels - 1
    return scale * (unpacked(message[SCALE_BYTES:], _bits(how), size) - steps).float() / steps


def as_matrix(vector: Tensor) -> Tensor:
    """A vector as a matrix, as nearly square as possible, padded with zeros."""
    rows, columns = matrix_shape(vector.numel())
    return torch.nn.functional.pad(vector, (0, rows * columns - vector.numel())).view(rows, columns)


def first_factor(how: Compressor, vector: Tensor, draw: torch.Generator) -> Tensor:
    """The random right factor with which a low-rank approximation by power iteration starts."""
    rows, columns = matrix_shape(vector.numel())
    rank = min(how.rank, rows, columns)
    return torch.randn(columns, rank, generator=draw, device=vector.device)


def orthogonal(columns: Tensor) -> Tensor:
    """An orthonormal basis of the space that the given columns span."""
    return torch.linalg.qr(columns).Q


def packed(codes: Tensor, bits: int) -> Tensor:
    """Integers of ``bits`` bits each, packed into bytes."""
    places = torch.arange(bits, device=codes.device)
    weights = 2 ** torch.arange(8, device=codes.device)
    parts = []
    for part in codes.split(CODES_AT_ONCE):
        ones = (part[:, None] >> places & 1).flatten()
        ones = torch.nn.functional.pad(ones, (0, -len(ones) % 8))
        parts.append((ones.view(-1, 8) * weights).sum(dim=1).to(torch.uint8))
    return torch.cat(parts)


def unpacked(message: Tensor, bits: int, size: int) -> Tensor:
    """Unpack integers of a few bits from bytes."""
    places, weights = (torch.arange(n, device=message.device) for n in (8, bits))
    parts = []
    for part in message.split(CODES_AT_ONCE * bits // 8):
        ones = (part.long()[:, None] >> places & 1).flatten()
        codes = ones[: len(ones) // bits * bits].view(-1, bits)
        parts.append((codes << weights).sum(dim=1))
    return torch.cat(parts)[:size]


def _steps(how: Compressor, vector: Tensor, scale: Tensor, draw: torch.Generator) -> Tensor:
    """Values quantised to integers by stochastic rounding; 0 stands for the most negative level."""
    steps = how.levels - 1
    scaled = vector.abs() / scale.clamp(min=torch.finfo(torch.float32).tiny) * steps
    low = scaled.floor()
    chance = torch.rand(vector.shape, generator=draw, device=vector.device)
    return (vector.sign() * (low + (chance < scaled - low))).long() + steps


def _bits(how: Compressor) -> int:
    return (2 * how.levels - 2).bit_length()


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


def _numbers(message: Tensor, kind: torch.dtype = torch.float32) -> Tensor:
    # A copy, since a slice of a message may be misaligned for the data type.
    return message.clone().view(kind)
