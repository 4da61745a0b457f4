"""Tells whether a plan fits in memory and, if not, finds the cheapest change that makes it fit."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any

from experiments.bench.adapter_words import adapters_called, bytes_of_adapters
from experiments.bench.logit_words import logits_called
from experiments.bench.problem import (
    asked_words,
    check_beside_plan,
    hardware_named,
    load_equal,
    numbers_of,
    on_cluster_with,
    peak_bounds_of,
    probable_words,
    problem_of,
    room_words,
    untimed_words,
)
from experiments.budget.changes import Changed, single, spread, together
from experiments.cli.command import experiment
from experiments.cli.commandline import DONE, OF_CLUSTER, as_options, progress
from experiments.pages.charts import Drawn
from experiments.pages.groups import grouped
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, gib, table, table_of, yes_no
from experiments.tuning import search_plots
from experiments.tuning.leaner import leaner, leaner_adapters
from mistlab import catalog
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError, reject, to_mapping
from mistlab.cost.memory import allocator_of, host_bytes_of, room_bytes
from mistlab.engines.engine import ENGINES
from mistlab.job.job import Job, dump_job, hardware_from
from mistlab.job.prediction import MemoryByClass, Prediction
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import Hardware
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.plan_words import count_words, plan_words
from mistlab.schedule.placement import even_shares
from simulators.symbolic import SymbolicPredictor

# A changed plan that is tried in place of a plan that does not fit, with its cost.


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A changed plan with its prediction, a description of the changes, and the GPUs on which it is
    tried (the given GPUs, more of them, or another kind).
    """

    changed: Changed
    kind: str
    words: str
    prediction: Prediction

    @property
    def job(self) -> Job:
        """The job (workload, cluster and plan) of the changed plan."""
        return self.changed.job

    @property
    def group(self) -> str:
        """The kinds of changes that were made to the plan, joined to one text."""
        return " and ".join(change.kind for change in self.changed.changes)


# Shows whether a plan fits, as text and as pictures of its memory by kind of content (weights,
# activations, ...).


def report_of(
    study: Study, asked: Tried, cheapest: Tried | None, otherwise: Tried | None = None
) -> Report:
    """The report of the command ``will_it_fit``, made from its result rows; ``otherwise`` is a plan
    that fits if the training itself is changed.
    """
    row = study.rows[0]
    work, cluster = asked.job.workload, asked.job.cluster
    title = f"Will it fit: {work.model.name} on {cluster.num_gpus} {cluster.hardware.name}"
    others = [one for one in study.rows if one["kind"] not in ("asked", "cheapest")]
    logits = logits_called(asked.job, asked.prediction)
    paragraphs = [
        f"{asked_words(work, cluster)}, engine {asked.job.plan.engine}.",
        *(f"Note: {remark}." for remark in work.remarks),
        " ".join([_verdict(row), f"Plans may take {room_words(cluster)}.", _probable(row)]),
        "; ".join(plan_words(asked.job.plan)[:2]) + ".",
        _memory(row),
        *(f"{words}." for words in (row["adapters"], logits) if words),
    ]
    if work.train == "adapters":
        untimed = untimed_words(ENGINES[asked.job.plan.engine], work)
        paragraphs += filter(None, [untimed])
    if not row["fits"]:
        paragraphs.append(_changes(others))
        # What the user's own GPUs can train comes before other GPUs.
        ways = [[*_cheapest_words(study, cheapest)], [*_otherwise_words(otherwise)]]
        is_elsewhere = cheapest is not None and cheapest.kind == "elsewhere"
        paragraphs += [words for way in (ways[::-1] if is_elsewhere else ways) for words in way]
    return Report(
        title=title,
        words=paragraphs,
        summary={
            "fits": row["fits"],
            "fit_probability": row["fit_probability"],
            "cheapest": None if cheapest is None else cheapest.words,
            "otherwise": None if otherwise is None else otherwise.words,
        },
        pictures=[*_pictures(asked, cheapest)],
    )


