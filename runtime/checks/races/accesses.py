"""Records the memory accesses of one rank, and how streams and events order them."""

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from runtime.devices.driver import DevicePeaks

# A graph of one rank's work: stretches of work, their order, and their memory accesses.
#
# An actor does work in order: a stream of the device, the host's issuing thread, or the host's lane
# (a second thread of the host). A stretch is the work of an actor between two points at which the
# actor waits for another, or another waits for it.


# The names of two actors: the host's thread that issues work, and the host's lane, a second thread
# (``mistlab.schedule.stage_passes.LANES``).
HOST, HOST_LANE = "issuing thread", "host"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wait:
    """A wait of a ``task`` on a ``lane`` (queue of work) for the end of another task."""

    task: str
    lane: str
    for_task: str
    for_lane: str

    def __str__(self) -> str:
        return f"{self.task} on {self.lane} waits for {self.for_task} on {self.for_lane}"


class Source(NamedTuple):
    """A stretch of work that precedes another, and the wait that causes this order, if there is
    one.
    """

    stretch: int
    wait: Wait | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretch:
    """A stretch of one actor's work, which comes after all stretches in ``sources``; these have
    lower numbers.
    """

    actor: str
    task: str
    sources: list[Source]


class Access(NamedTuple):
    """An operator's access to bytes ``begin`` to ``end`` of a storage."""

    stretch: int
    storage: int
    begin: int
    end: int
    writes: bool
    operator: str
    task: str


Kind = Literal["race", "used before allocated", "freed while used"]


class Deed(NamedTuple):
    """What a task does on an actor, as text for messages."""

    task: str
    actor: str
    does: str

    def __str__(self) -> str:
        return f"{self.task} on {self.actor} {self.does}"


class Need(NamedTuple):
    """Two stretches of work that must be ordered: the kind of race if they are not, and their
    accesses to the same memory.
    """

    earlier: int
    later: int
    kind: Kind
    first: Access | Deed
    second: Access | Deed
    memory: Access


@dataclass(slots=True, eq=False)
class Trace:
    """The graph of a rank's work; its stretches are in the order in which the host issued them."""

    stretches: list[Stretch] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)
    # The names of storages; ``parts`` has names of byte ranges in some storages.
    storages: list[str] = field(default_factory=list)
    parts: dict[int, list[tuple[int, int, str]]] = field(default_factory=dict)
    # A function that returns the name of the task being issued.
    issuing: Callable[[], str] = "start".__str__
    _last: dict[str, int] = field(default_factory=dict)
    # ``_open``: actors whose last stretch can take more work. ``_busy``: actors whose last stretch
    # has work already.
    _open: set[str] = field(default_factory=set)
    _busy: set[str] = field(default_factory=set)
    # For each pair of an actor and a host actor, the last stretch of the host after which the
    # actor's work is known to come.
    _heard: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """The name of the task whose work the host is issuing."""
        return self.issuing()

    def called(self, access: Access) -> str:
        """The name of the memory that an access touches."""
        names = [
            name
            for begin, end, name in self.parts.get(access.storage, ())
            if begin < access.end and access.begin < end
        ]
        return " and ".join(names) or self.storages[access.storage]

    def deed(self, access: Access | Deed) -> Deed:
        """An access as text: the task, the actor, and the bytes that it reads or writes."""
        if isinstance(access, Deed):
            return access
        does = "writes" if access.writes else "reads"
        return Deed(
            task=access.task,
            actor=self.stretches[access.stretch].actor,
            does=f"{does} bytes {access.begin:,} to {access.end:,} ({access.operator})",
        )

    def reached(self, actor: str) -> int | None:
        """End the actor's last stretch of work; returns the stretch's number, or None if there is
        none.
        """
        self._open.discard(actor)
        return self._last.get(actor)

    def follow(self, actor: str, source: int | None, wait: Wait | None = None) -> None:
        """Let the actor's later work come after the stretch of work ``source``."""
        if source is not None:
            is_new = actor in self._open and actor not in self._busy
            # A stretch of work only waits for stretches with lower numbers, so one pass over all
            # stretches determines the order.
            if not is_new or self._last[actor] < source:
                self._begin(actor)
            self.stretches[self._last[actor]].sources.append(Source(source, wait))

    def work(self, actor: str, host: str) -> int:
        """The number of the stretch that contains the work which the host actor ``host`` now issues
        to ``actor``.
        """
        if actor != host:
            heard = self.reached(host)
            if heard is not None and self._heard.get((actor, host)) != heard:
                self._heard[actor, host] = heard
                self.follow(actor, heard)
        if actor not in self._open:
            self._begin(actor)
        self._busy.add(actor)
        return self._last[actor]

    def moment(self, actor: str, host: str) -> int:
        """Add a stretch without work, after all work of ``actor`` and ``host`` so far; returns its
        number.
        """
        sources = [self.reached(one) for one in {actor, host}]
        sources_there = [Source(one) for one in sources if one is not None]
        self.stretches.append(Stretch(actor=actor, task=self.task, sources=sources_there))
        return len(self.stretches) - 1

    def _begin(self, actor: str) -> None:
        before = self._last.get(actor)
        self._last[actor] = len(self.stretches)
        sources = [] if before is None else [Source(before)]
        self.stretches.append(Stretch(actor=actor, task=self.task, sources=sources))
        self._open.add(actor)
        self._busy.discard(actor)


