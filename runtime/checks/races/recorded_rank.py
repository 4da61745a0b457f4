"""Runs one rank and records the bytes that its operators read and write, their streams, and all
waits.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from mistlab.schedule.stage_passes import LANES
from runtime.checks.races.accesses import (
    HOST_LANE,
    ClockedDriver,
    ClockedEvent,
    ClockedStream,
    Memory,
    Trace,
)
from runtime.checks.recorded_library import Messages, RecordedGroup, RecordedLibrary, RowsOfEach
from runtime.comm.library import Work
from runtime.comm.replicas import ReplicaRanks, connected_replicas
from runtime.comm.topology import Connections
from runtime.devices.cuda import DRIVERS
from runtime.devices.driver import Driver
from runtime.engine.executor import Batches, Executor
from runtime.engine.streams.device_streams import CudaStreams
from runtime.engine.task_names import brief_name
from runtime.engine.training import Training

# Records in a trace which bytes every operator reads and writes, and on which stream.


# Operators that access no bytes, since they allocate memory or make a view.
_UNTOUCHING = frozenset(
    f"aten::{name}"
    for name in (
        "set_",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "detach",
        "_unsafe_view",
        "lift_fresh",
    )
)
# Operators that return a value to the host, which therefore waits for the current stream.
_ASKING = frozenset({"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::nonzero"})


class Recorder(TorchDispatchMode):
    """A dispatch mode that records each operator in the trace."""

    def __init__(self, trace: Trace, memory: Memory, driver: ClockedDriver) -> None:
        super().__init__()
        self.trace, self.memory, self.driver = trace, memory, driver

    def __torch_dispatch__(
        self,
        operator: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Record an operator's memory accesses, run it, then record the memory that it
        allocated.
        """
        kwargs = kwargs or {}
        facts = _facts_of(operator)
        name, touches = facts.name, facts.touches
        given = list(_given(facts, args, kwargs))
        actor = self._actor([tensor for tensor, _ in given], kwargs)
        stretch = self.trace.work(actor, self.driver.host) if touches else -1
        if touches:
            for tensor, writes in given:
                self.memory.touched(tensor, stretch, writes=writes, operator=name)
        result = operator(*args, **kwargs)
        for tensor in _tensors(result):
            if tensor.nbytes and not self.memory.known(tensor):
                self._note_made(tensor, actor, name, touches=touches)
        if name in _ASKING:
            self.trace.follow(self.driver.host, self.trace.reached(actor))
        return result

    def _note_made(self, tensor: Tensor, actor: str, operator: str, *, touches: bool) -> None:
        self.memory.allocated(tensor, actor)
        if touches:
            stretch = self.trace.work(actor, self.driver.host)
            self.memory.touched(tensor, stretch, writes=True, operator=operator)

    def _actor(self, tensors: list[Tensor], kwargs: Mapping[str, Any]) -> str:
        """The actor that runs an operator: the host's lane, the host's issuing thread, or the
        current stream.

        The host runs an operator if all its tensors are in host memory.
        """
        if self.driver.host == HOST_LANE:
            return HOST_LANE
        is_host = bool(tensors) and all(self.memory.is_host(tensor) for tensor in tensors)
        # A factory such as ``zeros_like`` runs on the device that it names, not on its argument's
        # device.
        if is_host and kwargs.get("device") is None:
            return self.driver.host
        return self.driver.current.name


# Methods that copy to the host on a GPU, but copy nothing and call no operator on a CPU.
_BROUGHT_TO_HOST = (Tensor.cpu, Tensor.tolist)


