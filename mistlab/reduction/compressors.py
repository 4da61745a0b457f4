"""Compressors of gradients: what is left of a vector, and the bytes that say it.

Unbiased ones have ``E C(x) = x`` and ``E |C(x) - x|^2 <= omega |x|^2``; contractive ones have
``E |C(x) - x|^2 <= (1 - delta) |x|^2``. Values are 4 bytes, and so are indices.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.core.values import bounded, check_fields, near_matches, refuse

VALUE_BYTES = INDEX_BYTES = 4
BITS_A_BYTE = 8
# An unbiased quantiser's interval is in units of the vector's norm; a scale is sent with it.
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor:
    """A compressor and its number: ``levels`` of ``qsgd``, the ``share`` that ``top_k`` keeps, the
    ``rank`` of ``power``."""

    kind: str = "none"
    levels: int = field(default=5, metadata=bounded(minimum=2))
    share: float = field(default=0.05, metadata=bounded(above=0, maximum=1))
    rank: int = field(default=1, metadata=bounded(minimum=1))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind not in KINDS:
            refuse("compressor", f"{self.kind!r} is unknown{near_matches(self.kind, KINDS)}")

    def __call__(self, vector: Floats, rng: np.random.Generator) -> Floats:
        """The vector as its receiver reads it."""
        return KINDS[self.kind](self, vector, rng)

    def kept(self, size: int) -> int:
        """How many values ``top_k`` keeps of so many."""
        return max(1, round(self.share * size))

    def sent_bytes(self, size: int) -> int:
        """The bytes of a message that has a vector of so many values."""
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


def _unchanged(_: Compressor, vector: Floats, __: np.random.Generator) -> Floats:
    return vector.copy()


def quantised(vector: Floats, levels: int, scale: float, rng: np.random.Generator) -> Floats:
    """Values from 0 to ``scale``, and their negatives, at ``levels`` equal steps, up or down by
    chance so that the mean is the value: 0.6 of 1 at five levels is 0.5 or 0.75."""
    if scale == 0:
        return np.zeros_like(vector)
    steps = levels - 1
    place = np.abs(vector) / scale * steps
    low = np.floor(place)
    raised = low + (rng.random(vector.shape) < place - low)
    return np.asarray(np.sign(vector) * raised * scale / steps, dtype=np.float64)


def _qsgd(how: Compressor, vector: Floats, rng: np.random.Generator) -> Floats:
    return quantised(vector, how.levels, float(np.linalg.norm(vector)), rng)


def _top_k(how: Compressor, vector: Floats, _: np.random.Generator) -> Floats:
    kept = how.kept(vector.size)
    places = np.argpartition(np.abs(vector), vector.size - kept)[vector.size - kept :]
    result = np.zeros_like(vector)
    result[places] = vector[places]
    return result


def _sign(_: Compressor, vector: Floats, __: np.random.Generator) -> Floats:
    return np.where(vector < 0, -1.0, 1.0) * float(np.mean(np.abs(vector)))


def _power(how: Compressor, vector: Floats, rng: np.random.Generator) -> Floats:
    """The nearest matrix of a rank that one power iteration finds from a random start."""
    rows, columns = matrix_shape(vector.size)
    padded = np.zeros(rows * columns)
    padded[: vector.size] = vector
    matrix = padded.reshape(rows, columns)
    start = rng.standard_normal((columns, min(how.rank, rows, columns)))
    left, _ = np.linalg.qr(matrix @ start)
    return np.asarray((left @ (left.T @ matrix)).reshape(-1)[: vector.size], dtype=np.float64)


def matrix_shape(size: int) -> tuple[int, int]:
    """Rows and columns of the squarest matrix that holds so many values."""
    rows = max(1, math.isqrt(size))
    return rows, -(-size // rows)


KINDS: Mapping[str, Callable[[Compressor, Floats, np.random.Generator], Floats]] = {
    "none": _unchanged,
    "qsgd": _qsgd,
    "top_k": _top_k,
    "sign": _sign,
    "power": _power,
}
