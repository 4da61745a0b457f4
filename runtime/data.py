"""Sequences of tokens to train on: from a file, or drawn at random.

A sequence depends only on the seed and on its number, counted over all steps, so every plan trains
on the same sequences. A file has plain 16-bit or 32-bit tokens (nanoGPT's format), or Megatron's
tokens, with an index file that gives their type and count.
"""

import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mistlab.core.values import reject
from mistlab.job.job import Job
from mistlab.plan.plan import Plan
from runtime.models.config import NOT_HIDDEN

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES: dict[int, np.dtype[Any]] = {
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
MOST_OF_16_BITS = 1 << 16


class Sequences(Protocol):
    """A data set: gives the tokens of each sequence by number, one more token than the sequence
    length.
    """

    @property
    def seed(self) -> int:
        """The seed from which tokens, or the order of sequences, are drawn."""

    @property
    def vocab(self) -> int:
        """The vocabulary size; all tokens are smaller."""

    def __call__(self, number: int) -> NDArray[np.int64]:
        """The tokens of the sequence with this number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFile:
    """The sequences in a file of tokens, in random order; neighbouring sequences overlap by one
    token.
    """

    path: Path
    tokens: NDArray[np.generic]
    length: int
    vocab: int
    seed: int

    @property
    def count(self) -> int:
        """The number of whole sequences in the file."""
        return (len(self.tokens) - 1) // self.length

    def __call__(self, number: int) -> NDArray[np.int64]:
        """The tokens of the sequence with this number; no sequence repeats before all have
        occurred.
        """
        epoch, index = divmod(number, self.count)
        begin = int(shuffled(self.count, self.seed, epoch)[index]) * self.length
        return self.part(begin, self.length + 1)

    def part(self, begin: int, count: int) -> NDArray[np.int64]:
        """Consecutive tokens of the file; raises an error for tokens outside the vocabulary."""
        tokens_read = self.tokens[begin : begin + count].astype(np.int64)
        outside = np.flatnonzero((tokens_read < 0) | (tokens_read >= self.vocab))
        if len(outside):
            reject(
                f"--data {self.path}: token {tokens_read[outside[0]]} at {begin + outside[0]} is "
                f"outside the vocabulary of {self.vocab} tokens (workload.model.vocab): give a "
                "file that the model's tokenizer made, or a larger vocab"
            )
        return tokens_read


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Sequences of uniformly random tokens."""

    length: int
    vocab: int
    seed: int

    def __call__(self, number: int) -> NDArray[np.int64]:
        """The tokens of the sequence with this number."""
        draw = np.random.default_rng((self.seed, number))
        return draw.integers(self.vocab, size=self.length + 1, dtype=np.int64)


def open_tokens(path: Path, *, length: int, vocab: int, seed: int) -> TokenFile:
    """Map a file of tokens into memory; raises an error if it is missing, truncated or too
    short.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        reject(f"--data {path}: {error.strerror}: give a file of tokens, or synthetic")
    index = path.with_suffix(".idx")
    kind, stated = _megatron(index) if index.exists() else (_plain_type(vocab), size)
    if size < stated or size % kind.itemsize:
        if size < stated:
            reject(
                f"--data {path}: {size} bytes are fewer than the {stated} of its index "
                f"{index.name}: the file is truncated, copy it again"
            )
        reject(
            f"--data {path}: {size} bytes are not a multiple of a token's {kind.itemsize}: the "
            "file is truncated, copy it again"
        )
    if size // kind.itemsize <= length:
        reject(
            f"--data {path}: {size // kind.itemsize} tokens are too few for a sequence of {length} "
            "and its next token: give a longer file, or a shorter workload.sequence_length"
        )
    tokens = np.memmap(path, dtype=kind, mode="r")
    return TokenFile(path=path, tokens=tokens, length=length, vocab=vocab, seed=seed)


def batch_of(
    sequences: Sequences, first: int, count: int, *, hides: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokens and targets (count, length) of ``count`` sequences from number ``first`` on. If the
    run ``hides`` tokens (encoders), some tokens are hidden, and the hidden tokens are the targets.
    """
    numbers = range(first, first + count)
    if hides:
        pairs = [hidden(sequences, number) for number in numbers]
        tokens, targets = (np.stack(each) for each in zip(*pairs, strict=True))
        return torch.from_numpy(tokens), torch.from_numpy(targets)
    whole = torch.from_numpy(np.stack([sequences(number) for number in numbers]))
    return whole[:, :-1], whole[:, 1:]


# The share of tokens that an encoder predicts (Devlin et al. 2018). Each sequence has the same
# number, so that micro-batches and ranks have equal weights. Of these tokens REPLACED are masked,
# and CHANGED become a random token.
HIDDEN_SHARE = 0.15
REPLACED, CHANGED = 0.8, 0.1


def hidden(sequences: Sequences, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens of a sequence, some of which are masked or changed, and the targets to predict.

    The mask token is the last of the vocabulary, as in RoBERTa.
    """
    tokens = sequences(number)[:-1].copy()
    draw = np.random.default_rng((sequences.seed, number, 1))
    count = max(1, round(HIDDEN_SHARE * len(tokens)))
    places = draw.choice(len(tokens), count, replace=False)
    targets = np.full_like(tokens, NOT_HIDDEN)
    targets[places] = tokens[places]
    chance, others = draw.random(count), draw.integers(sequences.vocab, size=count)
    tokens[places[chance < REPLACED]] = sequences.vocab - 1
    changed = (chance >= REPLACED) & (chance < REPLACED + CHANGED)
    tokens[places[changed]] = others[changed]
    return tokens, targets


def batches_of(
    sequences: Sequences, job: Job, *, step: int, replica: int, stage: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of each micro-batch in a step, for one data-parallel replica of a stage.

    In a micro-batch the replicas of a stage take neighbouring sequences, in order. So the sequences
    of a step depend only on its number.
    """
    first, hides = step * job.workload.global_batch, job.workload.model.is_encoder
    return [
        batch_of(sequences, first + span.start, len(span), hides=hides)
        for span in spans_of(job.plan, replica=replica, stage=stage)
    ]


def spans_of(plan: Plan, *, replica: int, stage: int) -> list[range]:
    """The indices of a step's sequences in each micro-batch, for one data-parallel replica of a
    stage.
    """
    stage_plan = plan.stages[stage]
    size, first = stage_plan.micro_batch, replica * stage_plan.micro_batch
    apart = stage_plan.data_parallel * size
    begins = [first + number * apart for number in range(plan.micro_batches)]
    return [range(begin, begin + size) for begin in begins]


@lru_cache(maxsize=2)
def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The random order in which an epoch takes its sequences."""
    return np.random.default_rng((seed, epoch)).permutation(count)


def _plain_type(vocab: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab <= MOST_OF_16_BITS else "<u4")


def _megatron(index: Path) -> tuple[np.dtype[Any], int]:
    """The data type of the tokens according to Megatron's index file, and the bytes that the token
    file must have.
    """
    content = index.read_bytes()
    if len(content) < _MEGATRON_HEADER.size:
        reject(
            f"--data {index}: {len(content)} bytes are not an index: the file is truncated, "
            "copy it again"
        )
    magic, _, code, count, _ = _MEGATRON_HEADER.unpack_from(content)
    begin, end = _MEGATRON_HEADER.size, _MEGATRON_HEADER.size + 4 * count
    if magic != _MEGATRON_MAGIC or code not in _MEGATRON_TYPES or len(content) < end:
        reject(f"--data {index}: is not an index of Megatron's tokens, or truncated: make it again")
    lengths = np.frombuffer(content[begin:end], dtype="<i4")
    return _MEGATRON_TYPES[code], int(lengths.sum()) * _MEGATRON_TYPES[code].itemsize
