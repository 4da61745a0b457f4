"""Columns of stage candidates, what each of them holds and does, and what it costs.

Axes: C candidates. Every column has length C.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.schedule.plan_orders import in_flight_of_plan
from mistlab.values.dimensions import DIMENSIONS
from mistlab.values.plan import Plan

Column = NDArray[Any]

# Where a stage is in the pipeline: by column, the symbol that stands for it in expressions.
POSITIONS: Mapping[str, str] = {
    "in_flight": "q",  # micro-batches whose activations are held at once
    "has_embedding": "e",  # 1 on the first stage, else 0
    "has_head": "t",  # 1 on the last stage, else 0
    "first_rank": "",
    "first_block": "",  # of the model's blocks, counted from 0; it matters where kinds take turns
}


def column_names() -> tuple[str, ...]:
    """What tells candidates apart: the dimensions of a stage, and its position."""
    return (*DIMENSIONS, *POSITIONS)


@dataclass(frozen=True, slots=True, eq=False, init=False)
class StageBatch:
    """Candidates for one stage, each a row: its plan and its place in the pipeline.

    Columns are named as in ``DIMENSIONS`` and ``POSITIONS`` and are attributes: ``batch.zero``.
    ``in_flight`` counts the micro-batches whose activations are held at once, the running one
    among them. ``has_embedding`` and ``has_head`` are 1 on the first and the last stage, else 0.
    Ranks fill nodes in order; the stage's begin at ``first_rank``.
    """

    columns: Mapping[str, Column]

    def __init__(self, **columns: Column | float) -> None:
        """Candidates of columns, or of numbers that all of them share; dimensions that are left out
        have their default, and a stage that is alone with one micro-batch its position."""
        given = {**_DEFAULTS, **_defaults(), **columns}
        rows = {len(column) for column in given.values() if isinstance(column, np.ndarray)}
        assert len(rows) == 1, f"columns of unlike lengths: {rows}"
        names = column_names()
        assert given.keys() == set(names), f"not the columns: {sorted(given.keys() ^ set(names))}"
        self._take({name: _column(given[name], *rows) for name in names})

    def _take(self, columns: Mapping[str, Column]) -> None:
        object.__setattr__(self, "columns", columns)

    def __len__(self) -> int:
        return len(self.columns["layers"])

    def __getattr__(self, name: str) -> Column:
        """A column."""
        if name == "columns" or name not in self.columns:
            raise AttributeError(name)
        return self.columns[name]

    def value(self, name: str) -> Column:
        """A column, by its name."""
        return self.columns[name]

    @classmethod
    def of_columns(cls, columns: Mapping[str, Column]) -> Self:
        """Candidates from all of their columns."""
        batch = cls.__new__(cls)
        batch._take(columns)
        return batch

    @classmethod
    def of_plan(cls, plan: Plan) -> Self:
        """The stages of a plan, in order."""
        return cls.of_plans([plan])

    @classmethod
    def of_plans(cls, plans: Sequence[Plan]) -> Self:
        """The stages of plans, one plan after another."""
        return cls.of_rows([row for plan in plans for row in rows_of(plan)])

    @classmethod
    def of_rows(cls, rows: Sequence["StageRow"]) -> Self:
        """Candidates from their rows."""
        columns = map(np.array, zip(*rows, strict=True))
        return cls.of_columns(dict(zip(column_names(), columns, strict=True)))

    @classmethod
    def joined(cls, batches: Sequence["StageBatch"]) -> Self:
        """The candidates of several batches, one after another."""
        return cls.of_columns(
            {
                name: np.concatenate([batch.columns[name] for batch in batches])
                for name in batches[0].columns
            }
        )

    def chosen(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Self:
        """Some of the candidates."""
        return self.of_columns({name: column[rows] for name, column in self.columns.items()})

    def with_columns(self, **columns: Column | float) -> Self:
        """The candidates with some columns changed."""
        return type(self)(**{**self.columns, **columns})

    def by_symbol(self, symbols: Iterable[str]) -> Mapping[str, Column]:
        """The columns of symbols of expressions, as far as they stand for columns."""
        names = {symbol: name for name, symbol in symbols_of_columns().items()}
        return {symbol: self.columns[names[symbol]] for symbol in symbols if symbol in names}


def symbols_of_columns() -> Mapping[str, str]:
    """The symbol of each column that has one."""
    symbols = {**{name: row.symbol for name, row in DIMENSIONS.items()}, **POSITIONS}
    return {name: symbol for name, symbol in symbols.items() if symbol}


_DEFAULTS: Mapping[str, float] = {
    "in_flight": 1,
    "has_embedding": 0,
    "has_head": 0,
    "first_rank": 0,
    "first_block": 0,
}


def _defaults() -> Mapping[str, float]:
    return {name: row.default for name, row in DIMENSIONS.items() if row.default is not None}


def _column(given: Column | float, rows: int) -> Column:
    return given if isinstance(given, np.ndarray) else np.full(rows, given)


# A candidate, in the order of the columns.
StageRow = tuple[float, ...]


def rows_of(plan: Plan, period: int | None = None) -> list[StageRow]:
    """The stages of a plan, in order; with a period first blocks count within so many."""
    rows: list[StageRow] = []
    first_rank, first_block, last = 0, 0, plan.num_stages - 1
    held = in_flight_of_plan(plan)
    for index, stage in enumerate(plan.stages):
        ends = int(index == 0), int(index == last)
        block = first_block % period if period else first_block
        rows.append((*stage.values(), held[index], *ends, first_rank, block))
        first_rank += stage.num_gpus
        first_block += stage.layers
    return rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagePeaks:
    """What decides whether each candidate fits; as in ``StageFigures``."""

    feasible: NDArray[np.bool_]
    held_bytes: NDArray[np.float64]
    largest_parameters: NDArray[np.float64]
    head_parameters: NDArray[np.float64]
    forward_peak_bytes: NDArray[np.float64]
    backward_peak_bytes: NDArray[np.float64]
    step_peak_bytes: NDArray[np.float64]
    host_bytes: NDArray[np.float64]

    @property
    def peak_bytes(self) -> NDArray[np.float64]:
        """The highest of the three peaks."""
        return _highest(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageFigures:
    """What each candidate holds and does: bytes of one rank, work of one micro-batch on it.

    ``feasible`` is false where the sizes do not divide: the other figures then mean nothing. The
    peaks hold everything: states, buffers, activations and temporaries; that of the step holds what
    it needs by itself, wherever it is hidden. ``moved_bytes`` are read
    and written by kernels, ``collective_bytes`` are messages between tensor-parallel ranks.
    ``held_bytes`` are there throughout: states and buffers. ``largest_parameters`` and
    ``head_parameters`` are of the largest layer and of the head.
    """

    feasible: NDArray[np.bool_]
    parameters: NDArray[np.float64]
    weights_bytes: NDArray[np.float64]
    gradients_bytes: NDArray[np.float64]
    optimizer_bytes: NDArray[np.float64]
    activations_bytes: NDArray[np.float64]
    buffers_bytes: NDArray[np.float64]
    step_buffer_bytes: NDArray[np.float64]
    logits_bytes: NDArray[np.float64]
    held_bytes: NDArray[np.float64]
    largest_parameters: NDArray[np.float64]
    head_parameters: NDArray[np.float64]
    forward_peak_bytes: NDArray[np.float64]
    backward_peak_bytes: NDArray[np.float64]
    step_peak_bytes: NDArray[np.float64]
    host_bytes: NDArray[np.float64]
    forward_flop: NDArray[np.float64]
    backward_flop: NDArray[np.float64]
    forward_moved_bytes: NDArray[np.float64]
    backward_moved_bytes: NDArray[np.float64]
    forward_collective_bytes: NDArray[np.float64]
    backward_collective_bytes: NDArray[np.float64]

    @property
    def peak_bytes(self) -> NDArray[np.float64]:
        """The highest of the three peaks."""
        return _highest(self)


def _highest(peaks: StagePeaks | StageFigures) -> NDArray[np.float64]:
    passes = np.maximum(peaks.forward_peak_bytes, peaks.backward_peak_bytes)
    return np.asarray(np.maximum(passes, peaks.step_peak_bytes))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSeconds:
    """What each candidate takes: a steady forward and backward of one micro-batch, and the rest.

    ``through`` is from when a micro-batch arrives until it can go on: without what the stage
    fetches before and finishes after it.
    The deltas are what the first forward and the last backward take beyond the steady ones, the
    optimizer's step included; of them, ``within`` is what makes the pass itself longer, while the
    rest may come before the micro-batch or after it. ``point_to_point_s`` is to the next stage and
    back where that is not part of the passes. ``step_s`` is the step's arithmetic alone, wherever
    it is hidden, and ``exposed_communication_s`` what a steady micro-batch takes beyond its
    computation.
    """

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    through_forward_s: NDArray[np.float64]
    through_backward_s: NDArray[np.float64]
    delta_forward_s: NDArray[np.float64]
    delta_backward_s: NDArray[np.float64]
    within_forward_s: NDArray[np.float64]
    within_backward_s: NDArray[np.float64]
    point_to_point_s: NDArray[np.float64]
    step_s: NDArray[np.float64]
    exposed_communication_s: NDArray[np.float64]

    @property
    def stable_s(self) -> NDArray[np.float64]:
        """A steady forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """What each candidate costs: its times, and bytes of its fullest GPU.

    ``fits`` is false where memory is short or the sizes do not divide; ``host_bytes`` are of one
    rank.
    """

    seconds: StageSeconds
    fits: NDArray[np.bool_]
    peak_allocated_bytes: NDArray[np.float64]
    peak_reserved_bytes: NDArray[np.float64]
    host_bytes: NDArray[np.float64]

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Candidates that were asked about in parts, one part after another."""
        columns = {
            entry.name: np.concatenate([getattr(part, entry.name) for part in parts])
            for entry in fields(cls)
            if entry.name != "seconds"
        }
        seconds = {
            entry.name: np.concatenate([getattr(part.seconds, entry.name) for part in parts])
            for entry in fields(StageSeconds)
        }
        return cls(seconds=StageSeconds(**seconds), **columns)
