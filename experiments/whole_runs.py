"""Fitting what only whole runs show: the rates that they sustain, how sure times are, and memory
beyond tensors."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize, nnls

from experiments.published import PublishedRun
from mistlab.cost.memory import reserved_bytes, room_bytes
from mistlab.engines import Allocator, EngineCalibration, Measured
from mistlab.hardware import Hardware, Source
from mistlab.stages import StageFigures
from mistlab.symbolic.stage_model import StageModel
from mistlab.units import MIB_BYTES
from simulators.symbolic import SymbolicPredictor

Values = NDArray[np.float64]

# Shares of the rates by themselves among which the sustained one is looked for.
SUSTAINED = np.linspace(0.75, 1.0, 11)
FINE = np.linspace(0.75, 1.0, 501)
# Of normally distributed errors 90 % lie within this many times their mean absolute value.
WIDTH_OF_MEAN = 2.06
# Measurements of equal runs differ by that much themselves.
LEAST_WIDTH = 0.001
DEFAULT_OUTSIDE_MIB = 300.0
MOST_STEPS = 40


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedRuns:
    """A hardware with what its runs showed, and each run's error when it was left out."""

    hardware: Hardware
    runs: tuple[PublishedRun, ...]
    left_out: Values


def predicted_s(run: PublishedRun, hardware: Hardware) -> float:
    """Seconds of an iteration of a run on a hardware."""
    cluster = replace(run.cluster, hardware=hardware)
    predictor = SymbolicPredictor(workload=run.workload, cluster=cluster)
    return float(
        predictor.iterations(
            run.stages,
            np.array([run.micro_batches]),
            engine=run.engine,
            overlap_communication=run.overlap_communication,
            sends_block=run.sends_block,
            step_moved=run.step_moved,
        )[0]
    )


def fit_sustained(runs: Sequence[PublishedRun], hardware: Hardware) -> FittedRuns:
    """The share of a GPU's rates that whole runs sustain, one number for all of them."""
    measured = np.array([run.iteration_s for run in runs])
    coarse = np.array(
        [[predicted_s(run, _sustaining(hardware, s)) for run in runs] for s in SUSTAINED]
    )
    # Times are all but linear in the inverse of the share.
    fine = np.stack(
        [np.interp(1 / FINE[::-1], 1 / SUSTAINED[::-1], of_run[::-1])[::-1] for of_run in coarse.T],
        axis=1,
    )
    errors = fine / measured - 1
    folds = np.array([run.fold for run in runs])
    left_out = np.empty(len(runs))
    for fold in np.unique(folds):
        out = folds == fold
        left_out[out] = errors[_best(errors[:, ~out]), out]
    sustained = float(FINE[_best(errors)])
    return FittedRuns(
        hardware=_with_engines(_sustaining(hardware, sustained), runs, left_out),
        runs=tuple(runs),
        left_out=left_out,
    )


def fit_launch_and_sustained(
    runs: Sequence[PublishedRun], hardware: Hardware, folds: Sequence[str]
) -> FittedRuns:
    """The host's time to launch and the sustained share, on whole folds; errors on the others."""
    seen = [run for run in runs if run.fold in folds]
    unseen = [run for run in runs if run.fold not in folds]
    measured = np.array([run.iteration_s for run in seen])
    # Runs on many GPUs are few and large: each cluster's runs weigh as much together.
    clusters = np.array([run.cluster.nodes > 1 for run in seen])
    assert hardware.compute is not None
    compute = hardware.compute

    def with_(point: Values) -> Hardware:
        sustained = float(np.clip(point[1], 0.5, 1.0))
        return replace(
            hardware,
            compute=replace(compute, launch_us=float(point[0]) * 40, sustained=sustained),
        )

    def loss(point: Values) -> float:
        errors = np.abs(np.array([predicted_s(run, with_(point)) for run in seen]) / measured - 1)
        return float(np.mean([_trimmed(errors[clusters == one]) for one in np.unique(clusters)]))

    start = np.array([[1.0, 0.95], [1.2, 0.95], [1.0, 0.85]])
    options = {"maxfev": MOST_STEPS, "initial_simplex": start, "xatol": 2e-3, "fatol": 1e-4}
    found = minimize(loss, start[0], method="Nelder-Mead", options=options)
    launch_us, sustained = found.x[0] * 40, float(np.clip(found.x[1], 0.5, 1.0))
    fitted = replace(
        hardware,
        compute=replace(
            compute, launch_us=round(float(launch_us), 2), sustained=round(sustained, 3)
        ),
    )
    left_out = np.array([predicted_s(run, fitted) / run.iteration_s - 1 for run in unseen])
    return FittedRuns(
        hardware=_with_engines(fitted, unseen, left_out, fitted_on=seen),
        runs=tuple(unseen),
        left_out=left_out,
    )