def _verdict(row: Row) -> str:
    needs, room = row["reserved_bytes"] / GIB_BYTES, row["room_bytes"] / GIB_BYTES
    host, host_room = row["host_bytes"] / GIB_BYTES, row["host_room_bytes"] / GIB_BYTES
    where = f"the fullest GPU, of stage {row['stage']}, needs {needs:.1f} of {room:.1f} GiB"
    if row["fits"]:
        return f"Yes: {where}, {room - needs:.1f} GiB are left."
    if needs > room:
        return f"No: {where}, {needs - room:.1f} GiB too much."
    return f"No: {where}, but a node's host memory needs {host:,.1f} of {host_room:,.1f} GiB."


def _probable(row: Row) -> str:
    """A sentence with the probability that the plan fits, or that it does not."""
    sentence: str = row["probable"]
    return f"{sentence[0].upper()}{sentence[1:]}."


def _memory(row: Row) -> str:
    """What fills the memory of the fullest GPU (weights, gradients, states, activations, ...),
    largest first.
    """
    held = sorted(row["memory"].items(), key=lambda item: -item[1])
    kept = row["reserved_bytes"] - sum(row["memory"].values())
    lines = [(name, size) for name, size in held if size]
    return table(
        ["held by", "GiB"], [(name, gib(size)) for name, size in (*lines, ("allocator", kept))]
    )


def _changes(rows: Sequence[Row]) -> str:
    return table_of(
        rows,
        ("change", "{change}"),
        ("fits", lambda row: yes_no(row["fits"])),
        ("fullest GPU (GiB)", lambda row: gib(row["reserved_bytes"], ".1f")),
        ("host (GiB)", lambda row: gib(row["host_bytes"], ",.0f")),
        ("iteration (s)", "{iteration_s:.3f}"),
        ("slower by", "{slower_by:+.1%}"),
    )


def _cheapest_words(study: Study, cheapest: Tried | None) -> Iterator[str]:
    if cheapest is None:
        most = "two" if study.options.quick else "four"
        yield (
            f"Nothing that was tried makes it fit: up to {most} changes at once, and two on up to "
            "32 times the GPUs and on other hardware of the catalogue. Search for another plan: "
            "python -m experiments.tune."
        )
        return
    row = study.rows[-1]
    what = "The cheapest change that makes it fit"
    if cheapest.kind == "elsewhere":
        what = (
            "No change of the plan makes it fit on these GPUs. The cheapest on more of them or "
            "on other GPUs that were measured"
        )
    yield (
        f"{what}: {cheapest.words}. An iteration takes "
        f"{row['iteration_s']:.3f} s, {row['slower_by']:+.1%} against the plan if it did fit, and "
        f"the fullest GPU {row['reserved_bytes'] / GIB_BYTES:.1f} of "
        f"{row['room_bytes'] / GIB_BYTES:.1f} GiB. The plan is {study.path_of('plan.yaml')}."
    )


def _otherwise_words(otherwise: Tried | None) -> Iterator[str]:
    if otherwise is not None:
        size = otherwise.prediction.peak_reserved_bytes / GIB_BYTES
        yield (
            f"Another training fits here: {otherwise.words}. An iteration takes "
            f"{otherwise.prediction.iteration_s:.3f} s, and the fullest GPU {size:.1f} GiB."
        )


def _pictures(asked: Tried, cheapest: Tried | None) -> Iterator[Drawn]:
    pictured = {
        "will_it_fit": ("as asked", asked),
        "will_it_fit-changed": ("with the cheapest change", cheapest),
    }
    for name, (title, tried) in pictured.items():
        if tried is not None:
            cluster = tried.job.cluster
            outside_bytes = allocator_of(cluster).outside_bytes
            draw = partial(
                search_plots.memory, tried.prediction, outside_bytes, cluster.memory_bytes
            )
            caption = f"A GPU of each stage at its fullest moment, {title}."
            yield Drawn(name=name, caption=caption, draw=draw)


# The options that may be given together with a plan file; all others are determined by the plan.
BESIDE_A_PLAN = ("hardware", *experiment("will_it_fit"), *OF_CLUSTER)

# The largest number of changes that are combined, and the same for a quick search.
MOST_CHANGES, QUICK_CHANGES = 4, 2
# The factors by which the number of GPUs is multiplied to see whether the plan fits then.
MORE_GPUS = (2, 4, 8, 16, 32)


