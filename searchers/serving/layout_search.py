"""Finds the serving layout (parallel degrees) that serves a load of requests best. Every layout on
a number of GPUs is timed in closed form, with many numbers of requests in flight.

All layouts are enumerated, so the result is proven best by the closed form.

Axes: C rows, each a layout with a number of requests in flight.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mistlab.core.arrays import Bools, Floats, Rows
from mistlab.plan.workload import ModelSpec
from mistlab.serving.load import Goals
from mistlab.serving.serving_plan import ServingPlan
from mistlab.serving.steady import SteadyLoad, SteadyState, split_state, steady_state
from mistlab.serving.step_cost import LayoutColumns, RankLayout

# A larger number of requests in flight is preferred only if it raises throughput by at least this
# factor.
MORE = 1.01
# The numbers of requests in flight, on all GPUs together, at which each layout is timed.
IN_FLIGHT = tuple(float(2 ** (half / 2)) for half in range(25))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSpace:
    """The serving layouts of one model on ``gpus`` GPUs of one kind; with ``splits``, also those
    with separate GPUs for prefill.
    """

    model: ModelSpec
    gpu: str
    engine: str
    weights: str
    cache: str
    gpus: int
    splits: bool = False
    budget: int = 8192
    sequences: int = 1024

    def layouts(self, gpus: int) -> Iterator[RankLayout]:
        """The layouts (parallel degrees) that one replica of the model may have on this many
        GPUs.
        """
        experts = self.model.experts
        for tp in _divisors(gpus):
            for pp in _divisors(gpus // tp):
                dp = gpus // tp // pp
                is_wide = experts is not None and dp > 1 and self.model.heads % tp == 0
                if self.model.heads % tp or pp > self.model.layers or (dp > 1 and not is_wide):
                    continue
                ranks = tp * dp
                widths = [1] if experts is None else [1, ranks] if dp == 1 else [ranks]
                for ep in dict.fromkeys(widths):
                    if experts is None or experts.count % ep == 0:
                        yield self._layout(tp=tp, pp=pp, ep=ep, dp=dp)

    def plans(self) -> Iterator[ServingPlan]:
        """All serving plans that the space of layouts allows."""
        for each in _divisors(self.gpus):
            for layout in self.layouts(each):
                yield self._plan(layout, self.gpus // each)
        if self.splits:
            yield from self._split_plans()

    def _split_plans(self) -> Iterator[ServingPlan]:
        for reading in range(1, self.gpus):
            for reader in _divisors(reading):
                for decoder in _divisors(self.gpus - reading):
                    for prefill in self.layouts(reader):
                        for layout in self.layouts(decoder):
                            yield ServingPlan(
                                layout=layout,
                                replicas=(self.gpus - reading) // decoder,
                                scheduler="disaggregated",
                                budget=self.budget,
                                sequences=self.sequences,
                                prefill=prefill,
                                prefill_replicas=reading // reader,
                            )

    def _plan(self, layout: RankLayout, replicas: int) -> ServingPlan:
        return ServingPlan(
            layout=layout, replicas=replicas, budget=self.budget, sequences=self.sequences
        )

    def _layout(self, *, tp: int, pp: int, ep: int, dp: int) -> RankLayout:
        return RankLayout(
            model=self.model,
            gpu=self.gpu,
            engine=self.engine,
            weights=self.weights,
            cache=self.cache,
            tp=tp,
            pp=pp,
            ep=ep,
            dp=dp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPlan:
    """A serving plan with a number of requests in flight: its time to the first token, its time per
    output token, and its requests per second, over all replicas.
    """

    plan: ServingPlan
    in_flight: float
    first_s: float
    token_s: float
    requests_per_s: float

    def distance(self, goals: Goals) -> float:
        """The largest factor by which the serving plan misses one of its latency goals; at most 1
        if it meets all of them.
        """
        first = self.first_s / goals.first_s if goals.first_s else 0.0
        token = self.token_s / goals.token_s if goals.token_s else 0.0
        return max(first, token)


def timed_plans(
    plans: Sequence[ServingPlan],
    constants: Mapping[str, float],
    lengths: tuple[float, float],
    in_flight: Sequence[float] = IN_FLIGHT,
) -> list[ServedPlan]:
    """Every serving plan that fits in memory, timed at each number of requests in flight."""
    served: list[ServedPlan] = []
    for is_split in (False, True):
        of_scheduler = [plan for plan in plans if (plan.scheduler == "disaggregated") == is_split]
        if of_scheduler:
            served += _timed(
                of_scheduler, constants, lengths, np.array(in_flight), is_split=is_split
            )
    return served


def _timed(
    plans: Sequence[ServingPlan],
    constants: Mapping[str, float],
    lengths: tuple[float, float],
    loads: Floats,
    *,
    is_split: bool,
) -> list[ServedPlan]:
    rows = np.repeat(np.arange(len(plans)), len(loads))
    flying = np.tile(loads, len(plans))
    state, fits = _state(plans, rows, flying, constants, lengths, is_split)
    return [
        ServedPlan(
            plan=plans[rows[row]],
            in_flight=float(flying[row]),
            first_s=float(state.first_s[row]),
            token_s=float(state.token_s[row]),
            requests_per_s=float(state.requests_per_s[row]),
        )
        for row in np.flatnonzero(fits)
    ]


def _state(
    plans: Sequence[ServingPlan],
    rows: Rows,
    flying: Floats,
    constants: Mapping[str, float],
    lengths: tuple[float, float],
    is_split: bool,
) -> tuple[SteadyState, Bools]:
    by = {name: np.full(len(rows), value) for name, value in constants.items()}
    replicas = np.array([float(plan.replicas) for plan in plans])[rows]
    decode = LayoutColumns.of([plan.layout for plan in plans]).rows(rows)
    load = SteadyLoad(
        in_flight=flying if is_split else flying / replicas,
        prompt=np.full(len(rows), lengths[0]),
        output=np.full(len(rows), lengths[1]),
        sequences=np.array([float(plan.sequences) for plan in plans])[rows],
        budget=np.array([float(plan.budget) for plan in plans])[rows],
    )
    if is_split:
        readers = np.array([float(plan.prefill_replicas) for plan in plans])[rows]
        prefill = LayoutColumns.of([plan.prefill or plan.layout for plan in plans]).rows(rows)
        state = split_state(prefill, decode, by, load, (readers, replicas))
        reads = prefill.memory_bytes * by["memory"] > prefill.weight_bytes
        return state, state.fits & reads
    state = steady_state(decode, by, load)
    whole = SteadyState(
        first_s=state.first_s,
        token_s=state.token_s,
        requests_per_s=state.requests_per_s * replicas,
        running=state.running,
        capacity=state.capacity,
        fits=state.fits,
    )
    return whole, state.fits


def best_of(timed: Sequence[ServedPlan], goals: Goals) -> list[ServedPlan]:
    """For each serving plan, the number of requests in flight with the highest throughput that
    meets the latency goals; plans with the highest throughput first.
    """
    best: dict[ServingPlan, ServedPlan] = {}
    for timed_plan in sorted(timed, key=lambda served: served.in_flight):
        known = best.get(timed_plan.plan)
        # The throughput that a larger number of requests in flight must exceed to be preferred.
        least = 0.0 if known is None else known.requests_per_s * MORE
        if timed_plan.distance(goals) <= 1 and timed_plan.requests_per_s > least:
            best[timed_plan.plan] = timed_plan
    return sorted(best.values(), key=lambda served: (-served.requests_per_s, served.plan.text))


def nearest_to(timed: Sequence[ServedPlan], goals: Goals) -> ServedPlan | None:
    """The serving plan that misses the latency goals by the smallest factor; None if there are no
    plans.
    """
    return min(timed, key=lambda one: one.distance(goals), default=None)


def pareto_of(timed: Sequence[ServedPlan]) -> list[ServedPlan]:
    """The Pareto frontier of throughput (requests per second) and time per output token, from the
    shortest time on.
    """
    frontier: list[ServedPlan] = []
    for timed_plan in sorted(timed, key=lambda one: (one.token_s, -one.requests_per_s)):
        if not frontier or timed_plan.requests_per_s > frontier[-1].requests_per_s * (1 + 1e-9):
            frontier.append(timed_plan)
    return frontier


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
