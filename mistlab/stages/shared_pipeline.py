"""Computes how long a 1F1B iteration takes if sends of stages that share a node's network slow one
another down: it plays all passes, with each send as fast as its links allow.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import NamedTuple

from mistlab.schedule.order_text import order_from_text
from mistlab.schedule.orders import one_forward_one_backward
from mistlab.schedule.slots import Phase
from mistlab.schedule.stage_passes import StagePass, StagePasses, in_turn, passes_of
from mistlab.stages.stage_batch import StageTimes

# A send from a stage to the next one or back: the stage, and whether it goes back.
Route = tuple[int, bool]
# The links that a send uses, each with the share of the link's bandwidth that it takes.
Uses = Sequence[tuple[int, float]]
# The start and the end of a pass.
Span = tuple[float, float]


class Step(NamedTuple):
    """A pass in the order of its stage: what kind of pass it is, the stage that its output goes to
    (-1 for none), and the number of the pass there that needs it.
    """

    kind: int
    goal: int
    needed: int


_FIRST, _FORWARD, _BACKWARD, _LAST = range(4)
_FORWARDS, _BACKWARDS = (_FIRST, _FORWARD), (_BACKWARD, _LAST)
_KINDS: dict[Phase, int] = {
    "first_forward": _FIRST,
    "forward": _FORWARD,
    "backward": _BACKWARD,
    "last_backward": _LAST,
}
# The orders of this many pipelines are cached.
_MOST_KEPT = 64


def _passes(stages: int, micro_batches: int) -> tuple[StagePasses, ...]:
    text = one_forward_one_backward(stages, micro_batches)
    return passes_of(order_from_text(text, num_stages=stages, micro_batches=micro_batches))


@lru_cache(maxsize=_MOST_KEPT)
def steps_of(stages: int, micro_batches: int) -> tuple[tuple[Step, ...], ...]:
    """The passes of each stage of a 1F1B pipeline in order."""
    passes = _passes(stages, micro_batches)
    needed = {one.needs: one.number for of_stage in passes for one in of_stage}
    return tuple(
        tuple(_step(one, needed.get(one.key, 0)) for one in of_stage) for of_stage in passes
    )


def _step(stage_pass: StagePass, needed: int) -> Step:
    goal = stage_pass.goes_to
    return Step(_KINDS[stage_pass.phase], -1 if goal is None else goal.stage, needed)


class Sending(NamedTuple):
    """How one kind of output of a stage is sent: in ``alone_s`` at full speed, and ``late_s`` later
    if a pass of the stage runs beside it all the time.

    ``uses`` are the links that other stages may use too; without such links, passes are assumed to
    run beside all sends.
    """

    alone_s: float
    late_s: float
    uses: Uses


class _Kind(NamedTuple):
    """The seconds of one kind of pass of a stage: it ends ``pass_s`` after the stage's previous
    pass, or ``through_s`` after the arrival of its input, whichever is later, and ``once_s`` later
    if it is a first or last pass.

    The stage's next pass waits for another ``left_s``.
    """

    pass_s: float
    through_s: float
    once_s: float
    left_s: float
    sending: Sending


# Times of pipeline stages by name, each with an entry for each stage.
_Columns = Mapping[str, Sequence[float]]
_PLAYED_TIMES = (
    *("forward_s", "backward_s", "through_forward_s", "through_backward_s"),
    *("within_forward_s", "within_backward_s", "after_first_s", "left_backward_s"),
    *("point_to_point_s", "received_s", "first_send_late_s", "begin_s", "end_s"),
)


def _kinds(times: _Columns, stage: int, uses: Mapping[Route, Uses]) -> list[_Kind]:
    """The kinds of passes of a stage, in the order of their numbers in ``Step``."""
    of = {name: column[stage] for name, column in times.items()}
    sent, returned = (
        _sending(times, lower, uses.get((stage, goes_back), ()))
        for lower, goes_back in ((stage, False), (max(0, stage - 1), True))
    )
    late_s = times["first_send_late_s"][stage - 1] if stage else 0.0
    forward_s, through_s, left_s = of["forward_s"], of["through_forward_s"], of["left_backward_s"]
    back_s, through_back_s = of["backward_s"] - left_s, of["through_backward_s"]
    return [
        _Kind(forward_s, through_s + late_s, of["within_forward_s"], of["after_first_s"], sent),
        _Kind(forward_s, through_s, 0.0, 0.0, sent),
        _Kind(back_s, through_back_s, 0.0, left_s, returned),
        _Kind(back_s, through_back_s, of["within_backward_s"], left_s, returned),
    ]


def _sending(times: _Columns, lower: int, uses: Uses) -> Sending:
    """How a stage and the next one send each other outputs, on the links in ``uses``."""
    whole_s = times["point_to_point_s"][lower] / 2
    if not uses:
        return Sending(whole_s, 0.0, ())
    alone_s = min(whole_s, times["received_s"][lower + 1])
    return Sending(alone_s, whole_s - alone_s, uses)


# An output that can be sent: when it is ready, how it is sent, the stage and the number of the pass
# there that need it, and the number of the sender's next pass.
Message = tuple[float, Sending, int, int, int]


class Send:
    """A send under way: the seconds left of it at full speed at a time, its slowdown since then,
    and when it ends if no other send begins or ends before.
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