def fit_allocator(runs: Sequence[PublishedRun]) -> tuple[Allocator, Values]:
    """The allocator of runs with known peaks, and the relative errors of reserved bytes when each
    run is left out."""
    with_peaks = [run for run in runs if run.reserved_bytes and run.plan is not None]
    rows = [_allocator_rows(run) for run in with_peaks]
    errors = []
    for out in range(len(rows)):
        others = [row for place, row in enumerate(rows) if place != out]
        terms, beyond, reserved = rows[out]
        errors.append((terms @ _solved(others) - beyond) / reserved)
    step, head = _solved(rows)
    # A head that is smaller than all that were measured takes in proportion.
    heads = np.concatenate([figures_of(run).head_parameters for run in with_peaks])
    smallest = heads[heads > 0].min()
    allocator = Allocator(
        step_bytes_a_parameter=round(float(step), 2),
        head_bytes_a_parameter=round(float(head) * MIB_BYTES / float(smallest), 2),
        head_mib=round(float(head), 1),
        outside_mib=DEFAULT_OUTSIDE_MIB,
    )
    return allocator, np.concatenate(errors)


def figures_of(run: PublishedRun) -> StageFigures:
    """What the stages of a run hold."""
    return StageModel.of(run.workload, run.engine).figures(run.stages)


def is_said_to_fit(run: PublishedRun) -> bool:
    """Whether a run, all of whose stages ran, is said to fit."""
    reserved = reserved_bytes(figures_of(run), run.stages, run.cluster, run.engine)
    return bool((reserved <= room_bytes(run.cluster)).all())


def _allocator_rows(run: PublishedRun) -> tuple[Values, Values, Values]:
    figures = figures_of(run)
    # Beyond what is predicted, so that the two add up to what is held.
    predicted = figures.peak_bytes
    shard = np.where(run.stages.zero >= 1, run.stages.data_parallel, 1)
    terms = np.stack([figures.largest_parameters / shard, run.stages.has_head * MIB_BYTES], axis=1)
    reserved = np.array(run.reserved_bytes)
    return terms, reserved - predicted, reserved


def _solved(rows: Sequence[tuple[Values, Values, Values]]) -> Values:
    terms, beyond, reserved = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    found, _ = nnls(terms / reserved[:, None], beyond / reserved)
    return np.asarray(found)


def _sustaining(hardware: Hardware, sustained: float) -> Hardware:
    assert hardware.compute is not None
    return replace(hardware, compute=replace(hardware.compute, sustained=round(sustained, 4)))


def _trimmed(errors: Values) -> float:
    """The mean without the largest eighth, which is where a few runs went wrong by themselves."""
    kept = np.sort(errors)[: len(errors) - len(errors) // 8]
    return float(kept.mean())


def _mean(errors: Values) -> float:
    return float(np.abs(errors).mean())


def _best(errors: Values) -> int:
    return int(np.argmin(np.abs(errors).mean(axis=1)))


def _with_engines(
    hardware: Hardware,
    runs: Sequence[PublishedRun],
    left_out: Values,
    fitted_on: Sequence[PublishedRun] = (),
) -> Hardware:
    """The hardware with how sure each engine's times are, from errors of runs left out.

    The ranges are of all runs that were looked at.
    """
    of_engine: dict[str, list[int]] = defaultdict(list)
    for place, run in enumerate(runs):
        of_engine[run.engine].append(place)
    kept = tuple(one for one in hardware.engines or () if one.engine not in of_engine)
    fitted = tuple(
        EngineCalibration(
            engine=runs[places[0]].engine,
            half_width=max(LEAST_WIDTH, round(WIDTH_OF_MEAN * _mean(left_out[places]), 4)),
            runs=len(places),
            hidden=_range([one.workload.model.hidden for one in seen]),
            gpus=_range([_gpus(one) for one in seen]),
            sequence_length=_range([one.workload.sequence_length for one in seen]),
        )
        for engine, places in of_engine.items()
        for seen in (
            [*(runs[p] for p in places), *(one for one in fitted_on if one.engine == engine)],
        )
    )
    # Where the engines' errors come from is said by whoever knows the table.
    source = hardware.provenance.engines or Source(kind="measured", source="whole runs")
    return replace(
        hardware,
        engines=(*kept, *fitted),
        provenance=replace(hardware.provenance, engines=source),
    )


def _gpus(run: PublishedRun) -> int:
    return int((run.stages.data_parallel * run.stages.tensor_parallel).sum())


def _range(values: Sequence[int]) -> Measured:
    return Measured(least=float(min(values)), most=float(max(values)))
