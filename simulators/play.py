"""Runs a task graph in simulated time with SimPy, with a process for each lane (queue) of each
stage.

The busy streams of a stage slow one another down, each by a factor that depends on the set of busy
streams. A send runs on the GPU-to-GPU stream; together with a collective of its stage both run at
half speed. When the set of busy streams changes, the rest of each running task continues at the new
speed. SimPy's queue holds one event per stage, the end of the task that ends first. When the set
changes, the processes that wait for this event are moved to a new event at the new time. Sends of
stages that share a node's network slow one another down in the same way (``simulators.graph``).
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from statistics import median

from simpy import Environment, Event

from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.placement import loop
from simulators.graph import LANES, SENDS, Network, TaskGraph

# How much streams slow one another down: a row for each set of busy streams (a bit mask is the
# row's index), with a factor on each stream's time.
Factors = Sequence[Sequence[float]]

ALONE: Factors = ((1.0,) * len(STREAMS),) * 2 ** len(STREAMS)
_GPU_TO_GPU, _SENDS = STREAMS.index("gpu_to_gpu"), LANES.index(SENDS)
# By what factor a send and a collective of the same stage take longer while both run.
_SHARED = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The start and the end of each task, in seconds from the beginning of the iteration."""

    starts_s: list[float]
    ends_s: list[float]


def play(graph: TaskGraph, factors: Sequence[Factors]) -> Times:
    """Run all tasks in simulated time; ``factors`` says for each stage how much its streams slow
    one another down. Raises ``StalledError`` if some tasks can never start.
    """
    environment = Environment()
    player = _Player(environment, graph, factors)
    environment.run()
    if player.unstarted:
        raise graph.stalled(task for task, start in enumerate(player.starts) if start < 0)
    return Times(starts_s=player.starts, ends_s=player.ends)


class _Ending(Event):
    """The event that a task of a stage ends; only the earliest of a stage's events is in SimPy's
    queue.
    """

    __slots__ = ()

    def at(self, delay: float) -> None:
        """Put the event into SimPy's queue, after a delay in seconds."""
        self._ok = True
        self._value = None
        self.env.schedule(self, delay=delay)


class _Contention:
    """The tasks that run on one stage, which slow one another down: how much of each is left, and
    which will end first.
    """

    __slots__ = (
        *("busy", "crowded", "environment", "events", "left", "next_lane", "shares", "since"),
        *("usual", "when"),
    )

    def __init__(self, environment: Environment, factors: Factors) -> None:
        self.environment = environment
        # For each set of busy lanes (queues), the lanes in it and the factor by which each slows
        # down.
        self.usual = self.shares = _shares(factors)
        self.left = [0.0] * len(LANES)
        self.events: list[_Ending | None] = [None] * len(LANES)
        self.busy = 0
        # The lane of a send that other sends on its links slow down; -1 if there is none.
        self.crowded = -1
        self.since = 0.0
        # The lane whose event is in SimPy's queue; -1 for none.
        self.next_lane = -1
        # The time of the event that is in SimPy's queue.
        self.when = 0.0

    def begin(self, lane: int, seconds: float, now: float) -> _Ending:
        """Start a task that takes ``seconds`` if nothing slows it down; returns the event of its
        end.
        """
        if now > self.since:
            self._advance(now)
        self.left[lane] = seconds
        event = self.events[lane] = _Ending(self.environment)
        self.busy |= 1 << lane
        self.await_next()
        return event

    def ending(self, lane: int) -> _Ending:
        """The event by which the running task of a lane (queue) ends."""
        event = self.events[lane]
        assert event is not None
        return event

    def end(self, lane: int, now: float) -> None:
        """End the task of a lane; afterwards the caller must call ``await_next`` or ``begin``."""
        if now > self.since:
            self._advance(now)
        self.left[lane] = 0.0
        self.busy &= ~(1 << lane)
        self.next_lane = -1
        if lane == self.crowded:
            self.crowded = -1
            self.shares = self.usual

    def crowd(self, lane: int, factor: float, now: float) -> None:
        """From now on, what is left of the task of a lane takes ``factor`` times as long."""
        if now > self.since:
            self._advance(now)
        self.crowded = lane
        self.shares = (
            self.usual
            if factor == 1
            else [
                [(one, share * factor if one == lane else share) for one, share in of_set]
                for of_set in self.usual
            ]
        )
        self.await_next()

    def _advance(self, now: float) -> None:
        """Subtract from each running task what it has completed since the set of busy lanes last
        changed.
        """
        elapsed, left = now - self.since, self.left
        for lane, factor in self.shares[self.busy]:
            rest = left[lane] - elapsed / factor
            left[lane] = rest if rest > 0 else 0.0
        self.since = now

    def await_next(self) -> None:
        """Put the event of the task that will end first into SimPy's queue."""
        if not self.busy:
            return
        left = self.left
        first, delay = -1, inf
        for lane, factor in self.shares[self.busy]:
            rest = left[lane] * factor
            if rest < delay:
                first, delay = lane, rest
        when = self.since + delay
        scheduled = self.next_lane
        if scheduled >= 0:
            if scheduled == first and when == self.when:
                return
            self._withdraw(scheduled)
        event = self.events[first]
        assert event is not None
        self.next_lane, self.when = first, when
        event.at(delay)

    def _withdraw(self, lane: int) -> None:
        """Take a lane's event out of use: a new event, not yet in SimPy's queue, gets its
        callbacks.
        """
        former = self.events[lane]
        assert former is not None
        event = self.events[lane] = _Ending(self.environment)
        event.callbacks, former.callbacks = former.callbacks, []


