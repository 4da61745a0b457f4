"""Lengths of training documents in tokens: from a file, or from a distribution.

A distribution is represented by a fixed number of its quantiles; no lengths are drawn at random.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Self

import numpy as np

from mistlab.core.arrays import Floats, Ints
from mistlab.core.values import MOST_TOKENS, Checked, bounded, reject

# A distribution of document lengths is represented by this many quantiles, at the midpoints of
# equal probabilities.
QUANTILES = 4096
# More than any cost of a micro-batch (``balanced``).
MOST_COST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLengths(Checked):
    """Lengths of training documents in tokens, ascending, and the number of documents of each
    length.
    """

    tokens: tuple[int, ...] = field(metadata=bounded(minimum=1, most=MOST_TOKENS))
    counts: tuple[float, ...] = field(metadata=bounded(above=0))

    @classmethod
    def of(cls, tokens: Floats | Ints, counts: Floats | None = None) -> Self:
        """Document lengths from a list of lengths and the number of documents of each (1 each if
        omitted).
        """
        whole = np.maximum(np.rint(tokens), 1).astype(np.int64)
        values, places = np.unique(whole, return_inverse=True)
        weights = np.ones(len(whole)) if counts is None else np.asarray(counts, dtype=float)
        summed = np.bincount(places, weights=weights)
        return cls(tokens=tuple(values.tolist()), counts=tuple(summed.tolist()))

    @property
    def mean(self) -> float:
        """The mean length of a document in tokens."""
        return float(np.average(self.tokens, weights=self.counts))

    def at(self, shares: Floats) -> Ints:
        """The document lengths at these quantiles, given as shares from 0 to 1."""
        ends = np.cumsum(self.counts)
        places = np.searchsorted(ends, np.asarray(shares) * ends[-1], side="right")
        lengths: Ints = np.asarray(self.tokens)[np.minimum(places, len(ends) - 1)]
        return lengths

    def within(self, context: int, *, cuts: bool = False) -> Self:
        """Document lengths that fit into ``context`` tokens: longer documents are truncated if
        ``cuts``, otherwise refused.
        """
        longest = self.tokens[-1]
        if longest <= context:
            return self
        if not cuts:
            reject(
                f"--lengths: a document has {longest} tokens, more than workload.sequence_length "
                f"{context}: give --cut to truncate it, or a larger "
                "workload.sequence_length"
            )
        return type(self).of(np.minimum(self.tokens, context), np.asarray(self.counts))


def best_fit(lengths: Ints, count: int, context: int) -> Ints:
    """Pack documents into ``count`` sequences of ``context`` tokens: the longest document first,
    each into the sequence in which it leaves the least space. The result has the number of each
    document's sequence, or -1 if it fits into none.
    """
    rooms, places = np.full(count, context), np.full(len(lengths), -1)
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = lengths[number]
        index = int(np.where(rooms >= length, rooms, context + 1).argmin())
        if rooms[index] >= length:
            rooms[index] -= length
            places[number] = index
    return places


def balanced(lengths: Ints, count: int, room: int, even_tokens: int) -> Ints | None:
    """Distribute documents over ``count`` micro-batches of at most ``room`` tokens: the longest
    document first, each to the micro-batch with the least cost that has space for it. The result
    has the number of each document's micro-batch; None if there is no space for a document.

    A document of ``even_tokens`` costs as much in attention as in all other operators. Costs are
    whole numbers, so that all ranks get the same result.
    """
    tokens, costs = np.zeros(count, np.int64), np.zeros(count, np.int64)
    chosen = np.zeros(len(lengths), np.int64)
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        fits = tokens + length <= room
        if not fits.any():
            return None
        index = int(np.where(fits, costs, MOST_COST).argmin())
        tokens[index] += length
        costs[index] += length * (even_tokens + length)
        chosen[number] = index
    return chosen


def lengths_from(text: str) -> DocumentLengths:
    """Document lengths from a file's path, or from a text that names a distribution, such as
    ``lognormal:600:1``.
    """
    kind, *parts = text.split(":")
    if kind not in DISTRIBUTIONS or not parts:
        return _from_file(Path(text))
    names = DISTRIBUTIONS[kind][0]
    try:
        numbers = [float(word) for word in parts]
    except ValueError:
        numbers = []
    if len(numbers) != len(names) or not all(0 < number < MOST_TOKENS for number in numbers):
        form = ":".join((kind, *names))
        reject(
            f"--lengths {text}: is not {form}, with numbers above 0: give such a text, or the path "
            "of a file with lengths"
        )
    shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
    return DocumentLengths.of(np.minimum(DISTRIBUTIONS[kind][1](shares, *numbers), MOST_TOKENS))


def _lognormal(shares: Floats, median: float, sigma: float) -> Floats:
    normal = NormalDist()
    return median * np.exp(sigma * np.array([normal.inv_cdf(one) for one in shares.tolist()]))


def _pareto(shares: Floats, least: float, exponent: float) -> Floats:
    made: Floats = least * (1 - shares) ** (-1 / exponent)
    return made


def _uniform(shares: Floats, least: float, most: float) -> Floats:
    return least + shares * (most - least)


# For each distribution, the names of its parameters, and the function from shares (0 to 1) to
# quantiles in tokens.
DISTRIBUTIONS: Mapping[str, tuple[tuple[str, ...], Callable[..., Floats]]] = {
    "lognormal": (("MEDIAN", "SIGMA"), _lognormal),
    "pareto": (("LEAST", "EXPONENT"), _pareto),
    "uniform": (("LEAST", "MOST"), _uniform),
}


def _from_file(path: Path) -> DocumentLengths:
    """Document lengths from a text file: each line has a length, or a length, a comma and the
    number of documents.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(":".join((kind, *names)) for kind, (names, _) in DISTRIBUTIONS.items())
        reason = getattr(error, "strerror", None) or "not text"
        reject(f"--lengths {path}: cannot be read ({reason}): give a file, or one of {known}")
    rows = [(number, line.split(",")) for number, line in enumerate(lines, start=1) if line.strip()]
    if rows and not rows[0][1][0].strip().isdigit():
        # The first line has no number: it is the header, which is dropped.
        del rows[0]
    tokens, counts = [], []
    for number, row in rows:
        try:
            length, count = int(row[0]), float(row[1]) if len(row) > 1 else 1.0
        except ValueError:
            length, count = 0, 0.0
        if not (0 < length <= MOST_TOKENS and 0 < count < float("inf")):
            text = ",".join(row)
            reject(
                f"--lengths {path}: line {number} is {text!r}: give a document's tokens, or "
                "tokens and number of documents, such as 512,3"
            )
        tokens.append(length)
        counts.append(count)
    if not tokens:
        reject(f"--lengths {path}: has no lengths: give a document's tokens on each line")
    return DocumentLengths.of(np.array(tokens), np.array(counts))
