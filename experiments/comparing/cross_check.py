"""The closed form against the event simulator, over random plans: differences and their spread."""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from experiments.comparing.random_plans import RandomPlan, random_plans
from experiments.frame.charts import Drawn
from experiments.frame.study import Report, Study
from experiments.frame.tables import Row, table
from experiments.reports import plots
from mistlab import catalog
from mistlab.engines.table import ENGINES
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.symbolic.stage_model import StageModel
from mistlab.values.datafile import write_yaml
from mistlab.values.errors import InputError
from mistlab.values.job import job_to_mapping
from simulators.events import EventSimulator
from simulators.memory import memory_of
from simulators.symbolic import SymbolicPredictor

PLANS, QUICK_PLANS = 1000, 40
WORST = 8
# How many plans of one problem are enough to say whether both rank them alike.
FEWEST_TO_RANK = 20
# What share of the plans should at least have it.
STRATA = {
    "several stages": 0.6,
    "uneven layers": 0.25,
    "offloading": 0.3,
    "ZeRO-2 or 3": 0.25,
    "close to the memory limit": 0.4,
    "one micro-batch": 0.05,
    "fewer micro-batches than stages": 0.05,
    "as many as stages": 0.05,
    "more micro-batches than stages": 0.25,
    "1 node": 0.25,
    "2 to 4 nodes": 0.25,
    "8 to 64 nodes": 0.25,
    "mistlab": 0.3,
    "megatron": 0.15,
    "megatron, nothing overlapped": 0.05,
    "deepspeed": 0.05,
    "deepspeed, nothing overlapped": 0.05,
    # As the searcher of the same name proposes them.
    "aceso": 0.005,
    "proposed by a searcher": 0.03,
    "the default problem": 0.03,
    **dict.fromkeys(catalog.hardware_names(), 0.1),
}


def cross_check(options: argparse.Namespace) -> int:
    """Compare, print the distribution and the worst plans, write rows, plans and a picture."""
    number = options.plans
    if number is None:
        number = QUICK_PLANS if options.quick else PLANS
    if number < 1:
        message = f"--plans {number}: nothing to compare: give at least 1"
        raise InputError(message)
    study = Study.begin("cross_check", options)
    drawn = _plans(number, options.seed, options.order)
    for place, plan in zip(study.counted(range(number), "plans"), drawn, strict=False):
        study.add(_row(place, plan))
        write_yaml(job_to_mapping(plan.job), study.path / f"{place:04}.yaml")
    return study.end(_report(study.rows, number))


def _plans(number: int, seed: int, order: str) -> Iterator[RandomPlan]:
    """Random plans; in an order of their own only pipelines whose engine takes it, fit or not."""
    for drawn in random_plans(number, seed):
        if order == DEFAULT_ORDER:
            yield drawn
        elif drawn.job.plan.num_stages > 1 and ENGINES[drawn.job.plan.engine].takes_orders:
            job = replace(drawn.job, plan=replace(drawn.job.plan, order=order))
            predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
            yield replace(drawn, job=job, prediction=predictor.predict(job.plan))


def _row(number: int, plan: RandomPlan) -> dict[str, Any]:
    job, closed = plan.job, plan.prediction
    simulator = EventSimulator(workload=job.workload, cluster=job.cluster)
    simulation = simulator.simulate(job.plan)
    room = np.full(job.plan.num_stages, float(job.cluster.memory_bytes))
    memory = memory_of(simulation, job.plan, StageModel.of(job.workload, job.plan.engine), room)
    peaks = [stage.peak_allocated_bytes for stage in closed.stages]
    shortfalls = [peak / one.peak_bytes - 1 for peak, one in zip(peaks, memory, strict=True)]
    cluster = job.cluster
    return {
        "plan": number,
        "workload": f"{job.workload.model.name}, sequence {job.workload.sequence_length}, batch "
        f"{job.workload.global_batch}, {job.workload.attention}, {cluster.nodes} x "
        f"{cluster.gpus_per_node} {cluster.hardware.name}",
        "stages": job.plan.num_stages,
        "micro_batches": job.plan.micro_batches,
        "engine": job.plan.engine,
        "proposed_by": plan.proposed_by,
        "missed": plan.missed,
        "strata": sorted(plan.strata),
        "symbolic_s": closed.iteration_s,
        "events_s": simulation.iteration_s,
        "difference": closed.iteration_s / simulation.iteration_s - 1,
        "memory_difference": max(shortfalls, key=abs),
        "tasks": len(simulation),
        "extras_share": _extras_s(plan) / closed.iteration_s,
    }


