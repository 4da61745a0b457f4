"""Fits the constants that only whole training runs determine: sustained rates, error bounds of
times, and memory beyond tensors.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import minimize

from experiments.calibration.published import PublishedRun
from experiments.cli.commandline import progress
from mistlab.calibration.fitted_memory import beyond_tensors, errors_of, fitted_allocator
from mistlab.calibration.fitted_sureness import half_width_of, misses, trimmed_mean
from mistlab.core.arrays import Bools, Floats
from mistlab.cost.confidence import half_width_at
from mistlab.cost.memory import reserved_bytes, room_bytes
from mistlab.engines.engine import ENGINES
from mistlab.graph.stage_model import StageModel
from mistlab.machine.hardware import Allocator, EngineCalibration, Hardware, MeasuredAt, Source
from mistlab.plan.dimensions import num_gpus
from mistlab.stages.stage_batch import StageBatch, StageFigures
from simulators.symbolic import SymbolicPredictor

# The values that are tried for the sustained share: the share of its measured operator rates that a
# GPU keeps up in whole training runs.
SUSTAINED = np.linspace(0.75, 1.0, 11)
FINE = np.linspace(0.75, 1.0, 501)
# If only runs of one model width were measured, the error bounds of times at other widths are
# widened by this factor.
FAR_OF_NEAR = 2.0
MOST_STEPS = 40


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedRuns:
    """A hardware with constants fitted to whole training runs, and the error on each run when it
    was left out of a fit: of a fit to all other runs (``left_out``), and of a fit to runs of other
    model widths only (``width_left_out``).

    An error is NaN if the run was part of the fit, or if all runs are of one width.
    """

    hardware: Hardware
    runs: tuple[PublishedRun, ...]
    left_out: Floats
    width_left_out: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeftOutWidth:
    """The runs of one model width that were left out of a fit: their errors, and how far each run
    is from the nearest fitted run.
    """

    hidden: int
    errors: Floats
    doublings: Floats


def predicted_s(run: PublishedRun, hardware: Hardware) -> float:
    """The predicted iteration time, in seconds, of a training run on a hardware."""
    return float(all_predicted_s([run], hardware)[0])


def all_predicted_s(runs: Sequence[PublishedRun], hardware: Hardware) -> Floats:
    """The predicted iteration time of each run; runs that differ only in their stages are predicted
    together.
    """
    together: dict[Hashable, list[int]] = defaultdict(list)
    for number, run in enumerate(runs):
        # The global batch determines nothing but the number of micro-batches, which is given here
        # for each run. So runs that differ only in their global batch are predicted together.
        workload = replace(run.workload, global_batch=1)
        how = run.ran_by, run.overlap_communication, len(run.stages)
        together[workload, run.cluster.nodes, run.cluster.gpus_per_node, how].append(number)
    seconds = np.empty(len(runs))
    for places in together.values():
        first = runs[places[0]]
        predictor = SymbolicPredictor(
            workload=first.workload, cluster=replace(first.cluster, hardware=hardware)
        )
        seconds[places] = predictor.iterations(
            StageBatch.joined([runs[place].stages for place in places]),
            np.array([runs[place].micro_batches for place in places]),
            engine=first.ran_by,
            overlap_communication=first.overlap_communication,
        )
    return seconds


def fit_sustained(runs: Sequence[PublishedRun], hardware: Hardware) -> FittedRuns:
    """The share of its measured operator rates that a GPU sustains in whole runs, as one number for
    all of them.
    """
    measured = np.array([run.iteration_s for run in runs])
    coarse = np.array([all_predicted_s(runs, _sustaining(hardware, s)) for s in SUSTAINED])
    # Between the shares that were tried, times are interpolated over the inverse of the share, in
    # which they are nearly linear.
    fine = np.stack(
        [np.interp(1 / FINE[::-1], 1 / SUSTAINED[::-1], of_run[::-1])[::-1] for of_run in coarse.T],
        axis=1,
    )
    errors = fine / measured - 1

    def by_the_others(labels: Floats) -> Floats:
        left_out = np.full(len(runs), np.nan)
        for label in np.unique(labels):
            out = labels == label
            if not out.all():
                left_out[out] = errors[_best(errors[:, ~out]), out]
        return left_out

    sustained = float(FINE[_best(errors)])
    return with_engines(
        FittedRuns(
            hardware=_sustaining(hardware, sustained),
            runs=tuple(runs),
            left_out=by_the_others(np.array([run.fold for run in runs])),
            width_left_out=by_the_others(_widths(runs)),
        )
    )


def fit_launch_and_sustained(
    runs: Sequence[PublishedRun], hardware: Hardware, folds: Sequence[str]
) -> FittedRuns:
    """The host's time to launch a kernel, and the sustained share of rates, fitted to selected
    groups of runs. Returns also the errors on the other runs, and on the runs of each model width
    when that width is left out.
    """
    seen = np.array([run.fold in folds for run in runs])
    widths = _widths(runs)

    def errors_by(fitted_on: Bools, of: Bools) -> tuple[Hardware, Floats]:
        fitted = _launching(
            hardware, [run for run, its in zip(runs, fitted_on, strict=True) if its]
        )
        chosen = [run for run, its in zip(runs, of, strict=True) if its]
        measured = np.array([run.iteration_s for run in chosen])
        return fitted, all_predicted_s(chosen, fitted) / measured - 1

    left_out, width_left_out = np.full((2, len(runs)), np.nan)
    fitted, left_out[~seen] = errors_by(seen, ~seen)
    for width in np.unique(widths):
        out = widths == width
        # All runs of the other widths are fitted, not only those in ``folds``: fewer runs could not
        # tell the host's time from the GPU's.
        if not out.all():
            progress(f"leaving out the {out.sum()} runs of width {width:g}")
            _, width_left_out[out] = errors_by(~out, out)
    # A run of a width that no fitted run has was not just left out of the fit: its whole width was.
    # So its error counts only in ``width_left_out``.
    left_out[~np.isin(widths, widths[seen])] = np.nan
    return with_engines(
        FittedRuns(
            hardware=fitted, runs=tuple(runs), left_out=left_out, width_left_out=width_left_out
        )
    )


def _launching(hardware: Hardware, runs: Sequence[PublishedRun]) -> Hardware:
    """The hardware with the launch time and the sustained share of rates that fit these runs
    best.
    """
    measured = np.array([run.iteration_s for run in runs])
    # Runs on several nodes are few and large, so runs on one node and runs on several get the same
    # total weight.
    clusters = np.array([run.cluster.nodes > 1 for run in runs])
    assert hardware.compute is not None
    compute = hardware.compute

    def with_(point: Floats) -> Hardware:
        return replace(
            hardware,
            compute=replace(
                compute,
                launch_us=round(float(point[0]) * 40, 2),
                sustained=round(float(np.clip(point[1], 0.5, 1.0)), 3),
            ),
        )

    def loss(point: Floats) -> float:
        errors = np.abs(all_predicted_s(runs, with_(point)) / measured - 1)
        return float(
            np.mean([trimmed_mean(errors[clusters == one]) for one in np.unique(clusters)])
        )

    start = np.array([[1.0, 0.95], [1.2, 0.95], [1.0, 0.85]])
    options = {"maxfev": MOST_STEPS, "initial_simplex": start, "xatol": 2e-3, "fatol": 1e-4}
    return with_(minimize(loss, start[0], method="Nelder-Mead", options=options).x)


def fit_allocator(runs: Sequence[PublishedRun]) -> tuple[Allocator, Floats]:
    """The memory allocator's constants, fitted to runs with known memory peaks; and the relative
    error of reserved bytes on each run when it is left out.
    """
    with_peaks = [run for run in runs if run.reserved_bytes and run.plan is not None]
    rows = [
        beyond_tensors(figures_of(run), run.stages, np.array(run.reserved_bytes))
        for run in with_peaks
    ]
    errors = []
    for out in range(len(rows)):
        others = [row for place, row in enumerate(rows) if place != out]
        errors.append(errors_of(rows[out], others))
    heads = np.concatenate([figures_of(run).head_parameters for run in with_peaks])
    allocator = fitted_allocator(rows, heads)
    return allocator, np.concatenate(errors)


def figures_of(run: PublishedRun) -> StageFigures:
    """The predicted memory of each stage of a run."""
    return StageModel.of(run.workload, run.engine).figures(run.stages)


def is_said_to_fit(run: PublishedRun) -> bool:
    """Whether every stage of a measured run, all of which did fit, is also predicted to fit."""
    reserved = reserved_bytes(figures_of(run), run.stages, run.cluster, ENGINES[run.engine])
    return bool((reserved <= room_bytes(run.cluster)).all())


def _sustaining(hardware: Hardware, sustained: float) -> Hardware:
    assert hardware.compute is not None
    return replace(hardware, compute=replace(hardware.compute, sustained=round(sustained, 4)))


def _best(errors: Floats) -> int:
    return int(np.argmin(np.abs(errors).mean(axis=1)))


def with_engines(fits: FittedRuns) -> FittedRuns:
    """The hardware with bounds of times for each engine, from the errors on runs that were left out
    of fits.
    """
    hardware = fits.hardware
    of_engine: dict[str, list[int]] = defaultdict(list)
    for number, run in enumerate(fits.runs):
        of_engine[run.engine].append(number)
    kept = tuple(one for one in hardware.engines or () if one.engine not in of_engine)
    fitted = tuple(_engine(engine, fits, places) for engine, places in of_engine.items())
    # The source of the engines' bounds is filled in by the caller.
    source = hardware.provenance.engines or Source(kind="measured", source="whole runs")
    hardware = replace(
        hardware,
        engines=(*kept, *fitted),
        provenance=replace(hardware.provenance, engines=source),
    )
    return replace(fits, hardware=hardware)


def _engine(engine: str, fits: FittedRuns, places: Sequence[int]) -> EngineCalibration:
    """The error bounds of an engine's times: for runs similar to its measured runs, and for runs
    far from them.
    """
    near = _known(fits.left_out[places])
    half_width = half_width_of(near)
    far, reach = _far(half_width, _left_out_widths(fits, places))
    return EngineCalibration(
        engine=engine,
        half_width=half_width,
        far_half_width=far,
        reach=reach,
        runs=len(near),
        at=tuple(dict.fromkeys(place_of(fits.runs[place]) for place in places)),
    )


def _far(half_width: float, widths: Sequence[LeftOutWidth]) -> tuple[float, float]:
    """The error bounds of times for model widths that were not measured, and the smallest distance
    (in doublings) from other measured widths at which these bounds were tested.

    Since few widths were measured, a new width is assumed to be as uncertain as the worst of them.
    """
    if not widths:
        return round(half_width * FAR_OF_NEAR, 4), 1.0
    worst = max(half_width_of(width.errors) for width in widths)
    nearest = min(float(width.doublings.min()) for width in widths)
    return max(half_width, worst), round(nearest, 2)


def widths_left_out(fits: FittedRuns, engine: str) -> Iterator[tuple[LeftOutWidth, float]]:
    """For each model width of an engine's runs: the share of its runs that lie inside the bounds
    fitted to the other widths.
    """
    places = [place for place, run in enumerate(fits.runs) if run.engine == engine]
    widths = _left_out_widths(fits, places)
    calibration = _engine(engine, fits, places)
    for width in widths:
        others = [other for other in widths if other is not width]
        far, reach = _far(calibration.half_width, others)
        bounds = replace(calibration, far_half_width=far, reach=reach)
        half_widths = np.array([half_width_at(bounds, one) for one in width.doublings.tolist()])
        yield width, float(np.mean(misses(width.errors) <= half_widths))


def _left_out_widths(fits: FittedRuns, places: Sequence[int]) -> list[LeftOutWidth]:
    widths = _widths(fits.runs)
    left_out = []
    for width in np.unique(widths[places]):
        out = [place for place in places if widths[place] == width]
        others = {place_of(fits.runs[place]) for place in np.flatnonzero(widths != width)}
        if others:
            nearest = [min(map(place_of(fits.runs[one]).doublings, others)) for one in out]
            left_out.append(
                LeftOutWidth(
                    hidden=int(width),
                    errors=fits.width_left_out[out],
                    doublings=np.array(nearest),
                )
            )
    return left_out


def _known(errors: Floats) -> Floats:
    return errors[~np.isnan(errors)]


def _widths(runs: Sequence[PublishedRun]) -> Floats:
    return np.array([float(run.workload.model.hidden) for run in runs])


def place_of(run: PublishedRun) -> MeasuredAt:
    """The model width, the number of GPUs and the sequence length of a measured run, by which its
    distance from other runs is computed.
    """
    return MeasuredAt(
        hidden=run.workload.model.hidden,
        gpus=int(num_gpus(run.stages.value).sum()),
        sequence_length=run.workload.sequence_length,
    )
