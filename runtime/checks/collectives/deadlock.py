"""Decides whether ranks that wait for one another all finish, or deadlock.

The rules are those of NCCL and of the runtime. A task begins after the previous task on its lane
(queue of work), after the tasks that it waits for, and after its host has issued it. A group's
calls run in the order of issue. A collective ends when all ranks of the group have begun it, an
exchange of messages when its senders and receivers have begun it. The first call of a kind and size
also blocks its host until all hosts of the group have issued theirs, because NCCL then makes
connections. Durations do not matter.

Ranks with equal tasks are first played as one rank, which waits for whatever any of them waits for.
If this rank finishes, all of them do. If not, each rank is played separately.

Streams may share a hardware queue (CUDA_DEVICE_MAX_CONNECTIONS). Work that waits for an event
blocks all work behind it in the queue, of any stream. An exchange runs on a stream of its own, and
torch makes the issuing stream wait for its end. A reduction that overlaps with a backward pass
waits in the queue of its own lane for the pass to reach that point, while the pass waits in the
queue of the compute lane for the end of the reduction.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from mistlab.schedule.stage_passes import LANES
from runtime.checks.collectives.world_calls import Call, RankCalls, Step

Groups = Sequence[tuple[str, tuple[int, ...]]]
# With more tasks in total, ranks with equal tasks are only played as one rank.
MOST_STEPS = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A task of a rank that never ends, and the call in which it waits, if any."""

    rank: int
    task: str
    call: Call | None

    def __str__(self) -> str:
        of = "" if self.call is None else f" ({self.call} in {self.call.group})"
        return f"{self.task} of rank {self.rank}{of}"


def deadlock(
    ranks: Sequence[RankCalls],
    groups: Groups,
    greeted: Sequence[RankCalls] = (),
    *,
    queues: int = len(LANES),
) -> list[Waiting]:
    """The tasks of a deadlock, each waiting for the next; the last waits for the first, or for a
    call that no rank makes. The list is empty if all ranks finish.

    ``greeted`` are the calls made while connecting: ranks that have exchanged messages have
    channels already. Lanes are assigned to ``queues`` hardware queues in turn.
    """
    alike: dict[int, list[RankCalls]] = defaultdict(list)
    for rank_calls in ranks:
        alike[id(rank_calls.steps)].append(rank_calls)
    circle = _Played(list(alike.values()), groups, greeted, queues).waiting()
    is_small = sum(len(one.steps) for one in ranks) <= MOST_STEPS
    if circle and len(alike) < len(ranks) and is_small:
        return _Played([[one] for one in ranks], groups, greeted, queues).waiting()
    return circle


@dataclass(frozen=True, slots=True)
class _Moments:
    """A graph of moments in time (begin or end of calls); a moment occurs once all moments that
    must precede it have occurred.

    For each moment it keeps the number of moments that must precede it, and the moments that follow
    it.
    """

    counts: list[int] = field(default_factory=list)
    followers: list[list[int]] = field(default_factory=list)

    def new(self, *before: int | None) -> int:
        """Add a moment that comes after the given moments; returns its number."""
        self.counts.append(0)
        self.followers.append([])
        moment = len(self.counts) - 1
        for earlier in before:
            self.order(earlier, moment)
        return moment

    def order(self, earlier: int | None, later: int) -> None:
        """Require that the moment ``later`` comes after the moment ``earlier``."""
        if earlier is not None:
            self.counts[later] += 1
            self.followers[earlier].append(later)

    def never(self) -> set[int]:
        """The moments that never occur, because they wait for one another."""
        counts = list(self.counts)
        ready = [moment for moment, count in enumerate(counts) if count == 0]
        for moment in ready:
            for follower in self.followers[moment]:
                counts[follower] -= 1
                if counts[follower] == 0:
                    ready.append(follower)
        return set(range(len(counts))) - set(ready)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallMoments:
    """The moments of one call: when it begins, ends and is issued, and when its host continues."""

    begins: int
    ends: int
    issued: int | None
    goes_on: int | None


class _LaidProgram:
    """Adds the tasks of one rank to the graph of moments, in the order of its lanes and queues."""

    def __init__(self, moments: _Moments, *, rank: int) -> None:
        self.of_queue: dict[int, int] = {}
        self.of: dict[int, Waiting] = {}
        self._moments, self._rank = moments, rank
        self._of_lane: dict[str, int] = {}
        self._of_group: dict[str, int] = {}
        self._ends_of_tasks: list[int] = []
        # The moment at which the host continues after the last call that blocked it.
        self._host: int | None = None
        self._at = 0

    def begin(self, step: Step, queue: int) -> None:
        """Begin a task: after earlier work on its lane and its hardware queue, after its host
        continues, and after the tasks that it waits for.
        """
        number = len(self._ends_of_tasks)
        named = [self._ends_of_tasks[number - wait] for wait in step.waits if wait <= number]
        before = self._of_lane.get(step.lane), self.of_queue.get(queue), self._host
        self._at = self.of_queue[queue] = self._new(step, None, *before, *named)

    def step_aside(self, step: Step, queue: int) -> None:
        """Move the task to another hardware queue for its next call, after the work already in that
        queue.
        """
        self._at = self.of_queue[queue] = self._new(step, None, self._at, self.of_queue.get(queue))

    def call(self, step: Step, call: Call, *, holds: bool) -> _CallMoments:
        """Let the task make a call, after earlier calls of the same group. If the call ``holds``,
        the host is blocked.
        """
        begins = self._new(step, call, self._at, self._of_group.get(call.group))
        ends = self._new(step, call, begins)
        issued = self._host
        if holds:
            self._host = self._new(step, call, issued)
        self._at = self._of_group[call.group] = ends
        return _CallMoments(
            begins=begins, ends=ends, issued=issued, goes_on=self._host if holds else None
        )

    def end(self, step: Step) -> None:
        """End a task of the rank, once its last call has ended."""
        self._ends_of_tasks.append(self._at)
        self._of_lane[step.lane] = self._at

    def _new(self, step: Step, call: Call | None, *before: int | None) -> int:
        moment = self._moments.new(*before)
        self.of[moment] = Waiting(rank=self._rank, task=step.task, call=call)
        return moment