def will_it_fit(options: argparse.Namespace, line: Sequence[str]) -> int:
    """Tell whether a plan fits its GPUs, what fills their memory, and the cheapest change that
    makes it fit.

    The plan is a file, in which --hardware replaces only the GPUs, or is described by options: all
    GPUs that tensor and pipeline parallelism leave are data-parallel replicas. If the plan does not
    fit, changes of one kind are tried, then combinations of several kinds: more recomputed blocks,
    states sharded or offloaded, smaller micro-batches, other parallel degrees. The cheapest change
    is the one with the shortest predicted iteration. If no change makes the plan fit, more GPUs and
    other hardware are tried, of which the boards that draw least power are the cheapest. Then the
    command names another training that fits and is faster: with a loss computed in chunks, 16-bit
    optimizer states, adapters, or a 4-bit base model, or with two of these.
    """
    job = _job(options) if options.plan is None else _given(options, line)
    study = Study.begin("will_it_fit", options)
    most = QUICK_CHANGES if options.quick else MOST_CHANGES
    asked, cheapest = cheapest_change(job, most=most, add=study.add)
    if cheapest is not None:
        dump_job(cheapest.job, study.path / "plan.yaml")
    otherwise = None
    if not asked.prediction.fits:
        is_here = cheapest is not None and cheapest.kind != "elsewhere"
        within_s = cheapest.prediction.iteration_s if cheapest is not None and is_here else inf
        otherwise = trained_otherwise(job, as_options=options.plan is None, within_s=within_s)
    return study.end(report_of(study, asked, cheapest, otherwise), DONE)


def _given(options: argparse.Namespace, line: Sequence[str]) -> Job:
    """The job of the plan file that is given, on the hardware and with the hardware figures that
    options set.
    """
    check_beside_plan(line, BESIDE_A_PLAN, str(options.plan))
    job = load_equal(options.plan)
    if any(word.partition("=")[0] == "--hardware" for word in line):
        with as_options():
            hardware = hardware_from(hardware_named(options.hardware), Path())
            job = replace(job, cluster=replace(job.cluster, hardware=hardware))
    return on_cluster_with(job, numbers_of(options))


def cheapest_change(
    job: Job, *, most: int = MOST_CHANGES, add: Callable[[Row], None] = lambda row: None
) -> tuple[Tried, Tried | None]:
    """A plan with its prediction and, if it does not fit, the cheapest change that makes it fit.
    Every changed plan that is tried is passed to ``add``.
    """
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
            reject(
                f"--{name.replace('_', '-')}: {getattr(options, name)} is too small: give at "
                "least 1"
            )


def _job(options: argparse.Namespace) -> Job:
    """The job with the plan that the options describe."""
    engine = options.engine or "mistlab"
    workload, cluster = problem_of(options, engines=(engine,))
    _check_degrees(options)
    layers, stages = workload.model.layers, options.stages
    group, blocks = options.tensor_parallel * stages, options.checkpointed_layers
    if stages > layers:
        reject(
            f"--stages {stages}: {workload.model.name or 'the model'} has only {layers} blocks for "
            f"pipeline stages: give at most {layers}"
        )
    if cluster.num_gpus % group:
        reject(
            f"--stages {stages} --tensor-parallel {options.tensor_parallel}: their product {group} "
            f"does not divide the {cluster.num_gpus} GPUs: give two degrees whose product divides "
            f"{cluster.num_gpus}"
        )
    replicas = cluster.num_gpus // group
    count, rest = divmod(workload.global_batch, replicas * options.micro_batch)
    if rest or not count:
        reject(
            f"--global-batch {workload.global_batch}: cannot be divided equally among {replicas} "
            f"data-parallel replicas with --micro-batch {options.micro_batch}: give a multiple of "
            f"{replicas * options.micro_batch}"
        )
    with as_options():
        stages_of_plan = tuple(
            StagePlan(
                layers=share,
                data_parallel=replicas,
                tensor_parallel=options.tensor_parallel,
                micro_batch=options.micro_batch,
                zero=options.zero,
                checkpointed_layers=share if blocks == "all" else min(blocks, share),
            )
            for share in even_shares(layers, stages)
        )
    plan = Plan(engine=engine, micro_batches=count, stages=stages_of_plan)
    with as_options():
        return Job(workload=workload, cluster=cluster, plan=plan)


