"""Arranges documents of unequal lengths into the sequences of each step.

A document depends only on the seed and its number. Which documents a step has depends only on the
seed, the lengths and the number of sequences. So every plan trains on the same documents. A
document of n tokens has n inputs and n - 1 targets: nothing is predicted beyond its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mistlab.core.values import reject
from mistlab.plan.lengths import DocumentLengths, best_fit
from runtime.data import Sequences, TokenFile, shuffled
from runtime.models.config import NOT_HIDDEN

# ``packed``: documents fill sequences, longest first. ``padded``: each document is a sequence.
# ``sorted``: each document is a sequence, as long as the longest of its micro-batch, and a step's
# documents are sorted by length. ``balanced``: documents are distributed over micro-batches by
# their cost, and a micro-batch is one sequence without padding.
Filling = Literal["packed", "padded", "sorted", "balanced"]
FILLINGS: tuple[Filling, ...] = get_args(Filling)
# The fillings in which micro-batches have other numbers of tokens than a whole batch's share.
VARYING: tuple[Filling, ...] = ("sorted", "balanced")
# Numbers that are combined with a seed, so that random document lengths and the random order of
# sequences do not depend on each other.
LENGTHS, SHUFFLED = 2, 3


class EndlessDocuments(Protocol):
    """An endless series of numbered documents."""

    @property
    def mean(self) -> float:
        """The mean length of documents in tokens."""

    def lengths(self, first: int, count: int) -> NDArray[np.int64]:
        """The lengths of ``count`` documents, from the number ``first`` on."""

    def tokens(self, number: int, length: int) -> NDArray[np.int64]:
        """The first ``length`` tokens of the document with this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnDocuments:
    """Documents of random lengths; their tokens are the first tokens of random sequences."""

    drawn: DocumentLengths
    sequences: Sequences

    @property
    def mean(self) -> float:
        """The mean length of random documents in tokens."""
        return self.drawn.mean

    def lengths(self, first: int, count: int) -> NDArray[np.int64]:
        """The lengths of ``count`` documents, from the number ``first`` on."""
        numbers = range(first, first + count)
        seed = self.sequences.seed
        shares = [np.random.default_rng((seed, number, LENGTHS)).random() for number in numbers]
        return self.drawn.at(np.array(shares))

    def tokens(self, number: int, length: int) -> NDArray[np.int64]:
        """The first tokens of a random document."""
        return self.sequences(number)[:length]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndedDocuments:
    """The documents of a file, each with the token that ends it, in random order; no document
    repeats before all have occurred. With ``cuts``, documents longer than the context are cut off.
    """

    file: TokenFile
    begins: NDArray[np.int64]

    @classmethod
    def of(cls, file: TokenFile, end: int, *, cuts: bool) -> Self:
        """The documents of a file, in which the token ``end`` ends each document."""
        ends = np.flatnonzero(file.tokens == end) + 1
        if not len(ends):
            reject(
                f"--lengths ends:{end}: no token of --data {file.path} is {end}: give the token "
                "that ends its documents"
            )
        begins = np.unique(np.concatenate([[0], ends, [len(file.tokens)]]))
        longest = int(np.diff(begins).max())
        if longest > file.length and not cuts:
            reject(
                f"--lengths ends:{end}: a document of --data {file.path} has {longest} tokens, "
                f"more than workload.sequence_length {file.length}: give --cut to cut it, or a "
                f"sequence_length of at least {longest}"
            )
        return cls(file=file, begins=begins)

    @property
    def mean(self) -> float:
        """The mean length of the file's documents in tokens."""
        return float(np.minimum(np.diff(self.begins), self.file.length).mean())

    def lengths(self, first: int, count: int) -> NDArray[np.int64]:
        """The lengths of ``count`` documents, from the number ``first`` on."""
        places = np.array([self._place(number) for number in range(first, first + count)])
        return np.minimum(np.diff(self.begins)[places], self.file.length)

    def tokens(self, number: int, length: int) -> NDArray[np.int64]:
        """The first tokens of a document of the file."""
        return self.file.part(int(self.begins[self._place(number)]), length)

    def _place(self, number: int) -> int:
        count = len(self.begins) - 1
        epoch, index = divmod(number, count)
        return int(shuffled(count, self.file.seed, epoch)[index])