class _Links:
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


class _Play:
    """Plays the passes and the sends of one iteration of a 1F1B pipeline.

    A stage runs its passes as soon as the arrival of their inputs is known, whatever the time, so
    only sends on shared links are played in order of time. A stage sends one output after another.
    """

    def __init__(
        self, free_s: Sequence[float], kinds: Sequence[Sequence[_Kind]], micro_batches: int
    ) -> None:
        count = len(kinds)
        self.kinds, self.steps = kinds, steps_of(count, micro_batches)
        # When the input of each pass arrives; None if that is not known yet.
        self.comes_s: list[list[float | None]] = [[None] * (2 * micro_batches) for _ in kinds]
        # Inputs of the first stage's forward passes and of the last one's backward passes, which
        # wait for no other stage.
        for stage, waits_for_none in ((0, _FORWARDS), (count - 1, _BACKWARDS)):
            for needed, step in enumerate(self.steps[stage]):
                if step.kind in waits_for_none:
                    self.comes_s[stage][needed] = -inf
        self.free_s = [*free_s]
        self.spans: list[list[Span]] = [[] for _ in kinds]
        # From when on a stage can send; infinite while the end of its send is not known.
        self.lane_s = [0.0] * count
        self.queues: list[deque[Message]] = [deque() for _ in kinds]
        # Sends that begin later, in order of time, and sends under way.
        self.later: list[tuple[float, int, Message]] = []
        self.under_way: list[Send] = []
        self.links = _Links()
        self.ready = [*range(count)]
        self._play()

    def _play(self) -> None:
        while True:
            while self.ready:
                self._run(self.ready.pop())
            first = None
            for send in self.under_way:
                if first is None or send.ends_s < first.ends_s:
                    first = send
            if self.later and (first is None or self.later[0][0] < first.ends_s):
                now, stage, message = heappop(self.later)
                send = Send(stage, message, now)
                self.under_way.append(send)
                self.links.enter(send, now)
            elif first is not None:
                self._end(first)
            else:
                return

    def _run(self, stage: int) -> None:
        """Run a stage's passes up to the first one whose input has no known arrival."""
        comes_s, kinds, steps = self.comes_s[stage], self.kinds[stage], self.steps[stage]
        free_s, spans = self.free_s[stage], self.spans[stage]
        number = len(spans)
        while number < len(steps) and (come_s := comes_s[number]) is not None:
            kind, goal, needed = steps[number]
            pass_s, through_s, once_s, left_s, sending = kinds[kind]
            begin_s = come_s if come_s > free_s else free_s
            end_s, waited_s = free_s + pass_s, come_s + through_s
            end_s = (waited_s if waited_s > end_s else end_s) + once_s
            spans.append((begin_s, end_s))
            free_s, number = end_s + left_s, number + 1
            if goal >= 0:
                self._send(stage, (end_s, sending, goal, needed, number))
        self.free_s[stage] = free_s

    def _send(self, stage: int, message: Message) -> None:
        lane_s, (ready_s, sending, goal, needed, _) = self.lane_s[stage], message
        if lane_s == inf:
            self.queues[stage].append(message)
            return
        begin_s = lane_s if lane_s > ready_s else ready_s
        if sending.uses:
            self.lane_s[stage] = inf
            heappush(self.later, (begin_s, stage, message))
        else:
            self._arrive(stage, goal, needed, begin_s + sending.alone_s + sending.late_s)

    def _arrive(self, stage: int, goal: int, needed: int, when_s: float) -> None:
        self.lane_s[stage] = self.comes_s[goal][needed] = when_s
        self.ready.append(goal)

    def _end(self, send: Send) -> None:
        """End a send on shared links; the next one of its stage may begin."""
        stage, (_, _, goal, needed, number) = send.stage, send.message
        self.under_way.remove(send)
        self.links.leave(send, send.ends_s)
        spans, queue = self.spans[stage], self.queues[stage]
        late_s = send.late_s(spans[number] if number < len(spans) else None)
        self._arrive(stage, goal, needed, send.ends_s + late_s)
        while queue and self.lane_s[stage] < inf:
            self._send(stage, queue.popleft())


