"""Simulates serving as Seesaw does it, with different parallel degrees (layouts) for prefill and
for decoding: runs the schedule of ``mistlab.serving.phase_schedule`` in simulated time.

Copies to and from the host run one after another, overlapped with passes and steps; a change of
layout waits for them.
"""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from mistlab.serving.changing import Moves, PhaseTimes
from mistlab.serving.load import ServingLoad
from mistlab.serving.phase_schedule import (
    Action,
    Change,
    DecodeSteps,
    Drop,
    Fetch,
    Moved,
    PhaseLimits,
    PhaseSchedule,
    ReadPrompts,
    Store,
    Wait,
)
from simulators.serving.continuous import PlayedRequest, played_requests
from simulators.serving.step_clock import StepClock


@dataclass(slots=True, kw_only=True)
class PlayedPhases:
    """The result of a simulated serving run whose GPUs change their parallel degrees: its requests
    and actions, the seconds spent on each activity, the number of changes, and the most blocks of
    keys and values on GPUs and hosts.
    """

    requests: list[PlayedRequest]
    actions: list[Action]
    seconds: float
    changes: int
    reading_s: float
    decoding_s: float
    changing_s: float
    copying_s: float
    peak_gpu: int
    peak_host: int

    @property
    def requests_per_s(self) -> float:
        """The number of completed requests per second."""
        return len(self.requests) / self.seconds if self.seconds else 0.0


