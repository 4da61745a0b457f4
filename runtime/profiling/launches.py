"""The host's time to launch kernels: blocks so small that nothing else takes time, as they run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from mistlab.cost.layers import work_of
from mistlab.model import Family
from mistlab.symbolic.graph import PHASES
from mistlab.symbolic.library import graph_of
from mistlab.symbolic.sizes import size_columns
from mistlab.workload import Attention, Precision, Workload
from runtime.profiling.timing import Clock, Timing
from runtime.profiling.tiny_blocks import TinyBlocks, tiny


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTiming:
    """A forward and a backward of a tiny block, and how many kernels they are counted as."""

    kernels: int
    timing: Timing


def launches(
    family: Family, attention: Attention, precision: Precision, clock: Clock, repetitions: int
) -> LaunchTiming:
    """Time the host over a family's block, run by the executor with nothing offloaded."""
    with one_thread():
        blocks = TinyBlocks(family, attention, precision, clock.device)
        samples = [blocks.sample_s() for _ in range(repetitions)]
        blocks.release()
    kernels = _kernels(tiny(family, attention, precision, layers=1))
    return LaunchTiming(kernels=kernels, timing=Timing.of(samples))


@contextmanager
def one_thread() -> Iterator[None]:
    """Where a CPU stands in for a GPU, its kernels are not shared out: to wake threads up takes
    longer than they do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _kernels(workload: Workload) -> int:
    """Kernels of a block's two passes, as predictions count them: what the executor does besides
    is charged to these."""
    compiled = work_of(graph_of(workload), "mistlab").compiled
    columns = size_columns(workload, np.array([1]), np.array([1]))
    counted = dict(zip(compiled.names, compiled(columns)[:, 0].tolist(), strict=True))
    return round(sum(counted[f"block {phase} kernels"] for phase in PHASES))
