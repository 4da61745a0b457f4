"""Compares the configurations that Megatron-Bridge publishes with the best ones that a search finds
on the same GPUs.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import product
from time import process_time
from typing import Any

from experiments.cli.commandline import DONE
from experiments.pages.charts import Bars
from experiments.pages.groups import grouped
from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.study import Report, Study
from experiments.pages.tables import TIMING, Row, table, table_of
from experiments.runs.configuration import Configuration, configuration_of
from experiments.runs.run_jobs import job_of
from experiments.runs.run_row import Recomputation
from experiments.runs.runs_table import TableRow
from mistlab.core.files import parse_yaml
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError
from mistlab.cost.memory import room_of_plan
from mistlab.engines.engine import ENGINES
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction
from mistlab.plan.dimensions import DIMENSIONS, counts_of_blocks, dimension_words
from mistlab.schedule.orders import INTERLEAVED
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor

TENSOR = (1, 2, 4, 8)
PIPELINE = (1, 2, 4, 8, 16)
MICRO_BATCH = (1, 2, 4)
EXPERT = (4, 8, 16, 32, 64)
# The shares of a stage's blocks that the search recomputes, besides the recomputation of the
# published run.
RECOMPUTED = (0.25, 0.5, 1.0)
# The share of memory that a configuration must leave free to be likelier to fit: about the mean
# error of predicted peaks (docs/results/runs.md).
LEFT = 0.1
# For each number of stages, how many of the fastest configurations are also tried with several
# model chunks per stage; and how many configurations are simulated in all.
CHUNKED, PLAYED = 4, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedConfiguration:
    """A configuration that the search tried, with its job and its prediction."""

    run: Configuration
    job: Job
    prediction: Prediction

    @property
    def full(self) -> float:
        """The share of its memory that the fullest GPU uses, as predicted."""
        room = room_of_plan(self.job.cluster, self.job.plan)
        peaks = [stage.peak_reserved_bytes for stage in self.prediction.stages]
        return float(max(peak / own for peak, own in zip(peaks, room, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The result of a search on the GPUs of a published run: the number of predicted
    configurations, and the fastest few that fit, with simulated seconds. ``roomy`` are those that
    leave a tenth of the memory free.
    """

    predicted: int
    played: Sequence[tuple[TriedConfiguration, float]]
    roomy: Sequence[tuple[TriedConfiguration, float]]


def search(run: Configuration) -> Search:
    """Predict other configurations on the GPUs of a published run, together with its own, and
    simulate the fastest ones that fit.
    """
    plain = tried(_stages_of_run(run))
    by_stages = grouped(_by_time(plain), lambda one: one.run.pipeline_parallel)
    deep = [one.run for some in by_stages.values() for one in some[:CHUNKED]]
    chunked = tried(
        replace(run, chunks=chunks)
        for run, chunks in product(deep, sorted({*INTERLEAVED.values()}))
        if run.pipeline_parallel > 1
    )
    every = [*plain, *chunked]
    fitting = _by_time(every)
    best = fitting[:PLAYED]
    roomy = [one for one in fitting if one.full <= 1 - LEFT][:PLAYED]
    seconds = {id(one): played_s(one.job) for one in (*best, *roomy)}
    return Search(
        predicted=len(every),
        played=[(one, seconds[id(one)]) for one in best],
        roomy=[(one, seconds[id(one)]) for one in roomy],
    )


def tried(runs: Iterable[Configuration]) -> list[TriedConfiguration]:
    """The predictions of those configurations that plans can express; equal plans are predicted
    only once.
    """
    jobs: dict[Job, Configuration] = {}
    for run in runs:
        try:
            jobs.setdefault(job_of(run).job, run)
        except InputError:
            continue
    if not jobs:
        return []
    first = next(iter(jobs))
    predictor = SymbolicPredictor(workload=first.workload, cluster=first.cluster)
    predictions = predictor.predict_many([job.plan for job in jobs])
    return [
        TriedConfiguration(run=run, job=job, prediction=prediction)
        for (job, run), prediction in zip(jobs.items(), predictions, strict=True)
    ]


def played_s(job: Job) -> float:
    """The seconds of an iteration by the event simulator."""
    simulator = EventSimulator(workload=job.workload, cluster=job.cluster)
    return simulator.simulate(job.plan).iteration_s


def _by_time(every: Sequence[TriedConfiguration]) -> list[TriedConfiguration]:
    fitting = [one for one in every if one.prediction.fits]
    return sorted(fitting, key=lambda one: one.prediction.iteration_s)


