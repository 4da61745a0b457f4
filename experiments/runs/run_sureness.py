"""Measures how far predictions of measured runs are off, by kind of run; and gives the predictions
of rows bounds made from that.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import gt, le
from typing import Any, Self

import numpy as np

from experiments.runs.driver_memory import buffers_bytes, stages_of_node
from experiments.runs.impossible import Limits
from experiments.runs.run_jobs import RunJob
from experiments.runs.run_row import PeakOf
from mistlab.calibration.fitted_sureness import SourceSpreads, spreads_of_kinds
from mistlab.core.arrays import Ints
from mistlab.core.units import GBYTES, GIB_BYTES
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
from mistlab.cost.memory import host_bytes_over, room_bytes, room_of_plan
from mistlab.engines.engine import ENGINES
from mistlab.job.prediction import Prediction, StagePrediction

# Measures how far predictions of measured runs are off, by kind of run and by source.


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """How far the measured time of a run is outside its predicted range, in units of uncertainty
    (``Range.miss``); negative if the run is faster.
    """

    kind: RunKind
    source: str
    model: str
    gpus: int
    roots: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The shortest and the longest predicted time of a run; the longest is that on the slowest
    known cluster. Their uncertainty grows with the square root of ``way`` (``RunKind.way``).
    """

    least_s: float
    longest_s: float
    way: float

    @classmethod
    def of(cls, prediction: Prediction, above: float, way: float) -> Self:
        """The range of a prediction's times. The longest time is the upper bound of the prediction,
        divided by ``above``.
        """
        least_s = prediction.iteration_s
        longest_s = max(least_s, prediction.iteration_s_high / above)
        return cls(least_s=least_s, longest_s=longest_s, way=way)

    def miss(self, measured_s: float) -> float:
        """How far a measured time is outside the range, in units of uncertainty; negative if it is
        faster.
        """
        nearest_s = min(max(measured_s, self.least_s), self.longest_s)
        return math.log(measured_s / nearest_s) / math.sqrt(self.way)

    def bounds_s(self, spread: Spread) -> tuple[float, float]:
        """The lower and upper bound of a time: the range, widened by how far predictions of such
        runs are off.
        """
        below, above = spread.around(self.way)
        return self.least_s * below, self.longest_s * above

    def bounded(self, prediction: Prediction, spread: Spread) -> Prediction:
        """A prediction with bounds: its range of times, widened by how far predictions of such runs
        are off.
        """
        low_s, high_s = self.bounds_s(spread)
        return replace(prediction, iteration_s_low=low_s, iteration_s_high=high_s)


def sureness_of(misses: Sequence[Miss], source: str = "") -> Sureness:
    """How far predictions are off, by kind of run, as measured on these runs."""
    spreads = _spreads(misses, np.full(len(misses), -1))
    return Sureness(source=source, kinds=_kinds(misses, spreads, 0))


