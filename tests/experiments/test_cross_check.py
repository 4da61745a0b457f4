"""Random plans, and the two predictors held against one another over them."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from experiments import cross_check, predict
from experiments.agreement import cross_check as comparing
from experiments.agreement.cross_check import PROBLEMS, STRATA, WORST
from experiments.bench import wide_plans as wide
from experiments.bench.random_plans import PROPOSING, random_plans
from experiments.bench.strained_plans import REGIMES, strained_plans
from experiments.cli.commandline import run
from mistlab import catalog
from mistlab.engines.engine import ENGINES
from mistlab.job.job import load_job
from simulators.events import EventSimulator

# What the page says, a little more of it: of all plans, of the default problem, of each stratum.
P95, P95_BY_DEFAULT, MEDIAN_OF_STRATUM = 0.03, 0.015, 0.005

# While somebody waits, plans are of these hardwares alone.
FEW = ("a100-40gb", "b300-288gb", "l4-24gb", "v100-16gb")


@pytest.fixture(params=["a few", pytest.param("the catalogue", marks=pytest.mark.slow)])
def hardwares(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sequence[str]:
    """The names of the hardwares that plans are drawn for."""
    if request.param == "a few":
        monkeypatch.setattr(catalog, "hardware_names", lambda: FEW)
    return catalog.calibrated_names()


def test_random_plans_fit_and_are_the_same_for_the_same_seed(hardwares: Sequence[str]) -> None:
    # The default problem, and three numbers of nodes of each hardware.
    problems = 1 + 3 * len(hardwares)
    plans = list(random_plans(problems, 7))
    assert plans[:3] == list(islice(random_plans(problems, 7), 3))
    assert plans[:2] != list(islice(random_plans(problems, 8), 2))
    assert {plan.job.cluster.hardware.name for plan in plans} == set(hardwares)
    assert len(plans) == problems
    for plan in plans:
        assert plan.prediction.fits
        assert plan.job.plan.layers == plan.job.workload.model.layers
    strata = [name for plan in plans for name in plan.strata]
    # An engine that few problems have plans for need not have a share.
    assert set(strata) - set(ENGINES) <= set(STRATA)


def test_searchers_propose_a_tenth_of_the_plans_of_a_problem() -> None:
    plans = list(islice(random_plans(40 * PROBLEMS, 7), 40))
    assert 1 + 3 * len(catalog.calibrated_names()) == PROBLEMS
    proposed = [plan.proposed_by for plan in plans if plan.proposed_by]
    assert proposed == list(PROPOSING)
    assert all(plan.is_default for plan in plans)


# Of few plans the median scatters more.
@pytest.mark.parametrize(
    ("plans", "seed", "median"),
    [(60, 3, 0.002), pytest.param(1000, 0, 0.001, marks=pytest.mark.slow)],
)
def test_the_two_agree_over_random_plans(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    plans: int,
    seed: int,
    median: float,
) -> None:
    """As far as docs/results/cross-check.md says."""
    # A reason takes as long as playing the plan six times.
    worst = WORST if plans >= 1000 else 2
    monkeypatch.setattr(comparing, "WORST", worst)
    arguments = ["--plans", str(plans), "--seed", str(seed), "--out", str(tmp_path)]
    assert run(cross_check.main, [*arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert summary["plans"] == summary["all"]["plans"] == len(rows) >= 0.99 * plans
    assert summary["all"]["median"] < median
    assert summary["all"]["p95"] < P95
    assert summary["strata"]["the default problem"]["p95"] < P95_BY_DEFAULT
    for name, wanted in STRATA.items():
        found = summary["strata"][name]
        assert found["share"] == found["plans"] / summary["plans"]
        if plans >= 1000:
            assert found["share"] >= wanted
            assert found["median"] < MEDIAN_OF_STRATUM
    assert len(summary["worst"]) == worst
    largest = max(rows, key=lambda row: abs(row["difference"]))
    assert summary["worst"][0] == {**largest, "reason": summary["worst"][0]["reason"]}
    assert all(row["reason"] for row in summary["worst"])
    assert load_job(tmp_path / f"{largest['plan']:04}.yaml").plan.num_stages == largest["stages"]
    assert (tmp_path / "differences.svg").exists()


def test_plans_of_today_are_of_all_engines_and_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "MODELS", {"gpt3-7b": (1,)})
    monkeypatch.setattr(wide, "HARDWARE", ("a100-80gb",))
    plans = list(wide.wide_plans(3, 1))
    assert plans[:1] == list(islice(wide.wide_plans(3, 1), 1))
    assert len({plan.job.plan.engine for plan in plans}) == len(plans) == 3
    for plan in plans:
        assert plan.prediction.fits
        assert plan.strata <= wide.wide_strata().keys()


def test_plans_that_wait_are_of_all_regimes_and_near() -> None:
    """A plan of each problem of a few regimes; the page says more of more plans."""
    few = [regime for regime in REGIMES if regime.name != "hybrids"]
    plans = list(strained_plans(2 * len(few), 3, few))
    assert plans[:2] == list(islice(strained_plans(2 * len(few), 3, few), 2))
    assert {plan.regime for plan in plans} == {regime.name for regime in few}
    differences = []
    for plan in plans:
        assert plan.prediction.fits
        job = plan.job
        simulator = EventSimulator(workload=job.workload, cluster=job.cluster)
        differences.append(plan.prediction.iteration_s / simulator.simulate(job.plan).iteration_s)
    sizes = np.abs(np.array(differences) - 1)
    assert np.median(sizes) < 0.01
    assert sizes.max() < 0.08


def test_plans_of_today_have_their_own_orders(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cross_check.main, ["--space", "wide-today", "--order", "gpipe"]) == 2
    assert (
        "--order gpipe: plans of space wide-today are drawn with all pipeline schedules"
        in capsys.readouterr().err
    )


def test_no_plans_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cross_check.main, ["--plans", "0"]) == 2
    assert "--plans 0: nothing to compare" in capsys.readouterr().err


def test_a_plan_can_be_played_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--simulator", "events", "--timeline", str(tmp_path), "--json"]
    assert run(predict.main, arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["predictor"] == "events"
    trace = json.loads((tmp_path / "gpt3-2.7b-4xl4.trace.json").read_text())
    phases = {event["ph"] for event in trace["traceEvents"]}
    assert phases == {"M", "X", "s", "f", "C"}
    last = max(e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X")
    assert last == pytest.approx(answer["iteration_s"] * 1e6)
    assert (tmp_path / "gpt3-2.7b-4xl4.svg").stat().st_size > 20_000


def test_a_timeline_needs_the_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(predict.main, ["--timeline", str(tmp_path)]) == 2
    assert "--timeline: works only with --simulator events" in capsys.readouterr().err
