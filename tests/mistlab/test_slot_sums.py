"""Sums of slots against sums added up one by one; and that they take one processor core."""

import os
import subprocess
import sys

import numpy as np
import pytest

from mistlab.core import distinct as slot_sums
from mistlab.core.distinct import FEW_ROWS, Distinct, summed_slots

ROWS = 3 * FEW_ROWS


def distinct(count: int, draw: np.random.Generator, rows: int = ROWS) -> Distinct:
    return Distinct(columns=(np.arange(count),), index=draw.integers(0, count, rows))


# A table in several blocks, of one row in the last block, of one strategy or set of layers, and of
# no kind of slot; candidates one by one.
@pytest.mark.parametrize(
    ("kinds", "strategies", "stages"),
    [(24, 400, 100), (10, 101, 25), (12, 1, 900), (12, 900, 1), (0, 30, 40), (9, 1500, 1400)],
)
def test_sums_are_those_of_single_candidates(
    kinds: int, strategies: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_sums, "ON_ONE_THREAD", 1 << 14)
    draw = np.random.default_rng(kinds)
    where = np.repeat([True, False], [kinds, 3])
    lengths, counts = draw.random((2, kinds, strategies)), draw.random((kinds + 3, stages))
    of_strategy, of_layers = distinct(strategies, draw), distinct(stages, draw)
    found = summed_slots([(lengths, where)], counts, of_strategy, of_layers)
    for row in range(0, ROWS, 97):
        own = lengths[:, :, of_strategy.index[row]] * counts[:kinds, of_layers.index[row]]
        assert found[:, row] == pytest.approx(own.sum(axis=1), rel=1e-12)


SUMS = """
import time, numpy as np
from mistlab.core.distinct import Distinct, summed_slots
draw = np.random.default_rng(0)
def distinct(count): return Distinct(columns=(np.arange(count),),
                                     index=draw.integers(0, count, 1 << 14))
parts = distinct(700), distinct(150)
lengths, counts, where = draw.random((40, 24, 700)), draw.random((24, 150)), np.ones(24, bool)
# The library's own threads are busy while they start.
for _ in range(10): summed_slots([(lengths, where)], counts, *parts)
process_s, thread_s = time.process_time(), time.thread_time()
for _ in range(10): summed_slots([(lengths, where)], counts, *parts)
process_s, thread_s = time.process_time() - process_s, time.thread_time() - thread_s
print((process_s - thread_s) / thread_s)
"""


def test_sums_keep_no_other_core_busy() -> None:
    # Threads for so small products only wait for one another.
    two = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    said = subprocess.run(
        [sys.executable, "-c", SUMS], env=two, capture_output=True, text=True, check=True
    )
    assert float(said.stdout) < 0.05
