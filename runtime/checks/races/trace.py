"""What one rank did, as a graph: stretches of work, what each came after, and what each touched.

An actor is a stream of the device, the thread of the host that issues, or the host's lane. A
stretch is an actor's work between two points at which it hears of others, or others hear of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

# The thread that issues, and the lane of the host (``mistlab.schedule.lanes.LANES``).
HOST, HOST_LANE = "issuing thread", "host"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wait:
    """A wait for an event that a task has: of ``task`` on ``lane`` for the end of another task."""

    task: str
    lane: str
    for_task: str
    for_lane: str

    def __str__(self) -> str:
        return f"{self.task} on {self.lane} waits for {self.for_task} on {self.for_lane}"


class Source(NamedTuple):
    """A stretch that another one comes after, and the wait that this rests on, if it is one."""

    stretch: int
    wait: Wait | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretch:
    """Work of one actor; all of it comes after all ``sources``, which have lower numbers."""

    actor: str
    task: str
    sources: list[Source]


class Access(NamedTuple):
    """An operator's use of bytes ``begin`` to ``end`` of a storage."""

    stretch: int
    storage: int
    begin: int
    end: int
    writes: bool
    operator: str
    task: str


Kind = Literal["race", "used before allocated", "freed while used"]


class Deed(NamedTuple):
    """What a task did on an actor, in words."""

    task: str
    actor: str
    does: str

    def __str__(self) -> str:
        return f"{self.task} on {self.actor} {self.does}"


class Need(NamedTuple):
    """Two stretches that must be in order, and why: a rule, and what was done with a memory."""

    earlier: int
    later: int
    kind: Kind
    first: Access | Deed
    second: Access | Deed
    memory: Access


@dataclass(slots=True, eq=False)
class Trace:
    """The graph, in the order in which the host issued it."""

    stretches: list[Stretch] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)
    # What each storage is called, and what the parts of some are, by their bytes.
    storages: list[str] = field(default_factory=list)
    parts: dict[int, list[tuple[int, int, str]]] = field(default_factory=dict)
    # Says which task is being issued.
    issuing: Callable[[], str] = "start".__str__
    _last: dict[str, int] = field(default_factory=dict)
    # Actors whose last stretch takes more work, and those whose last stretch has taken some.
    _open: set[str] = field(default_factory=set)
    _busy: set[str] = field(default_factory=set)
    # The last stretch of an actor of the host that another actor comes after.
    _heard: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """The task that is being issued."""
        return self.issuing()

    def called(self, access: Access) -> str:
        """What an access touches, by name."""
        names = [
            name
            for begin, end, name in self.parts.get(access.storage, ())
            if begin < access.end and access.begin < end
        ]
        return " and ".join(names) or self.storages[access.storage]

    def deed(self, access: Access | Deed) -> Deed:
        """An access in words."""
        if isinstance(access, Deed):
            return access
        does = "writes" if access.writes else "reads"
        return Deed(
            task=access.task,
            actor=self.stretches[access.stretch].actor,
            does=f"{does} bytes {access.begin:,} to {access.end:,} ({access.operator})",
        )

    def reached(self, actor: str) -> int | None:
        """The actor's last stretch, which ends here; None if it has done nothing."""
        self._open.discard(actor)
        return self._last.get(actor)

    def follow(self, actor: str, source: int | None, wait: Wait | None = None) -> None:
        """Let what an actor does from now on come after a stretch."""
        if source is not None:
            is_new = actor in self._open and actor not in self._busy
            # Sources have lower numbers, so that one pass over the stretches finds all orders.
            if not is_new or self._last[actor] < source:
                self._begin(actor)
            self.stretches[self._last[actor]].sources.append(Source(source, wait))

    def work(self, actor: str, host: str) -> int:
        """The stretch of what an actor of the host gives to an actor now."""
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
        """A stretch without work: behind all that an actor, and what gives it work, has come to."""
        sources = [self.reached(one) for one in {actor, host}]
        found = [Source(one) for one in sources if one is not None]
        self.stretches.append(Stretch(actor=actor, task=self.task, sources=found))
        return len(self.stretches) - 1

    def _begin(self, actor: str) -> None:
        before = self._last.get(actor)
        self._last[actor] = len(self.stretches)
        sources = [] if before is None else [Source(before)]
        self.stretches.append(Stretch(actor=actor, task=self.task, sources=sources))
        self._open.add(actor)
        self._busy.discard(actor)