# Tracks the memory accesses of operators, from allocation to release.
#
# CUDA's caching allocator allocates memory for one stream, its owner. If other streams use the
# memory too, two rules hold: they may use it only after the point at which the owner allocated it,
# and it may be freed only after the owner has waited for all uses.


@dataclass(slots=True, kw_only=True, eq=False)
class _Storage:
    """Allocated memory; ``owner`` is the stream that allocated it, or the host.

    ``owner`` is None for memory from before the trace, which the allocator's rules exempt.
    """

    number: int
    owner: str | None
    made_at: int | None = None
    made: str = ""
    is_host: bool = False
    # The last access of each actor (stream or thread) to this memory.
    users: dict[str, Access] = field(default_factory=dict)
    watch: weakref.ref[torch.UntypedStorage] | None = None


class Memory:
    """Records in a trace which bytes operators access, and which storages tensors belong to."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._live: dict[int, _Storage] = {}
        self._noted: set[tuple[int, int, int, int, bool]] = set()

    def known(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor is in the trace already."""
        return tensor.untyped_storage()._cdata in self._live

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is in host memory that is copied to or from the device."""
        storage = self._live.get(tensor.untyped_storage()._cdata)
        return storage is not None and storage.is_host

    def name(self, tensor: Tensor, name: str) -> None:
        """Give the bytes of a tensor a name for messages."""
        begin, end = _bytes_of(tensor)
        if end > begin:
            part = (begin, end, name)
            self.trace.parts.setdefault(self._storage_of(tensor).number, []).append(part)

    def made_on_host(self, memory: Tensor) -> None:
        """Record new host memory that is copied to or from the device."""
        number = self._number(f"host memory of {memory.nbytes:,} bytes")
        self._follow(memory, _Storage(number=number, owner=HOST, is_host=True))

    def allocated(self, tensor: Tensor, actor: str) -> None:
        """Record new memory that a stream allocated after all its work so far."""
        trace = self.trace
        shape = "x".join(map(str, tensor.shape)) or "1"
        made = f"{shape} {str(tensor.dtype).removeprefix('torch.')} made by {trace.task}"
        storage = _Storage(
            number=self._number(made),
            owner=actor,
            made_at=trace.reached(actor),
            made=trace.task,
            is_host=actor == HOST,
        )
        self._follow(tensor, storage)

    def touched(self, tensor: Tensor, stretch: int, *, writes: bool, operator: str) -> None:
        """Record that an operator in a stretch of work reads or writes a tensor."""
        begin, end = _bytes_of(tensor)
        storage = self._storage_of(tensor)
        key = (stretch, storage.number, begin, end, writes)
        if key in self._noted or begin == end:
            return
        self._noted.add(key)
        trace = self.trace
        access = Access(stretch, storage.number, begin, end, writes, operator, trace.task)
        trace.accesses.append(access)
        self._check_allocation(storage, access)
        storage.users[trace.stretches[stretch].actor] = access

    def _storage_of(self, tensor: Tensor) -> _Storage:
        """The traced storage of a tensor; one from before the trace has no owner."""
        storage = self._live.get(tensor.untyped_storage()._cdata)
        if storage is None:
            storage = _Storage(number=self._number("memory of before"), owner=None)
            self._follow(tensor, storage)
        return storage

    def _check_allocation(self, storage: _Storage, access: Access) -> None:
        actor = self.trace.stretches[access.stretch].actor
        is_first = actor != storage.owner and actor not in storage.users
        if is_first and not storage.is_host and storage.made_at is not None:
            self.trace.needs.append(
                Need(
                    earlier=storage.made_at,
                    later=access.stretch,
                    kind="used before allocated",
                    first=Deed(storage.made, str(storage.owner), "allocates it"),
                    second=access,
                    memory=access,
                )
            )

    def _follow(self, tensor: Tensor, storage: _Storage) -> None:
        memory = tensor.untyped_storage()
        key = memory._cdata

        def ended(_: object) -> None:
            if self._live.get(key) is storage:
                del self._live[key]
                self._check_end(storage)

        storage.watch = weakref.ref(memory, ended)
        self._live[key] = storage

    def _check_end(self, storage: _Storage) -> None:
        trace, owner = self.trace, storage.owner
        others = [access for actor, access in storage.users.items() if actor != owner]
        if owner is None or not others:
            return
        end = trace.moment(owner, HOST)
        for access in others:
            trace.needs.append(
                Need(
                    earlier=access.stretch,
                    later=end,
                    kind="freed while used",
                    first=access,
                    second=Deed(trace.task, owner, "may use it again: the last tensor is gone"),
                    memory=access,
                )
            )

    def _number(self, name: str) -> int:
        self.trace.storages.append(name)
        return len(self.trace.storages) - 1


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """The offsets in its storage at which a tensor's bytes begin and end."""
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return begin, begin
    if tensor.is_contiguous():
        return begin, begin + int(tensor.nbytes)
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


