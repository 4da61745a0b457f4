"""Whether a plan fits, and the cheapest change that makes it fit."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.bench.problem import load_equal, numbers_of, on_cluster_with, problem_of
from experiments.budget.changes import Changed, single, spread, together
from experiments.budget.fitting_words import Tried, report_of
from experiments.cli.commandline import DONE, as_options, progress
from experiments.pages.groups import grouped
from experiments.pages.study import Study
from mistlab import catalog
from mistlab.core.values import InputError, to_mapping
from mistlab.cost.memory import allocator_of, host_bytes_of, room_bytes
from mistlab.job.job import Job, dump_job
from mistlab.job.prediction import MemoryByClass
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from mistlab.schedule.placement import even_shares
from simulators.symbolic import SymbolicPredictor

# So many changes at once are tried, and in haste.
MOST_CHANGES, QUICK_CHANGES = 4, 2
# More nodes are tried up to so many times.
MORE_NODES = (2, 4, 8, 16, 32)
Row = dict[str, Any]


def will_it_fit(options: argparse.Namespace) -> int:
    """Whether a plan fits its GPUs, what fills them, and the cheapest change that makes it fit.

    The plan is a file, or is described by options: replicas over all GPUs, as far as tensor and
    pipeline parallelism leave them. Where it does not fit, changes of one kind are tried, then
    of several together: more blocks recomputed, states sharded or swapped, smaller
    micro-batches, other meshes. The cheapest is the one with the shortest predicted iteration.
    Where none of them fits, more GPUs and other hardware are tried, and the boards that draw
    least power are the cheapest.
    """
    given = None if options.plan is None else load_equal(options.plan)
    job = _job(options) if given is None else on_cluster_with(given, numbers_of(options))
    study = Study.begin("will_it_fit", options)
    most = QUICK_CHANGES if options.quick else MOST_CHANGES
    asked, cheapest = cheapest_change(job, most=most, add=study.add)
    if cheapest is not None:
        dump_job(cheapest.job, study.path / "plan.yaml")
    return study.end(report_of(study, asked, cheapest), DONE)


def cheapest_change(
    job: Job, *, most: int = MOST_CHANGES, add: Callable[[Row], None] = lambda row: None
) -> tuple[Tried, Tried | None]:
    """A plan with its prediction and, where it does not fit, the cheapest of the changes that make
    it fit; every try is a row that ``add`` is told of."""
    (asked,) = _predicted([Changed(changes=(), job=job)], "asked")
    add(_row(asked, asked))
    if asked.prediction.fits:
        return asked, None
    cheapest = _cheapest(asked, most, add)
    if cheapest is not None:
        add({**_row(cheapest, asked), "kind": "cheapest"})
    return asked, cheapest


def _check_degrees(options: argparse.Namespace) -> None:
    for name in ("tensor_parallel", "stages", "micro_batch"):
        if getattr(options, name) < 1:
            option = f"--{name.replace('_', '-')}"
            message = f"{option}: {getattr(options, name)} is too small: give at least 1"
            raise InputError(message)


def _job(options: argparse.Namespace) -> Job:
    """The plan that the options describe."""
    workload, cluster = problem_of(options)
    _check_degrees(options)
    layers, stages = workload.model.layers, options.stages
    group = options.tensor_parallel * stages
    if stages > layers or cluster.num_gpus % group:
        message = (
            f"--stages {stages} --tensor-parallel {options.tensor_parallel}: do not divide "
            f"{cluster.num_gpus} GPUs and {layers} blocks: give degrees whose product divides "
            f"{cluster.num_gpus}, and at most {layers} stages"
        )
        raise InputError(message)
    replicas = cluster.num_gpus // group
    count, rest = divmod(workload.global_batch, replicas * options.micro_batch)
    if rest or not count:
        message = (
            f"--global-batch {workload.global_batch}: {replicas} replicas with micro-batches of "
            f"{options.micro_batch} do not divide it: give a multiple of "
            f"{replicas * options.micro_batch}"
        )
        raise InputError(message)
    with as_options():
        own = tuple(
            StagePlan(
                layers=share,
                data_parallel=replicas,
                tensor_parallel=options.tensor_parallel,
                micro_batch=options.micro_batch,
                zero=options.zero,
                checkpointed_layers=min(options.checkpointed_layers, share),
            )
            for share in even_shares(layers, stages)
        )
    plan = Plan(engine=options.engine or "mistlab", micro_batches=count, stages=own)
    with as_options():
        return Job(workload=workload, cluster=cluster, plan=plan)


def _predicted(changed: Sequence[Changed], kind: str) -> list[Tried]:
    """Plans of one problem with their predictions; those that cannot be predicted are left out."""
    if not changed:
        return []
    job = changed[0].job
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    predictions = predictor.predict_many([one.job.plan for one in changed])
    return [
        Tried(changed=one, kind=kind, words=one.words, prediction=prediction)
        for one, prediction in zip(changed, predictions, strict=True)
    ]


def _cheapest(asked: Tried, most: int, add: Callable[[Row], None]) -> Tried | None:
    """The change with the shortest iteration of those that fit: a single one or several on these
    GPUs; where none fits more GPUs and other ones."""
    changed = [*single(asked.job)]
    progress(f"{len(changed)} plans with one change")
    tried = _predicted(changed, "single")
    for one in _telling(tried):
        add(_row(one, asked))
    fitting = [one for one in tried if one.prediction.fits]
    for number in range(2, most + 1):
        if fitting and number > QUICK_CHANGES:
            break
        several = _predicted([*together(asked.job, number)], f"{number} together")
        progress(f"{len(several):,} plans with {number} changes")
        fitting += [one for one in several if one.prediction.fits]
    if not fitting:
        elsewhere = [*_elsewhere(asked)]
        for one in elsewhere:
            add(_row(one, asked))
        fitting = [one for one in elsewhere if one.prediction.fits]
    return min(fitting, key=_price, default=None)


def _price(one: Tried) -> tuple[float, float]:
    """The price of a change: power of all boards first, where there are more GPUs or other ones,
    then seconds."""
    watts = one.job.cluster.hardware.gpu.board_watts or 0.0
    return watts * one.job.plan.num_gpus, one.prediction.iteration_s


def _telling(tried: Sequence[Tried]) -> Iterator[Tried]:
    """Of the changes of each kind the fastest that fits; where none does, the one that saves
    most."""
    for alike in grouped(tried, lambda one: one.group).values():
        fitting = [one for one in alike if one.prediction.fits]
        if fitting:
            yield min(fitting, key=lambda one: one.prediction.iteration_s)
        else:
            yield min(alike, key=lambda one: one.prediction.peak_reserved_bytes)


def _elsewhere(asked: Tried) -> Iterator[Tried]:
    """All that saves memory here, on more nodes and on GPUs with more memory."""
    cluster = asked.job.cluster
    progress("more GPUs, and GPUs with more memory")
    for times in MORE_NODES:
        nodes = replace(cluster, nodes=times * cluster.nodes)
        found = [*_best_there(asked.job, nodes, times)]
        yield from found
        if found:
            break
    for name in catalog.calibrated_names():
        hardware = catalog.hardware(name)
        if hardware.gpu.memory_bytes > cluster.whole_memory_bytes and not cluster.memory_gib:
            yield from _best_there(asked.job, replace(cluster, hardware=hardware), 1)


def _best_there(asked: Job, cluster: Cluster, times: int) -> Iterator[Tried]:
    """The fastest plan that fits on another cluster, with so many times the GPUs."""
    where = f"on {times * asked.plan.num_gpus} {cluster.hardware.name}"
    fitting = []
    for job in spread(asked, cluster, times):
        changed = [Changed(changes=(), job=job), *single(job), *together(job, 2)]
        fitting += [one for one in _predicted(changed, "elsewhere") if one.prediction.fits]
    if fitting:
        best = min(fitting, key=_price)
        yield replace(best, words=", ".join(filter(None, (where, best.words))))


def _row(one: Tried, asked: Tried) -> Row:
    prediction, cluster = one.prediction, one.job.cluster
    fullest = max(prediction.stages, key=lambda stage: stage.peak_reserved_bytes)
    memory: Mapping[str, int] = to_mapping(fullest.memory)
    assert set(memory) == {*MemoryByClass.__slots__}
    return {
        "kind": one.kind,
        "change": one.words,
        "fits": prediction.fits,
        "gpus": one.job.plan.num_gpus,
        "iteration_s": prediction.iteration_s,
        "slower_by": prediction.iteration_s / asked.prediction.iteration_s - 1,
        "stage": prediction.stages.index(fullest),
        "reserved_bytes": fullest.peak_reserved_bytes,
        "room_bytes": round(room_bytes(cluster)),
        "outside_bytes": round(allocator_of(cluster).outside_bytes),
        "host_bytes": round(host_bytes_of(one.job.plan, prediction, cluster)),
        "host_room_bytes": cluster.host_memory_bytes,
        "memory": memory,
    }