class _PhasePlayer:
    """Executes the actions of a schedule of prefill and decode phases in simulated time, and tells
    the schedule which requests have arrived and which copies have ended.
    """

    def __init__(
        self,
        load: ServingLoad,
        clocks: tuple[StepClock, StepClock],
        limits: PhaseLimits,
        times: PhaseTimes,
        environment: simpy.Environment,
    ) -> None:
        self.reading, self.decoding = clocks
        self.limits, self.times = limits, times
        self.environment = environment
        self.requests = played_requests(load)
        self.arriving = deque(self.requests)
        self.schedule = PhaseSchedule(load, limits, self)
        self.copied_at_s = 0.0
        self.fetched_s: deque[float] = deque()
        self.longest_s = 0.0
        self.actions: list[Action] = []
        self.spent = dict.fromkeys(("reading_s", "decoding_s", "changing_s", "copying_s"), 0.0)
        self.changes = 0
        self.keeps_tokens = False

    # Tells the schedule which requests have arrived, and which copies have ended, by the simulated
    # time.

    def arrived(self) -> list[int]:
        """The numbers of the requests that have arrived since the previous call."""
        come = []
        while self.arriving and self.arriving[0].arrival_s <= self.environment.now + 1e-12:
            come.append(self.arriving.popleft().number)
        return come

    def is_fetched(self, request: int) -> bool:
        """Whether a request's keys and values have been copied back to the GPUs."""
        return self.requests[request].ready_s <= self.environment.now

    def most_steps(self, requests: Sequence[Sequence[int]]) -> int:
        """How many decode steps run before another request can join them: because it arrives, or
        because its copy from the host ends.
        """
        coming = [*self._next_fetched(), *[one.arrival_s for one in list(self.arriving)[:1]]]
        if not coming:
            return 10**9
        ahead_s = min(coming) - self.environment.now
        return int(ahead_s / self._step_s(requests, 1)) + 1

    def _next_fetched(self) -> list[float]:
        """A list with the time at which the next copy from the host ends; empty if no copy is under
        way. Copies end in the order in which they started.
        """
        while self.fetched_s and self.fetched_s[0] <= self.environment.now:
            self.fetched_s.popleft()
        return list(self.fetched_s)[:1]

    # Carries out the schedule's actions in simulated time.

    def process(self) -> Generator[simpy.Event, Any, None]:
        for action in self.schedule.actions():
            self.actions.append(action)
            start_s = self.environment.now
            match action:
                case ReadPrompts():
                    yield from self._read(action)
                    self.spent["reading_s"] += self.environment.now - start_s
                case DecodeSteps():
                    yield from self._decode(action)
                    self.spent["decoding_s"] += self.environment.now - start_s
                case Store():
                    self._copy(action.tokens * self.times.store_s)
                case Fetch():
                    self._copy(action.tokens * self.times.fetch_s)
                    self.requests[action.request].ready_s = self.copied_at_s
                    self.fetched_s.append(self.copied_at_s)
                case Change():
                    yield from self._change(action)
                case Drop():
                    self.requests[action.request].dropped += 1
                case Wait():
                    yield from self._wait()

    def _copy(self, seconds: float) -> None:
        self.copied_at_s = max(self.copied_at_s, self.environment.now) + seconds

    def _read(self, action: ReadPrompts) -> Generator[simpy.Event, Any, None]:
        """Prefill prompts on one of the replicas, one pass after another. The passes are pipelined
        through the stages: together they take the sum of all passes' times, plus the longest pass's
        time once for each further stage.
        """
        tokens = sum(action.tokens)
        pairs = sum(one**2 / 2 for one in action.tokens)
        each_s = self.reading.pass_s(tokens, pairs / tokens)
        further_s = (self.reading.stages - 1) * max(0.0, each_s - self.longest_s)
        self.longest_s = max(self.longest_s, each_s)
        yield self.environment.timeout(further_s + each_s / self.limits.readers)
        for number in action.requests:
            request, now_s = self.requests[number], self.environment.now
            if request.first_s is None:
                request.first_s = now_s
            self._made(request, 1, now_s, 0.0)

    def _decode(self, action: DecodeSteps) -> Generator[simpy.Event, Any, None]:
        start_s = self.environment.now
        each_s = self._step_s(action.requests, action.steps)
        yield self.environment.timeout(each_s * action.steps)
        for numbers in action.requests:
            for number in numbers:
                self._made(self.requests[number], action.steps, start_s + each_s, each_s)

    def _step_s(self, requests: Sequence[Sequence[int]], steps: int) -> float:
        """The seconds of one decode step on the slowest replica, since all replicas decode at the
        same time. Several consecutive steps all count as the middle one.
        """
        slowest_s = 0.0
        for numbers in requests:
            if numbers:
                held = sum(self.schedule.requests[number].held + 1 for number in numbers)
                context = held / len(numbers) + (steps - 1) / 2
                slowest_s = max(slowest_s, self.decoding.decode_s(len(numbers), context))
        return slowest_s

    def _made(self, request: PlayedRequest, tokens: int, first_s: float, each_s: float) -> None:
        if self.keeps_tokens:
            request.token_times += [first_s + each_s * step for step in range(tokens)]
        request.made += tokens
        if request.made == request.output:
            request.end_s = self.environment.now

    def _change(self, action: Change) -> Generator[simpy.Event, Any, None]:
        now_s, to_decoding = self.environment.now, action.to == "decoding"
        if self.copied_at_s > now_s:
            self.spent["copying_s"] += self.copied_at_s - now_s
            yield self.environment.timeout(self.copied_at_s - now_s)
        times = self.times
        seconds = times.to_decode_s if to_decoding else times.to_prompts_s
        if seconds:
            self.changes += 1
        seconds += self._moved_s(
            action.moved, times.decoding_moves if to_decoding else times.prompts_moves
        )
        self.longest_s = 0.0
        self.spent["changing_s"] += seconds
        yield self.environment.timeout(seconds)

    def _moved_s(self, moved: Sequence[Moved], moves: Moves) -> float:
        """The seconds until the rank that receives the most has its part of the keys and values
        that stay on the GPUs.
        """
        tokens: dict[tuple[int, int], int] = {}
        for move in moved:
            way = move.source, move.target
            tokens[way] = tokens.get(way, 0) + move.tokens
        each = [[count * share for share in moves.get(way, ())] for way, count in tokens.items()]
        return max(map(sum, zip(*[one for one in each if one], strict=True)), default=0.0)

    def _wait(self) -> Generator[simpy.Event, Any, None]:
        now_s, coming = self.environment.now, self._next_fetched()
        if coming:
            self.spent["copying_s"] += min(coming) - now_s
        coming += [one.arrival_s for one in list(self.arriving)[:1]]
        yield self.environment.timeout(max(0.0, min(coming) - now_s))


def play_phases(
    load: ServingLoad,
    clocks: tuple[StepClock, StepClock],
    limits: PhaseLimits,
    times: PhaseTimes,
    *,
    keeps_tokens: bool = False,
) -> PlayedPhases:
    """Simulate a load on GPUs that change their parallel degrees; ``clocks`` has the durations of
    steps with the degrees for prefill and with those for decoding.
    """
    environment = simpy.Environment()
    player = _PhasePlayer(load, clocks, limits, times, environment)
    player.keeps_tokens = keeps_tokens
    environment.process(player.process())
    environment.run()
    done = sorted((one for one in player.requests if one.end_s is not None), key=_end)
    return PlayedPhases(
        requests=done,
        actions=player.actions,
        seconds=environment.now,
        changes=player.changes,
        peak_gpu=player.schedule.peak_gpu,
        peak_host=player.schedule.peak_host,
        **player.spent,
    )


def _end(request: PlayedRequest) -> float:
    assert request.end_s is not None
    return request.end_s
