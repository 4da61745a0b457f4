"""The command ``whole_loop``: profiles this machine, runs plans and baselines in turn, and compares
their times with predictions.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import combinations, product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from experiments.bench.problem import workload_of
from experiments.cli.commandline import DONE, as_options, progress
from experiments.pages.charts import Bars
from experiments.pages.groups import grouped
from experiments.pages.study import Report, Study, beside
from experiments.pages.tables import TIMING, Row, table
from experiments.speedup.contenders import OURS, Contender, contenders
from experiments.speedup.measure_speedup import chosen_systems
from experiments.speedup.same_training import held_against
from experiments.speedup.trial import run_trial
from experiments.training.run_options import check_node
from mistlab.job.job import Job, hardware_from, job_to_mapping, model_from
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import Hardware
from mistlab.plan.named_spaces import space_of
from mistlab.plan.workload import ModelSpec, Workload
from searchers.meshes import equal_pipelines, only
from searchers.savings import Chooser, chosen_plan
from simulators.symbolic import SymbolicPredictor

# A model so large that a step of eight sequences takes one to four seconds on a core: arithmetic
# then takes much longer than Python.
MODEL = ModelSpec.of(family="gpt", hidden=512, layers=8, heads=8, vocab=4096)
SPACE = "wide"
MOST_DRAWN = 1000
QUICK = {"plans": 3, "trials": 1, "repeats": 1, "steps": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEntry:
    """One of the runs that are compared: a plan of this package or of a baseline, on as many ranks
    as the plan has.

    ``is_trial`` says that the system tries the plan to be fast; other plans are drawn at random.
    """

    name: str
    system: str
    is_trial: bool
    contender: Contender


def whole_loop(options: argparse.Namespace) -> int:
    """Do everything on one machine: profile it, search for plans, run a dozen of them and the plans
    of baselines, and compare times with predictions.

    The machine is profiled, unless --hardware names its file. The best plans of a search, as many
    plans of each baseline, and random plans then run in turn, several times each. The report
    compares predictions with measurements. On a machine without GPUs, processes stand in for GPUs.
    A call that was stopped can be continued. Baselines need pip install '.[baselines]'; --systems
    mistlab leaves them out.
    """
    if options.quick:
        vars(options).update(QUICK)
    systems = chosen_systems(options.systems)
    workload = _workload(options)
    check_node(options.device, options.gpus_per_node, workload.precision, "--precision")
    study = Study.begin("whole_loop", options, goes_on=True)
    hardware = _hardware(options, study.path)
    entries = [*_own(workload, hardware, options)]
    cluster = Cluster(hardware=hardware, nodes=1, gpus_per_node=hardware.node.gpus)
    for system in systems:
        if system != OURS:
            tried = contenders(system, workload, cluster, options.trials, options.seed)
            entries += [
                LoopEntry(
                    name=f"{system} {number}", system=system, is_trial=True, contender=contender
                )
                for number, contender in enumerate(tried, start=1)
            ]
    earlier = {_key(row): row for row in study.earlier}
    ours: Sequence[float] | None = None
    # The plans run in turn, so that all of them suffer equally if the machine slows down.
    for number, entry in study.counted([*product(range(options.repeats), entries)], "runs"):
        row = _described(entry, number)
        outcome = earlier.get(_key(row))
        if outcome is None:
            settings = {"steps": options.steps, "device": options.device, "seed": options.seed}
            outcome = run_trial(entry.system, entry.contender.job, **settings)
            assert outcome is not None
            outcome = held_against(outcome, ours, workload.precision)
            seconds = outcome.get(TIMING, {}).get("median_s")
            progress(
                f"{entry.name}: {outcome['outcome'] if seconds is None else f'{seconds:.3f} s'}"
            )
        if entry.system == OURS and TIMING in outcome:
            ours = ours or outcome.get("losses")
        study.add({**outcome, **row})
    return study.end(report(study.rows, hardware, has_priority=_has_priority()), DONE)


def _workload(options: argparse.Namespace) -> Workload:
    with as_options():
        return workload_of(
            options,
            model=MODEL if options.model is None else model_from(options.model, Path()),
            precision=options.precision or ("fp32" if options.device == "cpu" else "bf16"),
        )


def _hardware(options: argparse.Namespace, folder: Path) -> Hardware:
    """The hardware that is named, or this machine from an earlier profile or a new one."""
    if options.hardware is not None:
        return hardware_from(options.hardware, Path())
    path = folder / "machine.yaml"
    if not path.exists():
        request = {"out": path, "tables": None, "datasheet": None, "only": None, "json": False}
        asked = {**vars(options), **request, "attention_kernel": "flash"}
        with redirect_stdout(sys.stderr):
            import_module("experiments.calibration.profile_hardware").profile(
                argparse.Namespace(**asked)
            )
    return hardware_from(str(path), Path())


def _own(
    workload: Workload, hardware: Hardware, options: argparse.Namespace
) -> Iterator[LoopEntry]:
    """The best plans of a search on all devices, followed by random plans on one device and on
    all.
    """
    devices = hardware.node.gpus
    clusters = [Cluster(hardware=hardware, nodes=1, gpus_per_node=n) for n in sorted({1, devices})]
    count, seed = min(options.trials, options.plans), options.seed
    entries = {one.job.plan: one for one in contenders(OURS, workload, clusters[-1], count, seed)}
    searched = len(entries)
    for contender in _drawn(workload, clusters, seed):
        if len(entries) >= options.plans:
            break
        entries.setdefault(contender.job.plan, contender)
    for number, contender in enumerate(entries.values(), start=1):
        yield LoopEntry(
            name=f"{number:02d}", system=OURS, is_trial=number <= searched, contender=contender
        )


def _drawn(workload: Workload, clusters: Sequence[Cluster], seed: int) -> Iterator[Contender]:
    """Random plans that fit in memory: a cluster is drawn first, then a pipeline on it, then memory
    savings.
    """
    draw = np.random.default_rng(seed)
    chooser = Chooser(lambda _, options: int(draw.integers(options)))
    space = space_of(SPACE)
    for tried in range(MOST_DRAWN):
        cluster = clusters[tried % len(clusters)]
        problem = Problem(workload=workload, cluster=cluster)
        pipelines = [*equal_pipelines(problem, space)]
        pipeline = pipelines[int(draw.integers(len(pipelines)))]
        plan = chosen_plan(problem, only(pipeline, space), chooser)
        if plan is None:
            continue
        prediction = SymbolicPredictor(workload=workload, cluster=cluster).predict(plan)
        if prediction.fits:
            yield Contender(
                job=Job(workload=workload, cluster=cluster, plan=plan), prediction=prediction
            )


def _has_priority() -> bool:
    """Whether the operating system gives this process, and so each run, priority over all ordinary
    processes.
    """
    return os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)


def _described(entry: LoopEntry, number: int) -> dict[str, Any]:
    job, prediction = entry.contender.job, entry.contender.prediction
    return {
        "name": entry.name,
        "system": entry.system,
        "is_trial": entry.is_trial,
        "repeat": number,
        "ranks": job.plan.num_gpus,
        "plan": job_to_mapping(job)["plan"],
        "predicted_s": prediction and prediction.iteration_s,
    }


def _key(row: Row) -> str:
    return repr((row["system"], row["repeat"], row["plan"]))


# The report: compares predictions with measurements, and this package's plans with those of the
# baselines.


# Two plans are ranked only if their times differ by at least this factor.
APART = 1.25
HEAD = (
    *("plan", "ranks", "dp x tp x pp", "micro-batch", "ZeRO", "recomputed", "offloaded"),
    *("measured s", "spread", "predicted s", "error"),
)

PRIORITY = (
    "Runs had real-time priority, because the machine had other work. Linux leaves a twentieth of "
    "each second to other work all the same, and predictions do not know of that."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A plan with its prediction, and with the median step time of each of its runs."""

    name: str
    system: str
    is_trial: bool
    ranks: int
    plan: Mapping[str, Any]
    predicted_s: float
    runs_s: tuple[float, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Measured":
        """The measurement of a plan from its result rows, of which at least one is of a run that
        succeeded.
        """
        names = ("name", "system", "is_trial", "ranks", "plan", "predicted_s")
        runs_s = tuple(row[TIMING]["median_s"] for row in rows if TIMING in row)
        return cls(**{name: rows[0][name] for name in names}, runs_s=runs_s)

    @property
    def seconds(self) -> float:
        """The median of the step times of the plan's runs, in seconds."""
        return median(self.runs_s)

    @property
    def spread(self) -> float:
        """The range of the step times of the plan's runs, as a share of their median."""
        return (max(self.runs_s) - min(self.runs_s)) / self.seconds

    @property
    def error(self) -> float:
        """The predicted step time over the measured one, minus one."""
        return self.predicted_s / self.seconds - 1

    @property
    def line(self) -> tuple[object, ...]:
        """The plan's line in the table of measurements."""
        stages = self.plan["stages"]
        first = stages[0]
        degrees = (first["data_parallel"], first["tensor_parallel"], len(stages))
        blocks = sum(stage["layers"] for stage in stages)
        recomputed = sum(stage.get("checkpointed_layers", 0) for stage in stages)
        ratios = [stage.get("offload", {}) for stage in stages]
        kinds = sorted({name for one in ratios for name, ratio in one.items() if ratio})
        return (
            *(self.name, self.ranks, " x ".join(map(str, degrees))),
            first["micro_batch"],
            "/".join(str(stage.get("zero", 0)) for stage in stages),
            f"{recomputed} of {blocks}",
            ", ".join(kinds) or "-",
            *(f"{self.seconds:.3f}", f"{self.spread:.0%}", f"{self.predicted_s:.3f}"),
            f"{self.error:+.1%}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """The speedup of this package's best plan over a baseline's. ``low`` compares its slowest run
    with the baseline's fastest, ``high`` the reverse; ``trials`` are the numbers of plans that both
    tried.
    """

    over: str
    trials: tuple[int, int]
    ratio: float
    low: float
    high: float

    @property
    def words(self) -> str:
        """The speedup as text: a win, a loss, or a difference within the spread of the runs."""
        verdict = "a win" if self.low > 1 else "a loss" if self.high < 1 else "within the spread"
        ours, theirs = self.trials
        return (
            f"The fastest of {ours} searched plans is {self.ratio:.2f} times as fast as the "
            f"fastest of {theirs} of {self.over} ({self.low:.2f} to {self.high:.2f} from run to "
            f"run): {verdict}."
        )


def report(rows: Sequence[Row], hardware: Hardware, *, has_priority: bool) -> Report:
    """The report: a table of runs, the errors of predictions, whether plans are ranked correctly,
    and speedups.
    """
    by_name = grouped(rows, lambda row: row["name"])
    ran = [Measured.of(own) for own in by_name.values() if any(TIMING in row for row in own)]
    paragraphs = [f"Measured on {hardware.description or hardware.name}."]
    if has_priority:
        paragraphs.append(PRIORITY)
    paragraphs += [table(HEAD, [one.line for one in ran])] if ran else []
    paragraphs += [
        f"{row['name']}: {row['outcome']}"
        for rows_of_name in by_name.values()
        for row in rows_of_name[:1]
        if not any(TIMING in row for row in rows_of_name)
    ]
    of_ours = [one for one in ran if one.system == OURS]
    summary: dict[str, Any] = {"plans": len(of_ours)}
    if of_ours:
        speedups = _speedups(ran)
        summary[TIMING] = _judged(of_ours) | {"speedups": [asdict(one) for one in speedups]}
        paragraphs += _sentences(summary[TIMING], len(of_ours)) + [one.words for one in speedups]
    picture = Bars(
        name="whole_loop",
        caption="Seconds of a step, predicted and measured.",
        groups=[one.name for one in ran],
        series={
            "predicted": [one.predicted_s for one in ran],
            "measured": [one.seconds for one in ran],
        },
        y="s",
    )
    both = [*beside("whole_loop"), *beside("whole_loop-one-core")]
    return Report(
        title="The whole loop on one machine",
        words=paragraphs,
        summary=summary,
        pictures=[picture] if ran else [],
        beside=both if hardware.gpu.cores else (),
    )


def _judged(ours: Sequence[Measured]) -> dict[str, Any]:
    """The errors of predictions; and of the pairs of plans that the runs can tell apart, the share
    that is predicted in the right order.
    """
    errors = [abs(one.error) for one in ours]
    pairs = [
        (first, other) if first.seconds < other.seconds else (other, first)
        for first, other in combinations(ours, 2)
    ]
    apart = [(one, other) for one, other in pairs if other.seconds > APART * one.seconds]
    wrong = [(one, other) for one, other in apart if one.predicted_s >= other.predicted_s]
    return {
        "median_error": median(errors),
        "largest_error": max(errors),
        "pairs_apart": len(apart),
        "pairs_right": len(apart) - len(wrong),
        "pairs_wrong": [[one.name, other.name] for one, other in wrong],
    }


def _speedups(ran: Sequence[Measured]) -> list[Speedup]:
    """For each baseline, the measured speedup of the fastest plan that this package's search found
    over the baseline's fastest plan.
    """
    tried = grouped((run for run in ran if run.is_trial), lambda run: run.system)
    best = {system: min(own, key=lambda run: run.seconds) for system, own in tried.items()}
    ours = best.pop(OURS, None)
    if ours is None:
        return []
    return [
        Speedup(
            over=system,
            trials=(len(tried[OURS]), len(tried[system])),
            ratio=theirs.seconds / ours.seconds,
            low=min(theirs.runs_s) / max(ours.runs_s),
            high=max(theirs.runs_s) / min(ours.runs_s),
        )
        for system, theirs in best.items()
    ]


def _sentences(judged: Mapping[str, Any], plans: int) -> list[str]:
    errors = (
        f"Predicted beside measured: {judged['median_error']:.1%} in the median of {plans} plans, "
        f"{judged['largest_error']:.1%} at most."
    )
    order = (
        f"Of {judged['pairs_apart']} pairs of plans whose times differ by more than "
        f"{APART - 1:.0%}, {judged['pairs_right']} are predicted in the right order."
    )
    wrong = ", ".join(f"{one} before {other}" for one, other in judged["pairs_wrong"])
    return [f"{errors} {order}" + (f" Not so: {wrong}." if wrong else "")]
