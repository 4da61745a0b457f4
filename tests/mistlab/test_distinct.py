"""Distinct rows, in runs or in no order, against NumPy's own."""

import numpy as np
import pytest

from mistlab import distinct
from mistlab.distinct import distinct_rows


@pytest.mark.parametrize("in_runs", [True, False])
def test_every_row_finds_itself(in_runs: bool) -> None:
    draw = np.random.default_rng(0)
    columns = [draw.integers(0, 3, 500), draw.choice([0.0, 0.25, 1.0], 500)]
    if in_runs:
        order = np.lexsort(columns)
        columns = [column[order] for column in columns]
    found = distinct_rows(columns)
    table = np.stack(columns, axis=1)
    assert len(found.columns[0]) == len(np.unique(table, axis=0)) == 9
    for column, values in zip(columns, found.columns, strict=True):
        assert (values[found.index] == column).all()


def test_both_zeros_are_one_row() -> None:
    assert len(distinct_rows([np.array([0.0, -0.0, 0.0])]).columns[0]) == 1


def test_rows_with_the_same_key_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distinct, "_MULTIPLIER", np.uint64(0))
    columns = [np.array([1.0, 2.0, 1.0, 3.0]), np.array([5.0, 5.0, 5.0, 6.0])]
    found = distinct_rows(columns)
    assert len(found.columns[0]) == 3
    for column, values in zip(columns, found.columns, strict=True):
        assert (values[found.index] == column).all()
