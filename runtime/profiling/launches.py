"""The host's time to launch kernels: blocks so small that nothing else takes time, as they run."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, process_time

import numpy as np
import torch

from mistlab.cost.layers import work_of
from mistlab.symbolic.graph import PHASES
from mistlab.symbolic.library import graph_of
from mistlab.symbolic.sizes import size_columns
from mistlab.values.model import Family
from mistlab.values.workload import Attention, Precision, Workload
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
    """Time the host over a family's block, run by the executor with nothing offloaded.

    Where the host stands in for a GPU too, its time is the process's own, whatever else runs.
    """
    now = process_time if clock.device.type == "cpu" else perf_counter
    with undisturbed():
        blocks = TinyBlocks(family, attention, precision, clock.device)
        samples = [blocks.sample_s(now) for _ in range(repetitions)]
        blocks.release()
    kernels = _kernels(tiny(family, attention, precision, layers=1))
    return LaunchTiming(kernels=kernels, timing=Timing.of(samples))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Where nothing but a block takes time: Python does not look for cycles, and kernels on a CPU
    are not shared out, since to wake threads up takes longer than they do."""
    threads, collects = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if collects:
            gc.enable()


def _kernels(workload: Workload) -> int:
    """Kernels of a block's two passes, as predictions count them: what the executor does besides
    is charged to these."""
    compiled = work_of(graph_of(workload), "mistlab").compiled
    columns = size_columns(workload, {"b": np.array([1]), "tp": np.array([1])})
    counted = dict(zip(compiled.names, compiled(columns)[:, 0].tolist(), strict=True))
    return round(sum(counted[f"block {phase} kernels"] for phase in PHASES))
