"""A graph of one rank's work: stretches of work, their order, and the memory that they touch.

An actor is a stream of the device, the host's thread that issues, or the host's lane. A stretch is
an actor's work between two points at which the actor waits for others, or others wait for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

# Names of the thread that issues and of the host's lane (``mistlab.schedule.lanes.LANES``).
HOST, HOST_LANE = "issuing thread", "host"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wait:
    """A wait of ``task`` on ``lane`` for the end of another task."""

    task: str
    lane: str
    for_task: str
    for_lane: str

    def __str__(self) -> str:
        return f"{self.task} on {self.lane} waits for {self.for_task} on {self.for_lane}"


class Source(NamedTuple):
    """A stretch that must come before another, and the wait that orders the two, if one does."""

    stretch: int
    wait: Wait | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretch:
    """Work of one actor, after all its ``sources``, which have lower numbers."""

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
    """An action of a task on an actor, in words."""

    task: str
    actor: str
    does: str

    def __str__(self) -> str:
        return f"{self.task} on {self.actor} {self.does}"


class Need(NamedTuple):
    """Two stretches that must be in order: the rule, and the two uses of memory behind it."""

    earlier: int
    later: int
    kind: Kind
    first: Access | Deed
    second: Access | Deed
    memory: Access


@dataclass(slots=True, eq=False)
class Trace:
    """The graph, in the order in which the host issued the work."""

    stretches: list[Stretch] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)
    # The name of each storage, and names of byte ranges in some storages.
    storages: list[str] = field(default_factory=list)
    parts: dict[int, list[tuple[int, int, str]]] = field(default_factory=dict)
    # Gives the name of the task that is being issued.
    issuing: Callable[[], str] = "start".__str__
    _last: dict[str, int] = field(default_factory=dict)
    # Actors whose last stretch can take more work, and actors whose last stretch has some.
    _open: set[str] = field(default_factory=set)
    _busy: set[str] = field(default_factory=set)
    # By pair of actor and host actor: the host's last stretch that the actor comes after.
    _heard: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """The task that is being issued."""
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
        """An access as a deed, in words."""
        if isinstance(access, Deed):
            return access
        does = "writes" if access.writes else "reads"
        return Deed(
            task=access.task,
            actor=self.stretches[access.stretch].actor,
            does=f"{does} bytes {access.begin:,} to {access.end:,} ({access.operator})",
        )

    def reached(self, actor: str) -> int | None:
        """End the actor's last stretch and return its number; None if the actor has none."""
        self._open.discard(actor)
        return self._last.get(actor)

    def follow(self, actor: str, source: int | None, wait: Wait | None = None) -> None:
        """Let the actor's work from now on come after a stretch."""
        if source is not None:
            is_new = actor in self._open and actor not in self._busy
            # Sources have lower numbers, so that one pass over the stretches finds their order.
            if not is_new or self._last[actor] < source:
                self._begin(actor)
            self.stretches[self._last[actor]].sources.append(Source(source, wait))

    def work(self, actor: str, host: str) -> int:
        """The stretch of the work that the host's actor ``host`` gives to ``actor`` now."""
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
        """A new stretch without work, after all work of ``actor`` and ``host`` so far."""
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
