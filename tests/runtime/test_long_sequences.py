"""The plan of a million tokens, scaled down: its peak in two processes is the predicted one.

Two ranks share a sequence, the loss comes in chunks, and blocks are recomputed from inputs that are
on the host, as in ``tests/searchers/test_million_tokens.py``.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from mistlab.graph.stage_model import StageModel  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from mistlab.stages.stage_batch import StageBatch  # noqa: E402
from tests.runtime.long_world import SPLITS, WORK, long_plan  # noqa: E402
from tests.runtime.test_real_ranks import run_world  # noqa: E402
from tests.runtime.worlds import ratios  # noqa: E402


def predicted_bytes(work: Workload, plan: Plan) -> float:
    return float(StageModel.of(work).figures(StageBatch.of_plan(plan)).peak_bytes[0])


@pytest.mark.slow
def test_two_processes_take_what_is_predicted(tmp_path: Path, warm_python: str) -> None:
    assert run_world(warm_python, "long_world", 2, tmp_path) == {}
    for rank in range(2):
        taken = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        for split in SPLITS:
            predicted = predicted_bytes(WORK, long_plan(split))
            assert taken[split] == pytest.approx(predicted, rel=0.02), (rank, split)


@pytest.mark.parametrize("split", SPLITS)
def test_each_saving_is_more_than_the_tolerance(split: str) -> None:
    """So a peak with one of them missing would not pass for the predicted one."""
    own = predicted_bytes(WORK, long_plan(split))
    whole = predicted_bytes(replace(WORK, loss="whole"), long_plan(split))
    here = predicted_bytes(WORK, long_plan(split, ratios(0, 0, 0, 0)))
    assert min(whole, here) > 1.04 * own
