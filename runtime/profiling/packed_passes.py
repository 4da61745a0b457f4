"""Measures a block's passes over sequences into which several documents are packed."""

import time
from collections.abc import Sequence

import torch

from mistlab.plan.workload import Workload
from runtime.models.families import confine, model_of
from runtime.models.wide_attention import CurrentDocuments, Documents

WARM_UP = 4


def seconds_of_packed(
    workload: Workload, sequences: Sequence[Sequence[int]], repetitions: int
) -> list[float]:
    """For each packed sequence, the CPU seconds of a forward and a backward pass of a model's first
    block, the minimum over repetitions.
    """
    model = model_of(workload)
    block = model.blocks[0]
    packed = CurrentDocuments()
    confine(block, packed)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.02)
    seconds = []
    # The first passes are slower, so the first sequences also run once before.
    for lengths in (*sequences[:WARM_UP], *sequences):
        packed.now = Documents.of([lengths])
        x = torch.randn(1, sum(lengths), workload.model.hidden, requires_grad=True)
        seconds.append(min(_pass_s(block, x) for _ in range(repetitions)))
    return seconds[min(WARM_UP, len(sequences)) :]


def _pass_s(block: torch.nn.Module, x: torch.Tensor) -> float:
    start = time.thread_time()
    block(x).sum().backward()
    return time.thread_time() - start
