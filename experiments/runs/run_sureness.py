"""How far measured runs lie from predictions, by kind of run, and the answers of predicted rows."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from experiments.runs.run_jobs import RunJob
from experiments.runs.run_row import PeakOf
from mistlab.calibration.fitted_sureness import SourceSpreads, spreads_of_kinds
from mistlab.core.arrays import Ints
from mistlab.core.units import GBYTES, GIB_BYTES, MIB_BYTES
from mistlab.cost.confidence import (
    SOURCES_OF_WIDER,
    TAIL,
    KnownKind,
    PeakBounds,
    RunKind,
    Spread,
    Sureness,
    bounds_of,
    peak_bounds,
)
from mistlab.cost.memory import room_bytes, room_of_plan
from mistlab.engines.engine import ENGINES
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction, StagePrediction
from mistlab.plan.plan import reader_of_degrees

# How far measured runs lie from predictions, by kinds of runs and their sources.


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """How far a measured run lies outside of what is predicted, in roots of its way: below 0 for a
    run that is faster."""

    kind: RunKind
    source: str
    model: str
    gpus: int
    roots: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The shortest and the longest time that is predicted of a run, before any doubt: the longest
    is that on the slowest cluster known. ``way`` is the unit of doubt (``RunKind.way``)."""

    least_s: float
    longest_s: float
    way: float

    @classmethod
    def of(cls, prediction: Prediction, above: float, way: float) -> Self:
        """The range of a prediction whose upper bound is ``above`` times the longest time."""
        least_s = prediction.iteration_s
        longest_s = max(least_s, prediction.iteration_s_high / above)
        return cls(least_s=least_s, longest_s=longest_s, way=way)

    def miss(self, measured_s: float) -> float:
        """How far a measurement lies outside, in roots of the way; below 0 if it is faster."""
        nearest_s = min(max(measured_s, self.least_s), self.longest_s)
        return math.log(measured_s / nearest_s) / math.sqrt(self.way)

    def bounds_s(self, spread: Spread) -> tuple[float, float]:
        """Bounds that lie around the range as far as runs are spread."""
        below, above = spread.around(self.way)
        return self.least_s * below, self.longest_s * above

    def bounded(self, prediction: Prediction, spread: Spread) -> Prediction:
        """A prediction with bounds that lie around the range as far as runs are spread."""
        low_s, high_s = self.bounds_s(spread)
        return replace(prediction, iteration_s_low=low_s, iteration_s_high=high_s)


def sureness_of(misses: Sequence[Miss], source: str = "") -> Sureness:
    """The kinds of runs that are known from measured ones."""
    spreads = _spreads(misses, np.full(len(misses), -1))
    return Sureness(source=source, kinds=_kinds(misses, spreads, 0))


def left_out(misses: Sequence[Miss], groups: Sequence[str]) -> Iterator[Spread | None]:
    """For each run the spread that is known from the runs of other groups, if there are any."""
    names, folds = np.unique(groups, return_inverse=True)
    if len(names) < 2:
        yield from (None for _ in misses)
        return
    spreads = _spreads(misses, folds)
    without = [
        Sureness(source="", kinds=_kinds(of_others, spreads, fold))
        for fold in range(len(names))
        for of_others in [[m for m, own in zip(misses, folds, strict=True) if own != fold]]
    ]
    for one, fold in zip(misses, folds, strict=True):
        yield without[fold].spread(one.kind, one.gpus)


def _spreads(misses: Sequence[Miss], folds: Ints) -> Mapping[str, SourceSpreads]:
    return spreads_of_kinds(
        np.array([one.roots for one in misses]),
        [one.kind.names for one in misses],
        np.unique([one.source for one in misses], return_inverse=True)[1],
        folds,
        SOURCES_OF_WIDER,
    )