@dataclass(frozen=True, slots=True, kw_only=True)
class Documented:
    """The options of a run that trains on documents: of random ``lengths``, or of the run's data,
    in which the token ``end`` ends each document. Documents longer than a sequence are an error,
    unless ``cuts`` cuts them off. ``even_tokens``: see ``PackedSequences``.
    """

    filling: Filling
    even_tokens: int = 0
    lengths: DocumentLengths | None = None
    end: int | None = None
    cuts: bool = False

    def source(self, sequences: Sequences, length: int) -> EndlessDocuments:
        """The documents that a run trains on, made from the run's data."""
        if self.lengths is not None:
            return DrawnDocuments(
                drawn=self.lengths.within(length, cuts=self.cuts), sequences=sequences
            )
        assert self.end is not None
        if not isinstance(sequences, TokenFile):
            reject(
                f"--lengths ends:{self.end}: synthetic data has no token that ends documents: give "
                "--data FILE"
            )
        return EndedDocuments.of(sequences, self.end, cuts=self.cuts)


@dataclass(slots=True, kw_only=True, eq=False)
class PackedSequences:
    """The sequences of each step (``count`` of ``length`` tokens), filled with the documents of
    ``source``; the rest of a sequence is padding, which is treated as a further document.

    Documents that do not fit into a step wait for the next. Steps are requested in order. For an
    earlier step, or a later one after a checkpoint, all steps before it are arranged again.
    Balanced micro-batches weigh documents by ``even_tokens``, the length of a document at which
    attention takes as long as all other operators.
    """

    source: EndlessDocuments
    filling: Filling
    length: int
    count: int
    seed: int
    even_tokens: int = 0
    _step: int = -1
    _next: int = 0
    _waiting: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    _rows: Sequence[NDArray[np.int64]] = ()

    def rows(self, step: int) -> Sequence[NDArray[np.int64]]:
        """The documents in each sequence of a step: rows (D, 2) of document number and length."""
        if step < self._step:
            self._step, self._next, self._waiting = -1, 0, self._waiting[:0]
        while self._step < step:
            self._step += 1
            is_apart = self.filling in ("padded", "sorted")
            self._rows = self._padded() if is_apart else self._packed()
        return self._rows

    def predicted(self, step: int) -> int:
        """The number of positions in a step that have a target token."""
        return sum(int((row[:, 1] - 1).sum()) for row in self.rows(step))

    def sequence(self, row: NDArray[np.int64], length: int) -> tuple[Tensor, Tensor]:
        """The tokens of a sequence padded to ``length``, and the target token at each position."""
        tokens = np.zeros(length, np.int64)
        targets = np.full(length, NOT_HIDDEN)
        begin = 0
        for number, count in row.tolist():
            end = begin + count
            tokens[begin:end] = self.source.tokens(number, count)
            targets[begin : end - 1] = tokens[begin + 1 : end]
            begin = end
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    def _padded(self) -> Sequence[NDArray[np.int64]]:
        documents = self._more(self.count)
        if self.filling == "sorted":
            documents = documents[np.argsort(documents[:, 1], kind="stable")]
        return list(documents[:, None])

    def _packed(self) -> Sequence[NDArray[np.int64]]:
        queue = self._waiting
        while (missing := self.count * self.length - int(queue[:, 1].sum())) > 0:
            more = self._more(max(1, int(missing / self.source.mean)))
            queue = np.concatenate([queue, more])
        places = best_fit(queue[:, 1], self.count, self.length)
        self._waiting = queue[places < 0]
        order = np.random.default_rng((self.seed, self._step, SHUFFLED)).permutation(self.count)
        return [queue[places == index] for index in order]

    def _more(self, count: int) -> NDArray[np.int64]:
        numbers = np.arange(self._next, self._next + count)
        self._next += count
        return np.stack([numbers, self.source.lengths(int(numbers[0]), count)], axis=1)
