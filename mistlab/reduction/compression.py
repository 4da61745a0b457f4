"""Gradient compressors by kind and parameter: the bytes of a compressed vector, and bounds on its
error.

Unbiased ones have ``E C(x) = x`` and ``E |C(x) - x|^2 <= omega |x|^2``; contractive ones have
``E |C(x) - x|^2 <= (1 - delta) |x|^2``. Values are 4 bytes, and so are indices.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from mistlab.core.values import Checked, bounded

CompressorKind = Literal["none", "qsgd", "top_k", "sign", "power"]
VALUE_BYTES = INDEX_BYTES = 4
BITS_A_BYTE = 8
# An unbiased quantiser rounds values relative to the vector's norm, which is sent along in this
# many bytes.
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor(Checked):
    """A compressor of gradients and its parameter: ``levels`` for ``qsgd``, the ``share`` of values
    that ``top_k`` keeps, the ``rank`` for ``power``.
    """

    kind: CompressorKind = "none"
    levels: int = field(default=5, metadata=bounded(minimum=2))
    share: float = field(default=0.05, metadata=bounded(above=0, maximum=1))
    rank: int = field(default=1, metadata=bounded(minimum=1))

    def kept(self, size: int) -> int:
        """The number of values that ``top_k`` keeps of a vector of ``values`` values."""
        return max(1, round(self.share * size))

    def sent_bytes(self, size: int) -> int:
        """The bytes of the message with a compressed vector of ``values`` values."""
        if size == 0:
            return 0
        shape = matrix_shape(size)
        each = {
            "none": VALUE_BYTES * size,
            "qsgd": SCALE_BYTES
            + math.ceil(size * math.ceil(math.log2(2 * self.levels - 1)) / BITS_A_BYTE),
            "top_k": self.kept(size) * (VALUE_BYTES + INDEX_BYTES),
            "sign": SCALE_BYTES + math.ceil(size / BITS_A_BYTE),
            "power": VALUE_BYTES * min(self.rank, *shape) * sum(shape),
        }
        return each[self.kind]

    @property
    def is_summable(self) -> bool:
        """Whether compressed messages of several ranks can be summed in transit, as a ring
        all-reduce needs; other messages are gathered.
        """
        return self.kind in ("none", "power")

    @property
    def is_unbiased(self) -> bool:
        """Whether the expected value of a decompressed vector is the vector itself."""
        return self.kind in ("none", "qsgd")

    def omega(self, size: int) -> float:
        """The bound omega of an unbiased compressor: the variance of its result, relative to the
        vector's squared norm.
        """
        if self.kind == "none":
            return 0.0
        steps = self.levels - 1
        return min(size / steps**2, math.sqrt(size) / steps)

    def delta(self, size: int) -> float:
        """The bound delta of a contractive compressor: the smallest share of a vector's squared
        norm that it keeps.
        """
        if self.kind in ("top_k", "none"):
            return self.kept(size) / size if self.kind == "top_k" else 1.0
        if self.kind == "sign":
            return 1 / size
        rows, columns = matrix_shape(size)
        return min(1.0, self.rank / min(rows, columns))


def matrix_shape(size: int) -> tuple[int, int]:
    """The rows and columns of the matrix with ``values`` values that is closest to a square."""
    rows = max(1, math.isqrt(size))
    return rows, -(-size // rows)
