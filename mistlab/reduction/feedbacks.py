"""Averages of compressed gradients with error feedback, which adds a step's compression errors to
the gradients of later steps.

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
    """Averages compressed gradients of ranks in each step, and keeps the compression errors for
    later steps.
    """

    def average(self, gradients: Floats, rng: np.random.Generator) -> Floats:
        """The average of the ranks' gradients in one step, as all ranks receive it."""
        ...


def _compressed(how: Compressor, rows: Floats, rng: np.random.Generator) -> Floats:
    """The gradient of each rank after compression, as other ranks decode it. Low-rank compression
    uses the same left factor on all ranks, so that messages can be summed (PowerSGD).
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
    """The mean over ranks of an array with a row for each rank."""
    return np.asarray(rows.mean(axis=0), dtype=np.float64)


@dataclass(slots=True)
class Forgetting:
    """No error feedback: the mean of the compressed gradients."""

    compressor: Compressor

    def average(self, gradients: Floats, rng: np.random.Generator) -> Floats:
        """The mean over ranks of the compressed gradients, without correction of compression
        errors.
        """
        return _mean(_compressed(self.compressor, gradients, rng))


@dataclass(slots=True)
class Remembering:
    """Error feedback MEM-SGD: a rank adds its compression error to its next gradient."""

    compressor: Compressor
    memory: Floats | float = 0.0

    def average(self, gradients: Floats, rng: np.random.Generator) -> Floats:
        """The mean over ranks of the compressed sum of a rank's gradient and its last compression
        error.
        """
        wanted = gradients + self.memory
        sent = _compressed(self.compressor, wanted, rng)
        self.memory = wanted - sent
        return _mean(sent)


@dataclass(slots=True)
class Doubling:
    """Error feedback DoubleSqueeze: in addition to the ranks, the server compresses the mean and
    keeps its compression error.
    """

    compressor: Compressor
    workers: Remembering = field(init=False)
    memory: Floats | float = 0.0

    def __post_init__(self) -> None:
        self.workers = Remembering(self.compressor)

    def average(self, gradients: Floats, rng: np.random.Generator) -> Floats:
        """The mean of the ranks' compressed gradients, which is compressed again by the server."""
        wanted = self.workers.average(gradients, rng) + self.memory
        sent = compressed(self.compressor, wanted, rng)
        self.memory = wanted - sent
        return sent


@dataclass(slots=True)
class ChangesOnly:
    """Error feedback EF21: each rank sends the compressed change of an estimate of its gradient;
    all ranks keep these estimates.
    """

    compressor: Compressor
    estimates: Floats | float = 0.0

    def average(self, gradients: Floats, rng: np.random.Generator) -> Floats:
        """The mean over ranks of the estimates of their gradients, after the changes sent in this
        step.
        """
        changes = _compressed(self.compressor, gradients - self.estimates, rng)
        self.estimates = self.estimates + changes
        return _mean(np.asarray(self.estimates))


@dataclass(slots=True)
class InRounds:
    """Error feedback NEOLITHIC: ranks and server compress an error and send it again in several
    rounds per step; both keep the error after the last round.
    """

    compressor: Compressor
    rounds: int = 2
    memory: Floats | float = 0.0
    server: Floats | float = 0.0

    def average(self, gradients: Floats, rng: np.random.Generator) -> Floats:
        """The mean of the gradients, which are sent to the server and back in several rounds."""
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
    """A new averaging with this error feedback, before its first step; ``neolithic`` sends
    ``rounds`` times per step.
    """
    if feedback not in FEEDBACKS:
        refuse("feedback", f"{feedback!r} is unknown{near_matches(feedback, FEEDBACKS)}")
    if feedback == "neolithic":
        return InRounds(compressor, rounds)
    return FEEDBACKS[feedback](compressor)  # type: ignore[call-arg]