class HostCopies(TorchFunctionMode):
    """A mode in which ``cpu`` and ``tolist`` copy from device to host and make the host wait, as on
    a GPU.
    """

    def __init__(self, memory: Memory, driver: ClockedDriver) -> None:
        super().__init__()
        self.memory, self.driver = memory, driver

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a torch function; a function that brings a tensor to the host gets a copy of the
        tensor.
        """
        if func in _BROUGHT_TO_HOST and not self.memory.is_host(args[0]):
            args = (self._copied(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))

    def _copied(self, tensor: Tensor) -> Tensor:
        with _disable_current_modes():
            copy = tensor.clone()
        self.memory.made_on_host(copy)
        driver, trace, name = self.driver, self.driver.trace, "aten::_to_copy"
        stretch = trace.work(driver.current.name, driver.host)
        self.memory.touched(tensor, stretch, writes=False, operator=name)
        self.memory.touched(copy, stretch, writes=True, operator=name)
        trace.follow(driver.host, trace.reached(driver.current.name))
        return copy


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFacts:
    """What an operator's schema says: its name, whether it touches memory, and of each argument, in
    their order, whether the operator writes to it.
    """

    name: str
    touches: bool
    writes: Mapping[str, bool]


@cache
def _facts_of(operator: OpOverload) -> OperatorFacts:
    """The facts of an operator. torch makes a schema's objects anew whenever it is asked for them,
    which takes longer than a small operator does.
    """
    schema = operator._schema
    return OperatorFacts(
        name=schema.name,
        touches=not (operator.is_view or schema.name in _UNTOUCHING),
        writes={
            argument.name: argument.alias_info is not None and argument.alias_info.is_write
            for argument in schema.arguments
        },
    )


def _given(
    facts: OperatorFacts, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[Tensor, bool]]:
    """The tensors among an operator's arguments, each with whether the operator writes to it."""
    values = [*zip(args, facts.writes.values(), strict=False)]
    values += [(value, facts.writes[name]) for name, value in kwargs.items()]
    for value, writes in values:
        for tensor in _tensors(value):
            if tensor.untyped_storage().nbytes():
                yield tensor, writes


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in an argument or result, which is a tensor or a list of tensors."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from (one for one in value if isinstance(one, Tensor))


# Stand-ins for the other ranks of a rank's groups, with the same values as this rank.
#
# The stream on which NCCL runs a group's asynchronous calls is an actor of the trace.


class EqualRanks:
    """Stand-ins for the other ranks, with this rank's values; their calls run on the current
    stream.
    """

    def __init__(self, driver: ClockedDriver) -> None:
        self._driver = driver
        self._streams: dict[str, ClockedStream] = {}

    def all_reduce(self, group: RecordedGroup, tensor: Tensor, operation: str) -> None:
        """Reduce a tensor in place, as if all ranks had the same values."""
        tensor.mul_(group.size() if operation == "sum" else 1)

    def all_gather(self, group: RecordedGroup, whole: Tensor, part: Tensor) -> None:
        """Fill ``whole`` with copies of ``part``, which may be a view of ``whole``."""
        size, rank = part.numel(), group.rank()
        whole[: rank * size].view(-1, size).copy_(part)
        whole[(rank + 1) * size :].view(-1, size).copy_(part)
        mine = whole[rank * size : (rank + 1) * size]
        # A part that already lies at its position in the result is only read.
        if mine.data_ptr() == part.data_ptr():
            part.sum()
        else:
            mine.copy_(part)

    def reduce_scatter(self, group: RecordedGroup, result: Tensor, whole: Tensor) -> None:
        """Fill ``result`` with the sum of equal parts; reads all of ``whole``."""
        result.copy_(whole.view(group.size(), -1).sum(0))

    def all_to_all(
        self, group: RecordedGroup, received: Tensor, sent: Tensor, rows: RowsOfEach
    ) -> None:
        """Fill ``received`` with this rank's own rows, repeated; reads all of ``sent``."""
        from_each, to_each = rows
        own_rows = sent.split(to_each)[group.rank()]
        for received_rows, sent_rows in zip(
            received.split(from_each), sent.split(to_each), strict=True
        ):
            sent_rows.sum()
            if received_rows.shape == own_rows.shape:
                received_rows.copy_(own_rows)
            else:
                received_rows.fill_(0.02)

    def exchange(self, group: RecordedGroup, sends: Messages, receives: Messages) -> None:
        """Read all tensors that are sent, and fill all tensors that are received with random
        values.
        """
        for tensor, _ in sends:
            tensor.sum()
        for tensor, _ in receives:
            # Zero bytes are valid in every encoding of compressed vectors.
            tensor.normal_(std=0.02) if tensor.is_floating_point() else tensor.zero_()

    def aside(self, group: RecordedGroup, call: Callable[[], None]) -> Work:
        """Make a call on NCCL's stream for the group, after the current stream's work."""
        driver = self._driver
        name = f"NCCL's {group.name}"
        stream = self._streams.setdefault(name, ClockedStream(driver, name))
        issued, ended = driver.event(), driver.event()
        issued.record(driver.current)
        stream.wait_event(issued)
        with driver.using(stream):
            call()
        ended.record(stream)
        return _OwnWork(driver, ended, call)


