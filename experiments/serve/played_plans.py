"""Simulates serving plans under a load, and finds the best one whose latency percentiles meet the
goals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mistlab.serving.load import Goals, ServingLoad
from mistlab.serving.steady import capacity_tokens
from mistlab.serving.step_cost import LayoutColumns
from searchers.serving.layout_search import ServedPlan
from simulators.serving.continuous import Batching, PlayedLoad, play_continuous
from simulators.serving.step_clock import StepClock

# For a load with a fixed number of requests in flight, this many times that number are simulated.
WAVES = 4
# How many plans a search simulates at most.
MOST_PLAYED = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPlan:
    """The result of a simulated serving plan: the latencies (to the first token, and per further
    token) that are not exceeded by a ``share`` of the requests, and the requests completed per
    second while further ones arrive.
    """

    served: ServedPlan
    share: float
    first_s: float
    token_s: float
    requests_per_s: float

    def distance(self, goals: Goals) -> float:
        """The largest factor by which the serving plan misses one of its latency goals; at most 1
        if it meets all of them.
        """
        played = replace(self.served, first_s=self.first_s, token_s=self.token_s)
        return played.distance(goals)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPlayer:
    """Simulates serving plans, with a fixed number of requests in flight or with the arrivals of
    the load.
    """

    load: ServingLoad
    goals: Goals
    constants: Mapping[str, float]

    def played(self, served: ServedPlan) -> PlayedPlan | None:
        """The result of simulating a plan; None if prefill and decoding have separate GPUs, which
        cannot be simulated.
        """
        if served.plan.prefill is not None:
            return None
        layout = served.plan.layout
        by = {name: np.array([value]) for name, value in self.constants.items()}
        load = self._load_of(served)
        batching = Batching(
            capacity=int(capacity_tokens(LayoutColumns.of([layout]), by)[0]),
            budget=served.plan.budget,
            sequences=served.plan.sequences * layout.dp,
        )
        clock = StepClock.of(layout, self.constants, most=min(1024, served.plan.sequences))
        done = play_continuous(load, clock, batching, replicas=served.plan.replicas)
        return self._figures(served, load, done)

    def best_of(self, timed: Sequence[ServedPlan]) -> tuple[PlayedPlan | None, PlayedPlan | None]:
        """The first plan whose simulated latency percentiles meet the goals, and the plan that
        comes nearest to meeting them (the same plan if one meets them). Plans are simulated in the
        order of their predicted throughput, at most ``MOST_PLAYED`` of them.
        """
        nearest: PlayedPlan | None = None
        meeting = [one for one in timed if one.distance(self.goals) <= 1]
        order = sorted(meeting, key=lambda one: -one.requests_per_s)
        for served in order[:MOST_PLAYED]:
            played = self.played(served)
            if played is None:
                continue
            if played.distance(self.goals) <= 1:
                return played, played
            if nearest is None or played.distance(self.goals) < nearest.distance(self.goals):
                nearest = played
        return None, nearest

    def _load_of(self, served: ServedPlan) -> ServingLoad:
        if self.goals.requests_per_s is not None or any(self.load.arrivals_s):
            return self.load
        in_flight = max(1, round(served.in_flight))
        return replace(_repeated(self.load, WAVES * in_flight), in_flight=in_flight)

    def _figures(self, served: ServedPlan, load: ServingLoad, done: PlayedLoad) -> PlayedPlan:
        client_s, share = self.constants["first"], self.goals.share
        # With a fixed number of requests in flight, the first ones all arrive at the same time, so
        # they are left out.
        steady = [request for request in done.requests if request.arrival_s > 0]
        if load.in_flight is None or not steady:
            steady = done.requests
        first = [client_s + (one.first_s or 0.0) - one.arrival_s for one in steady]
        each = [
            ((one.end_s or 0.0) - (one.first_s or 0.0)) / max(1, one.output - 1) for one in steady
        ]
        return PlayedPlan(
            served=served,
            share=share,
            first_s=float(np.quantile(first, share)),
            token_s=float(np.quantile(each, share)),
            requests_per_s=_steady_rate(load, done),
        )


def _steady_rate(load: ServingLoad, done: PlayedLoad) -> float:
    """The requests that complete per second while others still arrive. With a fixed number of
    requests in flight, the time until the first ones complete is left out. If all requests arrive
    at once, the rate is that of the whole run.
    """
    ends = sorted(request.end_s or 0.0 for request in done.requests)
    last_s = max(request.arrival_s for request in done.requests)
    first = 0 if load.in_flight is None else min(load.in_flight, len(ends))
    since_s = ends[first - 1] if first else 0.0
    ended = sum(since_s < end_s <= last_s for end_s in ends)
    return ended / (last_s - since_s) if ended else done.requests_per_s


def _repeated(load: ServingLoad, count: int) -> ServingLoad:
    """A load with at least this number of requests, which repeat the given lengths and arrive all
    at once.
    """
    times = -(-count // len(load))
    return ServingLoad(
        prompts=load.prompts * times,
        outputs=load.outputs * times,
        arrivals_s=(0.0,) * (len(load) * times),
    )
