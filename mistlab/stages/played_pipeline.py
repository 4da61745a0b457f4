"""Computes how long a 1F1B iteration takes by playing all its passes and sends one by one; those
sends that share a node's network slow one another down.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import NamedTuple

from mistlab.core.arrays import Floats
from mistlab.network.shared_sends import (
    LinksInUse,
    Message,
    Route,
    Send,
    Sending,
    Span,
    Uses,
    sends_meet,
)
from mistlab.schedule.order_text import order_from_text
from mistlab.schedule.orders import one_forward_one_backward
from mistlab.schedule.stage_passes import StagePass, StagePasses, in_turn, passes_of
from mistlab.stages.stage_batch import LATE, MOVED, StageTimes

# Plays passes and sends in plain numbers as if each send had its links to itself.


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

    The stage's next pass waits for another ``left_s``, and for ``ahead_s`` after the time at which
    the pass would have ended if it had not waited for its input. The output is sent in ``sent_s``.
    """

    pass_s: float
    through_s: float
    once_s: float
    left_s: float
    ahead_s: float
    sent_s: float


def _free_again_s(free_s: float, end_s: float, taken: PassTimes) -> float:
    """When a stage is free for its next pass: after one that has ``taken`` these times and ended at
    ``end_s``, for which the stage was free at ``free_s``.
    """
    if not taken.ahead_s:
        return end_s + taken.left_s
    return max(free_s + taken.pass_s + taken.once_s + taken.ahead_s, end_s + taken.left_s)


# Times of pipeline stages by name, each with an entry for each stage.
Columns = Mapping[str, Sequence[float]]
ENDS_LATE = "first_send_late_s", "end_send_late_s", "end_return_late_s"
PLAYED_TIMES = (
    *("forward_s", "backward_s", "through_forward_s", "through_backward_s"),
    *("within_forward_s", "within_backward_s", "left_backward_s"),
    *("point_to_point_s", "begin_s", "end_s", *ENDS_LATE),
)
# Times that the closed form of an iteration does without: of passes that differ from others of
# their kind, of what they leave, a send beside no pass, and how much a whole pass, and what it
# reduces first, lengthen a send.
TIMES_OF_KINDS = "again_forward_s", "again_backward_s", *MOVED, "stepped_s", "stepped_late_s"
FURTHER_TIMES = *TIMES_OF_KINDS, "sent_s", *LATE