def _shares(factors: Factors) -> list[list[tuple[int, float]]]:
    """For each set of busy lanes (a bit mask), the lanes in it and the factor by which each slows
    down.
    """
    shares = []
    for chosen in range(2 ** len(LANES)):
        streams = chosen & ~(1 << _SENDS)
        are_shared = chosen >> _SENDS and streams >> _GPU_TO_GPU & 1
        if chosen >> _SENDS:
            streams |= 1 << _GPU_TO_GPU
        of_set = []
        for lane in range(len(LANES)):
            if chosen >> lane & 1:
                stream = _GPU_TO_GPU if lane == _SENDS else lane
                share = _SHARED if are_shared and stream == _GPU_TO_GPU else 1.0
                of_set.append((lane, float(factors[streams][stream]) * share))
        shares.append(of_set)
    return shares


class _Player:
    """The SimPy processes of all lanes (queues of tasks), and the state that they share."""

    __slots__ = (
        *(
            "asleep",
            "contention",
            "ends",
            "environment",
            "graph",
            "hosts",
            "network",
            "ready",
            "starts",
        ),
        *("unstarted", "waits"),
    )

    def __init__(
        self, environment: Environment, graph: TaskGraph, factors: Sequence[Factors]
    ) -> None:
        lanes = len(LANES) * graph.stages
        self.environment = environment
        self.graph = graph
        self.contention = [_Contention(environment, of_stage) for of_stage in factors]
        self.network = Network()
        # For each stage, the time at which its host has issued all tasks asked of it so far.
        self.hosts = [0.0] * graph.stages
        self.starts = [-1.0] * len(graph)
        self.ends = [-1.0] * len(graph)
        self.waits = graph.waits.copy()
        self.unstarted = len(graph)
        self.asleep: list[Event | None] = [None] * lanes
        self.ready: list[list[int]] = [[] for _ in range(lanes)]
        counts = [0] * lanes
        for task, (lane, waits) in enumerate(zip(graph.lanes, graph.waits, strict=True)):
            counts[lane] += 1
            if not waits:
                self.ready[lane].append(task)
        for lane, count in enumerate(counts):
            if count:
                environment.process(self._lane(lane, count))

    def _lane(self, lane: int, count: int) -> Generator[Event, None, None]:
        """Run the ``count`` tasks of a lane in the order of their numbers, each as soon as it is
        ready.
        """
        environment, starts, ends = self.environment, self.starts, self.ends
        seconds, ready, issues = self.graph.seconds, self.ready[lane], self.graph.issues
        network, uses_of, after_end = self.network, self.graph.networks, self.graph.after_end
        paces = self.graph.paces
        stage, stream = divmod(lane, len(LANES))
        contention = self.contention[stage]
        running, now = False, 0.0
        for _ in range(count):
            if not ready:
                if running:
                    contention.await_next()
                    running = False
                event = self.asleep[lane] = Event(environment)
                yield event
                now = environment.now
            task = heappop(ready)
            issued_s = self._issued(task, lane) if task in issues else now
            if issued_s > now:
                yield from self._pause(contention, issued_s - now)
                running, now = False, environment.now
            starts[task] = now
            self._started(task, stage)
            event = contention.begin(stream, seconds[task], now)
            if uses := uses_of.get(task):
                network.enter(contention, stream, uses, now)
                event = contention.ending(stream)
            yield event
            now = ends[task] = environment.now
            contention.end(stream, now)
            if uses:
                network.leave(contention, stream, uses, now)
            running = True
            if task in paces and (held_s := self._held_s(task, now)) > 0:
                yield from self._pause(contention, held_s)
                running, now = False, environment.now
                ends[task] = now
            if waiting := after_end[task]:
                self._release(task, waiting)
        contention.await_next()

    def _pause(self, contention: _Contention, seconds: float) -> Generator[Event, None, None]:
        """Keep a lane of a stage idle for some seconds."""
        contention.await_next()
        yield self.environment.timeout(seconds)

    def _started(self, task: int, stage: int) -> None:
        """Tell the tasks that wait for this task's start that it has started. If the task blocks
        the receiver during a send, the host issues nothing until it ends.
        """
        self.unstarted -= 1
        if task in self.graph.holds:
            self.hosts[stage] += self.graph.seconds[task]
        if waiting := self.graph.after_start[task]:
            self._release(task, waiting)

    def _held_s(self, task: int, now: float) -> float:
        """By how many seconds a task takes longer than its computation, because the host issues its
        kernels more slowly.
        """
        graph = self.graph
        return self.starts[task] + graph.paces[task] * graph.seconds[task] - now

    def _issued(self, task: int, lane: int) -> float:
        """The time at which the host of a stage has issued a task, after all tasks that it issued
        before.
        """
        stage = lane // len(LANES)
        self.hosts[stage] += self.graph.issues[task]
        return self.hosts[stage]

    def _release(self, task: int, offsets: Sequence[int]) -> None:
        """Tell the tasks that wait for a task that it has started or ended, and wake the lanes of
        tasks that are now ready.
        """
        waits, lanes, asleep = self.waits, self.graph.lanes, self.asleep
        for offset in offsets:
            waiting = task + offset
            waits[waiting] -= 1
            if not waits[waiting]:
                lane = lanes[waiting]
                heappush(self.ready[lane], waiting)
                event = asleep[lane]
                if event is not None:
                    asleep[lane] = None
                    event.succeed()


