"""The command ``cross_check``: compares the closed-form predictor with the event simulator over
random plans.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from experiments.bench.random_plans import NODES, RandomPlan, random_plans
from experiments.bench.strained_plans import strained_plans, strained_strata
from experiments.bench.wide_plans import wide_plans, wide_strata
from experiments.pages.charts import Drawn
from experiments.pages.groups import grouped
from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.study import Report, Study, beside
from experiments.pages.tables import Row, number, table, table_of
from experiments.prediction import plots
from mistlab import catalog
from mistlab.core.files import write_yaml
from mistlab.core.values import FieldError, reject
from mistlab.cost.tasks import TaskModel
from mistlab.engines.engine import ENGINES
from mistlab.graph.stage_model import StageModel
from mistlab.job.job import Job, job_to_mapping
from mistlab.machine.slowdowns import NO_INTERFERENCE
from mistlab.plan.dimensions import OFFLOADS
from mistlab.plan.plan import Offload, Plan
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.schedule.slots import Kind
from simulators.events import EventSimulator
from simulators.memory import memory_of
from simulators.symbolic import SymbolicPredictor, as_they_are

# Writes the text of cross-check pages: which plans were compared, and why the two predictors differ
# on some.


# Compares the closed form with the event simulator over random plans: the differences of their
# iteration times, and how these are distributed.


PLANS, QUICK_PLANS = 1000, 40
WORST = 8
# A rank correlation is computed only for problems with at least this many plans.
FEWEST_TO_RANK = 20
# The number of problems (a model on a cluster), each of which gets equally many random plans: the
# default problem, and some for each kind of hardware.
PROBLEMS = 1 + len(NODES) * len(catalog.calibrated_names())
# The drawn plans may be this much fewer than asked for, since the number per problem is rounded
# down and not every draw finds a plan that fits.
NEARLY = 0.9
# Properties that a plan may have, each with the share of the random plans that must have it at
# least.
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
    "megatron": 0.05,
    "megatron, nothing overlapped": 0.05,
    "deepspeed": 0.05,
    "deepspeed, nothing overlapped": 0.05,
    "aceso": 0.05,
    "proposed by a searcher": 0.03,
    "the default problem": NEARLY / PROBLEMS,
    **dict.fromkeys(catalog.calibrated_names(), NEARLY * len(NODES) / PROBLEMS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """A set of random plans to compare: the function that draws them, and the title and texts of
    its result page.

    ``strata`` are the properties that are reported, each with the share of plans that should have
    it.
    """

    space: str
    title: str
    plans: Callable[[int, int], Iterator[RandomPlan]]
    strata: Mapping[str, float]
    beside: str
    picture: str = "differences"


def cross_check(options: argparse.Namespace) -> int:
    """Compare the closed form with the event simulator over random valid plans that fit in memory.

    Both take the durations of single tasks from the same functions, and share nothing else. The
    closed form adds up durations of slots (the tasks of one layer on four streams) as if all
    streams waited for one another after each, and takes all micro-batches to be alike. The event
    simulator plays every task. The difference is the closed form's time over the simulator's, less
    one.
    """
    number = options.plans
    if number is None:
        number = QUICK_PLANS if options.quick else PLANS
    if number < 1:
        reject(f"--plans {number}: nothing to compare: give at least 1")
    if options.space != POPULATION.space and options.order != DEFAULT_ORDER:
        reject(
            f"--order {options.order}: plans of space {options.space} are drawn with all "
            "pipeline schedules: leave --order out"
        )
    population = {one.space: one for one in (POPULATION, WIDE, STRAINED)}[options.space]
    study = Study.begin("cross_check", options)
    drawn, jobs = _plans(population, number, options.seed, options.order), []
    for index, plan in zip(study.counted(range(number), "plans"), drawn, strict=False):
        study.add(_row(index, plan))
        jobs.append(plan.job)
        write_yaml(job_to_mapping(plan.job), study.path / f"{index:04}.yaml")
    worst = sorted(study.rows, key=lambda row: -abs(row["difference"]))[:WORST]
    explained = [
        {**row, "reason": str(reason_of(jobs[row["plan"]], row["difference"]))}
        for row in study.counted(worst, "reasons of the largest differences")
    ]
    return study.end(_report(study.rows, number, population, explained))


def _plans(population: Population, number: int, seed: int, order: str) -> Iterator[RandomPlan]:
    """Random plans. If ``order`` is not the default pipeline schedule, only pipelines that can run
    this schedule are drawn; they need not fit in memory.
    """
    for drawn in population.plans(number, seed):
        if order == DEFAULT_ORDER:
            yield drawn
        elif drawn.job.plan.num_stages > 1 and ENGINES[drawn.job.plan.engine].takes_orders:
            job = _in_order(drawn.job, order)
            if job is None:
                continue
            predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
            yield replace(drawn, job=job, prediction=predictor.predict(job.plan))


def _in_order(job: Job, order: str) -> Job | None:
    """The job with another pipeline schedule; None if its stages cannot run that schedule."""
    try:
        return replace(job, plan=replace(job.plan, order=order))
    except FieldError:
        return None


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
        f"{cluster.gpus_per_node} {cluster.name}",
        "stages": job.plan.num_stages,
        "micro_batches": job.plan.micro_batches,
        "engine": job.plan.engine,
        "order": job.plan.order,
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
    """By how many seconds the first and the last micro-batch together take longer on a stage than
    two micro-batches in the steady state; the maximum over the stages.
    """
    return max(
        max(0.0, stage.delta_forward_s) + max(0.0, stage.delta_backward_s)
        for stage in plan.prediction.stages
    )


def _summary(rows: Sequence[Row], population: Population, worst: Sequence[Row]) -> dict[str, Any]:
    return {
        "plans": len(rows),
        "missed": sum(row["missed"] for row in rows),
        "tasks": sum(row["tasks"] for row in rows),
        "all": _distribution(rows),
        "strata": {
            name: _stratum([row for row in rows if name in row["strata"]], len(rows))
            for name in population.strata
        },
        "dominated_by_extras": _distribution([r for r in rows if r["extras_share"] > 0.2]),
        "memory": _memory(rows),
        "rank_correlations": _correlations(rows),
        "worst": [*worst],
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
    """How far predicted and simulated memory peaks of stages differ over all plans: the median, the
    95 % quantile and the maximum of the relative differences, and the share of them within 1 %.
    """
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
    alike = [row for row in rows if row["workload"] == lowest]
    return {
        "workloads_ranked": len(ranks),
        "lowest_ranked": lowest,
        "lowest_rank_correlation": None if lowest is None else ranks[lowest],
        "lowest_ranked_plans": len(alike),
        "lowest_without_one": _without_one(alike),
    }


def _without_one(alike: Sequence[Mapping[str, Any]]) -> list[float]:
    """The lowest and the highest rank correlation between predicted and simulated times that can
    result from leaving out a single plan.
    """
    fewer = [[*alike[:place], *alike[place + 1 :]] for place in range(len(alike))]
    correlations = [_rank_correlation(rows) for rows in fewer]
    return [min(correlations), max(correlations)] if correlations else []


def _ranks(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {
        workload: _rank_correlation(alike)
        for workload, alike in grouped(rows, lambda row: row["workload"]).items()
        if len(alike) >= FEWEST_TO_RANK
    }


def _rank_correlation(rows: Sequence[Mapping[str, Any]]) -> float:
    ranked = spearmanr([row["symbolic_s"] for row in rows], [row["events_s"] for row in rows])
    return float(ranked.statistic)


def _report(
    rows: Sequence[Row], wanted: int, population: Population, worst: Sequence[Row]
) -> Report:
    summary = _summary(rows, population, worst)
    return Report(
        title=population.title,
        words=[*_paragraphs(summary, wanted, population)],
        summary=summary,
        pictures=[
            Drawn(
                name=population.picture,
                caption="Differences over what comes once an iteration.",
                draw=partial(plots.differences, rows),
            )
        ],
        beside=beside(population.beside),
    )


def _paragraphs(summary: Mapping[str, Any], wanted: int, population: Population) -> Iterator[str]:
    yield (
        f"{summary['plans']} of {wanted} plans, {summary['tasks']:,} tasks; draws left out, which "
        f"were not valid, did not fit or not closely: {summary['missed']:,}. A difference is the "
        "closed form's time over the event simulator's, less one. The last column is the lowest "
        f"rank correlation of problems that have {FEWEST_TO_RANK} of the plans."
    )
    strata = {
        name + (" (few)" if figures["share"] < population.strata[name] else ""): (figures, figures)
        for name, figures in summary["strata"].items()
    }
    lines = {
        "all": (summary["all"], summary["rank_correlations"]),
        **strata,
        "first and last over 20 %": (summary["dominated_by_extras"], {}),
    }
    head = ("plans", "number", "median", "95 % within", "largest", "mean", "lowest", "ranks")
    yield table(head, [_line(name, *found) for name, found in lines.items()])
    ranks = summary["rank_correlations"]
    if ranks["lowest_without_one"]:
        lowest, highest = ranks["lowest_without_one"]
        yield (
            f"The lowest rank correlation is of {ranks['lowest_ranked_plans']} plans "
            f"({ranks['lowest_ranked']}); with any one of them left out it is {lowest:.4f} to "
            f"{highest:.4f}. A stratum that is marked (few) has fewer plans than it should have."
        )
    memory = summary["memory"]
    yield (
        f"Peaks of memory: median {memory['median']:.2%}, largest {memory['largest']:.2%}; plans "
        f"whose peaks are within 1 % on every stage: {memory['within_1_percent']:.1%}."
    )
    yield (
        "The largest differences, each with the one thing without which the two differ least (if "
        "that takes half of the difference away):"
    )
    yield IN_A_FILE
    yield _worst_table(summary["worst"])


def _worst_table(rows: Sequence[Row]) -> str:
    return table_of(
        rows,
        ("plan", "{plan}"),
        ("difference", "{difference:+.1%}"),
        ("order", "{order}, {engine}"),
        ("stages", "{stages}"),
        ("micro-batches", "{micro_batches}"),
        ("first and last", "{extras_share:.0%}"),
        ("problem", "{workload}"),
        ("reason", lambda row: row["reason"]),
    )


def _line(name: str, figures: Mapping[str, Any], ranks: Mapping[str, Any]) -> tuple[str, ...]:
    if not figures["plans"]:
        return (name, "0", *("-",) * 6)
    lowest = ranks.get("lowest_rank_correlation")
    sizes = (f"{figures[key]:.2%}" for key in ("median", "p95", "largest"))
    signed = (f"{figures[key]:+.2%}" for key in ("bias", "lowest"))
    return (name, str(figures["plans"]), *sizes, *signed, number(lowest, ".4f"))


POPULATION = Population(
    space="mist",
    title="The closed form against the event simulator",
    plans=random_plans,
    strata=STRATA,
    beside="cross_check",
)
WIDE = Population(
    space="wide-today",
    title="The closed form against the event simulator, over today's dimensions",
    plans=wide_plans,
    strata=wide_strata(),
    beside="cross_check-wide",
    picture="differences-wide",
)
STRAINED = Population(
    space="strained",
    title="The closed form against the event simulator, where pipelines wait",
    plans=strained_plans,
    strata=strained_strata(),
    beside="cross_check-strained",
    picture="differences-strained",
)


# Finds the reason why the closed form and the event simulator differ on a plan: the feature without
# which they differ least.
# Both predict the plan again with one feature removed at a time: a kind of offloading, a kind of
# task, the time of sends, the host, or the interference of streams.


Altered = Callable[[TaskModel], TaskModel]
# Seconds in place of zero for a send without cost: a send that takes exactly zero seconds would no
# longer be a task of the schedule.
_HARDLY_ANY = 1e-9
# A feature counts as the reason for a difference if at most this share of the difference remains
# without it.
HALF = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why two predictors differ on a plan: the removed feature, and the difference that remains
    without it. ``removed`` is empty if no single feature explains half of the difference.
    """

    removed: str
    difference: float

    def __str__(self) -> str:
        if not self.removed:
            return "several things together"
        return f"{self.removed} ({self.difference:+.1%} without)"


