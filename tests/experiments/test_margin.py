"""The memory to keep free so that plans fit surely, and what a search with it gives by tune."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import tune
from experiments.bench.bench import Bench, Entry
from experiments.bench.problem import (
    SURE,
    margin_gib,
    margins_gib,
    peak_bounds_of,
    sure_words,
)
from experiments.cli.command import EXAMPLE
from experiments.cli.commandline import INTERRUPTED as CODE
from experiments.cli.commandline import run
from mistlab import catalog
from mistlab.job.job import Job, load_job
from mistlab.machine.cluster import Cluster, NodeGroup
from searchers.strategy import INTERRUPTED
from simulators.symbolic import SymbolicPredictor

UNLIKE = (
    *("--model", "gpt3-1.3b", "--hardware", "t4-16gb:1,a100-80gb:1", "--gpus-per-node", "2"),
    *("--space", "megatron"),
)


def test_gpus_of_several_kinds_keep_free_what_all_of_them_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A100s would need more than T4s have: plans are sure on T4s at least, and the rest is said."""
    out = str(tmp_path / "plan.yaml")
    assert run(tune.main, [*UNLIKE, "--out", out]) == 0
    told = re.search(
        r"\nIt fits with a probability of (\d+)% .*: --keep-free-gib (\d+) asks for 90% on t4-16gb "
        r"\(90% takes (\d+) GiB on a100-80gb, which not all GPUs can keep free\), and gives "
        r"[\d.]+ s .* fits with (\d+)% \(.*\.\n",
        capsys.readouterr().out,
    )
    assert told
    freely, margin, of_large, keeping = (int(number) for number in told.groups())
    assert freely < 90 <= keeping
    assert margin < 16 < of_large
    assert run(tune.main, [*UNLIKE, "--keep-free-gib", str(margin), "--out", out]) == 0
    assert f"\nIt fits with a probability of {keeping}% (" in capsys.readouterr().out


def _job(*hardware: str, **changes: Any) -> Job:
    first, *others = (catalog.hardware(name) for name in hardware)
    groups = tuple(NodeGroup(hardware=one, nodes=1) for one in others)
    cluster = Cluster(hardware=first, nodes=len(hardware), gpus_per_node=4, others=groups)
    return replace(load_job(EXAMPLE), cluster=replace(cluster, **changes))


def test_the_margin_is_that_of_the_largest_gpu_that_all_gpus_can_keep_free() -> None:
    alone = {name: margin_gib(_job(name)) for name in ("t4-16gb", "l4-24gb", "a100-80gb")}
    assert 0 < (alone["t4-16gb"] or 0) < (alone["l4-24gb"] or 0) < 14 < (alone["a100-80gb"] or 0)
    for hardware in (("t4-16gb", "l4-24gb"), ("l4-24gb", "t4-16gb")):
        assert margin_gib(_job(*hardware)) == alone["l4-24gb"]
    three = _job("a100-80gb", "t4-16gb", "l4-24gb")
    assert margins_gib(three) == alone
    assert margin_gib(three) == alone["l4-24gb"]


def test_no_margin_is_asked_for_that_is_kept_free_or_that_no_gpu_has() -> None:
    job = _job("l4-24gb")
    margin = margin_gib(job)
    assert margin is not None
    assert margin_gib(_job("l4-24gb", keep_free_gib=margin - 1.0)) == margin
    assert margin_gib(_job("l4-24gb", keep_free_gib=float(margin))) is None
    assert margin_gib(_job("l4-24gb", memory_gib=1.0)) is None


def test_no_sentence_says_90_percent_and_asks_for_memory_to_reach_it() -> None:
    """A probability just below 90 % is printed as 90 %, and counts as it is printed."""
    just_below = set()
    for tenths in range(230, 290):
        job = _job("a100-80gb", memory_gib=tenths / 10)
        prediction = SymbolicPredictor(workload=job.workload, cluster=job.cluster).predict(job.plan)
        probability = peak_bounds_of(job, prediction).fit_probability
        asks = "--keep-free-gib" in sure_words(job, prediction)
        assert asks == (int(f"{probability:.0%}"[:-1]) < 90)
        just_below |= {probability} if SURE - 0.005 < probability < SURE else set()
    assert just_below


def test_memory_of_gpus_is_no_remedy_where_a_node_lacks_memory_of_its_own() -> None:
    asked = _job("l4-24gb", host_memory_gib=1.0)
    stages = [
        replace(stage, offload=replace(stage.offload, optimizer=1.0)) for stage in asked.plan.stages
    ]
    plan = replace(asked.plan, stages=tuple(stages))
    job = replace(asked, plan=plan)
    prediction = SymbolicPredictor(workload=job.workload, cluster=job.cluster).predict(plan)
    assert peak_bounds_of(job, prediction).fit_probability == 0
    sentence = sure_words(job, prediction)
    assert re.search(r": its fullest node lacks [\d.]+ GiB of host memory\.$", sentence)
    assert "--keep-free-gib" not in sentence


@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [
        ({"status": "FEASIBLE"}, 0, ""),
        ({"status": "BUDGET", "reason": INTERRUPTED}, CODE, "interrupted: the plan stands"),
        ({"status": "INFEASIBLE", "plan": None, "prediction": None}, 0, ", and gives no plan; "),
    ],
)
def test_a_repeated_search_tells_what_it_has_proven(
    ends: dict[str, Any],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever becomes of the repeated search, the answer of the first is told and written."""
    search: Callable[..., Entry] = Bench.search

    def ended(bench: Bench, *asked: Any) -> Entry:
        entry = search(bench, *asked)
        if bench.problem.cluster.keep_free_gib is None:
            return entry
        return replace(entry, result=replace(entry.result, **ends, gap=None, lower_bound_s=None))

    monkeypatch.setattr(Bench, "search", ended)
    out = tmp_path / "plan.yaml"
    assert run(tune.main, [*UNLIKE, "--out", str(out)]) == code
    told = capsys.readouterr()
    assert says in told.out + told.err
    assert (", and gives" in told.out) == (ends["status"] == "INFEASIBLE")
    assert "asks for 90%" in told.out
    assert load_job(out).plan.num_gpus == 4
