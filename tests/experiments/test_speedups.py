"""Ratios of predicted and of played times, and what is said of grids outside the space."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import speedups
from experiments.bench.bench import Bench, Entry
from experiments.cli.commandline import run
from experiments.studies.speedups import _is_outside as is_outside
from mistlab.job.search import Budget, Problem
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan, StagePlan
from searchers.registry import SEARCHERS
from searchers.savings import Chooser, chosen_plan
from searchers.strategy import Ending
from tests.searchers.problems import SMALL

FOUR = replace(SMALL, cluster=replace(SMALL.cluster, gpus_per_node=4, memory_gib=None))
STAGE = StagePlan(layers=2, data_parallel=2, tensor_parallel=1, micro_batch=1, zero=1)
ALONE = StagePlan(layers=1, data_parallel=1, tensor_parallel=1, micro_batch=2)


def asked(problem: Problem, plan: Plan) -> Entry:
    """What a searcher finds that asks about one plan."""
    with pytest.MonkeyPatch.context() as patch:

        def one(_problem: Any, _space: Any, ledger: Any, _draw: Any) -> Ending:
            ledger.predict([plan])
            return Ending()

        patch.setitem(SEARCHERS, "one", one)  # type: ignore[arg-type]
        budget = Budget(evaluations=1)
        return Bench.of(problem).search("one", space_of("megatron"), budget, 0, lambda _: None)


@pytest.mark.parametrize(
    ("stages", "outside"),
    [
        ((STAGE, STAGE), False),
        ((replace(STAGE, zero=0), replace(STAGE, zero=0)), True),
        # A single rank shards nothing, whatever its level.
        ((ALONE,) * 4, False),
    ],
    ids=["sharded", "not sharded", "single ranks"],
)
def test_a_grid_s_best_plan_is_outside_if_the_space_lacks_its_shape(
    stages: tuple[StagePlan, ...], outside: bool
) -> None:
    entry = asked(FOUR, Plan(engine="megatron", micro_batches=2, stages=stages))
    assert entry.answer is not None
    assert is_outside(FOUR, entry) == outside


@pytest.fixture
def quick_searchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searchers that take the last plan with choices that can be made, which fits."""

    def last(problem: Any, space: Any, ledger: Any, _draw: Any) -> Ending:
        plan = chosen_plan(problem, space, Chooser(lambda _, options: options - 1))
        ledger.predict([plan])
        return Ending()

    for name in ("mist", "megatron", "deepspeed"):
        monkeypatch.setitem(SEARCHERS, name, last)  # type: ignore[arg-type]


@pytest.mark.usefixtures("quick_searchers")
def test_rows_compare_predicted_times_and_played_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--quick", "--hardware", "l4-24gb", "--out", str(tmp_path), "--json"]
    assert run(speedups.main, options) == 0
    answer = json.loads(capsys.readouterr().out)
    compared = [row for row in answer["rows"] if row["over_megatron"] is not None]
    assert compared
    for row in compared:
        assert row["over_megatron"] == row["megatron_s"] / row["mist_s"]
        assert row["over_megatron_played"] == row["megatron_played_s"] / row["mist_played_s"]
        assert (row["wide_over_megatron"] is not None) == row["grid_is_outside"]
    assert answer["rows"][0]["measured_over_megatron"] == 1.279
    ratios = [row["over_megatron"] for row in compared]
    flash, every = answer["averages"]
    assert flash["mean"] == pytest.approx(sum(ratios) / len(ratios))
    assert (flash["least"], flash["most"]) == (min(ratios), max(ratios))
    assert flash["published_mean"] == 1.32
    assert every["published_mean"] == 1.28


def test_hardware_without_a_published_evaluation_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--hardware", "h100-80gb", "--out", str(tmp_path / "new")]
    assert run(speedups.main, options) == 2
    assert "give l4-24gb or a100-40gb" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
