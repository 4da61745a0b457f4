"""Computes how long a 1F1B iteration takes by playing all its passes and sends one by one; those
sends that share a node's network slow one another down.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.schedule.order_text import order_from_text
from mistlab.schedule.orders import one_forward_one_backward
from mistlab.schedule.stage_passes import StagePass, StagePasses, in_turn, passes_of
from mistlab.stages.stage_batch import StageTimes

# Plays passes and sends in plain numbers as if each send had its links to itself.


# A send from a stage to the next one or back: the stage, and whether it goes back.
Route = tuple[int, bool]
# The orders of this many pipelines are cached.
_MOST_KEPT = 64


class Step(NamedTuple):
    """A pass in the order of its stage: what kind of pass it is, the stage that its output goes to
    (-1 for none), and the number of the pass there that needs it.
    """

    kind: int
    goal: int
    needed: int


# The kinds of passes, by the stage's pass before them: a first forward pass, forward passes after
# a forward and after a backward pass, and backward passes and last ones after either.
_KINDS = 7
_FIRST, _FORWARD, _FORWARD_TURNED, _BACKWARD, _BACKWARD_AGAIN, _LAST, _LAST_AGAIN = range(_KINDS)
_FORWARDS, _BACKWARDS = range(_BACKWARD), range(_BACKWARD, _KINDS)


def _passes(stages: int, micro_batches: int) -> tuple[StagePasses, ...]:
    text = one_forward_one_backward(stages, micro_batches)
    return passes_of(order_from_text(text, num_stages=stages, micro_batches=micro_batches))


@lru_cache(maxsize=_MOST_KEPT)
def steps_of(stages: int, micro_batches: int) -> tuple[tuple[Step, ...], ...]:
    """The passes of each stage of a 1F1B pipeline in order."""
    passes = _passes(stages, micro_batches)
    needed = {one.needs: one.number for of_stage in passes for one in of_stage}
    return tuple(
        tuple(
            _step(stage_pass, before, needed.get(stage_pass.key, 0))
            for stage_pass, before in zip(of_stage, (None, *of_stage), strict=False)
        )
        for of_stage in passes
    )


def _step(stage_pass: StagePass, before: StagePass | None, needed: int) -> Step:
    goal = stage_pass.goes_to
    if before is None:
        kind = _FIRST
    elif stage_pass.kind == "F":
        kind = _FORWARD if before.kind == "F" else _FORWARD_TURNED
    elif stage_pass.phase == "last_backward":
        kind = _LAST if before.kind == "F" else _LAST_AGAIN
    else:
        kind = _BACKWARD if before.kind == "F" else _BACKWARD_AGAIN
    return Step(kind, -1 if goal is None else goal.stage, needed)


# A pass of a pipeline among all of its passes: its stage, its index (that of its stage times the
# number of passes of a stage, plus its number there), the row of its times, and the index of the
# pass that needs its output (-1 for none).
_Turn = tuple[int, int, int, int]


@lru_cache(maxsize=_MOST_KEPT)
def _in_turn(stages: int, micro_batches: int) -> tuple[_Turn, ...]:
    """All passes of a pipeline, each after the passes that it waits for."""
    steps, of_stage = steps_of(stages, micro_batches), 2 * micro_batches
    turns = []
    for stage_pass in in_turn(_passes(stages, micro_batches)):
        stage, number = stage_pass.stage, stage_pass.number
        kind, goal, needed = steps[stage][number]
        goes_to = goal * of_stage + needed if goal >= 0 else -1
        turns.append((stage, stage * of_stage + number, stage * _KINDS + kind, goes_to))
    return tuple(turns)


class PassTimes(NamedTuple):
    """The seconds of one kind of pass of a stage: it ends ``pass_s`` after the stage's previous
    pass, or ``through_s`` after the arrival of its input, whichever is later, and ``once_s`` later
    if it is a first pass.

    The stage's next pass waits for another ``left_s``. The output is sent in ``sent_s``.
    """

    pass_s: float
    through_s: float
    once_s: float
    left_s: float
    sent_s: float


# Times of pipeline stages by name, each with an entry for each stage.
Columns = Mapping[str, Sequence[float]]
PLAYED_TIMES = (
    *("forward_s", "backward_s", "through_forward_s", "through_backward_s"),
    *("within_forward_s", "within_backward_s", "after_first_s", "left_backward_s"),
    *("point_to_point_s", "received_s", "first_send_late_s", "begin_s", "end_s"),
)


def times_of_passes(times: Columns, again_s: Sequence[Sequence[float]]) -> list[PassTimes]:
    """How long each kind of pass of a 1F1B pipeline takes, a row for each stage and kind.

    The kinds tell passes by what their stage ran before. ``again_s`` are two numbers for each
    stage: how much longer a forward pass takes after a forward pass than after a backward pass
    (mostly less than zero, as the backward pass leaves gradients to reduce), and how much longer a
    backward pass takes after a backward pass than after a forward pass. The extra time of a stage's
    last backward pass delays its send too, even one that waits for an earlier send: the last
    gradients are sent while the last reductions run.
    """
    rows = []
    columns = (times[name] for name in PLAYED_TIMES[:8])
    sent_s = [both_s / 2 for both_s in times["point_to_point_s"]]
    late_s = 0.0
    for stage, (of_stage, (less_s, more_s)) in enumerate(
        zip(zip(*columns, strict=True), again_s, strict=True)
    ):
        forward_s, back_s, through_s, through_back_s, within_s, last_s, after_s, left_s = of_stage
        back_s -= left_s
        sent, returned = sent_s[stage], sent_s[max(0, stage - 1)]
        rows += [
            PassTimes(forward_s, through_s + late_s, within_s, after_s, sent),
            PassTimes(forward_s + less_s, through_s, 0.0, 0.0, sent),
            PassTimes(forward_s, through_s, 0.0, 0.0, sent),
            PassTimes(back_s, through_back_s, 0.0, left_s, returned),
            PassTimes(back_s + more_s, through_back_s, 0.0, left_s, returned),
            PassTimes(back_s, through_back_s, 0.0, left_s + last_s, returned + last_s),
            PassTimes(back_s + more_s, through_back_s, 0.0, left_s + last_s, returned + last_s),
        ]
        late_s = times["first_send_late_s"][stage]
    return rows


def free_at_first(times: Columns) -> list[float]:
    """From when on each stage of a 1F1B pipeline counts as free for its first pass, in seconds.

    The first pass finds its stage idle, so it ends when its input has passed through the stage
    (``through_forward_s``), not after the time from one pass to the next (``forward_s``). The
    difference is added here, so that the first pass can be played like all others.
    """
    first = zip(
        *(times[name] for name in ("begin_s", "through_forward_s", "forward_s")), strict=True
    )
    return [begin_s + through_s - forward_s for begin_s, through_s, forward_s in first]


class Walk(NamedTuple):
    """The seconds in an iteration at which passes and sends happen: when each stage is free after
    its last pass, and when each pass ends and its input arrives.
    """

    free_s: list[float]
    ends_s: list[float]
    comes_s: list[float]


def walked(free_s: Sequence[float], times: Sequence[tuple[float, ...]], micro_batches: int) -> Walk:
    """When each pass of a 1F1B pipeline ends and its output arrives, if no send slows another.

    ``free_s`` is when each stage is free for its first pass (``free_at_first``), and ``times`` how
    long each kind of pass takes (``times_of_passes``). A stage sends one output after another.
    """
    free, lane_s = [*free_s], [0.0] * len(free_s)
    comes = [-inf] * (2 * micro_batches * len(free))
    ends = comes.copy()
    for stage, index, row, goes_to in _in_turn(len(free), micro_batches):
        pass_s, through_s, once_s, left_s, sent_s = times[row]
        end_s, waited_s = free[stage] + pass_s, comes[index] + through_s
        end_s = ends[index] = (waited_s if waited_s > end_s else end_s) + once_s
        free[stage] = end_s + left_s
        if goes_to >= 0:
            begin_s = lane_s[stage] if lane_s[stage] > end_s else end_s
            lane_s[stage] = comes[goes_to] = begin_s + sent_s
    return Walk(free, ends, comes)


def sends_of(
    walk: Walk, times: Sequence[PassTimes], micro_batches: int
) -> Iterator[tuple[float, float, Route]]:
    """The start and the end of each send of a pipeline, with its stage and direction."""
    comes_s = walk.comes_s
    for stage, _, row, goes_to in _in_turn(len(walk.free_s), micro_batches):
        if goes_to >= 0:
            end_s = comes_s[goes_to]
            yield end_s - times[row].sent_s, end_s, (stage, row % _KINDS >= _BACKWARD)


# Plays sends that share links, each as fast as its links allow.


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


def _sendings(times: Columns, uses: Mapping[Route, Uses]) -> list[list[Sending]]:
    """How each stage sends the outputs of each kind of pass, on the links in ``uses``."""
    sendings = []
    for stage, last_s in enumerate(times["within_backward_s"]):
        sent = _sending(times, stage, uses.get((stage, False), ()))
        returned = _sending(times, max(0, stage - 1), uses.get((stage, True), ()))
        last = returned._replace(alone_s=returned.alone_s + last_s)
        sendings.append(
            [sent] * len(_FORWARDS) + [returned] * (_LAST - _BACKWARD) + [last] * (_KINDS - _LAST)
        )
    return sendings


def _sending(times: Columns, lower: int, uses: Uses) -> Sending:
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
        self,
        free_s: Sequence[float],
        times: Sequence[PassTimes],
        sendings: Sequence[Sequence[Sending]],
        micro_batches: int,
    ) -> None:
        count = len(free_s)
        self.times, self.sendings = times, sendings
        self.steps = steps_of(count, micro_batches)
        # When the input of each pass arrives; None if that is not known yet.
        self.comes_s: list[list[float | None]] = [[None] * (2 * micro_batches) for _ in free_s]
        # Inputs of the first stage's forward passes and of the last one's backward passes, which
        # wait for no other stage.
        for stage, waits_for_none in ((0, _FORWARDS), (count - 1, _BACKWARDS)):
            for needed, step in enumerate(self.steps[stage]):
                if step.kind in waits_for_none:
                    self.comes_s[stage][needed] = -inf
        self.free_s = [*free_s]
        self.spans: list[list[Span]] = [[] for _ in free_s]
        # From when on a stage can send; infinite while the end of its send is not known.
        self.lane_s = [0.0] * count
        self.queues: list[deque[Message]] = [deque() for _ in free_s]
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
        comes_s, steps = self.comes_s[stage], self.steps[stage]
        times, sendings = self.times[stage * _KINDS : (stage + 1) * _KINDS], self.sendings[stage]
        free_s, spans = self.free_s[stage], self.spans[stage]
        number = len(spans)
        while number < len(steps) and (come_s := comes_s[number]) is not None:
            kind, goal, needed = steps[number]
            pass_s, through_s, once_s, left_s, _ = times[kind]
            begin_s = come_s if come_s > free_s else free_s
            end_s, waited_s = free_s + pass_s, come_s + through_s
            end_s = (waited_s if waited_s > end_s else end_s) + once_s
            spans.append((begin_s, end_s))
            free_s, number = end_s + left_s, number + 1
            if goal >= 0:
                self._send(stage, (end_s, sendings[kind], goal, needed, number))
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


def _sends_meet(sends: Iterable[tuple[float, float, Route]], uses: Mapping[Route, Uses]) -> bool:
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
# On fewer nodes, pipelines are played from this many stages on. Of two stages the closed form has
# all chains: it is short only where data leaves passes in a row, and bounds would not reach longer
# times. Where sends share no links, up to this many passes are played, in half a millisecond.
FEWEST_STAGES_PLAYED, _MOST_PASSES = 3, 2048


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
    times: StageTimes,
    again_s: Floats,
    micro_batches: Sequence[int],
    places: Sequence[Sequence[Places]],
) -> list[float]:
    """The seconds of an iteration of each 1F1B pipeline, from all its passes and sends played with
    the times and the places of its stages; 0 if they are not played.

    ``times`` and ``again_s`` (``times_of_passes``) are tables with a row for each pipeline. Where
    sends may overload a link and any meet there, each is as fast as its links allow.

    The closed form of the iteration time (``mistlab.cost.pipeline``) has some of the chains of
    passes and sends that wait for one another, and gives every send its links alone, but has the
    delays by hosts, and by passes and sends that slow one another. A stage that waits has these
    delays meanwhile, so an iteration takes the longer of both times, not their sum. Lower bounds of
    the closed form still hold.
    """
    uses = [*map(_shared_uses, places)]
    # Hosts are not played, so nor are pipelines under hosts whose sends do not meet.
    are_exact = np.logical_not(times.issued_backward_s.any(axis=1)).tolist()
    tables = {name: getattr(times, name) for name in PLAYED_TIMES}
    return [
        _played_s(
            {name: table[row].tolist() for name, table in tables.items()},
            again_s[row].tolist(),
            count,
            of_sends,
            is_exact=is_exact,
        )
        if of_sends or (is_exact and _played_passes(len(again_s[row]), count) <= _MOST_PASSES)
        else 0.0
        for row, (count, of_sends, is_exact) in enumerate(
            zip(micro_batches, uses, are_exact, strict=True)
        )
    ]


def _groups(stages: int) -> int:
    return max(4, _PASSES_PLAYED // (2 * stages**2))


def _played_passes(stages: int, micro_batches: int) -> int:
    """How many passes are played of a pipeline with many micro-batches."""
    beyond = max(0, micro_batches // stages - _groups(stages))
    return 2 * stages * (micro_batches - beyond * stages)


def _played_s(
    times: Columns,
    again_s: Sequence[Sequence[float]],
    micro_batches: int,
    uses: Mapping[Route, Uses],
    *,
    is_exact: bool,
) -> float:
    stages = len(again_s)
    played = _played_passes(stages, micro_batches) // (2 * stages)
    first_s, of_passes = free_at_first(times), times_of_passes(times, again_s)
    walk = walked(first_s, of_passes, played)
    if uses and _sends_meet(sends_of(walk, of_passes, played), uses):
        shared = _Play(first_s, of_passes, _sendings(times, uses), played)
        free_s, ends_s = shared.free_s, [end_s for _, end_s in shared.spans[-1]]
    elif is_exact:
        free_s, ends_s = walk.free_s, walk.ends_s[-2 * played :]
    else:
        return 0.0
    longest_s = max(map(sum, zip(free_s, times["end_s"], strict=True)))
    if played < micro_batches:
        groups, of_group = _groups(stages), 2 * stages
        between_s = ends_s[(groups - 1) * of_group - 1] - ends_s[of_group - 1]
        longest_s += (micro_batches - played) // stages * between_s / (groups - 2)
    return longest_s
