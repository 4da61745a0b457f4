"""Measures the time that the host takes to launch kernels, with blocks so small that a run is
host-bound.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter, process_time

import numpy as np
import torch

from mistlab.cost.layers import work_of
from mistlab.engines.engine import Precision
from mistlab.engines.mistlab import MISTLAB
from mistlab.graph.graph import PHASES
from mistlab.graph.library import graph_of
from mistlab.graph.symbols import size_columns
from mistlab.plan.plan import NO_OFFLOAD, Offload, Plan, StagePlan
from mistlab.plan.workload import Attention, Family, ModelSpec, Workload
from runtime.comm.topology import isolated
from runtime.engine.executor import Executor
from runtime.engine.streams.device_streams import streams_of
from runtime.engine.streams.lanes import Streams
from runtime.engine.training import Training
from runtime.profiling.timing import Clock, Timing

# Runs small, host-bound blocks on one device with the runtime's executor.


HIDDEN, HEADS, SEQUENCE, VOCAB = 64, 2, 8, 128
# The time of an iteration with FEW blocks is subtracted from that of an iteration with MANY.
# Embedding, head and other work done once per iteration are in both, with equally cold CPU caches.
# What remains includes the optimizer step of a block, once for all micro-batches.
FEW, MANY = 4, 8
MICRO_BATCHES = 16


def tiny(family: Family, attention: Attention, precision: Precision, *, layers: int) -> Workload:
    """A workload whose model has ``layers`` blocks so small that its run is host-bound."""
    return Workload(
        model=ModelSpec.of(family=family, hidden=HIDDEN, layers=layers, heads=HEADS, vocab=VOCAB),
        sequence_length=SEQUENCE,
        global_batch=MICRO_BATCHES,
        attention=attention,
        precision=precision,
    )


class TinyBlocks:
    """Two models of small blocks, ready to run on the executor; with ``again`` all blocks are
    recomputed.
    """

    def __init__(
        self,
        family: Family,
        attention: Attention,
        precision: Precision,
        device: torch.device,
        *,
        again: bool = False,
        offload: Offload = NO_OFFLOAD,
        streams: Callable[[torch.device], Streams] = streams_of,
    ) -> None:
        self._device = device
        self._runs = []
        for layers in (FEW, MANY):
            stage = StagePlan(
                layers=layers,
                data_parallel=1,
                tensor_parallel=1,
                micro_batch=1,
                checkpointed_layers=layers if again else 0,
                offload=offload,
            )
            plan = Plan(micro_batches=MICRO_BATCHES, stages=(stage,))
            run = Executor(
                tiny(family, attention, precision, layers=layers),
                plan,
                isolated(plan, 0, device, seed=0),
                streams(device),
                Training(learning_rate=1e-4),
                device=device,
                seed=0,
            )
            self._runs.append(run)
        tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64, device=device)
        self._batches = [(tokens, tokens)] * MICRO_BATCHES
        # The first iterations are slower than later ones, and are not counted.
        self.sample_s()

    def sample_s(self, now: Callable[[], float] = perf_counter) -> float:
        """The seconds of the forward and backward pass of one small block."""
        few_s, many_s = self.samples_s(now)
        return (many_s - few_s) / (MANY - FEW) / MICRO_BATCHES

    def samples_s(self, now: Callable[[], float] = perf_counter) -> list[float]:
        """The seconds of an iteration of the model with few blocks, and of the model with many."""
        return [self._iteration_s(run, now) for run in self._runs]

    def release(self) -> None:
        """Return the pinned host memory of both models."""
        for run in self._runs:
            run.release()

    def _iteration_s(self, run: Executor, now: Callable[[], float]) -> float:
        # A run reads the times of tasks after each step, so this measurement does too.
        run.streams.spans()
        begin = now()
        run.iterate(self._batches)
        run.streams.synchronize()
        return now() - begin


# Measures the host's time to launch kernels, with blocks so small that a run is host-bound.


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTiming:
    """The measured time of a small block's forward and backward pass, and the number of its
    kernels.
    """

    kernels: int
    timing: Timing


def launches(
    family: Family, attention: Attention, precision: Precision, clock: Clock, repetitions: int
) -> LaunchTiming:
    """Time the host while the executor runs small blocks of a model family, without offloading.

    On a CPU the time is this process's CPU time, so that other processes do not add to it.
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
    """Within the ``with`` block, avoid what disturbs a measurement of host time.

    Python's garbage collector is off, and kernels on a CPU run in one thread, because waking
    threads takes longer than such a small kernel.
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
    """The number of kernels in a block's forward and backward pass, as predictions count them.

    The measured time is divided by it, so other work of the executor is charged to these kernels.
    """
    compiled = work_of(graph_of(workload), MISTLAB.rules_in(workload.precision)).compiled
    columns = size_columns(workload, {"b": np.array([1]), "tp": np.array([1])})
    counted = dict(zip(compiled.names, compiled(columns)[:, 0].tolist(), strict=True))
    return round(sum(counted[f"block {phase} kernels"] for phase in PHASES))