def _extras_s(plan: RandomPlan) -> float:
    """What the first and last micro-batches take beyond steady ones, the most of any stage."""
    return max(
        max(0.0, stage.delta_forward_s) + max(0.0, stage.delta_backward_s)
        for stage in plan.prediction.stages
    )


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    worst = sorted(rows, key=lambda row: -abs(row["difference"]))[:WORST]
    return {
        "plans": len(rows),
        "missed": sum(row["missed"] for row in rows),
        "tasks": sum(row["tasks"] for row in rows),
        "all": _distribution(rows),
        "strata": {
            name: _stratum([row for row in rows if name in row["strata"]], len(rows))
            for name in STRATA
        },
        "dominated_by_extras": _distribution([r for r in rows if r["extras_share"] > 0.2]),
        "memory": _memory(rows),
        "rank_correlations": _correlations(rows),
        "worst": [dict(row) for row in worst],
    }


def _distribution(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not rows:
        return {"plans": 0}
    differences = np.array([row["difference"] for row in rows])
    sizes = np.abs(differences)
    return {
        "plans": len(rows),
        "median": float(np.median(sizes)),
        "p95": float(np.quantile(sizes, 0.95)),
        "largest": float(sizes.max()),
        "bias": float(differences.mean()),
        "lowest": float(differences.min()),
    }


def _stratum(rows: Sequence[Mapping[str, Any]], plans: int) -> dict[str, Any]:
    return {**_distribution(rows), "share": len(rows) / plans, **_correlations(rows)}


def _memory(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The largest difference of any stage's peak, over plans."""
    differences = np.abs([row["memory_difference"] for row in rows])
    return {
        "median": float(np.median(differences)),
        "p95": float(np.quantile(differences, 0.95)),
        "largest": float(differences.max()),
        "within_1_percent": float((differences <= 0.01).mean()),
    }


def _correlations(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ranks = _ranks(rows)
    lowest = min(ranks, key=lambda workload: ranks[workload], default=None)
    return {
        "workloads_ranked": len(ranks),
        "lowest_ranked": lowest,
        "lowest_rank_correlation": None if lowest is None else ranks[lowest],
    }


def _ranks(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    by_workload: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_workload[row["workload"]].append(row)
    return {
        workload: float(
            spearmanr([r["symbolic_s"] for r in alike], [r["events_s"] for r in alike]).statistic
        )
        for workload, alike in by_workload.items()
        if len(alike) >= FEWEST_TO_RANK
    }


def _report(rows: Sequence[Row], wanted: int) -> Report:
    summary = _summary(rows)
    return Report(
        title="The closed form against the event simulator",
        words=[*_words(summary, wanted)],
        summary=summary,
        pictures=[
            Drawn(
                name="differences",
                caption="Differences over what comes once an iteration.",
                draw=partial(plots.differences, rows),
            )
        ],
        beside=[BESIDE],
    )


def _words(summary: Mapping[str, Any], wanted: int) -> Iterator[str]:
    yield (
        f"{summary['plans']} of {wanted} plans, {summary['tasks']:,} tasks; draws left out, which "
        f"were not valid, did not fit or not closely: {summary['missed']:,}. A difference is the "
        "closed form's time over the event simulator's, less one. The last column is the lowest "
        f"rank correlation of problems that have {FEWEST_TO_RANK} of the plans."
    )
    strata = {
        name + (" (few)" if found["share"] < STRATA[name] else ""): (found, found)
        for name, found in summary["strata"].items()
    }
    lines = {
        "all": (summary["all"], summary["rank_correlations"]),
        **strata,
        "first and last over 20 %": (summary["dominated_by_extras"], {}),
    }
    head = ("plans", "number", "median", "95 % within", "largest", "mean", "lowest", "ranks")
    yield table(head, [_line(name, *found) for name, found in lines.items()])
    memory = summary["memory"]
    yield (
        f"Peaks of memory: median {memory['median']:.2%}, largest {memory['largest']:.2%}; plans "
        f"whose peaks are within 1 % on every stage: {memory['within_1_percent']:.1%}."
    )
    yield "The largest differences:"
    worst = ("plan", "difference", "stages", "micro-batches", "first and last", "problem", "plans")
    yield table(
        worst,
        [
            (
                row["plan"],
                f"{row['difference']:+.1%}",
                row["stages"],
                row["micro_batches"],
                f"{row['extras_share']:.0%}",
                row["workload"],
                ", ".join(row["strata"]),
            )
            for row in summary["worst"]
        ],
    )


def _line(name: str, found: Mapping[str, Any], ranks: Mapping[str, Any]) -> tuple[str, ...]:
    if not found["plans"]:
        return (name, "0", *("-",) * 6)
    lowest = ranks.get("lowest_rank_correlation")
    sizes = (f"{found[key]:.2%}" for key in ("median", "p95", "largest"))
    signed = (f"{found[key]:+.2%}" for key in ("bias", "lowest"))
    rank = "-" if lowest is None else f"{lowest:.4f}"
    return (name, str(found["plans"]), *sizes, *signed, rank)


BESIDE = """## What the plans are

Plans come from 25 problems: the commands' default problem, and each calibrated hardware of the
catalogue on one node, on 2 or 4 and on 8 to 64 nodes, with a model that fits its memory. Up to
four plans of each problem are those that `mist`, `aceso`, `megatron` and `deepspeed` propose in
100 evaluations. The others are random plans of all engines, in equal parts (as far as there are
such plans) with one micro-batch, with fewer micro-batches than stages, as many, and more. Half of
them had to be close to the memory limit. Micro-batches times blocks are at most 3,000, so large
clusters have few micro-batches. Nothing of the kind was published.

## Why the two differ

If nothing overlaps, contends or stalls, they agree to 1e-9 (`tests/simulators/test_events.py`).
So do pipelines of equal stages with equal sends (`tests/simulators/test_pipelines.py`).
Otherwise:

- *Stages of few blocks* that swap more than they compute: one to four blocks whose copies take up
  to ten times as long as their passes, on fast GPUs. Slots are barriers in the closed form, but
  not in the simulator: there swaps of one pass go on in the next, and while a stage waits.
- *Gradients swapped whole* in each pass: the same effect, in steady passes.
- *Sends behind reductions*: while the last micro-batch's gradients are reduced, a send waits for
  the end of the running reduction, at each stage. The simulator has one stream for both. The
  executor has separate lanes for sends, so the truth is nearer to the closed form.
- *Sends beside swaps*: the closed form slows passes by the send beside them, as if no copies ran.
  With all four streams busy the slowdown is larger.

An earlier population had two kinds of hardware on one or two nodes, and never fewer micro-batches
than stages; over it 95 % of the plans were within 1.8 %. Over this population, with only sends in
rounds repaired, 95 % were within 3.8 %, and single plans came out 15 % too short or 19 % too long
([what was repaired](../decisions/0008-pipeline-objective.md)).

A played iteration knows more than the closed form: stages that send at one time share their
node's network, micro-batches may differ, and tasks may vary ([how fast](speed.md))."""