def _sends_meet(
    free_s: Sequence[float], kinds: Sequence[Sequence[_Kind]], micro_batches: int
) -> bool:
    """Whether sends of two stages use a link at the same time if the passes and the sends of one
    iteration are played as by ``_Play``, but as if each send had its links to itself.
    """
    count = len(kinds)
    comes_s = [[-inf] * (2 * micro_batches) for _ in kinds]
    lane_s, free_s = [0.0] * count, [*free_s]
    sends: list[tuple[float, float, int, Uses]] = []
    for stage, number, (kind, goal, needed) in _in_turn(count, micro_batches):
        pass_s, through_s, once_s, left_s, sending = kinds[stage][kind]
        end_s, waited_s = free_s[stage] + pass_s, comes_s[stage][number] + through_s
        end_s = (waited_s if waited_s > end_s else end_s) + once_s
        free_s[stage] = end_s + left_s
        if goal >= 0:
            begin_s = lane_s[stage] if lane_s[stage] > end_s else end_s
            sent_s = begin_s + sending.alone_s + sending.late_s
            lane_s[stage] = comes_s[goal][needed] = sent_s
            if sending.uses:
                sends.append((begin_s, sent_s, stage, sending.uses))
    last: dict[int, tuple[float, int]] = {}
    for begin_s, end_s, stage, uses in sorted(sends):
        for link, _ in uses:
            until_s, other = last.get(link, (0.0, stage))
            if begin_s < until_s and stage != other:
                return True
            if end_s > until_s:
                last[link] = end_s, stage
    return False


@lru_cache(maxsize=_MOST_KEPT)
def _in_turn(stages: int, micro_batches: int) -> tuple[tuple[int, int, Step], ...]:
    """The stage and the number of each pass of a pipeline, each after the passes that it waits
    for.
    """
    steps = steps_of(stages, micro_batches)
    ordered = in_turn(_passes(stages, micro_batches))
    return tuple((one.stage, one.number, steps[one.stage][one.number]) for one in ordered)


# Computes which links the sends of a pipeline may overload, and how long an iteration takes then.