# Computes how long the passes of each stage take in a simulated iteration.
#
# A pass begins when its stage is free and the micro-batch has arrived, and ends when the stage has
# computed the micro-batch. So a stage's own copies from the host count, and waits for other stages
# do not. Optimizer steps before the first micro-batch arrives count towards the first forward pass,
# tasks after the last backward pass towards that pass.


# Identifies a pass of a stage: its kind, chunk (part of the model) and micro-batch.
Pass = tuple[str, int, int]
_COMPUTING = ("F", "B", "W")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """The seconds of the passes of one stage; the first and the last pass include the tasks before
    and after all passes.

    Micro-batches are in the order of their first forward and first backward passes. If a stage has
    several chunks, a micro-batch's times in them are added; separate passes for weight gradients
    count as part of its backward pass.
    """

    forwards_s: tuple[float, ...]
    backwards_s: tuple[float, ...]

    @property
    def steady_s(self) -> tuple[float, float] | None:
        """The seconds of a steady-state forward and backward pass; None if there is only one
        micro-batch.
        """
        if len(self.forwards_s) == 1:
            return None
        return median(self.forwards_s[1:]), median(self.backwards_s[:-1])


def pass_times(graph: TaskGraph, times: Times) -> list[PassTimes]:
    """The seconds of each stage's passes, computed from the start and end of its tasks."""
    stages = [_StagePasses() for _ in range(graph.stages)]
    for task, (kind, _, _) in enumerate(graph.labels):
        stage = stages[graph.stage(task)]
        of = kind, graph.chunk(task) if kind in _COMPUTING else 0, graph.micro_batches[task]
        stage.add(of, times.starts_s[task], times.ends_s[task])
    # A micro-batch arrives at a stage when its send ends; if sending takes no time, when it has
    # been computed.
    for ends in pairwise(graph.places or loop(graph.stages).places):
        for kind, ((source, above), (goal, below)) in (("F", ends), ("B", ends[::-1])):
            stages[goal].came_s |= {
                (kind, below, micro_batch): end_s
                for (sent_kind, chunk, micro_batch), end_s in stages[source].ends_s.items()
                if (sent_kind, chunk) == (kind, above)
            }
    for send, task in graph.sends:
        of = graph.labels[task][0], graph.chunk(task), graph.micro_batches[task]
        stages[graph.stage(task)].came_s[of] = times.ends_s[send]
    return [stage.pass_times() for stage in stages]