def _predicted(changed: Sequence[Changed], kind: str) -> list[Tried]:
    """The changed plans of one problem, each with its prediction; all are predicted at once."""
    if not changed:
        return []
    job = changed[0].job
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    predictions = predictor.predict_many([one.job.plan for one in changed])
    return [
        Tried(changed=change, kind=kind, words=change.words, prediction=prediction)
        for change, prediction in zip(changed, predictions, strict=True)
    ]


def _cheapest(asked: Tried, most: int, add: Callable[[Row], None]) -> Tried | None:
    """The changed plan that fits and has the shortest iteration, with a single change or a
    combination of several; None if no change is enough. More GPUs and other kinds of GPUs are tried
    only if no change fits these GPUs.
    """
    changed = [*single(asked.job)]
    if changed:
        progress(f"{count_words(len(changed), 'plan')} with one change")
    tried = _predicted(changed, "single")
    for change in _best_of_each_kind(tried):
        add(_row(change, asked))
    fitting = [one for one in tried if one.prediction.fits]
    for number in range(2, most + 1):
        if fitting and number > QUICK_CHANGES:
            break
        several = _predicted([*together(asked.job, number)], f"{number} together")
        if several:
            progress(f"{count_words(len(several), 'plan')} with {number} changes")
        fitting += [one for one in several if one.prediction.fits]
    if not fitting:
        elsewhere = [*_elsewhere(asked)]
        for change in elsewhere:
            add(_row(change, asked))
        fitting = [one for one in elsewhere if one.prediction.fits]
    return min(fitting, key=_price, default=None)


def trained_otherwise(job: Job, *, as_options: bool, within_s: float = inf) -> Tried | None:
    """A job that fits since its training is changed, and whose iteration takes less than
    ``within_s``; None if there is none.

    It has the first change of training (``leaner``) with which the plan fits unchanged. If no
    single change is enough, it is the fastest job with one or two of these changes and one change
    of the plan; jobs that train the same weights as before come first. Its text names a change of
    the training by command-line options, or by fields of a plan file's workload.
    """
    once, twice = (list(_leaner(job, number, as_options=as_options)) for number in (1, 2))
    for training, other in once:
        fitting = [*_fitting(training, [Changed(changes=(), job=other)], within_s)]
        if fitting:
            return fitting[0]
    work = job.workload
    fitting = [
        tried
        for training, other in (*once, *twice)
        for tried in _fitting(training, [Changed(changes=(), job=other), *single(other)], within_s)
    ]
    return min(
        fitting,
        key=lambda tried: (
            tried.job.workload.train != work.train or tried.job.workload.base != work.base,
            _price(tried),
        ),
        default=None,
    )


def _fitting(training: str, changed: Sequence[Changed], within_s: float) -> Iterator[Tried]:
    """The plans of a changed training that fit and whose iteration takes less than ``within_s``."""
    for tried in _predicted(changed, "otherwise"):
        if tried.prediction.fits and tried.prediction.iteration_s < within_s:
            yield replace(tried, words=" and ".join(filter(None, (training, tried.words))))


def _leaner(job: Job, number: int, *, as_options: bool) -> Iterator[tuple[str, Job]]:
    """The job after each combination of this many changes that train with less memory, and the
    changes as text.
    """
    workloads = [job.workload]
    ways = [*leaner(job.workload), *leaner_adapters(job.workload)]
    for changes in combinations(ways, number):
        with suppress(InputError):
            workload = job.workload
            for values, _ in changes:
                workload = replace(workload, **values)
            if workload not in workloads:
                workloads.append(workload)
                texts = [
                    remedy if as_options else _in_plan_file(values, remedy)
                    for values, remedy in changes
                ]
                yield " and ".join(texts), replace(job, workload=workload)


def _in_plan_file(values: Mapping[str, Any], remedy: str) -> str:
    """A change of the training as text, with the fields of a plan file in place of options."""
    fields = ", ".join(f"{name}: {value}" for name, value in values.items())
    return f"{remedy.partition(' (')[0]} (workload: {fields})"


def _price(change: Tried) -> tuple[float, float]:
    """A sort key for changed plans: first the total power of the GPU boards, if GPUs are added or
    replaced, then the seconds of an iteration.
    """
    watts = change.job.cluster.hardware.gpu.board_watts or 0.0
    return watts * change.job.plan.num_gpus, change.prediction.iteration_s


