"""Distributes the documents of a step over its micro-batches, and makes their tensors.

Which documents a micro-batch has depends only on the step's documents and on the plan's numbers of
micro-batches, replicas and sequences. In sorted and balanced micro-batches the number of tokens
varies. The loss is the mean over all target tokens of a step, so the mean of a micro-batch is
weighted by its number of positions.

Axes: D documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mistlab.core.values import reject
from mistlab.graph.symbols import sizes_of_candidates
from mistlab.job.job import Job
from mistlab.plan.lengths import balanced
from mistlab.plan.plan import Plan
from runtime.data import spans_of
from runtime.documents import VARYING, Filling, PackedSequences
from runtime.models.wide_attention import Documents

# The dimensions of a plan that give the sequences of a micro-batch, and its tensor-parallel ranks.
SEQUENCES, TENSOR = (sizes_of_candidates()[symbol] for symbol in ("b", "tp"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DocumentBatch:
    """The documents of each sequence in a micro-batch, as rows (D, 2) of document number and
    length, and the ``length`` of a sequence with its padding.
    """

    rows: Sequence[NDArray[np.int64]]
    length: int

    @property
    def lengths(self) -> list[list[int]]:
        """The lengths of each sequence's documents; padding is the last of them."""
        made = []
        for row in self.rows:
            lengths: list[int] = row[:, 1].tolist()
            left = self.length - sum(lengths)
            made.append([*lengths, left] if left else lengths)
        return made


def check_filling(job: Job, filling: Filling) -> None:
    """Refuse a run whose micro-batches vary in length, where its ranks need equal ones."""
    if filling not in VARYING:
        return
    first, *others = (stage.degree(SEQUENCES) for stage in job.plan.stages)
    for number, size in enumerate(others, start=1):
        if size != first:
            reject(
                f"--filling {filling}: plan.stages[{number}].{SEQUENCES} is {size}, but {first} in "
                "stage 0, and stages cannot divide a micro-batch of varied length differently: "
                f"give all stages the same {SEQUENCES}, or --filling packed"
            )
    if job.workload.model.experts is not None:
        reject(
            f"--filling {filling}: ranks that exchange tokens with experts need equally many, and "
            "these micro-batches vary in length: give --filling packed"
        )
    if filling == "balanced" and job.workload.attention == "math":
        reject(
            "--filling balanced: a micro-batch is a single sequence, and workload.attention: math "
            "keeps the scores of all its pairs of tokens: give workload.attention: flash, or "
            "--filling packed or sorted"
        )


def batches_of_step(
    packed: PackedSequences, plan: Plan, *, step: int, replica: int, stage: int
) -> list[DocumentBatch]:
    """The documents of each micro-batch in a step, for one data-parallel replica of a stage."""
    rows = packed.rows(step)
    if packed.filling == "sorted":
        # Neighbours by length go to different replicas, so that replicas take equally long.
        size, count = plan.stages[stage].degree(SEQUENCES), plan.data_ranks[stage]
        begins = range(0, len(rows), size * count)
        each = [rows[begin + replica : begin + size * count : count] for begin in begins]
        return [_narrow(of_batch, plan) for of_batch in each]
    if packed.filling == "balanced":
        parts = _balanced(packed, plan, rows)[replica * plan.micro_batches :]
        return [_narrow([part], plan) for part in parts[: plan.micro_batches]]
    return [
        DocumentBatch(rows=rows[span.start : span.stop], length=packed.length)
        for span in spans_of(plan, replica=replica, stage=stage)
    ]


def _narrow(rows: Sequence[NDArray[np.int64]], plan: Plan) -> DocumentBatch:
    """A micro-batch whose sequences are as long as the longest of them, rounded up to what
    sequence-parallel ranks can divide.
    """
    longest = max(int(row[:, 1].sum()) for row in rows)
    parts = lcm(*(stage.degree(TENSOR) for stage in plan.stages if stage.splits_tokens))
    return DocumentBatch(rows=rows, length=-(-longest // parts) * parts)


def _balanced(
    packed: PackedSequences, plan: Plan, rows: Sequence[NDArray[np.int64]]
) -> list[NDArray[np.int64]]:
    """The documents of each micro-batch of all replicas, a replica's micro-batches in a row. If
    they cannot be balanced, micro-batches have the documents of as many packed sequences.
    """
    size = plan.stages[0].degree(SEQUENCES)
    count = len(rows) // size
    documents = np.concatenate(rows)
    parts = balanced(documents[:, 1], count, size * packed.length, packed.even_tokens)
    if parts is None:
        begins = range(0, len(rows), size)
        return [np.concatenate(rows[begin : begin + size]) for begin in begins]
    return [documents[parts == index] for index in range(count)]


def packed_batches(
    packed: PackedSequences, plan: Plan, *, step: int, replica: int, stage: int
) -> Sequence[tuple[Tensor, ...]]:
    """For each micro-batch of a replica of a stage: tokens, targets, each token's position in its
    document, and where documents begin (padded to a fixed size).
    """
    made = []
    for batch in batches_of_step(packed, plan, step=step, replica=replica, stage=stage):
        sequences = [packed.sequence(row, batch.length) for row in batch.rows]
        tokens, targets = (torch.stack(each) for each in zip(*sequences, strict=True))
        documents = Documents.of(batch.lengths)
        begins = torch.full((tokens.numel() + 1,), tokens.numel())
        begins[: len(documents.begins)] = documents.begins
        made.append((tokens, targets, documents.positions, begins))
    return made


def documents_of(
    packed: PackedSequences,
    plan: Plan,
    batches: Sequence[tuple[Tensor, ...]],
    *,
    step: int,
    replica: int,
    stage: int,
) -> list[Documents]:
    """The documents of each micro-batch, described by the tensors of ``packed_batches`` on their
    device.
    """
    of_step = batches_of_step(packed, plan, step=step, replica=replica, stage=stage)
    micro_batches = plan.micro_batches * plan.data_ranks[stage]
    predicted = max(1, packed.predicted(step))
    made = []
    for batch, (_, _, positions, begins) in zip(of_step, batches, strict=True):
        lengths = [length for row in batch.lengths for length in row]
        bounds = begins[: len(lengths) + 1].int()
        weight = positions.numel() * micro_batches / predicted
        made.append(Documents(lengths=lengths, positions=positions, begins=bounds, weight=weight))
    return made
