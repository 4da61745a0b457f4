"""A compressor of gradients by its kind and number: bytes of its messages, and its bounds.

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
# An unbiased quantiser's interval is in units of the vector's norm; a scale is sent with it.
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor(Checked):
    """A compressor and its number: ``levels`` of ``qsgd``, the ``share`` that ``top_k`` keeps, the
    ``rank`` of ``power``."""

    kind: CompressorKind = "none"
    levels: int = field(default=5, metadata=bounded(minimum=2))
    share: float = field(default=0.05, metadata=bounded(above=0, maximum=1))
    rank: int = field(default=1, metadata=bounded(minimum=1))

    def kept(self, size: int) -> int:
        """How many values ``top_k`` keeps of so many."""
        return max(1, round(self.share * size))

    def sent_bytes(self, size: int) -> int:
        """The bytes of a message that has a vector of so many values."""
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
        """Whether messages of several ranks add up on their way, as a ring's all-reduce needs; all
        others are gathered."""
        return self.kind in ("none", "power")

    @property
    def is_unbiased(self) -> bool:
        """Whether the mean of what is received is the vector."""
        return self.kind in ("none", "qsgd")

    def omega(self, size: int) -> float:
        """The bound of an unbiased compressor's variance over the square of the norm."""
        if self.kind == "none":
            return 0.0
        steps = self.levels - 1
        return min(size / steps**2, math.sqrt(size) / steps)

    def delta(self, size: int) -> float:
        """The least share of the square of the norm that a contractive compressor keeps."""
        if self.kind in ("top_k", "none"):
            return self.kept(size) / size if self.kind == "top_k" else 1.0
        if self.kind == "sign":
            return 1 / size
        rows, columns = matrix_shape(size)
        return min(1.0, self.rank / min(rows, columns))


def matrix_shape(size: int) -> tuple[int, int]:
    """Rows and columns of the squarest matrix that holds so many values."""
    rows = max(1, math.isqrt(size))
    return rows, -(-size // rows)