def _best_of_each_kind(tried: Sequence[Tried]) -> Iterator[Tried]:
    """For each kind of change, the fastest plan that fits; if none fits, the plan with the smallest
    memory peak.
    """
    for alike in grouped(tried, lambda change: change.group).values():
        fitting = [change for change in alike if change.prediction.fits]
        if fitting:
            yield min(fitting, key=lambda change: change.prediction.iteration_s)
        else:
            yield min(alike, key=lambda change: change.prediction.peak_reserved_bytes)


def _elsewhere(asked: Tried) -> Iterator[Tried]:
    """Every attempt to make a plan fit: changes on the given GPUs, more GPUs, and GPUs with more
    memory.
    """
    cluster = asked.job.cluster
    progress("more GPUs, and GPUs with more memory")
    for times in MORE_GPUS:
        fitting = [*_best_there(asked.job, _larger(cluster, times), times)]
        yield from fitting
        if fitting:
            break
    for name in catalog.calibrated_names():
        hardware = catalog.hardware(name)
        has_more = hardware.gpu.memory_bytes > cluster.whole_memory_bytes
        if has_more and not cluster.memory_gib and (there := _as_many_gpus(cluster, hardware)):
            yield from _best_there(asked.job, there, 1)


def _larger(cluster: Cluster, times: int) -> Cluster:
    """A cluster with several times as many GPUs: on the same nodes as far as these have as many,
    then on more nodes.
    """
    room = 1 if cluster.others else cluster.hardware.node.gpus // cluster.gpus_per_node
    in_node = max(part for part in (1, *MORE_GPUS) if part == 1 or part <= min(room, times))
    return replace(
        cluster,
        nodes=cluster.nodes * times // in_node,
        gpus_per_node=cluster.gpus_per_node * in_node,
    )


def _as_many_gpus(cluster: Cluster, hardware: Hardware) -> Cluster | None:
    """A cluster with equally many GPUs of other hardware, on more nodes if these have fewer GPUs
    each; None if the numbers do not divide evenly.
    """
    per_node = min(cluster.gpus_per_node, hardware.node.gpus)
    if cluster.num_gpus % per_node:
        return None
    nodes = cluster.num_gpus // per_node
    return replace(cluster, hardware=hardware, nodes=nodes, gpus_per_node=per_node)


def _best_there(asked: Job, cluster: Cluster, times: int) -> Iterator[Tried]:
    """The fastest plan that fits on another cluster, which has this multiple of the GPUs."""
    where = f"on {times * asked.plan.num_gpus} {cluster.hardware.name}"
    fitting = []
    for job in spread(asked, cluster, times):
        changed = [Changed(changes=(), job=job), *single(job), *together(job, 2)]
        fitting += [one for one in _predicted(changed, "elsewhere") if one.prediction.fits]
    if fitting:
        best = min(fitting, key=_price)
        yield replace(best, words=", ".join(filter(None, (where, best.words))))


def _row(change: Tried, asked: Tried) -> Row:
    prediction, cluster = change.prediction, change.job.cluster
    fullest = max(prediction.stages, key=lambda stage: stage.peak_reserved_bytes)
    memory: Mapping[str, int] = to_mapping(fullest.memory)
    assert set(memory) == {*MemoryByClass.__slots__}
    bounds = peak_bounds_of(change.job, prediction)
    work, stage = change.job.workload, prediction.stages.index(fullest)
    adapters = adapters_called(work, bytes_of_adapters(work, change.job.plan, stage))
    return {
        "kind": change.kind,
        "change": change.words,
        "fits": prediction.fits,
        "fit_probability": bounds.fit_probability,
        "probable": probable_words(bounds, cluster),
        "gpus": change.job.plan.num_gpus,
        "iteration_s": prediction.iteration_s,
        "slower_by": prediction.iteration_s / asked.prediction.iteration_s - 1,
        "stage": stage,
        "reserved_bytes": fullest.peak_reserved_bytes,
        "room_bytes": round(room_bytes(cluster)),
        "outside_bytes": round(allocator_of(cluster).outside_bytes),
        "host_bytes": round(host_bytes_of(change.job.plan, prediction, cluster)),
        "host_room_bytes": cluster.host_memory_bytes,
        "memory": memory,
        "adapters": adapters,
    }
