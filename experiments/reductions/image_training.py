"""Trains a small network on handwritten digits with eight workers, under each gradient reduction.

The data set is the 1,797 images of 8 x 8 pixels that scikit-learn ships, a part of UCI's. Every
method has the same steps, batches, initial weights and choice of learning rates. It uses the rate
with the best accuracy on the validation set, over all seeds; its result is the accuracy on the test
set.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from mistlab.core.arrays import Floats, Ints
from mistlab.core.values import reject
from mistlab.reduction.compression import Compressor
from mistlab.reduction.feedbacks import FEEDBACKS, Averaging, averaging
from mistlab.reduction.graphs import mixing_matrix
from mistlab.reduction.robust import trimmed_mean, with_liars

WORKERS = 8
HIDDEN, CLASSES = 48, 10
BATCH = 16
RATES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
CUT_OFF = Compressor(kind="top_k", share=0.05)
# The methods of a published comparison, each with the accuracies of ResNet-18 and ResNet-20 on
# CIFAR-10.
PUBLISHED: Mapping[str, tuple[float, float]] = {
    "plain": (93.99, 91.62),
    "memory": (94.35, 91.27),
    "double": (94.11, 90.73),
    "neolithic": (94.63, 91.43),
    "ef21": (87.37, 65.82),
}
# All methods with which the network is trained: the published ones, and compression without error
# feedback, gossip, local steps, an asynchronous server, and a Byzantine worker under the mean and
# the trimmed mean.
WAYS = (*PUBLISHED, "none", "gossip", "local", "asynchronous", "one lies", "one lies, trimmed")
LOCAL_STEPS = 8
LIARS = (3,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Images of handwritten digits and their labels, as a training, a validation and a test set."""

    training: tuple[Floats, Ints]
    validation: tuple[Floats, Ints]
    test: tuple[Floats, Ints]

    @classmethod
    @cache
    def loaded(cls) -> "Digits":
        """The digits data set of scikit-learn, shuffled with a fixed seed and split into three
        sets.
        """
        try:
            from sklearn.datasets import load_digits  # noqa: PLC0415 (an extra)
        except ModuleNotFoundError:
            reject(
                "scikit-learn, which has the images, is not installed: pip install '.[images]', or "
                "give --costs-alone for the costs without training"
            )
        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        images = (digits.data[order] / 16).astype(np.float64)
        labels = digits.target[order].astype(np.int64)
        cuts = (0, 1197, 1497, len(labels))
        parts = [(images[a:b], labels[a:b]) for a, b in pairwise(cuts)]
        return cls(training=parts[0], validation=parts[1], test=parts[2])


def first_weights(seed: int, pixels: int = 64) -> Floats:
    """The initial weights of a network with one hidden layer, as one vector."""
    rng = np.random.default_rng(seed)
    first = rng.standard_normal((pixels + 1, HIDDEN)) * np.sqrt(2 / pixels)
    second = rng.standard_normal((HIDDEN + 1, CLASSES)) * np.sqrt(1 / HIDDEN)
    first[-1] = second[-1] = 0
    return np.concatenate([first.ravel(), second.ravel()])


def _layers(weights: Floats, pixels: int) -> tuple[Floats, Floats]:
    cut = (pixels + 1) * HIDDEN
    return weights[:cut].reshape(pixels + 1, HIDDEN), weights[cut:].reshape(HIDDEN + 1, CLASSES)


def _forward(weights: Floats, images: Floats) -> tuple[Floats, Floats]:
    first, second = _layers(weights, images.shape[1])
    hidden = np.maximum(images @ first[:-1] + first[-1], 0)
    return hidden, hidden @ second[:-1] + second[-1]


def gradient(weights: Floats, images: Floats, labels: Ints) -> Floats:
    """The gradient of a network's mean cross entropy over a batch."""
    _, second = _layers(weights, images.shape[1])
    hidden, logits = _forward(weights, images)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(labels)), labels] -= 1
    shares /= len(labels)
    back = (shares @ second[:-1].T) * (hidden > 0)
    parts = (images.T @ back, back.sum(axis=0), hidden.T @ shares, shares.sum(axis=0))
    return np.concatenate([part.ravel() for part in parts])