def reason_of(job: Job, difference: float) -> Reason:
    """The feature of a plan without which the two predictors differ least; ``removed`` is empty if
    more than half of the difference remains without it.
    """
    reasons = [
        Reason(removed=name, difference=difference_of(replace(job, plan=plan), altered))
        for name, plan, altered in _altered(job.plan)
    ]
    least = min(reasons, key=lambda one: abs(one.difference))
    if abs(least.difference) <= HALF * abs(difference):
        return least
    return Reason(removed="", difference=difference)


def difference_of(job: Job, altered: Altered = as_they_are) -> float:
    """The relative difference of the closed form's iteration time from the event simulator's, if
    both apply the given changes to task times.
    """
    work, cluster = job.workload, job.cluster
    closed = SymbolicPredictor(workload=work, cluster=cluster, altered=altered).predict(job.plan)
    simulator = EventSimulator(workload=work, cluster=cluster, altered=altered)
    played = simulator.simulate(job.plan)
    return closed.iteration_s / played.iteration_s - 1


def _altered(plan: Plan) -> Iterator[tuple[str, Plan, Altered]]:
    """Variants of a plan or of its task times, each without one feature, together with that
    feature's name.
    """
    engine = ENGINES[plan.engine]
    for name in OFFLOADS:
        if any(stage.value(name) > 0 for stage in plan.stages):
            kind = name.removeprefix("offload_")
            yield f"offloaded {_WORDS.get(kind, kind)}", _keeping(plan, kind), as_they_are
    rows = engine.template(overlap_communication=plan.overlap_communication).phases.values()
    kinds = {row.kind for of_phase in rows for row in of_phase}
    for kind, removed in _REMOVABLE.items():
        if kind in kinds:
            yield removed, plan, partial(_without_tasks, kind)
    if plan.num_stages > 1:
        yield "sends", plan, _without_sends
    if engine.host is not None:
        yield "the host's time", plan, _without_host
    yield "streams that slow one another down", plan, _without_contention


