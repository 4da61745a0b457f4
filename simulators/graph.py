"""The task graph that the event simulator runs, and the network links that its sends share."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.placement import StageChunk
from mistlab.schedule.slots import Action, Direction, Kind

# Slows down sends of different stages that use one node's network at the same time.
#
# A node's network sends and receives at the same bandwidth. A send's own duration assumes that only
# its stage uses the network. If concurrent sends of several stages need more than the bandwidth,
# all of them slow down by the same factor. Inter-node collectives are not slowed: a group never
# gets more than its ranks' share of the network, even if nothing else uses it.


# A link that a send uses: the link's index, and the share of its bandwidth that the send takes if
# it is alone on the link.
Use = tuple[int, float]


class Sender(Protocol):
    """A stage in simulated time, as a network sees it: a task that runs on it can be slowed
    down.
    """

    def crowd(self, stream: int, factor: float, now: float) -> None:
        """From now on, what is left of the task on a stream takes ``factor`` times as long."""


class Network:
    """The sends under way on each link, and the share of the link's bandwidth that they need
    together.
    """

    __slots__ = ("_asked", "_users")

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}
        self._users: dict[int, dict[tuple[Sender, int], Sequence[Use]]] = {}

    def enter(self, sender: Sender, stream: int, uses: Sequence[Use], now: float) -> None:
        """Record that a send has begun, and slow down the sends on its links if these are
        overloaded.
        """
        for link, part in uses:
            self._asked[link] = self._asked.get(link, 0.0) + part
            self._users.setdefault(link, {})[sender, stream] = uses
        self._share(uses, now)

    def leave(self, sender: Sender, stream: int, uses: Sequence[Use], now: float) -> None:
        """Record that a send has ended, and speed up the other sends on its links."""
        for link, part in uses:
            self._asked[link] -= part
            del self._users[link][sender, stream]
            if not self._users[link]:
                self._asked[link] = 0.0
        self._share(uses, now)

    def _share(self, uses: Sequence[Use], now: float) -> None:
        """Set the slowdown of all sends that use these links; each send is as slow as on its most
        overloaded link.
        """
        users = {user: of_user for link, _ in uses for user, of_user in self._users[link].items()}
        for (sender, stream), of_user in users.items():
            slowest = max(1.0, *(self._asked[link] for link, _ in of_user))
            sender.crowd(stream, slowest, now)


# A graph of tasks and their dependencies: the input of the event simulator.
#
# A task runs in one lane (queue) of one stage, and a lane runs one task at a time. Each stream is a
# lane; sends that overlap with the next pass have a lane of their own, as in the runtime. A task is
# ready when the tasks that it waits for have started or ended. Of the ready tasks of a lane, the
# one with the lowest number runs first.


# What a task does apart from its stage and micro-batch: its kind, its direction and its layer.
Label = tuple[Kind, Direction | None, int | None]
# The tasks that wait for a task, each as its own number minus the number of the task that it waits
# for.
Offsets = tuple[int, ...]

# The lane (queue of tasks) for a stage's sends; it uses the same links as the stream for GPU-to-GPU
# communication.
SENDS = "sends"
LANES = (*STREAMS, SENDS)

# An error message names at most this many of the tasks that wait.
NAMED = 8


class StalledError(Exception):
    """Raised if some tasks can never start; the message names tasks that wait for one another."""


@dataclass(slots=True, kw_only=True)
class TaskGraph:
    """The tasks of an iteration as columns, with their dependencies; a task's number is its row.

    A column is a plain list, so equal passes share their values. ``after_end`` and ``after_start``
    have, for each task, the tasks that wait for its end or its start, as offsets from its number;
    ``waits`` counts the tasks for which it waits. Entries of ``lanes`` are numbered through all
    stages: five times the stage, plus the lane's index in ``LANES``.
    """

    stages: int
    first_layers: tuple[int, ...] = ()
    # For each part of the model, the stage and the chunk that hold it; empty if each stage has one
    # chunk.
    places: tuple[StageChunk, ...] = ()
    labels: list[Label] = field(default_factory=list)
    micro_batches: list[int] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    after_end: list[Offsets] = field(default_factory=list)
    after_start: list[Offsets] = field(default_factory=list)
    # Each task that sends, with the receiver's first task that waits for the send.
    sends: list[tuple[int, int]] = field(default_factory=list)
    # For each task that sends between nodes, the links that it uses, and its share of each link's
    # bandwidth.
    networks: dict[int, tuple[Use, ...]] = field(default_factory=dict)
    # For each task, the seconds that the host takes to issue it; only tasks whose stream may wait
    # for the host have an entry.
    issues: dict[int, float] = field(default_factory=dict)
    # Whether each stage takes its optimizer step and begins the next iteration without waiting for
    # the other stages.
    steps_apart: bool = False
    # For each task whose kernels are launched by a host that never runs ahead: the least factor by
    # which the task takes longer than its computation. Its stream idles between kernels.
    paces: dict[int, float] = field(default_factory=dict)
    # Tasks during which the host of their stage issues nothing.
    holds: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.labels)

    def add(self, action: Action, lane: str, seconds: float, *, after: Iterable[int] = ()) -> int:
        """Add a task that starts when the tasks ``after`` have ended; returns the new task's
        number.
        """
        assert action.stage < self.stages, f"{action}: there are {self.stages} stages"
        self.labels.append((action.kind, action.direction, action.layer))
        self.micro_batches.append(action.micro_batch)
        self.lanes.append(len(LANES) * action.stage + LANES.index(lane))
        self.seconds.append(seconds)
        self.waits.append(0)
        self.after_end.append(())
        self.after_start.append(())
        task = len(self) - 1
        for source in after:
            self.wait(task, end_of=source)
        return task

    def wait(self, task: int, *, end_of: int) -> None:
        """Make a task wait until another task has ended."""
        self.after_end[end_of] = (*self.after_end[end_of], task - end_of)
        self.waits[task] += 1

    def wait_for_start(self, task: int, *, start_of: int) -> None:
        """Make a task wait until another task has started."""
        self.after_start[start_of] = (*self.after_start[start_of], task - start_of)
        self.waits[task] += 1

    def stage(self, task: int) -> int:
        """The number of the stage that runs a task."""
        return self.lanes[task] // len(LANES)

    def lane(self, task: int) -> str:
        """The name of the lane (queue) in which a task runs."""
        return LANES[self.lanes[task] % len(LANES)]

    def chunk(self, task: int) -> int:
        """The number, within its stage, of the chunk (part of the model) that a task belongs to."""
        if not self.first_layers:
            return 0
        layer = self.labels[task][2]
        assert layer is not None
        return self.places[bisect_right(self.first_layers, layer) - 1].chunk

    def action(self, task: int) -> Action:
        """A task as an ``Action``: its stage, kind, direction, layer and micro-batch."""
        kind, direction, layer = self.labels[task]
        return Action(
            stage=self.stage(task),
            kind=kind,
            direction=direction,
            layer=layer,
            micro_batch=self.micro_batches[task],
        )

    def edges(self) -> Iterator[tuple[int, int, bool]]:
        """Every dependency of a task on another: the number of the task to wait for, the number of
        the waiting task, and whether it waits for the end rather than the start.
        """
        for ended, column in ((True, self.after_end), (False, self.after_start)):
            for task, offsets in enumerate(column):
                for offset in offsets:
                    yield task, task + offset, ended

    def stalled(self, unstarted: Iterable[int]) -> StalledError:
        """An error that says which of the tasks ``unstarted`` wait for one another, so that they
        can never start.
        """
        left = set(unstarted)
        sources: dict[int, list[int]] = {}
        for source, task, _ in self.edges():
            if source in left and task in left:
                sources.setdefault(task, []).append(source)
        cycle = _cycle(sources, min(left))
        if cycle:
            what = " which waits for ".join(str(self.action(task)) for task in cycle)
            return StalledError(f"{len(left)} tasks cannot start: {what}")
        named = ", ".join(str(self.action(task)) for task in sorted(left)[:NAMED])
        return StalledError(
            f"{len(left)} tasks cannot start, since they wait for tasks that do not exist: {named}"
        )


def _cycle(sources: dict[int, list[int]], first: int) -> list[int]:
    """The numbers of tasks that wait for one another in a cycle, the first of them again at the
    end; empty if there is no cycle.
    """
    seen: dict[int, int] = {}
    task = first
    while task not in seen:
        if task not in sources:
            return []
        seen[task] = len(seen)
        task = min(sources[task])
    return [*list(seen)[seen[task] :], task]