class _Played:
    """Simulates the tasks of all ranks, where ranks with equal tasks may be played as one."""

    def __init__(
        self,
        played: list[list[RankCalls]],
        groups: Groups,
        greeted: Sequence[RankCalls],
        queues: int,
    ) -> None:
        self._played, self._queues = played, queues
        self._place = {one.rank: place for place, alike in enumerate(played) for one in alike}
        self._greeted = {one.rank: {*one.sends, *one.receives} for one in greeted}
        self._moments = _Moments()
        # A moment that must come after itself, so it never occurs; calls without a counterpart wait
        # for it.
        self._nothing = self._moments.new()
        self._moments.order(self._nothing, self._nothing)
        self._of: dict[int, Waiting] = {}
        self._made: list[dict[tuple[str, bool], list[_CallMoments]]] = []
        for alike in played:
            self._made.append(self._issued(alike))
        self._order_groups(groups)

    def waiting(self) -> list[Waiting]:
        """A cycle of tasks that never end, each waiting for the next; empty if all tasks end."""
        never = self._moments.never() - {self._nothing}
        if not never:
            return []
        before = {
            later: earlier
            for earlier in (*never, self._nothing)
            for later in self._moments.followers[earlier]
        }
        path = [min(never)]
        while path[-1] != self._nothing and path[-1] not in path[:-1]:
            path.append(before[path[-1]])
        begin = 0 if path[-1] == self._nothing else path.index(path[-1])
        path_waiting = [self._of[moment] for moment in path[begin:] if moment in self._of]
        return [one for one, _ in groupby(path_waiting)]

    def _issued(self, alike: Sequence[RankCalls]) -> dict[tuple[str, bool], list[_CallMoments]]:
        """Add a rank's tasks to the graph of moments; returns its calls by group, with exchanges of
        messages separate from collectives.
        """
        laid = _LaidProgram(self._moments, rank=alike[0].rank)
        known = {("exchange", link) for link in self._links(alike)}
        made: dict[tuple[str, bool], list[_CallMoments]] = defaultdict(list)
        aside = LANES.index("tensor_parallel") % self._queues
        for step in alike[0].steps:
            queue = LANES.index(step.lane) % self._queues
            laid.begin(step, queue)
            for call in _calls_made(alike, step):
                is_exchange = call.kind == "exchange"
                name = call.link if is_exchange else call.group
                kind = (call.kind, name if is_exchange else f"{name} {call.what}")
                if call.beside:
                    laid.step_aside(step, aside)
                moments_of_call = laid.call(step, call, holds=kind not in known)
                known.add(kind)
                made[name, is_exchange].append(moments_of_call)
                if is_exchange or call.beside:
                    laid.of_queue[queue] = moments_of_call.ends
            laid.end(step)
        self._of.update(laid.of)
        return made

    def _links(self, alike: Sequence[RankCalls]) -> set[str]:
        """The links on which all of these ranks exchanged a message while connecting."""
        return set.intersection(*(self._greeted.get(one.rank, set()) for one in alike))

    def _order_groups(self, groups: Groups) -> None:
        """Make the n-th calls of all ranks of a group wait for one another."""
        gathered = {
            (name, frozenset(self._place[rank] for rank in ranks)) for name, ranks in groups
        }
        for name, places in gathered:
            lists = [self._made[place].get((name, False), []) for place in places]
            for number in range(max(map(len, lists)) if len(places) > 1 else 0):
                self._let_wait([made[number] if number < len(made) else None for made in lists])
        for list_number, by_group in enumerate(self._made):
            for (link, is_exchange), made in by_group.items():
                for other in (
                    self._exchanging_with(list_number, link) - {list_number} if is_exchange else ()
                ):
                    theirs = self._made[other].get((link, True), [])
                    for number, theirs_meets in enumerate(made):
                        self._let_wait(
                            [theirs_meets, theirs[number] if number < len(theirs) else None]
                        )

    def _exchanging_with(self, list_number: int, link: str) -> set[int]:
        """The indices of the played ranks that exchange messages with this rank over a link."""
        return {
            self._place[peer]
            for calls in self._played[list_number]
            for peer in (*calls.sends.get(link, ()), *calls.receives.get(link, ()))
        }

    def _let_wait(self, made: Sequence[_CallMoments | None]) -> None:
        """Let calls that belong together end once all have begun; hosts that they block continue
        once all are issued.
        """
        moments, nothing = self._moments, self._nothing
        begun = moments.new(*(nothing if call is None else call.begins for call in made))
        there = [call for call in made if call is not None]
        for call in there:
            moments.order(begun, call.ends)
        if any(call.goes_on is not None for call in there):
            issued = moments.new(*(nothing if call is None else call.issued for call in made))
            for call in there:
                if call.goes_on is not None:
                    moments.order(issued, call.goes_on)


def _calls_made(alike: Sequence[RankCalls], step: Step) -> Iterator[Call]:
    """The calls of a task, without exchanges that have no messages, which a run skips."""
    for call in step.calls:
        if call.kind != "exchange" or any(
            one.sends.get(call.link) or one.receives.get(call.link) for one in alike
        ):
            yield call
