"""Whether ranks that wait for one another come to an end, by the rules of NCCL and of the runtime.

A task begins behind the task before it on its lane, behind those that its program names, and when
its host has issued it. A group's calls run in the order of issue. A reduction or concatenation ends
when all ranks of the group have begun theirs, an exchange when those have that it has messages for
or from. A call that is the first of its kind and size holds its host too, until the hosts of all
others issue theirs: NCCL connects what it needs for it. Nothing else takes time.

Ranks with one program are played as one that waits for whatever any of them waits for. If that one
comes to an end, so do they all; if it does not, each rank is played by itself.

Streams may share a hardware queue (CUDA_DEVICE_MAX_CONNECTIONS). What waits in a queue for an event
keeps all behind it from beginning, whatever their streams; and torch lets the stream that exchanges
messages wait for the end of the exchange, which has a stream of its own. A reduction beside a
backward pass waits in its own lane's queue for the pass, and the pass in compute's for its end.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from mistlab.schedule.lanes import LANES
from runtime.checks.collectives.calls import Call, RankCalls, Step

Groups = Sequence[tuple[str, tuple[int, ...]]]
# With more tasks in all, ranks that do not end together are not played one by one.
MOST_STEPS = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A task of a rank that waits, and in which call of which group, if in one."""

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
    """Tasks of which each waits for the next and the last for the first, or for what nobody calls.

    Empty if all come to an end. ``greeted`` are calls before these: ranks that have exchanged
    messages in them have their channels. Lanes have ``queues`` in turn.
    """
    alike: dict[int, list[RankCalls]] = defaultdict(list)
    for one in ranks:
        alike[id(one.steps)].append(one)
    found = _Played(list(alike.values()), groups, greeted, queues).waiting()
    is_small = sum(len(one.steps) for one in ranks) <= MOST_STEPS
    if found and len(alike) < len(ranks) and is_small:
        return _Played([[one] for one in ranks], groups, greeted, queues).waiting()
    return found


@dataclass(frozen=True, slots=True)
class _Moments:
    """Moments that come when all before them have: how many those are, and who follows each."""

    counts: list[int] = field(default_factory=list)
    followers: list[list[int]] = field(default_factory=list)

    def new(self, *before: int | None) -> int:
        """A moment behind others."""
        self.counts.append(0)
        self.followers.append([])
        moment = len(self.counts) - 1
        for earlier in before:
            self.order(earlier, moment)
        return moment

    def order(self, earlier: int | None, later: int) -> None:
        """Let a moment come behind another."""
        if earlier is not None:
            self.counts[later] += 1
            self.followers[earlier].append(later)

    def never(self) -> set[int]:
        """Those that never come."""
        counts = list(self.counts)
        ready = [moment for moment, count in enumerate(counts) if count == 0]
        for moment in ready:
            for follower in self.followers[moment]:
                counts[follower] -= 1
                if counts[follower] == 0:
                    ready.append(follower)
        return set(range(len(counts))) - set(ready)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A call: the moments of its beginning and end, of its issue, and when its host goes on."""

    begins: int
    ends: int
    issued: int | None
    goes_on: int | None


class _Laid:
    """A program as moments: what each task and call comes behind on its own rank."""

    def __init__(self, moments: _Moments, *, rank: int) -> None:
        self.of_queue: dict[int, int] = {}
        self.of: dict[int, Waiting] = {}
        self._moments, self._rank = moments, rank
        self._of_lane: dict[str, int] = {}
        self._of_group: dict[str, int] = {}
        self._ends: list[int] = []
        # When the host goes on behind the last call that held it.
        self._host: int | None = None
        self._at = 0

    def begin(self, step: Step, queue: int) -> None:
        """A task begins: behind its lane, its queue, its host, and what it waits for."""
        number = len(self._ends)
        named = [self._ends[number - wait] for wait in step.waits if wait <= number]
        before = self._of_lane.get(step.lane), self.of_queue.get(queue), self._host
        self._at = self.of_queue[queue] = self._new(step, None, *before, *named)

    def step_aside(self, step: Step, queue: int) -> None:
        """What a task calls now is in another queue, behind the task and behind what is there."""
        self._at = self.of_queue[queue] = self._new(step, None, self._at, self.of_queue.get(queue))

    def call(self, step: Step, call: Call, *, holds: bool) -> _Made:
        """A task makes a call, behind its group's calls before; it may hold the host."""
        begins = self._new(step, call, self._at, self._of_group.get(call.group))
        ends = self._new(step, call, begins)
        issued = self._host
        if holds:
            self._host = self._new(step, call, issued)
        self._at = self._of_group[call.group] = ends
        return _Made(begins=begins, ends=ends, issued=issued, goes_on=self._host if holds else None)

    def end(self, step: Step) -> None:
        """A task ends with its last call."""
        self._ends.append(self._at)
        self._of_lane[step.lane] = self._at

    def _new(self, step: Step, call: Call | None, *before: int | None) -> int:
        moment = self._moments.new(*before)
        self.of[moment] = Waiting(rank=self._rank, task=step.task, call=call)
        return moment