def accuracy(weights: Floats, images: Floats, labels: Ints) -> float:
    """The share of images that a network classifies correctly."""
    _, logits = _forward(weights, images)
    return float((logits.argmax(axis=1) == labels).mean())


@dataclass(slots=True, kw_only=True)
class ImageWorkers:
    """Eight workers that train with one gradient reduction, each with weights of its own."""

    way: str
    rate: float
    seed: int
    compressor: Compressor = CUT_OFF
    weights: Floats = field(init=False)
    step: int = field(default=0, init=False)
    _served: Floats = field(init=False)
    _rng: np.random.Generator = field(init=False)
    _averaging: Averaging = field(init=False)

    def __post_init__(self) -> None:
        self.weights = np.tile(first_weights(self.seed), (WORKERS, 1))
        self._served = self.weights[0].copy()
        self._rng = np.random.default_rng([self.seed, 1])
        sends_all = self.way not in FEEDBACKS
        compressor = Compressor() if sends_all else self.compressor
        self._averaging = averaging("none" if sends_all else self.way, compressor)

    def advance(self, images: Floats, labels: Ints) -> None:
        """Train all workers for one step, each on its own batch."""
        self.step += 1
        batches = self._rng.integers(len(labels), size=(WORKERS, BATCH))
        gradients = np.stack(
            [
                gradient(mine, images[batch], labels[batch])
                for mine, batch in zip(self.weights, batches, strict=True)
            ]
        )
        if self.way == "gossip":
            mixed = mixing_matrix("one_peer", WORKERS, self.step)
            self.weights = mixed @ (self.weights - self.rate * gradients)
        elif self.way == "local":
            self.weights = self.weights - self.rate * gradients
            if self.step % LOCAL_STEPS == 0:
                self.weights[:] = self.weights.mean(axis=0)
        elif self.way == "asynchronous":
            # An asynchronous server applies the workers' gradients in turn; each was computed with
            # the weights that its worker received last.
            for number, worker_gradient in enumerate(gradients):
                self._served = self._served - self.rate / WORKERS * worker_gradient
                self.weights[number] = self._served
        elif self.way in ("one lies", "one lies, trimmed"):
            trimmed = len(LIARS) if "trimmed" in self.way else 0
            mean = trimmed_mean(with_liars(gradients, LIARS), trimmed)
            self.weights = self.weights - self.rate * mean
        else:
            self.weights = self.weights - self.rate * self._averaging.average(gradients, self._rng)


def trained(way: str, rate: float, seed: int, steps: int) -> tuple[float, float]:
    """The accuracy of the workers' mean weights on the validation and the test set, after a number
    of training steps.
    """
    digits = Digits.loaded()
    workers = ImageWorkers(way=way, rate=rate, seed=seed)
    for _ in range(steps):
        workers.advance(*digits.training)
    mean = workers.weights.mean(axis=0)
    if not np.isfinite(mean).all():
        return 0.0, 0.0
    return accuracy(mean, *digits.validation), accuracy(mean, *digits.test)


def training_rows(ways: Sequence[str], seeds: int, steps: int) -> Iterator[dict[str, Any]]:
    """A result row for each method: its accuracy and the spread over seeds, with the learning rate
    that has the best validation accuracy.
    """
    for way in ways:
        by_rate = {
            rate: np.array([trained(way, rate, seed, steps) for seed in range(seeds)])
            for rate in RATES
        }
        rate = max(by_rate, key=lambda each: by_rate[each][:, 0].mean())
        tested = 100 * by_rate[rate][:, 1]
        yield {
            "part": "training",
            "way": way,
            "rate": rate,
            "accuracy": float(tested.mean()),
            "spread": float(tested.std(ddof=1)) if seeds > 1 else 0.0,
            "published": list(PUBLISHED.get(way, ())),
        }