def left_out(misses: Sequence[Miss], groups: Sequence[str]) -> Iterator[Spread | None]:
    """For each run, how far predictions are off in all groups of runs but its own; None if there is
    only one group.
    """
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
    for miss, fold in zip(misses, folds, strict=True):
        yield without[fold].spread(miss.kind, miss.gpus)


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
    """The kinds of runs, each with how far predictions of its runs are off, in one fold of a
    cross-validation.
    """
    together: dict[str, list[Miss]] = defaultdict(list)
    for miss in misses:
        for name in miss.kind.names:
            together[name].append(miss)
    return tuple(
        KnownKind(
            name=name,
            offset=round(float(spreads[name].offset[fold]), 4),
            between=round(float(spreads[name].between[fold]) ** 0.5, 4),
            within=round(float(spreads[name].within[fold]) ** 0.5, 4),
            runs=len(alike),
            sources=len({miss.source for miss in alike}),
            most_gpus=max(miss.gpus for miss in alike),
        )
        for name, alike in sorted(together.items())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A measured figure compared with its bounds: whether it lies inside them, and its interval
    score.

    ``score`` is the interval score of the logarithms of times (Gneiting and Raftery, 2007): the
    width, and by how far the measurement lies outside, counted 20 times for bounds of 90 %. Bounds
    that are honest and no wider than needed have the lowest mean.
    """

    width: float
    is_inside: bool
    score: float

    @classmethod
    def of(cls, measured_s: float, bounds_s: tuple[float, float]) -> Self:
        """Compare a measured figure with a lower and an upper bound."""
        low_s, high_s = bounds_s
        outside = max(1.0, low_s / measured_s, measured_s / high_s)
        width = high_s / low_s
        score = math.log(width) + math.log(outside) / TAIL
        return cls(width=width, is_inside=outside == 1, score=score)


# Answers a row of a table of runs: with its predicted time and memory, or the reason why there is
# none.


# If the time on the slowest known cluster is at least this multiple of the prediction, a note
# states it; the number is a choice (docs/reference/measured-runs.md).
MUCH_SLOWER = 1.1
# All measured runs that used more than this share of a GPU's memory (70 of 80 GB) were slow.
NEARLY_FULL = 70 / 79.1
# The fraction of the host link's rate that copies to pageable memory reach; an estimate.
PAGEABLE = 7 / 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """What the bounds of a run's time depend on: the kind of run, its GPUs, and the range of its
    predicted times.
    """

    kind: RunKind
    gpus: int
    range: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAnswer:
    """The answer to a row of a table; if there is no prediction, ``refused`` says why.

    ``doubt`` has what the bounds depend on, ``sequences`` are those of the predicted step,
    ``buffers_bytes`` the memory of communicators on a GPU of each stage beyond torch's, ``peak``
    the bounds of the memory peak. ``stages_of_node`` is the number of stages in the first node;
    ``limits`` are those that no run on the row's GPUs can pass.
    """

    prediction: Prediction | None = None
    notes: tuple[str, ...] = ()
    refused: str = ""
    doubt: Doubt | None = None
    sequences: int = 0
    buffers_bytes: tuple[float, ...] = ()
    stages_of_node: int = 0
    peak: PeakBounds | None = None
    limits: Limits | None = None

    def place_of(self, peak_of: PeakOf) -> int:
        """The index of the stage whose memory was measured: the first, the last, the fullest of the
        first node, or the fullest of all.
        """
        assert self.prediction is not None
        stages = self.prediction.stages
        if peak_of == "first":
            return 0
        if peak_of == "last":
            return len(stages) - 1
        seen = self.stages_of_node if peak_of == "node" else len(stages)
        return max(range(seen), key=lambda place: stages[place].peak_allocated_bytes)

    def mapping(self, peak_of: PeakOf) -> Mapping[str, Any]:
        """The answer as plain values; memory is that of one GPU of the stage that was measured."""
        if self.prediction is None or self.peak is None:
            return {"refused": self.refused}
        prediction = self.prediction
        stage = prediction.stages[self.place_of(peak_of)]
        return {
            "iteration_s": prediction.iteration_s,
            "iteration_s_low": prediction.iteration_s_low,
            "iteration_s_high": prediction.iteration_s_high,
            "peak_allocated_gib": stage.peak_allocated_bytes / GIB_BYTES,
            "peak_reserved_gib": stage.peak_reserved_bytes / GIB_BYTES,
            "peak_reserved_gib_low": self.peak.peak_reserved_bytes_low / GIB_BYTES,
            "peak_reserved_gib_high": self.peak.peak_reserved_bytes_high / GIB_BYTES,
            "fits": prediction.fits,
            "fit_probability": self.peak.fit_probability,
            "global_batch": self.sequences,
            "notes": [*self.notes],
        }


# The parts of memory that are model states rather than activations.
STATES = ("weights", "gradients", "optimizer")


def answered(prediction: Prediction, run_job: RunJob) -> RunAnswer:
    """The answer for a run from its prediction, with a note if the run nearly fills a GPU."""
    workload, cluster, engine = run_job.job.workload, run_job.job.cluster, run_job.job.plan.engine
    notes, more = run_job.notes, list[str]()
    if not run_job.elsewhere.is_plain:
        room, plan = room_of_plan(cluster, run_job.job.plan), run_job.job.plan
        rate = PAGEABLE * cluster.hardware.node.host_link_gbytes_per_s * GBYTES
        copies_s = run_job.elsewhere.copies_s(prediction, plan.micro_batches, rate)
        prediction = prediction.lasting(1 + copies_s / prediction.iteration_s)
        prediction = run_job.elsewhere.applied(prediction, lambda stage: float(room[stage]))
    if run_job.times > 1:
        prediction = _repeated(prediction, run_job.times)
        more.append(f"the pipeline fills and drains {run_job.times} times a step")
    gpus = run_job.job.plan.num_gpus
    bounds = bounds_of(workload, cluster, engine)
    _, above = bounds.around(gpus, prediction.mfu)
    around = Range.of(prediction, above, run_job.kind.way(prediction.mfu))
    slowest = ENGINES[engine].slowest
    if slowest and around.longest_s > MUCH_SLOWER * prediction.iteration_s:
        more.append(
            f"on the slowest cluster known it takes {around.longest_s:.3g} s (--profile {slowest})"
        )
    if run_job.saves_unsaid and not prediction.fits and _has_room(run_job, prediction):
        prediction = _capped(prediction, int(room_bytes(cluster)))
        more.append("recompute is empty, and memory is short: all of it assumed full")
    # Memory is measured on the first stage by default, which holds the most micro-batches.
    fullest = prediction.stages[0].peak_allocated_bytes
    if fullest > NEARLY_FULL * cluster.memory_bytes:
        factor = ENGINES[engine].crowded_factor
        prediction, around = slowed(prediction, around, factor)
        more.append(
            f"memory is nearly full ({fullest / GIB_BYTES:.1f} of "
            f"{cluster.memory_bytes / GIB_BYTES:.1f} GiB): runs are slow"
            + (f", {factor:g} times as long assumed" if factor > 1 else "")
        )
    rooms: list[float] = room_of_plan(cluster, run_job.job.plan).tolist()
    lacks_host = host_bytes_over(run_job.job.plan, prediction, cluster) > 0
    peak = peak_bounds(prediction, rooms, run_job.kind.engine, lacks_host=lacks_host)
    prediction = _released(prediction, rooms)
    if run_job.unrunnable:
        prediction = replace(prediction, fits=False)
        more.append(run_job.unrunnable)
    # The bounds are those for the kind of the measured run, not those for its plan.
    bounds = replace(bounds, kind=run_job.kind)
    return RunAnswer(
        prediction=around.bounded(prediction, bounds.spread(gpus)),
        notes=(*notes, *bounds.notes(gpus), *more),
        doubt=Doubt(kind=run_job.kind, gpus=gpus, range=around),
        sequences=workload.global_batch * run_job.times,
        buffers_bytes=buffers_bytes(run_job.job),
        stages_of_node=stages_of_node(run_job.job),
        peak=peak,
        limits=run_job.limits,
    )


def nearly_fills(prediction: Prediction, run_job: RunJob) -> bool:
    """Whether the predicted memory of a run nearly fills a GPU, or exceeds it."""
    peak = max(stage.peak_allocated_bytes for stage in prediction.stages)
    return not prediction.fits or peak > NEARLY_FULL * run_job.job.cluster.memory_bytes


def is_far_too_full(prediction: Prediction, run_job: RunJob) -> bool:
    """Whether a run that shards its weights as FSDP does would need more than twice the memory that
    it has.

    Such a run must have recomputed whole blocks, since recomputing only some GEMMs of a block saves
    too little. Systems other than FSDP have further ways to save memory, such as offloading.
    """
    is_sharded = ENGINES[run_job.job.plan.engine].system == "fsdp"
    return is_sharded and prediction.peak_reserved_bytes > 2 * room_bytes(run_job.job.cluster)


# Systems that recompute blocks whole where memory is short.
OF_WHOLE_BLOCKS = ("fsdp", "trainer")


def keeps_too_much(prediction: Prediction, run_job: RunJob) -> bool:
    """Whether the activations of a stage's blocks alone are more than a GPU may hold, so that no
    state in host memory makes room for them, and the engine's software recomputes whole blocks.

    Megatron's systems have more ways: named parts of blocks, and activations in host memory.
    """
    if ENGINES[run_job.job.plan.engine].system not in OF_WHOLE_BLOCKS:
        return False
    rooms: list[float] = room_of_plan(run_job.job.cluster, run_job.job.plan).tolist()
    kept = [stage.memory.activations for stage in prediction.stages]
    return any(map(gt, kept, rooms)) and not run_job.elsewhere.activations


def _has_room(run_job: RunJob, prediction: Prediction) -> bool:
    """Whether the GPUs of each stage have room for the states that the row says they hold, which
    recomputation cannot reduce.
    """
    rooms: list[float] = room_of_plan(run_job.job.cluster, run_job.job.plan).tolist()
    held = [sum(getattr(one.memory, name) for name in STATES) for one in prediction.stages]
    return not run_job.states_stay or all(map(le, held, rooms))


def _repeated(prediction: Prediction, times: int) -> Prediction:
    """The prediction of a step that consists of several equal iterations."""
    return replace(
        prediction,
        iteration_s=prediction.iteration_s * times,
        iteration_s_low=prediction.iteration_s_low * times,
        iteration_s_high=prediction.iteration_s_high * times,
    )


def _capped(prediction: Prediction, room: int) -> Prediction:
    """A prediction whose memory is limited to that of a GPU, for a run that saved memory in ways
    that are not known.
    """
    stages = (
        replace(
            stage,
            peak_allocated_bytes=min(stage.peak_allocated_bytes, room),
            peak_reserved_bytes=min(stage.peak_reserved_bytes, room),
        )
        for stage in prediction.stages
    )
    return replace(prediction, fits=True, stages=tuple(stages))


def _released(prediction: Prediction, rooms: Sequence[float]) -> Prediction:
    """A prediction without cached memory that a GPU has no room for beside tensors: torch's
    allocator gives back what it caches before it fails (``release_cached_blocks``,
    c10/cuda/CUDACachingAllocator.cpp).

    Whether the run fits stays as predicted: cached memory in pieces may not make room.
    """

    def reserved(stage: StagePrediction, room: int) -> int:
        holds_tensors = stage.peak_allocated_bytes <= room
        return min(stage.peak_reserved_bytes, room) if holds_tensors else stage.peak_reserved_bytes

    stages = tuple(
        replace(stage, peak_reserved_bytes=reserved(stage, int(rooms[number])))
        for number, stage in enumerate(prediction.stages)
    )
    return replace(prediction, stages=stages)


def slowed(prediction: Prediction, around: Range, factor: float) -> tuple[Prediction, Range]:
    """A prediction with its time multiplied by a factor; the shortest time of its range stays the
    same.
    """
    longer = replace(
        prediction,
        iteration_s=prediction.iteration_s * factor,
        iteration_s_high=prediction.iteration_s_high * factor * factor**0.5,
        tokens_per_s=prediction.tokens_per_s / factor,
        mfu=prediction.mfu / factor,
    )
    return longer, replace(around, longest_s=around.longest_s * factor * factor**0.5)