# A driver that runs on the CPU and records in a trace how streams and events order work.
#
# Work on a stream runs at once, on CPU tensors. The trace records which earlier work this work
# would have waited for on a GPU.


Result = TypeVar("Result")


class ClockedStream:
    """A stream whose work is recorded under an actor named after the stream's lane."""

    def __init__(self, driver: "ClockedDriver", name: str) -> None:
        self.driver, self.name = driver, name

    def wait_event(self, event: "ClockedEvent") -> None:
        """Let the stream's later work come after an event."""
        self.driver.wait(self.name, event)


class ClockedEvent:
    """An event: once recorded, it marks a point in the work of an actor."""

    def __init__(self, driver: "ClockedDriver") -> None:
        self.driver = driver
        self.stretch: int | None = None
        self.task = self.lane = ""

    def record(self, stream: ClockedStream) -> None:
        """Mark the end of all work given to the stream so far."""
        self.note(stream.name)

    def note(self, actor: str) -> None:
        """Mark the end of all work of an actor so far."""
        trace = self.driver.trace
        if actor != self.driver.host:
            trace.work(actor, self.driver.host)
        self.stretch, self.task, self.lane = trace.reached(actor), trace.task, actor

    def synchronize(self) -> None:
        """Let the later work of the calling thread come after the event."""
        self.driver.wait(self.driver.host, self)

    def elapsed_time(self, _end_event: "ClockedEvent") -> float:
        """Always zero milliseconds, since a trace has no times."""
        return 0.0


class _HostFuture(Future[Result]):
    """The result of a call on the host's lane; a thread that reads it continues after the call."""

    end: ClockedEvent

    def result(self, timeout: float | None = None) -> Result:
        """The result of the call; later work of the calling thread comes after the call."""
        self.end.synchronize()
        return super().result(timeout)


class _HostThread(Executor):
    """The host's lane, an actor of the trace; its calls run in the thread that submits them."""

    def __init__(self, driver: "ClockedDriver") -> None:
        self.driver = driver

    def submit(self, call: Callable[..., Result], /, *args: Any, **named: Any) -> Future[Result]:
        """Run a call at once, and record it as work of the host's lane."""
        driver, future = self.driver, _HostFuture[Result]()
        issuer = driver.host
        driver.trace.follow(HOST_LANE, driver.trace.reached(issuer))
        driver.host = HOST_LANE
        try:
            future.set_result(call(*args, **named))
        finally:
            future.end = ClockedEvent(driver)
            future.end.note(HOST_LANE)
            driver.host = issuer
        return future


