"""One recurrence for all kinds of durations: numbers and columns agree to the last digit."""

from dataclasses import fields

import numpy as np
import pytest

from mistlab.cost.chains import Counts
from mistlab.cost.pipeline import iteration_s
from mistlab.stages.stage_batch import StageTimes

CANDIDATES = 40


def times_of(draw: np.random.Generator, stages: int) -> dict[str, np.ndarray]:
    """Random times, in which a micro-batch passes through no later than its pass ends."""
    shape = CANDIDATES, stages
    times = {entry.name: draw.uniform(0, 1, shape) for entry in fields(StageTimes)}
    times["forward_s"] += times["through_forward_s"] + times["held_forward_s"]
    times["backward_s"] += times["through_backward_s"] + times["left_backward_s"]
    return times


@pytest.mark.parametrize("stages", [1, 2, 3, 6])
@pytest.mark.parametrize("unlike", [False, True], ids=["equal batches", "unlike batches"])
def test_a_pipeline_alone_takes_as_long_as_in_a_column(stages: int, unlike: bool) -> None:
    draw = np.random.default_rng(stages)
    times = times_of(draw, stages)
    micro_batches = draw.integers(1, 12, CANDIDATES) if unlike else np.full(CANDIDATES, 7)
    together = iteration_s(StageTimes(**times), micro_batches)
    alone = [
        iteration_s(
            StageTimes(**{name: table[row : row + 1] for name, table in times.items()}),
            micro_batches[row : row + 1],
        )[0]
        for row in range(CANDIDATES)
    ]
    assert together.tolist() == alone


@pytest.mark.parametrize("stages", range(1, 7))
def test_counts_of_one_number_are_those_of_a_column(stages: int) -> None:
    column = np.arange(1, 20)
    together = Counts.of(column, stages)
    for row, micro_batches in enumerate(column.tolist()):
        alone = Counts.of(micro_batches, stages)
        for entry in fields(Counts):
            assert getattr(alone, entry.name) == getattr(together, entry.name)[row]
    assert Counts.of(1, stages).alternates is False