class _Played:
    """Ranks, each list of which is played as one."""

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
        # What nobody does.
        self._nothing = self._moments.new()
        self._moments.order(self._nothing, self._nothing)
        self._of: dict[int, Waiting] = {}
        self._made: list[dict[tuple[str, bool], list[_Made]]] = []
        for alike in played:
            self._made.append(self._issued(alike))
        self._meet(groups)

    def waiting(self) -> list[Waiting]:
        """Tasks that never end, each of which waits for the next."""
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
        found = [self._of[moment] for moment in path[begin:] if moment in self._of]
        return [one for one, _ in groupby(found)]

    def _issued(self, alike: Sequence[RankCalls]) -> dict[tuple[str, bool], list[_Made]]:
        """Lay a program out; its calls by group, exchanges and others apart."""
        laid = _Laid(self._moments, rank=alike[0].rank)
        known = {("exchange", link) for link in self._links(alike)}
        made: dict[tuple[str, bool], list[_Made]] = defaultdict(list)
        aside = LANES.index("tensor_parallel") % self._queues
        for step in alike[0].steps:
            queue = LANES.index(step.lane) % self._queues
            laid.begin(step, queue)
            for call in _real(alike, step):
                is_exchange = call.kind == "exchange"
                kind = (call.kind, call.group if is_exchange else f"{call.group} {call.what}")
                if call.beside:
                    laid.step_aside(step, aside)
                one = laid.call(step, call, holds=kind not in known)
                known.add(kind)
                made[call.group, is_exchange].append(one)
                if is_exchange or call.beside:
                    laid.of_queue[queue] = one.ends
            laid.end(step)
        self._of.update(laid.of)
        return made

    def _links(self, alike: Sequence[RankCalls]) -> set[str]:
        """Links on which all have exchanged a message before."""
        return set.intersection(*(self._greeted.get(one.rank, set()) for one in alike))

    def _meet(self, groups: Groups) -> None:
        """Let calls wait for the others of their group, by number."""
        gathered = {
            (name, frozenset(self._place[rank] for rank in ranks)) for name, ranks in groups
        }
        for name, places in gathered:
            lists = [self._made[place].get((name, False), []) for place in places]
            for number in range(max(map(len, lists)) if len(places) > 1 else 0):
                self._gather([made[number] if number < len(made) else None for made in lists])
        for place, by_group in enumerate(self._made):
            for (link, is_exchange), made in by_group.items():
                for other in self._ends(place, link) - {place} if is_exchange else ():
                    theirs = self._made[other].get((link, True), [])
                    for number, one in enumerate(made):
                        self._gather([one, theirs[number] if number < len(theirs) else None])

    def _ends(self, place: int, link: str) -> set[int]:
        """Those that exchange messages with one."""
        return {
            self._place[peer]
            for one in self._played[place]
            for peer in (*one.sends.get(link, ()), *one.receives.get(link, ()))
        }

    def _gather(self, made: Sequence[_Made | None]) -> None:
        """Let some calls end when all have begun, and their hosts go on when all are issued."""
        moments, nothing = self._moments, self._nothing
        begun = moments.new(*(nothing if one is None else one.begins for one in made))
        there = [one for one in made if one is not None]
        for one in there:
            moments.order(begun, one.ends)
        if any(one.goes_on is not None for one in there):
            issued = moments.new(*(nothing if one is None else one.issued for one in made))
            for one in there:
                if one.goes_on is not None:
                    moments.order(issued, one.goes_on)


def _real(alike: Sequence[RankCalls], step: Step) -> Iterator[Call]:
    """The calls of a step but exchanges without messages, which nobody makes."""
    for call in step.calls:
        if call.kind != "exchange" or any(
            one.sends.get(call.group) or one.receives.get(call.group) for one in alike
        ):
            yield call
