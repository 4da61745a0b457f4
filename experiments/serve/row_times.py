"""Predicts many rows of serving tables at once: runs with a fixed number of requests in flight,
offline batches, and runs with a request rate.

Axes: C rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.serve.served_rows import BUDGET, OFFLINE_IN_FLIGHT, READS_FIRST, ServedRow
from mistlab.core.arrays import Bools, Floats, Rows
from mistlab.serving.steady import (
    Constants,
    SteadyLoad,
    SteadyState,
    capacity_tokens,
    decode_step_s,
    prompt_pass_s,
    split_state,
    steady_state,
)
from mistlab.serving.step_cost import LayoutColumns

# A run of few requests takes as long as its longest answer, which is assumed to have this many
# times the mean length.
LONGEST_ANSWER = 2.0
# The search for the mean number of requests in flight: how many numbers it tries in each round, its
# number of rounds, and the least number that it tries, since the mean is rarely below one.
TRIED, _ROUNDS = 8, 5
FEWEST_IN_FLIGHT = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTimes:
    """For each row, the seconds to the first token and per further token, the requests and output
    tokens per second over all GPUs, and whether the layout fits in memory.
    """

    first_s: Floats
    token_s: Floats
    requests_per_s: Floats
    output_per_s: Floats
    fits: Bools


class RowModel:
    """Predicts rows of serving tables with any constants; what does not depend on the constants is
    computed only once.
    """

    def __init__(self, rows: Sequence[ServedRow]) -> None:
        self.rows = rows
        self.decode = LayoutColumns.of([row.layout for row in rows])
        self.prefill = LayoutColumns.of([row.prefill or row.layout for row in rows])
        self.readers = np.array([max(1, row.workers[0]) for row in rows], dtype=float)
        self.decoders = np.array([max(1, row.workers[1]) for row in rows], dtype=float)
        self.split = np.array([row.prefill is not None for row in rows])
        self.prompt = np.array([row.prompt for row in rows])
        self.output = np.array([row.output for row in rows])
        self.in_flight = np.array([row.in_flight for row in rows])
        self.sequences = np.array([row.sequences for row in rows])
        self.rate = np.array([row.rate or np.nan for row in rows])
        self.requests = np.array([row.requests or 1 for row in rows], dtype=float)
        self.waves = np.array([row.has_one_length for row in rows], dtype=bool)
        self.reads_first = np.array([row.run.engine in READS_FIRST for row in rows], dtype=bool)
        kinds = np.array([row.kind for row in rows])
        self.kinds = {kind: np.flatnonzero(kinds == kind) for kind in dict.fromkeys(kinds.tolist())}

    def times(self, by: Constants) -> RowTimes:
        """The predicted times of all rows."""
        size = len(self.rows)
        names = ("first_s", "token_s", "requests_per_s", "output_per_s")
        columns = {name: np.zeros(size) for name in names}
        fits = np.zeros(size, dtype=bool)
        for kind, index in self.kinds.items():
            of = {
                "closed loop": self._closed,
                "offline": self._closed,
                "static batch": self._static,
                "rate": self._rate,
            }[kind]
            times = of(index, {name: column[index] for name, column in by.items()})
            for name in names:
                columns[name][index] = getattr(times, name)
            fits[index] = times.fits
        return RowTimes(**columns, fits=fits)

    def _closed(self, index: Rows, by: Constants) -> RowTimes:
        parts = [
            (rows, state)
            for rows in (index[~self.split[index]], index[self.split[index]])
            if len(rows)
            for state in (self._state(rows, _at(by, np.searchsorted(index, rows))),)
        ]
        joined = {
            name: np.concatenate([getattr(state, name) for _, state in parts])
            for name in ("first_s", "token_s", "requests_per_s", "fits")
        }
        order = np.argsort(np.concatenate([rows for rows, _ in parts]), kind="stable")
        ordered = {name: column[order] for name, column in joined.items()}
        return RowTimes(output_per_s=ordered["requests_per_s"] * self.output[index], **ordered)

    def _state(self, rows: Rows, by: Constants) -> SteadyState:
        """The steady state of runs with a fixed number of requests in flight, either all with
        chunked prefill or all without; rates are those of all replicas together.
        """
        load = self._load(rows, self.in_flight[rows])
        if self.split[rows[0]]:
            workers = self.readers[rows], self.decoders[rows]
            return split_state(self.prefill.rows(rows), self.decode.rows(rows), by, load, workers)
        replicas = self.decoders[rows]
        each = self._load(rows, self.in_flight[rows] / replicas)
        state = steady_state(self.decode.rows(rows), by, each)
        return SteadyState(
            first_s=state.first_s,
            token_s=state.token_s,
            requests_per_s=state.requests_per_s * replicas,
            running=state.running * replicas,
            capacity=state.capacity,
            fits=state.fits,
        )

    def _load(self, rows: Rows, in_flight: Floats) -> SteadyLoad:
        return SteadyLoad(
            in_flight=in_flight,
            prompt=self.prompt[rows],
            output=self.output[rows],
            sequences=self.sequences[rows],
            budget=np.full(len(rows), BUDGET),
            waves=self.waves[rows],
            reads_first=self.reads_first[rows],
        )

    def _static(self, rows: Rows, by: Constants) -> RowTimes:
        """The times of batches in which all prompts are prefilled together, and all outputs are
        decoded together to the end.
        """
        of, batch = self.decode.rows(rows), self.in_flight[rows]
        prompt, output = self.prompt[rows], self.output[rows]
        read_s = of.pp * prompt_pass_s(of, by, batch * prompt, prompt / 2)
        token_s = decode_step_s(of, by, batch, prompt + output / 2)
        rate = batch / (read_s + output * token_s)
        return RowTimes(
            first_s=read_s,
            token_s=token_s,
            requests_per_s=rate,
            output_per_s=rate * output,
            fits=capacity_tokens(of, by) >= prompt + output,
        )

    def _rate(self, rows: Rows, by: Constants) -> RowTimes:
        """The times of runs with a request rate: as many requests are in flight as are needed for
        as many to complete as arrive.
        """
        of, requests = self.decode.rows(rows), self.requests[rows]
        rate = np.where(np.isfinite(self.rate[rows]), self.rate[rows], np.inf)
        low = np.full(len(rows), FEWEST_IN_FLIGHT)
        high = np.minimum(requests, OFFLINE_IN_FLIGHT)
        # Each round tries several numbers of requests between the limits in one call, since a call
        # costs more than a few further rows.
        again = np.repeat(np.arange(len(rows)), TRIED)
        many, by_many = of.rows(again), _at(by, again)
        for _ in range(_ROUNDS):
            tried = np.geomspace(low, high, TRIED + 1, axis=1)[:, 1:]
            state = steady_state(many, by_many, self._load(rows[again], tried.ravel()))
            is_enough = state.requests_per_s.reshape(tried.shape) >= rate[:, None]
            # The largest number counts as enough, so that the search ends there if all numbers are
            # too small.
            is_enough[:, -1] = True
            reached = np.argmax(is_enough, axis=1)[:, None]
            places = np.concatenate([low[:, None], tried], axis=1)
            low, high = (np.take_along_axis(places, reached + add, axis=1)[:, 0] for add in (0, 1))
        state = steady_state(of, by, self._load(rows, high))
        answer_s = state.first_s + self.output[rows] * state.token_s
        arrival_s = requests / np.minimum(rate, state.requests_per_s)
        done = requests / (arrival_s + LONGEST_ANSWER * answer_s * np.isfinite(self.rate[rows]))
        return RowTimes(
            first_s=state.first_s,
            token_s=state.token_s,
            requests_per_s=done,
            output_per_s=done * self.output[rows],
            fits=state.fits,
        )


def _at(by: Constants, places: Rows) -> Mapping[str, Floats]:
    return {name: column[places] for name, column in by.items()}
