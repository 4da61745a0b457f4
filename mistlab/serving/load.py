"""A serving load: requests with prompt and output lengths and arrival times, and the goals that a
serving plan has to meet.

Axes: R requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from mistlab.core.arrays import Floats, Ints
from mistlab.core.values import (
    MOST_QUANTITY,
    MOST_TOKENS,
    Checked,
    bounded,
    check_fields,
    quantity,
    refuse,
    reject,
    shown,
)

Arrivals = Literal["at once", "poisson", "trace", "closed loop"]
Shape = Literal["fixed", "uniform", "lognormal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths(Checked):
    """A distribution of request lengths: fixed, uniform from ``low`` times the largest length to
    the largest, or lognormal with a mean and a standard deviation of logarithms, truncated at
    ``most``.
    """

    shape: Shape = "fixed"
    tokens: float = field(metadata=bounded(above=0, most=MOST_TOKENS))
    low: float = field(default=0.8, metadata=bounded(minimum=0, maximum=1))
    spread: float = field(default=0.8, metadata=bounded(minimum=0, most=10))
    most: int = field(default=MOST_TOKENS, metadata=bounded(minimum=1, most=MOST_TOKENS))

    @property
    def mean(self) -> float:
        """The mean length of the distribution, before rounding and truncation."""
        return self.tokens * (1 + self.low) / 2 if self.shape == "uniform" else self.tokens

    def drawn(self, count: int, draw: np.random.Generator) -> Ints:
        """Random request lengths from the distribution, each of at least one token."""
        if self.shape == "fixed":
            lengths = np.full(count, self.tokens)
        elif self.shape == "uniform":
            lengths = draw.uniform(self.low * self.tokens, self.tokens, count)
        else:
            middle = np.log(self.tokens) - self.spread**2 / 2
            lengths = draw.lognormal(middle, self.spread, count)
        whole: Ints = np.clip(np.rint(lengths), 1, self.most).astype(np.int64)
        return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals(Checked):
    """The goals of a serving plan: time to first token, time per output token, the share of
    requests that must meet both, and requests per second; None where there is no goal.
    """

    first_s: float | None = field(default=None, metadata=quantity())
    token_s: float | None = field(default=None, metadata=quantity())
    share: float = field(default=0.5, metadata=bounded(above=0, maximum=1))
    requests_per_s: float | None = field(default=None, metadata=quantity())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLoad:
    """The requests that a serving plan has to serve: prompt tokens, output tokens and arrival
    times. In a closed loop ``in_flight`` requests are active, and a new one arrives whenever one
    ends.
    """

    prompts: tuple[int, ...] = field(metadata=bounded(minimum=1, most=MOST_TOKENS))
    outputs: tuple[int, ...] = field(metadata=bounded(minimum=1, most=MOST_TOKENS))
    arrivals_s: tuple[float, ...] = field(metadata=bounded(minimum=0, most=MOST_QUANTITY))
    in_flight: int | None = field(default=None, metadata=bounded(minimum=1, most=MOST_TOKENS))

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.prompts:
            refuse("prompts", "are empty: give at least one request")
        for name in ("outputs", "arrivals_s"):
            if len(getattr(self, name)) != len(self.prompts):
                refuse(
                    name,
                    f"has {len(getattr(self, name))} values for {len(self.prompts)} requests: give "
                    "a value for each request",
                )
        if any(
            later < earlier
            for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        ):
            refuse(
                "arrivals_s",
                "decrease from one request to the next: give requests in order of arrival",
            )

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def mean_prompt(self) -> float:
        """The mean number of prompt tokens of a request."""
        return float(np.mean(self.prompts))

    @property
    def mean_output(self) -> float:
        """The mean number of output tokens of a request."""
        return float(np.mean(self.outputs))

    def check_context(self, context: int) -> None:
        """Refuse requests whose prompt and output together exceed the context length."""
        for number, (prompt, output) in enumerate(zip(self.prompts, self.outputs, strict=True)):
            if prompt + output > context:
                refuse(
                    f"prompts[{number}]",
                    f"{prompt} tokens of prompt and {output} of output are more than the context "
                    f"of {context}: give shorter requests, or a longer context",
                )

    def within(self, context: int) -> "ServingLoad":
        """A copy of the load whose requests end at the context length, as serving engines end
        them.
        """
        prompts = np.minimum(self.prompts, context - 1)
        outputs = np.minimum(self.outputs, context - prompts)
        return replace(self, prompts=tuple(prompts.tolist()), outputs=tuple(outputs.tolist()))


def drawn_load(
    count: int,
    lengths: tuple[Lengths, Lengths],
    draw: np.random.Generator,
    *,
    rate: float | None = None,
    in_flight: int | None = None,
) -> ServingLoad:
    """A load of requests with random lengths that arrive all together, as a Poisson process of
    ``rate`` per second, or in a closed loop.
    """
    prompts, outputs = (one.drawn(count, draw) for one in lengths)
    return ServingLoad(
        prompts=tuple(prompts.tolist()),
        outputs=tuple(outputs.tolist()),
        arrivals_s=_arrivals(count, draw, rate),
        in_flight=in_flight,
    )


def _arrivals(count: int, draw: np.random.Generator, rate: float | None) -> tuple[float, ...]:
    """The arrival times of a Poisson process with a rate per second; all zero without a rate."""
    if rate is None:
        return (0.0,) * count
    return tuple(np.cumsum(draw.exponential(1 / rate, count)).tolist())


# The columns of files with requests, and the range of each column's values.
TOKEN_COLUMNS = ("prompt_tokens", "output_tokens")
TRACE_COLUMNS = ("arrival_s", *TOKEN_COLUMNS)
HISTOGRAM_COLUMNS = (*TOKEN_COLUMNS, "requests")
LIMITS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(TOKEN_COLUMNS, (1, MOST_TOKENS)),
    **dict.fromkeys(("arrival_s", "requests"), (0, MOST_QUANTITY)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFile:
    """The rows of a file with requests, the longest context that a request may have, and the remedy
    that an error message names for longer requests.
    """

    rows: Sequence[Mapping[str, Any]]
    name: str
    context: int | None = None
    remedy: str = "a longer context"

    def trace(self) -> ServingLoad:
        """The load that a trace file records: a row for each request, in the order of arrival."""
        columns = self._columns(TRACE_COLUMNS)
        order = np.argsort(columns["arrival_s"], kind="stable")
        prompts, outputs = (columns[name][order].astype(int) for name in TOKEN_COLUMNS)
        return ServingLoad(
            prompts=tuple(prompts.tolist()),
            outputs=tuple(outputs.tolist()),
            arrivals_s=tuple(columns["arrival_s"][order].tolist()),
        )

    def histogram(
        self, count: int, draw: np.random.Generator, rate: float | None = None
    ) -> ServingLoad:
        """A load of requests drawn from a histogram file, whose rows say how many requests have
        these lengths.
        """
        columns = self._columns(HISTOGRAM_COLUMNS)
        weights = columns["requests"]
        if not weights.sum():
            reject(
                f"{self.name}: requests: 0 in all rows: give the number of requests with the "
                "lengths of each row"
            )
        drawn = draw.choice(len(weights), size=count, p=weights / weights.sum())
        prompts, outputs = (columns[name][drawn].astype(int) for name in TOKEN_COLUMNS)
        return ServingLoad(
            prompts=tuple(prompts.tolist()),
            outputs=tuple(outputs.tolist()),
            arrivals_s=_arrivals(count, draw, rate),
        )

    def _columns(self, names: Sequence[str]) -> dict[str, Floats]:
        """The numbers in the named columns of the file; refuses values that are not numbers, and a
        file without requests.
        """
        if not self.rows:
            reject(f"{self.name}: has no requests: give a row for each, with {', '.join(names)}")
        missing = [name for name in names if name not in self.rows[0]]
        if missing:
            reject(f"{self.name}: has no column {missing[0]}: give the columns {', '.join(names)}")
        columns = {
            name: np.array([self._number(name, *numbered) for numbered in enumerate(self.rows, 1)])
            for name in names
        }
        self._check_context(columns)
        return columns

    def _number(self, name: str, number: int, row: Mapping[str, Any]) -> float:
        text = row.get(name)
        cell = f"{self.name}: {name}: {shown(text)} in row {number}"
        try:
            value = float(text if text is not None else "")
        except ValueError:
            reject(f"{cell} is not a number: give a number")
        if not np.isfinite(value):
            reject(f"{cell} is not finite: give a finite number")
        least, most = LIMITS[name]
        if not least <= value <= most:
            reject(f"{cell} is out of range: give a number from {least:,.0f} to {most:,.0f}")
        if name in TOKEN_COLUMNS and value % 1:
            reject(f"{cell} is not a whole number of tokens: give a whole number")
        return value

    def _check_context(self, columns: Mapping[str, Floats]) -> None:
        prompts, outputs = (columns[name] for name in TOKEN_COLUMNS)
        context = MOST_TOKENS if self.context is None else self.context
        is_longer = prompts + outputs > context
        if not np.any(is_longer):
            return
        row = int(np.argmax(is_longer))
        reject(
            f"{self.name}: {TOKEN_COLUMNS[0]}: {prompts[row]:.0f} in row {row + 1}, with "
            f"{outputs[row]:.0f} of output, is more than the context of {context}: give shorter "
            f"requests, or {self.remedy}"
        )