def _stages_of_run(run: Configuration) -> Iterator[Configuration]:
    """The published run, and configurations with one chunk per stage for all other parallel degrees
    and micro-batch sizes that its engine, its GPUs and its batch allow.
    """
    yield replace(run, saves_unsaid=False)
    experts = run.shape.model.experts
    degrees = EXPERT if experts is not None else (1,)
    for tensor, pipeline, ranks, size in product(TENSOR, PIPELINE, degrees, MICRO_BATCH):
        data, rest = divmod(run.num_gpus, tensor * pipeline)
        if rest or run.global_batch % (data * size) or data * tensor % ranks:
            continue
        meshed = replace(
            run,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            data_parallel=data,
            context_parallel=1,
            expert_parallel=ranks,
            expert_tensor_parallel=1,
            micro_batch=size,
            micro_batches=run.global_batch // (data * size),
            sequence_parallel=tensor > 1,
            chunks=1,
            saves_unsaid=False,
        )
        for recompute, (zero, replicas) in product(_recomputed(meshed), _sharded(meshed)):
            yield replace(meshed, recompute=recompute, zero=zero, state_replicas=replicas)


def _recomputed(run: Configuration) -> Iterator[Recomputation]:
    """The kinds of recomputation to try: that of the published run (unless it recomputes whole
    blocks), none, and whole blocks in several shares of a stage's blocks.
    """
    if run.recompute.way not in ("full", "blocks"):
        yield run.recompute
    if run.recompute.way != "none":
        yield Recomputation(way="none")
    blocks = -(-run.shape.layers // run.pipeline_parallel)
    for count in sorted({max(1, round(share * blocks)) for share in RECOMPUTED}):
        yield Recomputation(way="blocks", blocks=count)


def _sharded(run: Configuration) -> Iterator[tuple[int, int]]:
    """The ZeRO levels and numbers of state replicas to try: sharded optimizer states and, without a
    pipeline, sharded weights over all ranks or inside nodes.
    """
    yield 1, 1
    if run.pipeline_parallel > 1 or ENGINES[run.engine].highest_zero < 3:
        return
    yield 3, 1
    nodes = run.num_gpus // run.gpus_per_node
    if nodes > 1 and run.data_parallel % nodes == 0:
        yield 3, nodes


FILE = "published_configurations.yaml"
# The most GPUs of a published run that a quick run includes: those of one node.
QUICK_GPUS = 8


def published_configurations(options: argparse.Namespace) -> int:
    """Compare the published configurations of Llama 3 8B and 70B and of DeepSeek V3 with the
    fastest that a search finds on the same GPUs.

    Megatron-Bridge publishes a configuration and the seconds of a step for each release. Each
    configuration is predicted and played by the event simulator. Then other configurations for the
    same engine, GPUs, batch and precision are predicted, and the best few are played. The fastest
    of these is what this project would run.
    """
    study = Study.begin("published_configurations", options)
    cases = [*cases_of_file()]
    if options.quick:
        cases = [cells for cells in cases if int(cells["gpus"]) <= QUICK_GPUS]
    for cells in study.counted(cases, "configurations"):
        study.add(_row(cells))
    return study.end(_report(study.rows), DONE)


def cases_of_file() -> Iterator[Mapping[str, str]]:
    """The published configurations in a file of the package, as the cells of a table of runs."""
    text = files("experiments.studies").joinpath(FILE).read_text(encoding="utf-8")
    content = parse_yaml(text, FILE)
    assert isinstance(content, Mapping)
    for row in content["rows"]:
        yield {name: str(value) for name, value in row.items()}


def _row(cells: Mapping[str, str]) -> dict[str, Any]:
    began_s = process_time()
    run = configuration_of(TableRow(file=FILE, number=1, line=1, cells=cells))
    (theirs,) = tried([run])
    theirs_s, searched_run = played_s(theirs.job), search(run)
    ours, ours_s = _fastest([*searched_run.played, (theirs, theirs_s)])
    roomy, roomy_s = _fastest(searched_run.roomy) if searched_run.roomy else (None, None)
    measured_s = float(cells["step_s"])
    return {
        "model": cells["model"],
        "gpus": f"{cells['gpus']} {cells['hardware']}",
        "release": cells["engine"].rpartition(" ")[2],
        "engine": run.engine,
        "measured_s": measured_s,
        "published": {**_figures(theirs, theirs_s), "error": theirs_s / measured_s - 1},
        "ours": _figures(ours, ours_s),
        "gain": theirs_s / ours_s,
        "roomy": None if roomy is None or roomy_s is None else _figures(roomy, roomy_s),
        "predicted": searched_run.predicted,
        "tokens": run.global_batch * run.sequence_length // run.num_gpus,
        TIMING: {"process_s": process_time() - began_s},
    }


def _fastest(
    played: Sequence[tuple[TriedConfiguration, float]],
) -> tuple[TriedConfiguration, float]:
    """The configuration with the shortest simulated iteration; of equally fast ones the last, which
    is the published configuration.
    """
    return min(reversed(played), key=lambda one: one[1])


def _figures(tried_run: TriedConfiguration, seconds: float) -> dict[str, Any]:
    return {
        "words": configuration_text(tried_run.run, tried_run),
        "predicted_s": tried_run.prediction.iteration_s,
        "played_s": seconds,
        "fits": tried_run.prediction.fits,
        "memory_gib": tried_run.prediction.peak_reserved_bytes / GIB_BYTES,
        "full": tried_run.full,
    }


def configuration_text(run: Configuration, tried_run: TriedConfiguration) -> str:
    """A configuration as text of a few words."""
    stage, plan = tried_run.job.plan.stages[0], tried_run.job.plan
    parts = [f"tp {stage.tensor_parallel}, pp {plan.num_stages}, dp {stage.data_parallel}"]
    if plan.order != "1f1b":
        parts.append(plan.order)
    changed = {
        name: row
        for name, row in DIMENSIONS.items()
        if row.default is not None and not row.is_told and stage.value(name) != row.default
    }
    degrees = [name for name, row in changed.items() if row.axes and not row.shared_by]
    parts += [f"{changed[name].symbol} {stage.degree(name)}" for name in degrees]
    parts.append(f"micro-batch {stage.micro_batch}")
    parts.append(f"ZeRO-{stage.zero}" if run.zero else "ZeRO-0")
    counts = [name for name in counts_of_blocks() if stage.value(name)]
    parts += [
        dimension_words(name, stage.value(name), stage.layers)
        for name in dict.fromkeys([*changed, *counts])
        if name not in degrees
    ]
    return ", ".join(parts)


def _report(rows: Sequence[Row]) -> Report:
    better = [row for row in rows if row["gain"] > 1]
    beyond = [row for row in better if row["gain"] - 1 > abs(row["published"]["error"])]
    sentence = (
        f"Of {len(rows)} published configurations, another one is faster as played in "
        f"{len(better)}, by {max((row['gain'] - 1 for row in better), default=0):.1%} at most; in "
        f"{len(beyond)} the gain is larger than the error with which the published one is played."
    )
    return Report(
        title="Published configurations, and what we would run",
        words=[
            sentence,
            table_of(
                rows,
                ("model", "{model}"),
                ("on", "{gpus}"),
                ("release", "{release}"),
                ("measured s", "{measured_s:.2f}"),
                ("played s", "{published[played_s]:.2f}"),
                ("error", "{published[error]:+.1%}"),
                ("ours s", "{ours[played_s]:.2f}"),
                ("gain", lambda row: f"{row['gain'] - 1:.1%}"),
                ("full", "{ours[full]:.0%}"),
                ("roomy s", lambda row: _roomy(row)[0]),
                ("gain ", lambda row: _roomy(row)[1]),
            ),
            ROOM,
            "Configurations, with the GiB that the fullest GPU reserves by prediction:",
            IN_A_FILE,
            table(
                ("model", "on", "published", "GiB", "ours", "GiB ", "roomy", "GiB  "),
                [*_configurations(rows)],
            ),
        ],
        summary={
            "faster": len(better),
            "beyond_the_error": len(beyond),
            "gains": [row["gain"] for row in rows],
        },
        pictures=[_picture(rows)],
    )


def _roomy(row: Row) -> tuple[str, str]:
    """The seconds of the best configuration that leaves a tenth of the memory free, and its gain
    over the published one.
    """
    if row["roomy"] is None:
        return "-", "-"
    seconds = row["roomy"]["played_s"]
    return f"{seconds:.2f}", f"{row['published']['played_s'] / seconds - 1:.1%}"


def _configurations(rows: Sequence[Row]) -> Iterator[Sequence[object]]:
    for row in rows:
        theirs, ours, roomy = row["published"], row["ours"], row["roomy"]
        full = "" if theirs["fits"] else ", does not fit by prediction"
        is_same = ours["words"] == theirs["words"]
        yield (
            row["model"],
            row["gpus"],
            f"{theirs['words']}{full}",
            f"{theirs['memory_gib']:.0f}",
            "the same" if is_same else ours["words"],
            f"{ours['memory_gib']:.0f}",
            *(("-", "-") if roomy is None else _as_last(roomy, theirs, ours)),
        )


def _as_last(roomy: Row, theirs: Row, ours: Row) -> tuple[str, str]:
    """The configuration that leaves a tenth of the memory free, as text, and its memory peak in
    GiB.
    """
    same = {theirs["words"]: "the published one", ours["words"]: "ours"}
    return str(same.get(roomy["words"], roomy["words"])), f"{roomy['memory_gib']:.0f}"


def _picture(rows: Sequence[Row]) -> Bars:
    def rates(seconds: Sequence[float]) -> list[float | None]:
        return [row["tokens"] / taken for row, taken in zip(rows, seconds, strict=True)]

    return Bars(
        name="published_configurations",
        caption="Tokens a second and GPU: as measured, and both configurations as played.",
        groups=[f"{row['model']} {row['gpus']}" for row in rows],
        series={
            "published, measured": rates([row["measured_s"] for row in rows]),
            "published, played": rates([row["published"]["played_s"] for row in rows]),
            "ours, played": rates([row["ours"]["played_s"] for row in rows]),
        },
        y="tokens a second and GPU",
        log_y=True,
    )


ROOM = """`full` is the share of its memory that ours takes on the fullest GPU by prediction.
`roomy` is the fastest configuration that leaves a tenth of it: take it where nobody can try
whether ours runs. A loss says what that room costs."""
