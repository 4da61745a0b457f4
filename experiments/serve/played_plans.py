"""Plays serving plans under a load, and finds the best one whose percentiles meet latency goals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mistlab.serving.load import Goals, ServingLoad
from mistlab.serving.steady import capacity_tokens
from mistlab.serving.step_cost import LayoutColumns
from searchers.serving.layout_search import ServedPlan
from simulators.serving.continuous import Batching, PlayedLoad, play_continuous
from simulators.serving.step_clock import StepClock

# The number of simulated requests of a closed loop, as a multiple of its requests in flight.
WAVES = 4
# The largest number of plans that one search simulates.
MOST_PLAYED = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPlan:
    """A simulated serving plan: the latencies that the ``share`` of requests do not exceed, and the
    requests per second while requests arrive.
    """

    served: ServedPlan
    share: float
    first_s: float
    token_s: float
    requests_per_s: float

    def distance(self, goals: Goals) -> float:
        """The largest factor by which latency goals are missed; 1 or less if all are met."""
        played = replace(self.served, first_s=self.first_s, token_s=self.token_s)
        return played.distance(goals)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPlayer:
    """Simulates serving plans at their requests in flight, or under the arrivals of the load."""

    load: ServingLoad
    goals: Goals
    constants: Mapping[str, float]

    def played(self, served: ServedPlan) -> PlayedPlan | None:
        """The simulation of a plan; None if prefill and decode have separate GPUs, which are not
        simulated.
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
        """The plan with the highest throughput whose latency percentiles meet the goals, and the
        plan that misses them by the smallest factor; plans are simulated in descending order of
        predicted throughput, at most ``MOST_PLAYED``.
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
        # The first requests of a closed loop arrive together, unlike all later ones.
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
    """The requests per second that end while others arrive: of a closed loop, after its first
    requests; of requests that arrive all at once, over the whole run.
    """
    ends = sorted(request.end_s or 0.0 for request in done.requests)
    last_s = max(request.arrival_s for request in done.requests)
    first = 0 if load.in_flight is None else min(load.in_flight, len(ends))
    since_s = ends[first - 1] if first else 0.0
    ended = sum(since_s < end_s <= last_s for end_s in ends)
    return ended / (last_s - since_s) if ended else done.requests_per_s


def _repeated(load: ServingLoad, count: int) -> ServingLoad:
    """A load of at least this number of requests, which arrive at once and repeat the given
    lengths.
    """
    times = -(-count // len(load))
    return ServingLoad(
        prompts=load.prompts * times,
        outputs=load.outputs * times,
        arrivals_s=(0.0,) * (len(load) * times),
    )
