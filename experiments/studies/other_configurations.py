"""Other configurations of a run on the same GPUs: predicted by the hundred, and the best played."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from experiments.pages.groups import grouped
from experiments.runs.configuration import Configuration
from experiments.runs.run_jobs import job_of
from experiments.runs.run_row import Recomputation
from mistlab.core.values import InputError
from mistlab.cost.memory import room_of_plan
from mistlab.engines.engine import ENGINES
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction
from mistlab.schedule.orders import INTERLEAVED
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor

TENSOR = (1, 2, 4, 8)
PIPELINE = (1, 2, 4, 8, 16)
MICRO_BATCH = (1, 2, 4)
EXPERT = (4, 8, 16, 32, 64)
# Recomputed blocks of a stage, as shares of its blocks, beside what the run itself recomputes.
RECOMPUTED = (0.25, 0.5, 1.0)
# Peaks of memory are predicted to within a tenth or so: configurations that leave as much will fit.
LEFT = 0.1
# Of each number of stages so many are tried with their blocks in chunks, and so many are played.
CHUNKED, PLAYED = 4, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedConfiguration:
    """A configuration, its job, and what is predicted of it."""

    run: Configuration
    job: Job
    prediction: Prediction

    @property
    def full(self) -> float:
        """The share of its memory that the fullest GPU takes by prediction."""
        room = room_of_plan(self.job.cluster, self.job.plan)
        peaks = [stage.peak_reserved_bytes for stage in self.prediction.stages]
        return float(max(peak / own for peak, own in zip(peaks, room, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The best configurations of a run's GPUs: how many were predicted, and the few that fit and
    are fastest, each with its played seconds. The ``roomy`` ones leave a tenth of the memory."""

    predicted: int
    played: Sequence[tuple[TriedConfiguration, float]]
    roomy: Sequence[tuple[TriedConfiguration, float]]


def search(run: Configuration) -> Search:
    """Predict other configurations of a run, and play the fastest ones that fit; the run itself is
    among them."""
    plain = tried(_configurations(run))
    by_stages = grouped(_fastest(plain), lambda one: one.run.pipeline_parallel)
    deep = [one.run for some in by_stages.values() for one in some[:CHUNKED]]
    chunked = tried(
        replace(one, chunks=chunks)
        for one, chunks in product(deep, sorted({*INTERLEAVED.values()}))
        if one.pipeline_parallel > 1
    )
    every = [*plain, *chunked]
    fitting = _fastest(every)
    best = fitting[:PLAYED]
    roomy = [one for one in fitting if one.full <= 1 - LEFT][:PLAYED]
    seconds = {id(one): played_s(one.job) for one in (*best, *roomy)}
    return Search(
        predicted=len(every),
        played=[(one, seconds[id(one)]) for one in best],
        roomy=[(one, seconds[id(one)]) for one in roomy],
    )


def tried(runs: Iterable[Configuration]) -> list[TriedConfiguration]:
    """Predictions of those configurations that plans can say; equal plans are predicted once."""
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
    """Seconds of an iteration as the event simulator plays it."""
    simulator = EventSimulator(workload=job.workload, cluster=job.cluster)
    return simulator.simulate(job.plan).iteration_s


def _fastest(every: Sequence[TriedConfiguration]) -> list[TriedConfiguration]:
    fitting = [one for one in every if one.prediction.fits]
    return sorted(fitting, key=lambda one: one.prediction.iteration_s)


def _configurations(run: Configuration) -> Iterator[Configuration]:
    """The run in one chunk a stage, and all others of its engine, GPUs, batch and arithmetic."""
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
    """Ways to recompute: the run's own, unless it is a number of blocks; none; and parts of each
    stage's blocks."""
    if run.recompute.way not in ("full", "blocks"):
        yield run.recompute
    if run.recompute.way != "none":
        yield Recomputation(way="none")
    blocks = -(-run.shape.layers // run.pipeline_parallel)
    for count in sorted({max(1, round(share * blocks)) for share in RECOMPUTED}):
        yield Recomputation(way="blocks", blocks=count)


def _sharded(run: Configuration) -> Iterator[tuple[int, int]]:
    """ZeRO levels and replicas of states: optimizer states sharded; without pipeline weights too,
    over all ranks or inside nodes."""
    yield 1, 1
    if run.pipeline_parallel > 1 or ENGINES[run.engine].highest_zero < 3:
        return
    yield 3, 1
    nodes = run.num_gpus // run.gpus_per_node
    if nodes > 1 and run.data_parallel % nodes == 0:
        yield 3, nodes
