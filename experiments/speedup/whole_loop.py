"""Runs plans and baselines in turn on a profiled machine, and holds predictions against them."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.problem import workload_of
from experiments.cli.commandline import DONE, as_options, progress
from experiments.pages.study import Study
from experiments.pages.tables import TIMING, Row
from experiments.speedup.contenders import OURS, Contender, contenders
from experiments.speedup.loop_report import report
from experiments.speedup.measure_speedup import chosen_systems
from experiments.speedup.trial import run_trial
from mistlab.job.job import Job, hardware_from, job_to_mapping, model_from
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import Hardware
from mistlab.plan.named_spaces import space_of
from mistlab.plan.workload import ModelSpec, Workload
from searchers.meshes import equal_pipelines, only
from searchers.savings import Chooser, chosen_plan
from simulators.symbolic import SymbolicPredictor

# Trains a step of eight sequences in one to four seconds on a core: arithmetic decides, not Python.
MODEL = ModelSpec.of(family="gpt", hidden=512, layers=8, heads=8, vocab=4096)
SPACE = "wide"
MOST_DRAWN = 1000
QUICK = {"plans": 3, "trials": 1, "repeats": 1, "steps": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing that runs: a plan of this package or a baseline's, on as many ranks as it takes.

    ``is_trial`` says that the system tries the plan to be fast; other plans are drawn at random.
    """

    name: str
    system: str
    is_trial: bool
    contender: Contender


def whole_loop(options: argparse.Namespace) -> int:
    """The whole loop on one machine: profile it, search, run a dozen plans and the baselines.

    The machine is profiled, unless --hardware names its file. The best plans of a search and
    plans drawn at random then run in turn, several times, with as many plans of each baseline
    as the search gave. Predictions stand beside measurements. Without a GPU processes stand in
    for GPUs. A call that was stopped goes on. Baselines need pip install '.[baselines]';
    --systems mistlab leaves them out.
    """
    if options.quick:
        vars(options).update(QUICK)
    systems = chosen_systems(options.systems)
    study = Study.begin("whole_loop", options, goes_on=True)
    workload = _workload(options)
    hardware = _hardware(options, study.path)
    entries = [*_own(workload, hardware, options)]
    cluster = Cluster(hardware=hardware, nodes=1, gpus_per_node=hardware.node.gpus)
    for system in systems:
        if system != OURS:
            tried = contenders(system, workload, cluster, options.trials, options.seed)
            entries += [
                Entry(name=f"{system} {number}", system=system, is_trial=True, contender=contender)
                for number, contender in enumerate(tried, start=1)
            ]
    earlier = {_key(row): row for row in study.earlier}
    # In turn, so that a machine that slows down slows every plan down.
    for number, entry in study.counted([*product(range(options.repeats), entries)], "runs"):
        row = _described(entry, number)
        told = earlier.get(_key(row))
        if told is None:
            settings = {"steps": options.steps, "device": options.device, "seed": options.seed}
            told = run_trial(entry.system, entry.contender.job, **settings)
            assert told is not None
            seconds = told.get(TIMING, {}).get("median_s")
            progress(f"{entry.name}: {told['outcome'] if seconds is None else f'{seconds:.3f} s'}")
        study.add({**told, **row})
    return study.end(report(study.rows, hardware, has_priority=_has_priority()), DONE)


def _workload(options: argparse.Namespace) -> Workload:
    with as_options():
        return workload_of(
            options,
            model=MODEL if options.model is None else model_from(options.model, Path()),
            precision=options.precision or ("fp32" if options.device == "cpu" else "bf16"),
        )


def _hardware(options: argparse.Namespace, folder: Path) -> Hardware:
    """The hardware that is named, or this machine as it was profiled before or is profiled now."""
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


def _own(workload: Workload, hardware: Hardware, options: argparse.Namespace) -> Iterator[Entry]:
    """The best plans of a search on all devices, then plans drawn at random on one and on all."""
    devices = hardware.node.gpus
    clusters = [Cluster(hardware=hardware, nodes=1, gpus_per_node=n) for n in sorted({1, devices})]
    count, seed = min(options.trials, options.plans), options.seed
    found = {one.job.plan: one for one in contenders(OURS, workload, clusters[-1], count, seed)}
    searched = len(found)
    for contender in _drawn(workload, clusters, seed):
        if len(found) >= options.plans:
            break
        found.setdefault(contender.job.plan, contender)
    for number, contender in enumerate(found.values(), start=1):
        yield Entry(
            name=f"{number:02d}", system=OURS, is_trial=number <= searched, contender=contender
        )


def _drawn(workload: Workload, clusters: Sequence[Cluster], seed: int) -> Iterator[Contender]:
    """Random plans that fit: first a cluster, then a pipeline of it, then how to save memory."""
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
    """Whether this process, and so each run, goes before all ordinary work of the machine."""
    return os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)


def _described(entry: Entry, number: int) -> dict[str, Any]:
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
