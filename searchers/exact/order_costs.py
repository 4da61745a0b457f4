"""Lower bounds of the costs of stages under pipeline schedules other than 1F1B.

A stage runs all passes of its chunks (parts of the model). The latency of a micro-batch through a
stage is the latency of the stage's first chunk. A range of recomputed blocks becomes a range for
each chunk. Where numbers of recomputed blocks lead to different kinds of time slots, they are
evaluated separately, and each time is the least of all evaluations.

Axes: C candidates.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mistlab.core.arrays import Floats, Ints, Rows
from mistlab.cost.chains import Chains
from mistlab.cost.order_path import OF_CHUNKS, OF_SENDS, InOrder, in_front_s, least_sends_of
from mistlab.cost.pipeline import prepended
from mistlab.engines.engine import ENGINES
from mistlab.job.search import FEWEST_ALIKE
from mistlab.plan.dimensions import RECOMPUTED, counts_of_blocks
from mistlab.schedule.orders import SPLIT, chunks_of
from mistlab.stages.stage_batch import (
    TIMES,
    StageBatch,
    StageCosts,
    StageSeconds,
    StagesInOrder,
    StageTimes,
    chunk_in_order,
    chunk_of_loop,
)
from searchers.exact.groups import Group

# The type of a function of two batches of candidates that returns lower bounds of stages' times,
# for all strategies with ratios and numbers of recomputed blocks between those of the first and of
# the second batch.
Bounds = Callable[[StageBatch, StageBatch], StageSeconds]

# The times of a chunk (a stage's part of the model) for which the least value over a set of
# memory-saving strategies is a lower bound of the stage.
ADDED = (*OF_CHUNKS, *OF_SENDS)

# The columns, apart from the number of recomputed blocks, in which the chunks (parts of the model)
# of one stage may differ.
_OF_CHUNKS = (
    *("layers", "has_embedding", "has_head", "comes_from", "goes_to"),
    *(name for name in counts_of_blocks() if name != RECOMPUTED),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderTraits:
    """The properties of a pipeline schedule and an engine on which lower bounds of stages
    depend.
    """

    chunks: int
    micro_batches: int
    splits: bool
    steps_apart: bool

    @classmethod
    def of(cls, order: str, engine: str, micro_batches: int) -> "OrderTraits":
        """The properties of a named pipeline schedule with this number of micro-batches."""
        return cls(
            chunks=chunks_of(order),
            micro_batches=micro_batches,
            splits=order in SPLIT,
            steps_apart=ENGINES[engine].steps_apart,
        )

    @property
    def goes_back(self) -> bool:
        """Whether a stage's iteration ends only after its last gradient has come back to the first
        stage.
        """
        return not (self.splits or self.steps_apart)

    def in_order(
        self,
        costs: StageCosts,
        ends: tuple[StageBatch, StageBatch],
        places: StagesInOrder | None,
        bounds: Bounds,
    ) -> StageCosts:
        """The costs of stages under this pipeline schedule, with lower bounds as times, for all
        strategies between those of the two batches in ``ends``. Without ``places``, stages get the
        model's chunks round robin.
        """

        def chunk_of(stages: StageBatch, chunk: int) -> StageBatch:
            if places is None:
                return chunk_of_loop(stages, chunk, self.chunks)
            return chunk_in_order(stages, chunk, places)

        least, most = (
            StageBatch.joined([chunk_of(end, chunk) for chunk in range(self.chunks)])
            for end in ends
        )
        rows = len(ends[0])
        times = _least_of(least, most, np.tile(np.arange(rows), self.chunks), bounds)
        chunks = [
            {name: column.reshape(self.chunks, rows)[chunk] for name, column in times.items()}
            for chunk in range(self.chunks)
        ]
        stage = InOrder.of(chunks, self.micro_batches, goes_back=self.goes_back)
        sends_s = {name: chunks[0][name] for name in OF_SENDS}
        return replace(costs, seconds=self._as_times(stage, sends_s, costs.seconds))

    def _as_times(
        self, stage: InOrder, sends_s: Mapping[str, Floats], seconds: StageSeconds
    ) -> StageSeconds:
        """Stores lower bounds in the fields of ``StageSeconds``: the forward time stands for all
        passes, and ``after_first_s`` for the host's time.
        """
        nothing = np.zeros_like(stage.all_s)
        each_s = stage.all_s / self.micro_batches
        return replace(
            seconds,
            **{
                **dict.fromkeys(TIMES, nothing),
                "forward_s": each_s,
                "through_forward_s": stage.first_s,
                "through_backward_s": stage.last_s,
                "delta_forward_s": stage.begin_s + stage.first_s - each_s + stage.issued_s,
                "delta_backward_s": stage.end_s,
                "after_first_s": stage.issued_s,
                **sends_s,
            },
        )

    def in_front_s(
        self, times: StageTimes, behind: Chains[Floats], *, is_last: bool
    ) -> Chains[Floats]:
        """Lower bounds of the times of pipelines that are extended in front by one stage with these
        times.
        """
        stage = InOrder(
            all_s=self.micro_batches * times.forward_s,
            issued_s=times.after_first_s,
            first_s=times.through_forward_s,
            last_s=times.through_backward_s,
            begin_s=times.begin_s,
            end_s=times.end_s,
        )
        there_s, back_s = least_sends_of(times)
        return in_front_s(
            stage,
            (there_s, back_s if self.goes_back else np.zeros_like(back_s)),
            behind,
            is_last=is_last,
            steps_apart=self.steps_apart,
        )


def chains_in_front(
    group: Group, engine: str, stage: StageTimes, behind: Chains[Floats], after: int
) -> Chains[Floats]:
    """The times along paths of dependent passes that start at stages with ``after`` stages behind
    them; lower bounds if the schedule is not 1F1B.
    """
    if group.has_formula:
        return prepended(stage, behind, group.micro_batches, after + 1)
    traits = OrderTraits.of(group.order, engine, group.micro_batches)
    return traits.in_front_s(stage, behind, is_last=after == 0)


def _least_of(
    least: StageBatch, most: StageBatch, stage: Rows, bounds: Bounds
) -> dict[str, Floats]:
    """The least times of each chunk (part of the model) over all candidates whose choices lie
    between those of ``least`` and ``most``; ``stage`` has the index of each chunk's stage. Equal
    chunks of a stage are evaluated once.
    """
    low, high, row = (
        np.concatenate(column)
        for column in zip(
            *(
                (
                    np.maximum(least.value(RECOMPUTED), fewest),
                    np.minimum(most.value(RECOMPUTED), at_most),
                    np.arange(len(least)),
                )
                for fewest, at_most in _runs(least.layers)
            ),
            strict=True,
        )
    )
    asked = np.flatnonzero(low <= high)
    low, high, row = low[asked], high[asked], row[asked]
    told_apart = [stage[row], low, high, *(least.value(name)[row] for name in _OF_CHUNKS)]
    first, of = _alike(told_apart)
    low, high, chosen = low[first], high[first], row[first]
    seconds = bounds(
        least.chosen(chosen).with_columns(**{RECOMPUTED: low}),
        most.chosen(chosen).with_columns(**{RECOMPUTED: high}),
    )
    times = StageTimes.of(seconds, -1)
    least_times = {name: np.full(len(least), np.inf) for name in ADDED}
    for name, column in least_times.items():
        values = seconds.issued_s if name == "issued_s" else getattr(times, name)
        np.minimum.at(column, row, values[of])
    return least_times


def _alike(
    columns: Sequence[Ints],
) -> tuple[Rows, Rows]:
    """Numbers the distinct rows of an array of integers: returns the index of the first of each set
    of equal rows, and for each row the number of its set.
    """
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        least = column.min(initial=0)
        codes = codes * (column.max(initial=0) - least + 1) + column - least
    _, first, of = np.unique(codes, return_index=True, return_inverse=True)
    return first, of


def _runs(blocks: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Ranges of numbers of recomputed blocks, as fewest and most, within which a stage's passes
    consist of the same kinds of time slots.
    """
    for few in range(FEWEST_ALIKE):
        yield np.full(len(blocks), few), np.full(len(blocks), few)
    yield np.full(len(blocks), FEWEST_ALIKE), blocks - 1
    yield np.maximum(blocks, FEWEST_ALIKE), blocks