_WORDS: Mapping[str, str] = {"optimizer": "optimizer state"}
_REMOVABLE: Mapping[Kind, str] = {"R": "reductions of gradients", "U": "gathers of weights"}


def _keeping(plan: Plan, kind: str) -> Plan:
    """The plan in which one kind of offloaded tensors stays on the GPU."""
    return replace(
        plan,
        stages=tuple(
            replace(stage, offload=_without(stage.offload, kind)) for stage in plan.stages
        ),
    )


def _without(offload: Offload, kind: str) -> Offload:
    return replace(offload, **{kind: 0.0})


def _without_tasks(kind: Kind, tasks: TaskModel) -> TaskModel:
    """The task times of a stage's passes, without the tasks of one kind."""
    phases = {
        phase: tuple(row for row in rows if row.kind != kind)
        for phase, rows in tasks.template.phases.items()
    }
    return replace(tasks, template=replace(tasks.template, phases=phases))


def _without_sends(tasks: TaskModel) -> TaskModel:
    return replace(tasks, send_factor=_HARDLY_ANY)


def _without_host(tasks: TaskModel) -> TaskModel:
    return replace(tasks, host=None)


def _without_contention(tasks: TaskModel) -> TaskModel:
    hardware = replace(tasks.cluster.hardware, interference=NO_INTERFERENCE)
    return replace(tasks, cluster=replace(tasks.cluster, hardware=hardware))