# The node of a stage, then its unit (such as a rack) of each network tier, each with the share of
# its links that the stage's sends to the next stage take.
Places = Sequence[tuple[int, float]]
# Sends of a 1F1B pipeline cross once between two nodes, so on fewer nodes none meets another that
# goes the same way.
FEWEST_NODES_SHARED = 3
# Of the groups of micro-batches, each as many as there are stages, four are played, or more in
# about this many passes. Further ones take as long as the groups between the first, in which the
# pipeline fills, and the last, in which it drains.
_PASSES_PLAYED = 512
_FIRST_TIMES = "begin_s", "through_forward_s", "forward_s"


def _shared_uses(places: Sequence[Places]) -> Mapping[Route, Uses]:
    """The links that sends of several stages may overload together, for each send between two
    stages that uses such links; a node, rack or other unit has one link out of it and one into it.
    """
    uses: dict[Route, list[tuple[int, float]]] = {}
    asked: dict[int, dict[int, float]] = {}
    for stage, (here, there) in enumerate(pairwise(places)):
        for level, ((lower, share), (upper, _)) in enumerate(zip(here, there, strict=True)):
            if lower == upper or not share:
                continue
            for route, (source, goal) in (
                ((stage, False), (lower, upper)),
                ((stage + 1, True), (upper, lower)),
            ):
                for link in (2 * (source * len(here) + level), 2 * (goal * len(here) + level) + 1):
                    uses.setdefault(route, []).append((link, share))
                    of_stages = asked.setdefault(link, {})
                    # A stage sends one output after another.
                    of_stages[route[0]] = max(share, of_stages.get(route[0], 0.0))
    overloaded = {link for link, of_stages in asked.items() if sum(of_stages.values()) > 1}
    return {
        route: on_overloaded
        for route, on_links in uses.items()
        if (on_overloaded := tuple(use for use in on_links if use[0] in overloaded))
    }


def played_iterations_s(
    times: StageTimes, micro_batches: Sequence[int], places: Sequence[Sequence[Places]]
) -> list[float]:
    """The seconds of an iteration of each 1F1B pipeline, from all its passes and sends played with
    the times and the places of its stages; 0 if no sends that may overload a link meet there.
    ``times`` are tables with a row for each pipeline.

    The closed form of the iteration time (``mistlab.cost.pipeline``) gives every send its links
    alone, but has the delays by hosts, and by passes and sends that slow one another. A stage that
    waits for a link has these delays meanwhile, so an iteration takes the longer of both times,
    not their sum. Lower bounds of the closed form still hold.
    """
    uses = [*map(_shared_uses, places)]
    if not any(uses):
        return [0.0] * len(uses)
    tables = {name: getattr(times, name) for name in _PLAYED_TIMES}
    return [
        _played_s({name: table[row].tolist() for name, table in tables.items()}, count, of_sends)
        if of_sends
        else 0.0
        for row, (count, of_sends) in enumerate(zip(micro_batches, uses, strict=True))
    ]


def _played_s(times: _Columns, micro_batches: int, uses: Mapping[Route, Uses]) -> float:
    stages = range(len(times["forward_s"]))
    groups = max(4, _PASSES_PLAYED // (2 * len(stages) ** 2))
    beyond = max(0, micro_batches // len(stages) - groups)
    played = micro_batches - beyond * len(stages)
    # A stage's first pass takes as long as its input takes through the stage.
    first = zip(*(times[name] for name in _FIRST_TIMES), strict=True)
    free_s = [begin_s + through_s - forward_s for begin_s, through_s, forward_s in first]
    kinds = [_kinds(times, stage, uses) for stage in stages]
    if not _sends_meet(free_s, kinds, played):
        return 0.0
    shared = _Play(free_s, kinds, played)
    longest_s = max(map(sum, zip(shared.free_s, times["end_s"], strict=True)))
    if beyond:
        ends_s = [end_s for _, end_s in shared.spans[-1]]
        of_group = 2 * len(stages)
        between_s = ends_s[(groups - 1) * of_group - 1] - ends_s[of_group - 1]
        longest_s += beyond * between_s / (groups - 2)
    return longest_s
