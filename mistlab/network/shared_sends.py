"""Computes when the outputs that pipeline stages send one another arrive, if sends delay each
other on a node's network, or wait for the collectives on their stage's link.

Axis: C candidates.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np

from mistlab.core.arrays import Floats, Ints
from mistlab.schedule.placement import Placement, StageChunk
from mistlab.schedule.stage_passes import PassKey, StagePass, StagePasses

# The route of a send: the index of the sending stage and that of the receiving stage.
Way = tuple[int, int]
# The seconds by which a send is delayed per second in which another one runs: on the link by which
# both leave a node, and on the one by which both enter a node.
OnLinks = tuple[Floats | float, Floats | float]
_SOURCE, _GOAL = range(2)
# A new send is checked for overlap with this many of the last sends on each other route.
_MET = 2
# The smallest float avoids a division by zero for sends that take no time.
_TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedNetworks:
    """Which sends between stages share a network, and how much they delay one another there.

    A route is a sending and a receiving stage. For each pair of routes, ``weights`` has the seconds
    by which a send on the first is delayed per second in which sends on both run: on the links by
    which their data leaves a node, and on those by which it enters one.
    """

    weights: Mapping[Way, Mapping[Way, OnLinks]]

    @classmethod
    def of(cls, levels: Sequence[tuple[Ints, Mapping[Way, Floats]]]) -> Self:
        """Derive how much sends on each pair of routes delay each other, from the nodes, racks and
        other network units that the stages are on.

        ``levels`` are nodes, then the units (such as racks) of each network tier. Each level has
        the node or unit that each stage is on (C, stages), and the share of its links that a send
        on each route needs, which is zero inside a node or unit. The delay of two sends is that of
        the level whose links they overload most.
        """
        weights: dict[Way, dict[Way, OnLinks]] = {}
        for way in levels[0][1]:
            for other in levels[0][1]:
                ends = [
                    np.max([_together(*level, way, other, end) for level in levels], axis=0)
                    for end in (_SOURCE, _GOAL)
                ]
                if any(weight.any() for weight in ends):
                    weights.setdefault(way, {})[other] = plain(ends[0]), plain(ends[1])
        return cls(weights=weights)


def shares_of_routes(units: Ints, share: Floats, placement: Placement) -> dict[Way, Floats]:
    """For each pair of stages that send to each other, the fraction of their node's (or rack's)
    network bandwidth that one send uses; 0 for stages within the same node (or rack).

    ``share`` (C, stages) has the fraction for sends from each stage to the next.
    """
    shares = {}
    for here, there in pairwise(placement.stages):
        lower = min(here, there) if abs(here - there) == 1 else here
        used_share = np.where(units[:, here] == units[:, there], 0.0, share[:, lower])
        if here != there:
            shares[here, there] = shares[there, here] = used_share
    return shares


def plain(column: Floats) -> Floats | float:
    """A column of one candidate as a number: arrays with one entry take ten times as long."""
    return column.item() if len(column) == 1 else column


def _together(units: Ints, shares: Mapping[Way, Floats], way: Way, other: Way, end: int) -> Floats:
    """The share by which two sends together exceed the bandwidth of a link that both use to leave
    or, by the ``end``, to enter a node or rack, for each candidate; zero if they do not exceed it
    or share no such link.
    """
    share, other_share = shares[way], shares[other]
    meets = (units[:, way[end]] == units[:, other[end]]) & (way[0] != other[0])
    uses = (share > 0) & (other_share > 0) & meets
    return np.where(uses, np.maximum(share + other_share - 1, 0.0), 0.0)


@dataclass(slots=True, eq=False)
class _Send:
    """A send of one output to another stage: its start, its end, and the seconds that it would take
    if no other send slowed it.

    ``delays_s`` are the seconds by which other sends delay it on the link by which it leaves its
    node, and on the link by which it enters another; the longer of both delays it.
    """

    begins: Any
    ends: Any
    seconds: Any
    delays_s: list[Any]

    def delay(self, later_s: Sequence[Any]) -> None:
        """Delay the send on both of its links."""
        before_s = np.maximum(*self.delays_s)
        self.delays_s = [sum(both) for both in zip(self.delays_s, later_s, strict=True)]
        self.ends = self.ends + np.maximum(*self.delays_s) - before_s

    def left_s(self, since: Any) -> Any:
        """The seconds that the rest of the send would take from a given time on if no other send
        slowed it; zero once it has ended.
        """
        lasts_s = np.maximum(self.ends - self.begins, _TINY)
        return np.maximum(self.ends - since, 0.0) * self.seconds / lasts_s


class Sends:
    """The times of sends between pipeline stages: each stage sends one output after another, and
    sends that share a network delay one another.
    """

    def __init__(self, networks: SharedNetworks | None) -> None:
        self.weights = {} if networks is None else networks.weights
        # Remember the send of each pass's output, each stage's last send, and the last sends on
        # each route.
        self.of_pass: dict[PassKey, _Send] = {}
        self.last: dict[int, _Send] = {}
        self.recent: dict[Way, list[_Send]] = {}

    def add(self, stage_pass: StagePass, end: Any, seconds: Any, *, queue: bool) -> None:
        """Add the send of a pass's output, which begins when the pass ends.

        With ``queue`` it waits until the stage's previous send has ended. Sends of different stages
        that leave or enter the same node share its network while they overlap: if two each need all
        of it, each is delayed by the overlap. Passes are added in order of time, so a send finds
        those that started before it; these are delayed, too.
        """
        goal, begins = stage_pass.goes_to, end
        assert goal is not None, "it sends nothing"
        if queue and stage_pass.stage in self.last:
            begins = np.maximum(end, self.last[stage_pass.stage].ends)
        send = _Send(begins, begins + seconds, seconds, [0.0, 0.0])
        self.of_pass[stage_pass.key] = self.last[stage_pass.stage] = send
        way = stage_pass.stage, goal.stage
        if way not in self.weights:
            return
        for other, weights in self.weights[way].items():
            for met in self.recent.get(other, ()):
                both = np.maximum(send.begins, met.begins)
                beside_s = np.minimum(send.left_s(both), met.left_s(both))
                later_s = [weight * beside_s for weight in weights]
                for delayed in (send, met):
                    delayed.delay(later_s)
        self.recent[way] = [*self.recent.get(way, ()), send][-_MET:]

    def going_on(self, stage: int, since: Any) -> tuple[Any, Any]:
        """The seconds for which a stage still sends at a given time, and the share of its last send
        that is left then.
        """
        send = self.last.get(stage)
        if send is None:
            return 0.0, 0.0
        left_s = np.maximum(send.ends - since, 0.0)
        lasts_s = np.maximum(send.ends - send.begins, _TINY)
        return left_s, np.minimum(left_s / lasts_s, 1.0)

    def come_s(self, stage_pass: StagePass, end: Any) -> Any:
        """The time at which a pass's input arrives from another stage, or ``end``, the end of the
        pass that computed it, if nothing is sent.
        """
        send = None if stage_pass.needs is None else self.of_pass.get(stage_pass.needs)
        return end if send is None else send.ends


# Computes how much later outputs of a stage arrive at the next stage because gathers and reductions
# of the sending stage use the link at the same time.


class PartCollectives(NamedTuple):
    """The seconds of the collectives of a part of the model that may run beside sends, each a
    number or a column (C).

    ``gather_s`` is the gather of one block's weights before the part's first forward pass;
    ``reductions_s`` are the reductions of all its gradients, which begin when the first block has
    computed in the last pass: in a weight-gradient pass after ``first_block_s``. If every pass
    reduces gradients, it does so for ``steady_s``.
    """

    gather_s: Any
    reductions_s: Any
    steady_s: Any
    first_block_s: Any


class BusyLinks:
    """Computes by how long a stage's collectives delay the sends of its outputs.

    A send and a collective share the stage's link evenly, so a send is delayed by the time it takes
    alone, or by that of the collective if that is shorter. ``reduced`` has the time until which
    each stage reduces the gradients of parts whose last pass is over. Two further collectives begin
    with the pass after the sending one: the gather of the stage's next chunk, and the reductions of
    a weight-gradient pass.
    """

    def __init__(
        self,
        of_parts: Sequence[PartCollectives],
        passes: Sequence[StagePasses],
        reduced: dict[int, Any],
        maximum: Callable[[Any, Any], Any],
    ) -> None:
        self.of_parts, self.parts = of_parts, passes[0].placement.parts
        self.reduced, self.maximum = reduced, maximum
        self.next: dict[PassKey, StagePass] = {
            before.key: after for of_stage in passes for before, after in pairwise(of_stage)
        }

    def late_s(self, stage_pass: StagePass, end: Any, sent_s: Any) -> Any:
        """The seconds by which collectives delay the output of a pass that ends at ``end``, whose
        send takes ``sent_s`` alone; reductions of earlier parts get later by it.
        """
        stage, late_s = stage_pass.stage, 0.0
        if stage in self.reduced:
            late_s = self._beside(sent_s, self.reduced[stage] - end)
            self.reduced[stage] += late_s
        after = self.next.get(stage_pass.key)
        if after is None:
            return late_s
        part = self.parts[StageChunk(stage, after.chunk)]
        gather_s, last_s, steady_s, first_block_s = self.of_parts[part]
        if after.phase == "first_forward":
            return self.maximum(late_s, self._beside(sent_s, gather_s))
        if after.kind == "W":
            reductions_s = last_s if after.phase == "last_backward" else steady_s
            return self.maximum(late_s, self._beside(sent_s - first_block_s, reductions_s))
        return late_s

    def _beside(self, sent_s: Any, collective_s: Any) -> Any:
        """The shorter one of the times of a send and of a collective, at least zero."""
        longer_s = self.maximum(sent_s - collective_s, 0.0)
        return self.maximum(sent_s - longer_s, 0.0)


# Plays sends that share links: each goes as fast as the links that it uses allow.


# A send from a stage to the next one or back: the stage, and whether it goes back.
Route = tuple[int, bool]
# The links that a send uses, each with the share of the link's bandwidth that it takes.
Uses = Sequence[tuple[int, float]]
# The start and the end of a pass.
Span = tuple[float, float]


class Sending(NamedTuple):
    """How one kind of output of a stage is sent: in ``alone_s`` at full speed, and ``late_s`` later
    if a pass of the stage runs beside it all the time.

    ``uses`` are the links that other stages may use too; without such links, passes are assumed to
    run beside all sends.
    """

    alone_s: float
    late_s: float
    uses: Uses


# An output that can be sent: when it is ready, how it is sent, the stage and the number of the pass
# there that need it, and the number of the sender's next pass.
Message = tuple[float, Sending, int, int, int]


class Send:
    """A send between two pipeline stages that is under way, and when it will end.

    Since ``since_s`` it takes ``slowdown`` times as long as alone; then ``left_s`` seconds of it
    were left at full speed. ``ends_s`` holds until another send on its links begins or ends.
    """

    __slots__ = ("began_s", "ends_s", "left_s", "message", "since_s", "slowdown", "stage", "uses")

    def __init__(self, stage: int, message: Message, now: float) -> None:
        self.stage, self.message, self.uses = stage, message, message[1].uses
        self.left_s, self.slowdown, self.began_s, self.since_s = message[1].alone_s, 1.0, now, now
        self.ends_s = now + self.left_s

    def slow_down(self, slowdown: float, now: float) -> None:
        """From now on, what is left of the send takes ``slowdown`` times as long."""
        self.left_s -= (now - self.since_s) / self.slowdown
        self.since_s, self.slowdown = now, slowdown
        self.ends_s = now + self.left_s * slowdown

    def late_s(self, span: Span | None) -> float:
        """The seconds by which the sender's next pass makes the send longer; ``span`` is the
        pass's start and end, None if it begins after the send.
        """
        late_s, lasted_s = self.message[1].late_s, self.ends_s - self.began_s
        if not late_s or span is None or lasted_s <= 0:
            return 0.0
        beside_s = min(self.ends_s, span[1]) - max(self.began_s, span[0])
        return late_s * max(0.0, beside_s / lasted_s)


class LinksInUse:
    """The sends under way on each link, and the share of its bandwidth that they ask for together.

    A send is as slow as on its most overloaded link.
    """

    def __init__(self) -> None:
        self.users: defaultdict[int, list[Send]] = defaultdict(list)
        self.asked: defaultdict[int, float] = defaultdict(float)

    def enter(self, send: Send, now: float) -> None:
        """Begin a send, and slow down those that share a link with it."""
        for link, share in send.uses:
            self.asked[link] += share
            self.users[link].append(send)
        self._share(send.uses, now, fewest=2)

    def leave(self, send: Send, now: float) -> None:
        """End a send, and speed up those that shared a link with it."""
        for link, share in send.uses:
            users = self.users[link]
            users.remove(send)
            self.asked[link] = self.asked[link] - share if users else 0.0
        self._share(send.uses, now, fewest=1)

    def _share(self, uses: Uses, now: float, *, fewest: int) -> None:
        """Set the slowdown of all sends on these links from ``now`` on, where at least ``fewest``
        share a link.
        """
        asked = self.asked
        for link, _ in uses:
            users = self.users[link]
            for user in users if len(users) >= fewest else ():
                slowdown = max(1.0, *[asked[of_user] for of_user, _ in user.uses])
                if slowdown != user.slowdown:
                    user.slow_down(slowdown, now)


def sends_meet(sends: Iterable[tuple[float, float, Route]], uses: Mapping[Route, Uses]) -> bool:
    """Whether sends of two stages use a link at the same time if each send had its links to
    itself; ``sends`` are those of ``sends_of``.
    """
    last: dict[int, tuple[float, int]] = {}
    for begin_s, end_s, route in sorted(send for send in sends if send[2] in uses):
        stage, _ = route
        for link, _ in uses[route]:
            until_s, other = last.get(link, (0.0, stage))
            if begin_s < until_s and stage != other:
                return True
            if end_s > until_s:
                last[link] = end_s, stage
    return False