@dataclass(slots=True)
class _StagePasses:
    """Collects from the tasks of one stage when each pass was computed, when micro-batches arrived,
    when optimizer steps ran, and when the last task other than a send ended.
    """

    starts_s: dict[Pass, float] = field(default_factory=dict)
    ends_s: dict[Pass, float] = field(default_factory=dict)
    came_s: dict[Pass, float] = field(default_factory=dict)
    steps_s: list[tuple[float, float]] = field(default_factory=list)
    all_end_s: float = 0.0

    def add(self, of: Pass, start_s: float, end_s: float) -> None:
        """Record the start and end of a task that belongs to the pass ``of``."""
        if of[0] in _COMPUTING:
            self.starts_s[of] = min(start_s, self.starts_s.get(of, start_s))
            self.ends_s[of] = max(end_s, self.ends_s.get(of, end_s))
        elif of[0] == "S":
            self.steps_s.append((start_s, end_s))
        if of[0] != "X":
            self.all_end_s = max(self.all_end_s, end_s)

    def pass_times(self) -> PassTimes:
        """The seconds of the stage's passes."""
        seconds: dict[bool, dict[int, float]] = {True: {}, False: {}}
        free_s = 0.0
        for of in sorted(self.starts_s, key=self.starts_s.__getitem__):
            kind, _, micro_batch = of
            lasts_s = self.ends_s[of] - max(free_s, self.came_s.get(of, 0.0))
            of_way = seconds[kind == "F"]
            of_way[micro_batch] = of_way.get(micro_batch, 0.0) + lasts_s
            free_s = self.ends_s[of]
        forwards, backwards = (list(of_way.values()) for of_way in seconds.values())
        forwards[0] += self._stepping_s()
        backwards[-1] += self.all_end_s - free_s
        return PassTimes(forwards_s=tuple(forwards), backwards_s=tuple(backwards))

    def _stepping_s(self) -> float:
        """The seconds of the optimizer steps that the stage takes before its first micro-batch
        arrives.
        """
        first = min(self.starts_s, key=self.starts_s.__getitem__)
        before = [end_s for start_s, end_s in self.steps_s if start_s < self.starts_s[first]]
        return min(self.came_s.get(first, 0.0), max(before, default=0.0))
