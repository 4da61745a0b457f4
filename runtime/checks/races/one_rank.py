"""Runs one rank of a plan alone on CPU tensors, and traces the work of its streams."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mistlab.schedule.lanes import LANES
from mistlab.values.plan import Plan
from mistlab.values.workload import Workload
from runtime.checks.races.clocked import ClockedDriver, ClockedStream
from runtime.checks.races.loop import loops
from runtime.checks.races.memory import Memory
from runtime.checks.races.recorder import Recorder
from runtime.checks.races.trace import Trace
from runtime.comm.topology import Connections, connected
from runtime.devices.driver import Driver
from runtime.devices.table import DRIVERS
from runtime.engine.executor import Batches, Executor
from runtime.engine.streams.cuda import CudaStreams
from runtime.engine.training import Training

DEVICE = torch.device("cpu")
# The first iteration differs from the others; a third shows work that two like ones share.
ITERATIONS = 3


def trace_of(
    workload: Workload, plan: Plan, rank: int, training: Training, *, serialises: bool = False
) -> Trace:
    """Train a rank for some iterations without waiting for their ends, then take the last step.

    A real run reads the loss after each iteration, and so waits for all work. Here nothing waits
    between iterations, so the program itself must order the work of one with the work of the next.
    """
    trace = Trace()
    memory = Memory(trace)
    driver = ClockedDriver(trace, memory)
    with standing_in(driver):
        connections = connected(plan, rank, loops(rank))
        streams = CudaStreams(DEVICE, driver, serialises=serialises)
        for lane in LANES:
            stream = streams.stream(lane)
            assert isinstance(stream, ClockedStream)
            stream.name = lane
        executor = Executor(workload, plan, connections, streams, training, device=DEVICE, seed=0)
        _name(executor, memory)
        trace.issuing = lambda: executor.issuing
        batches = _batches(workload, connections)
        with Recorder(trace, memory, driver):
            for _ in range(ITERATIONS):
                executor.iterate(batches)
            executor.report()
            executor.flush()
            executor.report()
    return trace


@contextmanager
def standing_in(driver: Driver) -> Iterator[None]:
    """Within the ``with`` block, let a driver drive the CPU as if it were a GPU."""
    DRIVERS[DEVICE.type] = driver
    try:
        yield
    finally:
        del DRIVERS[DEVICE.type]


def _batches(workload: Workload, connections: Connections) -> Batches:
    plan = connections.topology.plan
    shape = (plan.stages[connections.place.stage].micro_batch, workload.sequence_length)
    generator = torch.Generator().manual_seed(0)

    def tokens() -> Tensor:
        return torch.randint(workload.model.vocab, shape, generator=generator)

    return [(tokens(), tokens()) for _ in range(plan.micro_batches)]


def _name(executor: Executor, memory: Memory) -> None:
    """Name the parts of a rank's memory."""
    state = executor.state
    for layer, own in state.layers.items():
        kinds = zip(("masters", "moment 1", "moment 2"), own.optimizer, strict=True)
        vectors = {"weights": own.weights, "gradients": own.gradients, **dict(kinds)}
        for name, split in vectors.items():
            memory.name(split.resident, f"{name} of layer {layer}")
            memory.name(split.tail, f"{name} of layer {layer} on the host")
        memory.name(own.exchange, f"what the host exchanges of layer {layer}")
        memory.name(own.step, f"steps of layer {layer}")
    rings = {
        "weight": state.weight_slots,
        "gradient": state.gradient_slots,
        "sum": state.sum_slots,
    }
    for name, slots in rings.items():
        for entry, slot in enumerate(slots):
            memory.name(slot, f"{name} slot {entry}")