class NoGraph:
    """A captured CUDA graph, whose work is recorded during the capture."""

    def replay(self) -> None:
        """Does nothing: the work was recorded during the capture."""


class ClockedDriver:
    """A driver that runs on the CPU and records in a trace how streams and events order work."""

    backend = "none"
    version = ""

    def __init__(self, trace: Trace, memory: Memory) -> None:
        self.trace, self.memory = trace, memory
        # The host's actor (thread) that is running, and the current stream.
        self.host = HOST
        self.compute = self.current = ClockedStream(self, "compute")

    def wait(self, actor: str, event: ClockedEvent) -> None:
        """Let the later work of an actor come after an event."""
        trace = self.trace
        wait = Wait(task=trace.task, lane=actor, for_task=event.task, for_lane=event.lane)
        if actor != self.host:
            trace.follow(actor, trace.reached(self.host))
        trace.follow(actor, event.stretch, wait)

    def count(self) -> int:
        """The number of devices: one, the CPU."""
        return 1

    def choose(self, device: torch.device) -> None:
        """Does nothing: there is one device."""

    def name(self, device: torch.device) -> str:
        """An invented name of the device."""
        return "stand-in"

    def has_bf16(self, device: torch.device) -> bool:
        """True: values of tensors do not matter here."""
        return True

    def current_stream(self, device: torch.device) -> ClockedStream:
        """The stream on which operators run at present."""
        return self.current

    def stream(self, device: torch.device, *, urgent: bool = False) -> ClockedStream:
        """A new stream; the caller gives it a name."""
        return ClockedStream(self, "stream")

    @contextmanager
    def using(self, stream: ClockedStream) -> Iterator[None]:
        """Make a stream the current stream within the ``with`` block."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def capture(self, stream: ClockedStream) -> Iterator["NoGraph"]:
        """Run the work to be captured at once: only its order matters here."""
        yield NoGraph()

    def event(self) -> ClockedEvent:
        """A new event; the trace orders work by its recording and its waits."""
        return ClockedEvent(self)

    def synchronize(self, device: torch.device) -> None:
        """Let the host's later work come after the work of all streams."""
        for actor in {stretch.actor for stretch in self.trace.stretches} - {HOST, HOST_LANE}:
            self.trace.follow(self.host, self.trace.reached(actor))

    def read(self, tensor: Tensor, usual: int) -> list[int]:
        """The values of a tensor; the calling thread's later work comes after the current stream's
        work.
        """
        del usual
        tensor.sum()
        self.trace.follow(self.host, self.trace.reached(self.current.name))
        return [int(one) for one in tensor.tolist()]

    def generator(self, device: torch.device) -> torch.Generator:
        """A random generator of the CPU."""
        return torch.Generator()

    def idle(self, cycles: int) -> None:
        """Does nothing: a trace has no times."""

    def threads(self, name: str) -> Executor:
        """The executor for the host's second thread, the host's lane."""
        return _HostThread(self)

    def host_zeros(self, size_bytes: int) -> Tensor:
        """Zeros in host memory, which the trace records as host memory for copies."""
        with _disable_current_modes():
            zeros = torch.zeros(size_bytes, dtype=torch.uint8)
        self.memory.made_on_host(zeros)
        return zeros

    def pin(self, memory: Tensor) -> int:
        """Does nothing: a CPU needs no pinned memory."""
        return 0

    def unpin(self, memory: Tensor) -> None:
        """Record a write of the host to the memory, because no copy may still use memory that is
        unpinned.
        """
        stretch = self.trace.work(self.host, self.host)
        self.memory.touched(memory, stretch, writes=True, operator="unpin")

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """The free and the total bytes of the device: both 0, since a trace measures no memory."""
        return 0, 0

    def reserved_bytes(self, device: torch.device) -> int:
        """The bytes that an allocator reserves: 0, since a trace measures no memory."""
        return 0

    def cap(self, device: torch.device, share: float) -> None:
        """Does nothing: a trace has no limit of memory."""

    def count_anew(self, device: torch.device) -> None:
        """Does nothing: a trace measures no peaks of memory."""

    def peaks(self, device: torch.device) -> DevicePeaks:
        """The peaks of memory: all 0, since a trace measures no memory."""
        return DevicePeaks(allocated_bytes=0, reserved_bytes=0, retries=0)