def _kinds(
    misses: Sequence[Miss], spreads: Mapping[str, SourceSpreads], fold: int
) -> tuple[KnownKind, ...]:
    """The kinds of some runs with their spreads in a fold."""
    together: dict[str, list[Miss]] = defaultdict(list)
    for one in misses:
        for name in one.kind.names:
            together[name].append(one)
    return tuple(
        KnownKind(
            name=name,
            offset=round(float(spreads[name].offset[fold]), 4),
            between=round(float(spreads[name].between[fold]) ** 0.5, 4),
            within=round(float(spreads[name].within[fold]) ** 0.5, 4),
            runs=len(alike),
            sources=len({one.source for one in alike}),
            most_gpus=max(one.gpus for one in alike),
        )
        for name, alike in sorted(together.items())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """How a run's measurement lies to its bounds: whether within, and what the bounds cost.

    ``score`` is the interval score of the logarithms of times (Gneiting and Raftery, 2007): the
    width, and by how far the measurement lies outside, counted 20 times for bounds of 90 %. Bounds
    that are honest and no wider than needed have the lowest mean.
    """

    width: float
    is_inside: bool
    score: float

    @classmethod
    def of(cls, measured_s: float, bounds_s: tuple[float, float]) -> Self:
        """How a measurement lies to a lower and an upper bound."""
        low_s, high_s = bounds_s
        outside = max(1.0, low_s / measured_s, measured_s / high_s)
        width = high_s / low_s
        score = math.log(width) + math.log(outside) / TAIL
        return cls(width=width, is_inside=outside == 1, score=score)


# The answer to a row of a table of runs: its predicted time and memory, or why there is none.


# A note says what the slowest cluster known takes from this multiple of the prediction on; chosen
# by hand (docs/reference/measured-runs.md).
MUCH_SLOWER = 1.1
# All measured runs that took more than this share of a GPU's memory (70 of 80 GB) were slow.
NEARLY_FULL = 70 / 79.1
# Copies to pageable memory reach about so much of the rate of the link to the host; by hand.
PAGEABLE = 7 / 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """The grounds of a run's bounds: its kind, its GPUs, and the range that they lie around."""

    kind: RunKind
    gpus: int
    range: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAnswer:
    """The answer to a row; without a prediction, ``refused`` says why.

    ``doubt`` has the grounds of its bounds, ``sequences`` are those of the step that was predicted,
    ``outside_bytes`` what a driver counts beside torch's memory, ``peak`` the bounds of the peak.
    """

    prediction: Prediction | None = None
    notes: tuple[str, ...] = ()
    refused: str = ""
    doubt: Doubt | None = None
    sequences: int = 0
    outside_bytes: float = 0.0
    peak: PeakBounds | None = None

    def mapping(self, peak_of: PeakOf) -> Mapping[str, Any]:
        """The answer as plain data; memory is that of a stage's rank."""
        if self.prediction is None or self.peak is None:
            return {"refused": self.refused}
        found, stage = self.prediction, stage_of(self.prediction, peak_of)
        return {
            "iteration_s": found.iteration_s,
            "iteration_s_low": found.iteration_s_low,
            "iteration_s_high": found.iteration_s_high,
            "peak_allocated_gib": stage.peak_allocated_bytes / GIB_BYTES,
            "peak_reserved_gib": stage.peak_reserved_bytes / GIB_BYTES,
            "peak_reserved_gib_low": self.peak.peak_reserved_bytes_low / GIB_BYTES,
            "peak_reserved_gib_high": self.peak.peak_reserved_bytes_high / GIB_BYTES,
            "fits": found.fits,
            "fit_probability": self.peak.fit_probability,
            "global_batch": self.sequences,
            "notes": [*self.notes],
        }


def answered(prediction: Prediction, found: RunJob) -> RunAnswer:
    """The answer with the prediction of a run; a GPU that is nearly full is a note."""
    workload, cluster, engine = found.job.workload, found.job.cluster, found.job.plan.engine
    notes, more = found.notes, list[str]()
    if not found.elsewhere.is_plain:
        room, plan = room_of_plan(cluster, found.job.plan), found.job.plan
        rate = PAGEABLE * cluster.hardware.node.host_link_gbytes_per_s * GBYTES
        copies_s = found.elsewhere.copies_s(prediction, plan.micro_batches, rate)
        prediction = prediction.lasting(1 + copies_s / prediction.iteration_s)
        prediction = found.elsewhere.applied(prediction, lambda stage: float(room[stage]))
    if found.times > 1:
        prediction = _repeated(prediction, found.times)
        more.append(f"the pipeline fills and drains {found.times} times a step")
    gpus = found.job.plan.num_gpus
    bounds = bounds_of(workload, cluster, engine)
    _, above = bounds.around(gpus, prediction.mfu)
    around = Range.of(prediction, above, found.kind.way(prediction.mfu))
    slowest = ENGINES[engine].slowest
    if slowest and around.longest_s > MUCH_SLOWER * prediction.iteration_s:
        more.append(
            f"on the slowest cluster known it takes {around.longest_s:.3g} s (--profile {slowest})"
        )
    if found.saves_unsaid and not prediction.fits:
        prediction = _capped(prediction, int(room_bytes(cluster)))
        more.append("recompute is not said, and memory is short: all of it assumed full")
    # Runs were measured on their first stage, which holds the most micro-batches.
    fullest = prediction.stages[0].peak_allocated_bytes
    if fullest > NEARLY_FULL * cluster.memory_bytes:
        factor = ENGINES[engine].crowded_factor
        prediction, around = slowed(prediction, around, factor)
        more.append(
            f"memory is nearly full ({fullest / GIB_BYTES:.1f} of "
            f"{cluster.memory_bytes / GIB_BYTES:.1f} GiB): runs are slow"
            + (f", {factor:g} times as long assumed" if factor > 1 else "")
        )
    rooms: list[float] = room_of_plan(cluster, found.job.plan).tolist()
    peak = peak_bounds(prediction, rooms, engine)
    if found.unrunnable:
        prediction = replace(prediction, fits=False)
        more.append(found.unrunnable)
    # Of the run's own kind, not of a plan's.
    bounds = replace(bounds, kind=found.kind)
    return RunAnswer(
        prediction=around.bounded(prediction, bounds.spread(gpus)),
        notes=(*notes, *bounds.notes(gpus), *more),
        doubt=Doubt(kind=found.kind, gpus=gpus, range=around),
        sequences=workload.global_batch * found.times,
        outside_bytes=outside_bytes(found.job),
        peak=peak,
    )


# A context of CUDA or ROCm with the kernels of torch and of extensions, and NCCL's buffers for each
# communicator: as tools of the driver show them beside torch's memory. By hand.
CONTEXT_MIB, COMMUNICATOR_MIB = 1000, 300


def outside_bytes(job: Job) -> float:
    """What a driver counts beside torch's memory: the context, and the communicators of a rank: of
    each axis with several ranks, and of all."""
    stages = job.plan.stages
    axes = (*reader_of_degrees()(stages[0]), len(stages), job.plan.num_gpus)
    communicators = sum(ranks > 1 for ranks in axes)
    return (CONTEXT_MIB + communicators * COMMUNICATOR_MIB) * MIB_BYTES


def nearly_fills(prediction: Prediction, found: RunJob) -> bool:
    """Whether a run would nearly fill a GPU, or more."""
    peak = max(stage.peak_allocated_bytes for stage in prediction.stages)
    return not prediction.fits or peak > NEARLY_FULL * found.job.cluster.memory_bytes


def is_far_too_full(prediction: Prediction, found: RunJob) -> bool:
    """Whether a run whose weights are sharded as FSDP does would need more than twice its memory.

    What recomputes a part of a block's products saves less, so all of each block must be
    recomputed. Other systems have more ways, such as activations in host memory.
    """
    is_sharded = ENGINES[found.job.plan.engine].system == "fsdp"
    return is_sharded and prediction.peak_reserved_bytes > 2 * room_bytes(found.job.cluster)


def _repeated(prediction: Prediction, times: int) -> Prediction:
    """A prediction of a step that is one prediction's iteration several times."""
    return replace(
        prediction,
        iteration_s=prediction.iteration_s * times,
        iteration_s_low=prediction.iteration_s_low * times,
        iteration_s_high=prediction.iteration_s_high * times,
    )


def _capped(prediction: Prediction, room: int) -> Prediction:
    """A prediction of a run that saved memory in a way that nobody tells: it was full at most."""
    stages = (
        replace(
            stage,
            peak_allocated_bytes=min(stage.peak_allocated_bytes, room),
            peak_reserved_bytes=min(stage.peak_reserved_bytes, room),
        )
        for stage in prediction.stages
    )
    return replace(prediction, fits=True, stages=tuple(stages))


def slowed(prediction: Prediction, around: Range, factor: float) -> tuple[Prediction, Range]:
    """A prediction that takes several times as long, and its range: the shortest time stays."""
    longer = replace(
        prediction,
        iteration_s=prediction.iteration_s * factor,
        iteration_s_high=prediction.iteration_s_high * factor * factor**0.5,
        tokens_per_s=prediction.tokens_per_s / factor,
        mfu=prediction.mfu / factor,
    )
    return longer, replace(around, longest_s=around.longest_s * factor * factor**0.5)


def stage_of(prediction: Prediction, peak_of: PeakOf) -> StagePrediction:
    """The stage whose memory was measured: the first, the last, or else the fullest."""
    if peak_of == "first":
        return prediction.stages[0]
    if peak_of == "last":
        return prediction.stages[-1]
    return max(prediction.stages, key=lambda stage: stage.peak_allocated_bytes)
