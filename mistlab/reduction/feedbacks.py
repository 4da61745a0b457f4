"""Averages of compressed gradients, which add the compression errors back in later steps (error
feedback).

Gradients of all ranks are rows. Each average is what every rank gets of a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.core.values import near_matches, refuse
from mistlab.reduction.compression import Compressor, matrix_shape
from mistlab.reduction.compressors import compressed


class Averaging(Protocol):
    """Averages the gradients of ranks step by step, with memories that are kept between steps."""

    def average(self, gradients: Floats, rng: np.random.Generator) -> Floats:
        """The average of the step's gradients as every rank receives it."""
        ...


def _compressed(how: Compressor, rows: Floats, rng: np.random.Generator) -> Floats:
    """Each rank's gradient as the others decode it. Low-rank factors share the left factor, that of
    the mean of all gradients, so that messages can be summed in transit (PowerSGD).
    """
    if how.kind != "power":
        return np.stack([compressed(how, row, rng) for row in rows])
    size = rows.shape[1]
    height, width = matrix_shape(size)
    padded = np.zeros((len(rows), height * width))
    padded[:, :size] = rows
    matrices = padded.reshape(len(rows), height, width)
    start = rng.standard_normal((width, min(how.rank, height, width)))
    left, _ = np.linalg.qr(matrices.mean(axis=0) @ start)
    return np.asarray((left @ (left.T @ matrices)).reshape(len(rows), -1)[:, :size])


def _mean(rows: Floats) -> Floats:
    """The mean over ranks, which are rows."""
    return np.asarray(rows.mean(axis=0), dtype=np.float64)


@dataclass(slots=True)
class Forgetting:
    """The mean of compressed gradients without error feedback."""

    compressor: Compressor

    def average(self, gradients: Floats, rng: np.random.Generator) -> Floats:
        """The mean of all ranks' compressed gradients."""
        return _mean(_compressed(self.compressor, gradients, rng))


@dataclass(slots=True)
class Remembering:
    """MEM-SGD: a rank adds the compression error to its next gradient."""

    compressor: Compressor
    memory: Floats | float = 0.0

    def average(self, gradients: Floats, rng: np.random.Generator) -> Floats:
        """The mean of the compressed sums of gradient and remembered error."""
        wanted = gradients + self.memory
        sent = _compressed(self.compressor, wanted, rng)
        self.memory = wanted - sent
        return _mean(sent)


@dataclass(slots=True)
class Doubling:
    """DoubleSqueeze: the server also compresses the mean, and keeps its compression error."""

    compressor: Compressor
    workers: Remembering = field(init=False)
    memory: Floats | float = 0.0

    def __post_init__(self) -> None:
        self.workers = Remembering(self.compressor)

    def average(self, gradients: Floats, rng: np.random.Generator) -> Floats:
        """The compressed mean of the compressed gradients."""
        wanted = self.workers.average(gradients, rng) + self.memory
        sent = compressed(self.compressor, wanted, rng)
        self.memory = wanted - sent
        return sent


@dataclass(slots=True)
class ChangesOnly:
    """EF21: ranks send the compressed change of estimates of their gradients, which all ranks
    keep.
    """

    compressor: Compressor
    estimates: Floats | float = 0.0

    def average(self, gradients: Floats, rng: np.random.Generator) -> Floats:
        """The mean of all ranks' estimates, after the changes of this step."""
        changes = _compressed(self.compressor, gradients - self.estimates, rng)
        self.estimates = self.estimates + changes
        return _mean(np.asarray(self.estimates))


@dataclass(slots=True)
class InRounds:
    """NEOLITHIC: compression errors are compressed and sent again, several rounds per step, by
    ranks and by the server; the error after the last round is kept on both sides.
    """

    compressor: Compressor
    rounds: int = 2
    memory: Floats | float = 0.0
    server: Floats | float = 0.0

    def average(self, gradients: Floats, rng: np.random.Generator) -> Floats:
        """The mean of the gradients, sent in rounds in both directions."""
        wanted = gradients + self.memory
        sent = self._sent(wanted, rng)
        self.memory = wanted - sent
        mean = _mean(sent) + self.server
        back = self._sent(mean[None], rng)[0]
        self.server = mean - back
        return np.asarray(back, dtype=np.float64)

    def _sent(self, rows: Floats, rng: np.random.Generator) -> Floats:
        sent = np.zeros_like(rows)
        for _ in range(self.rounds):
            sent = sent + _compressed(self.compressor, rows - sent, rng)
        return sent


FEEDBACKS: Mapping[str, type[Averaging]] = {
    "none": Forgetting,
    "memory": Remembering,
    "double": Doubling,
    "ef21": ChangesOnly,
    "neolithic": InRounds,
}


def averaging(feedback: str, compressor: Compressor, rounds: int = 2) -> Averaging:
    """The averaging with this name, before its first step; ``neolithic`` uses so many
    ``rounds``.
    """
    if feedback not in FEEDBACKS:
        refuse("feedback", f"{feedback!r} is unknown{near_matches(feedback, FEEDBACKS)}")
    if feedback == "neolithic":
        return InRounds(compressor, rounds)
    return FEEDBACKS[feedback](compressor)  # type: ignore[call-arg]