def times_of_passes(
    times: Columns,
    of_kinds_s: Sequence[Sequence[float]],
    *,
    at_ends: bool = True,
) -> list[PassTimes]:
    """How long each kind of pass of a 1F1B pipeline takes, a row for each stage and kind.

    The kinds tell passes by what their stage ran before. ``of_kinds_s`` are ``TIMES_OF_KINDS`` of
    each stage: first, how much longer a forward pass takes after a forward pass than after a
    backward pass (mostly less than zero, as the backward pass leaves gradients to reduce), and how
    much longer a backward pass takes after a backward pass than after a forward pass. The extra
    time of a stage's last backward pass delays its send too, even one that waits for an earlier
    send: the last gradients are sent while the last reductions run. Unless ``at_ends``, sends of
    first and last micro-batches count as others.
    """
    rows = []
    columns = (times[name] for name in PLAYED_TIMES[:7])
    sent_s = [both_s / 2 for both_s in times["point_to_point_s"]]
    first_late_s, late_of_end_s, late_back_s = (
        times[name] if at_ends else [0.0] * len(sent_s) for name in ENDS_LATE
    )
    late_s = 0.0
    for stage, (of_stage, of_kinds) in enumerate(
        zip(zip(*columns, strict=True), of_kinds_s, strict=True)
    ):
        forward_s, back_s, through_s, through_back_s, within_s, last_s, left_s = of_stage
        less_s, more_s, moved_s, moved_back_s, moved_through_s, moved_left_s, *stepped_s = of_kinds
        ahead_s, after_s = stepped_s
        back_s, whole_left_s, left_s = back_s - left_s, left_s + last_s, left_s + moved_left_s
        idle_s, turned_s = through_s + moved_through_s, back_s + moved_back_s
        again_s = back_s + more_s - moved_left_s
        # Where optimizer steps lengthen a first pass, it has a time of its own.
        first_s = through_s if within_s else idle_s
        before = max(0, stage - 1)
        sent, returned = sent_s[stage], sent_s[before]
        last_sent = returned + last_s + late_back_s[before]
        rows += [
            PassTimes(forward_s, first_s + late_s, within_s, after_s, ahead_s, sent),
            PassTimes(forward_s + less_s, idle_s, 0.0, 0.0, 0.0, sent),
            PassTimes(forward_s + moved_s, idle_s, 0.0, 0.0, 0.0, sent),
            PassTimes(turned_s, through_back_s, 0.0, left_s, 0.0, returned),
            PassTimes(again_s, through_back_s, 0.0, left_s, 0.0, returned),
            PassTimes(turned_s, through_back_s, 0.0, whole_left_s, 0.0, last_sent),
            PassTimes(again_s, through_back_s, 0.0, whole_left_s, 0.0, last_sent),
        ]
        late_s = first_late_s[stage] + late_of_end_s[stage]
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

    ``sends_s`` is how long the output of each pass is sent, or None if that takes as long as its
    row of ``times`` says.
    """

    free_s: list[float]
    ends_s: list[float]
    comes_s: list[float]
    times: Sequence[PassTimes]
    sends_s: Sequence[float] | None

    def sent_s(self, index: int, row: int) -> float:
        """How long the output of a pass with this row of times is sent."""
        return self.times[row].sent_s if self.sends_s is None else self.sends_s[index]


def walked(
    free_s: Sequence[float],
    times: Sequence[PassTimes],
    micro_batches: int,
    sends_s: Sequence[float] | None = None,
) -> Walk:
    """When each pass of a 1F1B pipeline ends and its output arrives, if no send slows another.

    ``free_s`` is when each stage is free for its first pass (``free_at_first``), and ``times`` how
    long each kind of pass takes (``times_of_passes``); sends take ``sends_s`` if given. A stage
    sends one output after another.
    """
    free, lane_s = [*free_s], [0.0] * len(free_s)
    comes = [-inf] * (2 * micro_batches * len(free))
    ends, turns = comes.copy(), _in_turn(len(free), micro_batches)
    for stage, index, row, goes_to in turns:
        pass_s, through_s, once_s, left_s, ahead_s, sent_s = taken = times[row]
        end_s, waited_s = free[stage] + pass_s, comes[index] + through_s
        end_s = ends[index] = (waited_s if waited_s > end_s else end_s) + once_s
        # Few passes have anything ahead: the others do without the call.
        free[stage] = _free_again_s(free[stage], end_s, taken) if ahead_s else end_s + left_s
        if goes_to >= 0:
            if sends_s is not None:
                sent_s = sends_s[index]
            begin_s = lane_s[stage] if lane_s[stage] > end_s else end_s
            lane_s[stage] = comes[goes_to] = begin_s + sent_s
    return Walk(free, ends, comes, times, sends_s)


def sends_of(walk: Walk, micro_batches: int) -> Iterator[tuple[float, float, Route]]:
    """The start and the end of each send of a pipeline, with its stage and direction."""
    for stage, index, row, goes_to in _in_turn(len(walk.free_s), micro_batches):
        if goes_to >= 0:
            end_s = walk.comes_s[goes_to]
            yield end_s - walk.sent_s(index, row), end_s, (stage, row % _KINDS >= _BACKWARD)


def sends_beside_passes(
    walk: Walk,
    free_s: Sequence[float],
    times: Sequence[PassTimes],
    late_s: Sequence[Sequence[float]],
    alone_s: Sequence[float],
) -> list[float]:
    """How long sends take that are beside those passes of their stages which ran beside them in
    ``walk``, as in ``Walk.sends_s``.

    A whole forward and a whole backward pass of each stage, and the reductions of a backward pass
    before them, make a send ``late_s`` later, and a part of a pass as much less. Sends take at most
    twice ``alone_s``, as the link is shared by halves.
    """
    stages, of_stage = len(free_s), len(walk.ends_s) // len(free_s)
    steps = steps_of(stages, of_stage // 2)
    ends_s, begins_s, late_of = walk.ends_s, [], []
    for stage, first_s in enumerate(free_s):
        when_s, late_of_kind = first_s, _late_of_kinds(*late_s[stage])
        for number, step in enumerate(steps[stage]):
            index = stage * of_stage + number
            begins_s.append(max(when_s, walk.comes_s[index]))
            lasted_s = ends_s[index] - begins_s[-1]
            late_of.append(late_of_kind[step.kind] / lasted_s if lasted_s > 0 else 0.0)
            taken = times[stage * _KINDS + step.kind]
            when_s = _free_again_s(when_s, ends_s[index], taken)
    sends_s = [0.0] * len(ends_s)
    for stage, index, row, goes_to in _in_turn(stages, of_stage // 2):
        if goes_to < 0:
            continue
        end_s = walk.comes_s[goes_to]
        begin_s, later_s, beside = end_s - walk.sent_s(index, row), 0.0, index + 1
        while beside < (stage + 1) * of_stage and begins_s[beside] < end_s:
            both_s = min(ends_s[beside], end_s) - max(begins_s[beside], begin_s)
            later_s += late_of[beside] * max(both_s, 0.0)
            beside += 1
        is_back = row % _KINDS >= _BACKWARD
        usual_s = times[stage * _KINDS + (_BACKWARD if is_back else _FIRST)].sent_s
        of_last_s, whole_s = times[row].sent_s - usual_s, alone_s[stage - is_back]
        sends_s[index] = whole_s + of_last_s + min(later_s, whole_s)
    return sends_s


def _late_of_kinds(forward_s: float, backward_s: float, turned_s: float) -> Sequence[float]:
    """The seconds by which each kind of pass of a stage lengthens a send."""
    again_s = backward_s + turned_s
    both = backward_s, again_s
    return (forward_s, forward_s, forward_s + turned_s, *both, *both)


# Plays sends that share links, each as fast as its links allow.


def _sendings(
    times: Columns, alone_s: Sequence[float], uses: Mapping[Route, Uses]
) -> list[list[Sending]]:
    """How each stage sends the outputs of each kind of pass, on the links in ``uses``."""
    sendings = []
    for stage, last_s in enumerate(times["within_backward_s"]):
        before, whole_s = max(0, stage - 1), [both_s / 2 for both_s in times["point_to_point_s"]]
        sent = _sending(whole_s[stage], alone_s[stage], uses.get((stage, False), ()))
        returned = _sending(whole_s[before], alone_s[before], uses.get((stage, True), ()))
        last = returned._replace(alone_s=returned.alone_s + last_s)
        sendings.append(
            [sent] * len(_FORWARDS) + [returned] * (_LAST - _BACKWARD) + [last] * (_KINDS - _LAST)
        )
    return sendings


def _sending(whole_s: float, alone_s: float, uses: Uses) -> Sending:
    """How a stage and the next one send each other outputs, on the links in ``uses``."""
    if not uses:
        return Sending(whole_s, 0.0, ())
    return Sending(alone_s, whole_s - alone_s, uses)


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
        self.links = LinksInUse()
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
            pass_s, through_s, once_s, left_s, ahead_s, _ = taken = times[kind]
            begin_s = come_s if come_s > free_s else free_s
            end_s, waited_s = free_s + pass_s, come_s + through_s
            end_s = (waited_s if waited_s > end_s else end_s) + once_s
            spans.append((begin_s, end_s))
            number += 1
            free_s = _free_again_s(free_s, end_s, taken) if ahead_s else end_s + left_s
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
# Where sends outlast passes, pipelines are walked this often again, each time with sends beside the
# passes of the walk before.
_WALKED_AGAIN = 2
# On fewer nodes, pipelines are played from this many stages on. Of two stages the closed form has
# all chains: it is short only where data leaves passes in a row, and bounds would not reach longer
# times. Longer pipelines, whose passes grow with the square of the number of their stages, are
# played only where sends share links; a walk of 32 stages takes five milliseconds.
FEWEST_STAGES_PLAYED, _MOST_STAGES_PLAYED = 3, 32


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
    further_s: Floats,
    micro_batches: Sequence[int],
    places: Sequence[Sequence[Places]],
) -> list[float]:
    """The seconds of an iteration of each 1F1B pipeline, from all its passes and sends played with
    the times and the places of its stages; 0 if they are not played.

    ``times`` and ``further_s`` (``FURTHER_TIMES``) are tables with a row for each pipeline. Where
    sends may overload a link and any meet there, each is as fast as its links allow.

    The closed form of the iteration time (``mistlab.cost.pipeline``) has some of the chains of
    passes and sends that wait for one another, and gives every send its links alone, but has the
    delays by hosts, and by passes and sends that slow one another. A stage that waits has these
    delays meanwhile, so an iteration takes the longer of both times, not their sum. Lower bounds of
    the closed form still hold.
    """
    uses = [*map(_shared_uses, places)]
    tables = {name: getattr(times, name) for name in PLAYED_TIMES}
    return [
        _played_s(
            {name: table[row].tolist() for name, table in tables.items()},
            further_s[row].tolist(),
            count,
            of_sends,
        )
        if of_sends or len(further_s[row]) <= _MOST_STAGES_PLAYED
        else 0.0
        for row, (count, of_sends) in enumerate(zip(micro_batches, uses, strict=True))
    ]


def _outlast(alone_s: Sequence[float], times: Columns) -> bool:
    """Whether any send takes longer than a pass of either of its two stages, so that it may run
    beside several.
    """
    least_s = map(min, times["through_forward_s"], times["through_backward_s"])
    return any(sent_s > min(ends) for sent_s, ends in zip(alone_s, pairwise(least_s), strict=False))


def _groups(stages: int) -> int:
    return max(4, _PASSES_PLAYED // (2 * stages**2))


def _played_s(
    times: Columns,
    further_s: Sequence[Sequence[float]],
    micro_batches: int,
    uses: Mapping[Route, Uses],
) -> float:
    stages, kinds = len(further_s), len(TIMES_OF_KINDS)
    of_kinds_s = [of_stage[:kinds] for of_stage in further_s]
    groups = _groups(stages)
    played = micro_batches - max(0, micro_batches // stages - groups) * stages
    alone_s, late_s = (
        [of_stage[kinds] for of_stage in further_s],
        [of_stage[kinds + 1 :] for of_stage in further_s],
    )
    of_passes = times_of_passes(times, of_kinds_s)
    first_s = free_at_first(times)
    walk = walked(first_s, of_passes, played)
    if any(map(any, late_s)) and _outlast(alone_s, times):
        beside = times_of_passes(times, of_kinds_s, at_ends=False)
        for _ in range(_WALKED_AGAIN):
            sends_s = sends_beside_passes(walk, first_s, beside, late_s, alone_s)
            walk = walked(first_s, beside, played, sends_s)
    if uses and sends_meet(sends_of(walk, played), uses):
        shared = _Play(first_s, of_passes, _sendings(times, alone_s, uses), played)
        free_s, ends_s = shared.free_s, [end_s for _, end_s in shared.spans[-1]]
    else:
        free_s, ends_s = walk.free_s, walk.ends_s[-2 * played :]
    longest_s = max(map(sum, zip(free_s, times["end_s"], strict=True)))
    if played < micro_batches:
        of_group = 2 * stages
        between_s = ends_s[(groups - 1) * of_group - 1] - ends_s[of_group - 1]
        longest_s += (micro_batches - played) // stages * between_s / (groups - 2)
    return longest_s
