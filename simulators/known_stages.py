"""The costs of single stages, from which the cost of a pipeline is put together.

Axes: C candidates.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.pipeline import TIMES
from mistlab.values.errors import refuse
from mistlab.values.prediction import MemoryByClass, MemoryByPhase, StagePrediction
from mistlab.values.stages import StageCosts, StageFigures

# Bytes that 64 bits hold: 8 EiB.
MOST_BYTES = 2.0**63


@dataclass(frozen=True, slots=True)
class KnownStage:
    """The costs of a stage that was worked out before.

    ``times`` are in the order of ``StageTimes``. ``fits`` is about the memory of its GPUs. A rank
    keeps ``rank_host_bytes`` on its host.
    """

    times: tuple[float, ...]
    prediction: StagePrediction
    fits: bool
    num_gpus: int
    rank_host_bytes: float


def known_stages(
    costs: StageCosts, figures: StageFigures, num_gpus: NDArray[np.int64], gpus_per_node: int
) -> Iterator[KnownStage]:
    """Every candidate as a known stage, with so many GPUs on nodes of so many."""
    pipeline_s = _rows(*(getattr(costs.seconds, name) for name in TIMES))
    return map(
        KnownStage,
        map(tuple, pipeline_s),
        _predictions(costs, figures, np.minimum(num_gpus, gpus_per_node)),
        costs.fits.tolist(),
        num_gpus.tolist(),
        costs.host_bytes.tolist(),
    )


def _predictions(
    costs: StageCosts, figures: StageFigures, gpus_in_node: NDArray[np.int64]
) -> list[StagePrediction]:
    seconds = costs.seconds
    times = _rows(
        seconds.stable_s,
        seconds.delta_forward_s,
        seconds.delta_backward_s,
        seconds.step_s,
        seconds.exposed_communication_s,
    )
    sizes = _whole_rows(
        costs.peak_allocated_bytes,
        costs.peak_reserved_bytes,
        costs.host_bytes * gpus_in_node,
        figures.weights_bytes,
        figures.gradients_bytes,
        figures.optimizer_bytes,
        figures.activations_bytes,
        figures.buffers_bytes,
        figures.logits_bytes,
        figures.forward_peak_bytes,
        figures.backward_peak_bytes,
        figures.step_peak_bytes,
    )
    return [_stage_prediction(t, s) for t, s in zip(times, sizes, strict=True)]


def _stage_prediction(times: list[float], sizes: list[int]) -> StagePrediction:
    peak, reserved, host, weights, gradients, optimizer, kept, buffers, logits, *phases = sizes
    # At the peak, the running block's activations count as temporaries.
    states = weights + gradients + optimizer + buffers
    # Where all layers step at once, activations and logits are gone by then.
    is_step = phases[2] > max(phases[:2])
    activations = 0 if is_step else min(kept, peak - states)
    logits = 0 if is_step else min(logits, peak - states - activations)
    stable_s, delta_forward_s, delta_backward_s, step_s, exposed_s = times
    return StagePrediction(
        stable_s=stable_s,
        delta_forward_s=delta_forward_s,
        delta_backward_s=delta_backward_s,
        step_s=step_s,
        exposed_communication_s=max(0.0, exposed_s),
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        host_bytes=host,
        memory=MemoryByClass(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            activations=activations,
            buffers=buffers,
            logits=logits,
            temporaries=peak - states - activations - logits,
        ),
        memory_by_phase=MemoryByPhase(forward=phases[0], backward=phases[1], step=phases[2]),
    )


def _rows(*columns: NDArray[np.float64]) -> list[list[float]]:
    rows: list[list[float]] = np.stack(columns, axis=1).tolist()
    return rows


def _whole_rows(*columns: NDArray[np.float64]) -> list[list[int]]:
    """Bytes as whole numbers; refuses those that 64 bits do not hold, of sizes beyond all sense."""
    table = np.stack(columns, axis=1).round()
    if not (np.abs(table) < MOST_BYTES).all():
        refuse("workload", "needs more than 8 EiB of a GPU: lower its model, sequence or batch")
    rows: list[list[int]] = table.astype(np.int64).tolist()
    return rows
