"""Distinct rows, in runs or in no order, against NumPy's own."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mistlab.core import distinct
from mistlab.core.distinct import Known, distinct_rows, first_of_each


@pytest.mark.parametrize("rows", [60, 500])
@pytest.mark.parametrize("in_runs", [True, False])
def test_every_row_finds_itself(in_runs: bool, rows: int) -> None:
    draw = np.random.default_rng(0)
    columns = [draw.integers(0, 3, rows), draw.choice([0.0, 0.25, 1.0], rows)]
    if in_runs:
        order = np.lexsort(columns)
        columns = [column[order] for column in columns]
    found = distinct_rows(columns)
    table = np.stack(columns, axis=1)
    assert len(found.columns[0]) == len(np.unique(table, axis=0)) == 9
    for column, values in zip(columns, found.columns, strict=True):
        assert (values[found.index] == column).all()


@pytest.mark.parametrize("times", [1, 100])
def test_both_zeros_are_one_row(times: int) -> None:
    assert len(distinct_rows([np.tile([0.0, -0.0, 0.0], times)]).columns[0]) == 1


def test_rows_with_the_same_key_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distinct, "_MULTIPLIER", np.uint64(0))
    columns = [np.tile([1.0, 2.0, 1.0, 3.0], 100), np.tile([5.0, 5.0, 5.0, 6.0], 100)]
    found = distinct_rows(columns)
    assert len(found.columns[0]) == 3
    for column, values in zip(columns, found.columns, strict=True):
        assert (values[found.index] == column).all()


def test_the_first_of_equal_rows_stands_for_all() -> None:
    table = np.array([[2.0, 0.0], [1.0, 5.0], [2.0, -0.0], [0.0, 1.0], [1.0, 5.0]])
    assert first_of_each(table).tolist() == [0, 1, 3]


def test_what_is_known_is_not_worked_out_again() -> None:
    known: Known[list[tuple[int, ...]]] = Known()
    worked = []

    def table(columns: Sequence[NDArray[Any]]) -> list[tuple[int, ...]]:
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        worked.append(len(rows))
        return rows

    for rows in ([(1, 2), (3, 4), (1, 2)], [(3, 4)], [(5, 6), (1, 2)], [(5, 6)]):
        found, index = known([np.array(column) for column in zip(*rows, strict=True)], table)
        assert [found[place] for place in index] == rows
    assert worked == [2, 3]
