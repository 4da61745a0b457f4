"""Measures the host's time to launch kernels, with blocks so small that the rest takes none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, process_time

import numpy as np
import torch

from mistlab.cost.layers import work_of
from mistlab.engines.mistlab import MISTLAB
from mistlab.symbolic.graph import PHASES
from mistlab.symbolic.library import graph_of
from mistlab.symbolic.sizes import size_columns
from mistlab.values.model import Family
from mistlab.values.workload import Attention, Precision, Workload
from runtime.profiling.timing import Clock, Timing
from runtime.profiling.tiny_blocks import TinyBlocks, tiny


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTiming:
    """The time of a tiny block's forward and backward, and their number of kernels."""

    kernels: int
    timing: Timing


def launches(
    family: Family, attention: Attention, precision: Precision, clock: Clock, repetitions: int
) -> LaunchTiming:
    """Time the host while the executor runs blocks of a family, with nothing offloaded.

    On a CPU, the time is that of this process alone, so that other processes do not add to it.
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
    """Within the ``with`` block, keep everything but the measured work from taking time.

    Python's garbage collector is off. Kernels on a CPU run in one thread, because waking threads
    takes longer than such a kernel.
    """
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
    """The number of kernels in a block's two passes, as predictions count them.

    The executor's other work is charged to these kernels.
    """
    compiled = work_of(graph_of(workload), MISTLAB.kernels).compiled
    columns = size_columns(workload, {"b": np.array([1]), "tp": np.array([1])})
    counted = dict(zip(compiled.names, compiled(columns)[:, 0].tolist(), strict=True))
    return round(sum(counted[f"block {phase} kernels"] for phase in PHASES))
