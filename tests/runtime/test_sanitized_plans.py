"""Nothing is found in random plans, with parts of sequences among them."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from benchmarks.sanitized_plans import Row, page
from runtime.checks.fake.fake_device import register
from tests.runtime.drawn_runs import DrawnRun, drawn_run, findings
from tests.sweep import sweep

PLANS = 40
# The plans that make test checks: some of each kind, the last two with experts and parts of
# sequences.
QUICK = (*range(14), 30, 34)
SEEDS = (*QUICK, *sorted({*range(PLANS)} - {*QUICK}))


def with_moments(seed: int, run: DrawnRun) -> DrawnRun:
    """The run, in one of four with moments of 8 bits."""
    return run if seed % 4 else replace(run, work=replace(run.work, optimizer="adamw-8bit"))


@pytest.fixture(autouse=True, scope="module")
def _device() -> None:
    """Autograd has a thread for the device if it is there at the first backward pass."""
    register()


@pytest.mark.parametrize("seed", sweep(SEEDS, first=len(QUICK)))
def test_a_random_plan_has_no_race_and_no_collective_that_hangs(seed: int) -> None:
    run = with_moments(seed, drawn_run(seed))
    assert run.collectives() == {}
    assert run.races(run.ranks[seed % len(run.ranks)]) == []


@pytest.mark.parametrize("seed", sweep(range(0, PLANS, 4), first=1))
def test_no_host_of_a_random_plan_waits(seed: int) -> None:
    run = with_moments(seed, drawn_run(seed))
    assert run.waits(run.ranks[-1]) == []


def test_the_plans_split_tokens_and_have_experts_and_many_orders() -> None:
    runs = [drawn_run(seed) for seed in QUICK]
    assert sum(run.splits_tokens for run in runs) > len(QUICK) / 4
    assert sum(run.splits_sequences for run in runs) > len(QUICK) / 8
    assert sum(run.has_experts for run in runs) > len(QUICK) / 8
    assert sum(run.has_experts and run.splits_sequences for run in runs) > 1
    assert sum(run.work.model.dropout > 0 for run in runs) > len(QUICK) / 8
    assert len({run.plan.order for run in runs}) > 4
    assert len({run.training for run in runs}) > 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_nothing_is_found_on_any_kind_of_rank(seed: int) -> None:
    assert list(findings(with_moments(seed, drawn_run(seed)))) == []


def test_the_page_counts_findings_by_kind() -> None:
    clean = {"seed": 1, "order": "1f1b", "gpus": 2, "ranks": 2, "seconds": 1}
    clean |= {"splits_tokens": True, "splits_sequences": False, "has_experts": True, "drops": False}
    rows = [
        Row(**clean, races=(), waits=(), collectives={}),
        Row(**clean, races=("a race",), waits=(), collectives={"first call": 2}),
    ]
    lines = list(page(rows))
    assert "| random plans | 2 |" in lines
    assert "| with experts | 2 |" in lines
    assert "| ranks whose streams were traced | 4 |" in lines
    assert "| races | 1 |" in lines
    assert "| ranks missing in a first call | 2 |" in lines
    assert "seed 1: a race" in lines