class _OwnWork:
    """An asynchronous call on NCCL's stream, which keeps its tensors until something waits for
    it.
    """

    def __init__(
        self, driver: ClockedDriver, ended: ClockedEvent, call: Callable[[], None]
    ) -> None:
        self._driver, self._ended = driver, ended
        self._held: Callable[[], None] | None = call

    def wait(self) -> None:
        """Make the current stream wait for the end of the call."""
        self._driver.current.wait_event(self._ended)
        self._held = None


# Runs one rank of a plan alone, on CPU tensors, and traces the work of its streams.


DEVICE = torch.device("cpu")
# The first iteration differs from later ones, and a race between two equal iterations needs two
# further ones.
ITERATIONS = 3


def trained(executor: Executor, batches: Batches) -> None:
    """Train for some iterations without waiting for their ends, then run the deferred optimizer
    step.

    A real run reads the loss after each iteration, and so waits for all work. Here nothing waits
    between iterations, so that missing waits between them show. If weights are averaged or servers
    step after iterations, a whole averaging cycle and one more iteration follow. After each of them
    the report is read: in a run, too, only reading the report orders an average before the next
    iteration.
    """
    for _ in range(ITERATIONS):
        executor.iterate(batches)
    executor.report()
    if executor.cycle:
        for _ in range(executor.cycle + 1):
            executor.iterate(batches)
            executor.report()
    executor.flush()
    executor.report()


def trace_of(
    workload: Workload,
    plan: Plan,
    rank: int,
    training: Training,
    *,
    serialises: bool = False,
    run: Callable[[Executor, Batches], None] = trained,
) -> Trace:
    """The trace of a rank of a plan, which runs alone."""
    trace = Trace()
    memory = Memory(trace)
    driver = ClockedDriver(trace, memory)
    with standing_in(driver):
        library = RecordedLibrary(rank, plan.num_gpus, EqualRanks(driver))
        connections = connected_replicas(plan, workload, rank, library.maker())
        streams = CudaStreams(DEVICE, driver, serialises=serialises)
        for lane in LANES:
            stream = streams.stream(lane)
            assert isinstance(stream, ClockedStream)
            stream.name = lane
        of_replica = ReplicaRanks.of(plan, workload).plan
        executor = Executor(
            workload, of_replica, connections, streams, training, device=DEVICE, seed=0
        )
        _name(executor, memory)
        trace.issuing = lambda: brief_name(executor.issuing)
        batches = _batches(workload, connections)
        with HostCopies(memory, driver), Recorder(trace, memory, driver):
            run(executor, batches)
    return trace


@contextmanager
def standing_in(driver: Driver) -> Iterator[None]:
    """Within the ``with`` block, the runtime's code treats the CPU as a GPU with this driver."""
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
    """Name the tensors in a rank's memory, for messages."""
    state = executor.state
    layers = [pair for section in state.all_sections() for pair in section.layers.items()]
    for layer, layer_state in layers:
        # Frozen weights have no master weights or moments, and only quantised moments have scales.
        names = "masters", "moment 1", "moment 2", "scales of moment 1", "scales of moment 2"
        kinds = zip(names, layer_state.optimizer, strict=False)
        vectors = {
            "weights": layer_state.weights,
            "gradients": layer_state.gradients,
            **dict(kinds),
        }
        for name, split in vectors.items():
            memory.name(split.resident, f"{name} of layer {layer}")
            memory.name(split.tail, f"{name} of layer {layer} on the host")
        memory.name(layer_state.exchange, f"what the host exchanges of layer {layer}")
        memory.name(layer_state.step, f"steps of layer {layer}")
    rings = {
        "weight": state.rings.weights,
        "gradient": state.rings.gradients,
        "sum": state.rings.sums,
    }
    for name, slots in rings.items():
        for entry, slot in enumerate(slots):
            memory.name(slot, f"{name} slot {entry}")
