"""The host's time to launch kernels: blocks so small that nothing else takes time."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from mistlab.cost.layers import work_of
from mistlab.model import Family, ModelSpec
from mistlab.symbolic.graph import PHASES
from mistlab.symbolic.library import graph_of
from mistlab.symbolic.sizes import size_columns
from mistlab.workload import Attention, Precision, Workload
from runtime.models.families import model_of
from runtime.profiling.timing import Clock, Timing

HIDDEN, HEADS, SEQUENCE, VOCAB = 64, 2, 8, 128
# Launched without a pause in between, as a training loop does.
PASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTiming:
    """A forward and a backward of a tiny block, and how many kernels they are counted as."""

    kernels: int
    timing: Timing


def launches(
    family: Family, attention: Attention, precision: Precision, clock: Clock, repetitions: int
) -> LaunchTiming:
    """Time the host over a family's block."""
    workload = Workload(
        model=ModelSpec.of(family=family, hidden=HIDDEN, layers=1, heads=HEADS, vocab=VOCAB),
        sequence_length=SEQUENCE,
        global_batch=1,
        attention=attention,
        precision=precision,
    )
    with clock.device:
        block = model_of(workload).blocks[0]
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    dtype = next(block.parameters()).dtype
    x = torch.randn(1, SEQUENCE, HIDDEN, dtype=dtype, device=clock.device).requires_grad_()
    gradient = torch.randn_like(x)

    def passes() -> None:
        for _ in range(PASSES):
            block(x).backward(gradient)

    passes()
    samples = []
    for _ in range(repetitions):
        clock.wait()
        start = time.perf_counter()
        passes()
        clock.wait()
        samples.append((time.perf_counter() - start) / PASSES)
    return LaunchTiming(kernels=_kernels(workload), timing=Timing.of(samples))


def _kernels(workload: Workload) -> int:
    """Kernels of a block's two passes, as predictions count them."""
    compiled = work_of(graph_of(workload), "mistlab").compiled
    columns = size_columns(workload, np.array([1]), np.array([1]))
    counted = dict(zip(compiled.names, compiled(columns)[:, 0].tolist(), strict=True))
    return round(sum(counted[f"block {phase} kernels"] for phase in PHASES))
