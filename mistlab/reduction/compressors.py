"""Gradient compressors as functions of a vector; ``compression`` has their message sizes and error
bounds.
"""

from collections.abc import Callable, Mapping

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.reduction.compression import Compressor, matrix_shape


def _unchanged(_: Compressor, vector: Floats, __: np.random.Generator) -> Floats:
    return vector.copy()


def quantised(vector: Floats, levels: int, scale: float, rng: np.random.Generator) -> Floats:
    """Values between ``-scale`` and ``scale``, each rounded at random to one of ``levels`` equal
    steps, so that the expected result is the value: with five levels 0.6 becomes 0.5 or 0.75.
    """
    if scale == 0:
        return np.zeros_like(vector)
    steps = levels - 1
    steps_up = np.abs(vector) / scale * steps
    low = np.floor(steps_up)
    raised = low + (rng.random(vector.shape) < steps_up - low)
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
    """The low-rank approximation of a matrix after one power iteration from a random start."""
    rows, columns = matrix_shape(vector.size)
    padded = np.zeros(rows * columns)
    padded[: vector.size] = vector
    matrix = padded.reshape(rows, columns)
    start = rng.standard_normal((columns, min(how.rank, rows, columns)))
    left, _ = np.linalg.qr(matrix @ start)
    return np.asarray((left @ (left.T @ matrix)).reshape(-1)[: vector.size], dtype=np.float64)


KINDS: Mapping[str, Callable[[Compressor, Floats, np.random.Generator], Floats]] = {
    "none": _unchanged,
    "qsgd": _qsgd,
    "top_k": _top_k,
    "sign": _sign,
    "power": _power,
}


def compressed(how: Compressor, vector: Floats, rng: np.random.Generator) -> Floats:
    """A vector after compression, as the rank that receives its message decodes it."""
    return KINDS[how.kind](how, vector, rng)
