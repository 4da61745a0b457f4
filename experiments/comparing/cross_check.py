"""The closed form against the event simulator, over random plans: differences and their spread."""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from experiments.cli.commandline import DONE, print_json, progress
from experiments.cli.rundir import RunDirectory
from experiments.comparing.random_plans import RandomPlan, random_plans
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
    "proposed by a searcher": 0.03,
    "the default problem": 0.03,
    **dict.fromkeys(catalog.hardware_names(), 0.1),
}


def cross_check(options: argparse.Namespace) -> int:
    """Compare, print the distribution and the worst plans, write rows, plans and a picture."""
    if options.plans < 1:
        message = f"--plans {options.plans}: nothing to compare: give at least 1"
        raise InputError(message)
    directory = RunDirectory.make(options.out, "cross_check", vars(options))
    rows = []
    for number, plan in enumerate(_plans(options)):
        rows.append(_row(number, plan))
        if (number + 1) % 50 == 0:
            progress(f"{number + 1} of {options.plans} plans")
        write_yaml(job_to_mapping(plan.job), directory.path / f"{number:04}.yaml")
    summary = _summary(rows)
    directory.write_rows(rows)
    plots.differences(rows, directory.path / "differences.svg")
    if options.json:
        print_json(summary)
    else:
        print(_text(summary, options.out, options.plans))
    return DONE


def _plans(options: argparse.Namespace) -> Iterator[RandomPlan]:
    """Random plans; in an order of their own only pipelines whose engine takes it, fit or not."""
    for drawn in random_plans(options.plans, options.seed):
        if options.order == DEFAULT_ORDER:
            yield drawn
        elif drawn.job.plan.num_stages > 1 and ENGINES[drawn.job.plan.engine].takes_orders:
            job = replace(drawn.job, plan=replace(drawn.job.plan, order=options.order))
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


def _text(summary: Mapping[str, Any], out: Path, wanted: int) -> str:
    lines = [
        f"{summary['plans']} of {wanted} plans, {summary['tasks']:,} tasks",
        f"draws left out, which were not valid, did not fit or not closely: {summary['missed']:,}",
        "symbolic against events, differences in time, and the lowest rank correlation of problems",
        f"that have {FEWEST_TO_RANK} of the plans:",
        "",
        "| plans | number | median | 95 % within | largest | mean | lowest | ranks |",
        "|---|---|---|---|---|---|---|---|",
        _line("all", summary["all"], summary["rank_correlations"]),
    ]
    for name, found in summary["strata"].items():
        short = " (few)" if found["share"] < STRATA[name] else ""
        lines.append(_line(name + short, found, found))
    lines.append(_line("first and last over 20 %", summary["dominated_by_extras"], {}))
    memory = summary["memory"]
    lines += [
        "",
        f"peaks of memory: median {memory['median']:.2%}, largest {memory['largest']:.2%}",
        f"plans whose peaks are within 1 % on every stage: {memory['within_1_percent']:.1%}",
        "largest differences:",
    ]
    lines += [
        f"  plan {row['plan']}: {row['difference']:+.1%}, {row['stages']} stages, "
        f"{row['micro_batches']} micro-batches, first and last {row['extras_share']:.0%}; "
        f"{', '.join(row['strata'])}; {row['workload']}"
        for row in summary["worst"]
    ]
    return "\n".join([*lines, f"plans, rows and picture: {out}"])


def _line(name: str, found: Mapping[str, Any], ranks: Mapping[str, Any]) -> str:
    if not found["plans"]:
        return f"| {name} | 0 | | | | | | |"
    lowest = ranks.get("lowest_rank_correlation")
    return (
        f"| {name} | {found['plans']} | {found['median']:.2%} | {found['p95']:.2%} | "
        f"{found['largest']:.2%} | {found['bias']:+.2%} | {found['lowest']:+.2%} | "
        f"{'' if lowest is None else f'{lowest:.4f}'} |"
    )
