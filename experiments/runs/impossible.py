"""Tests whether the figures of a measured run are possible on the GPU that its row names: a step
takes at least the time of its GEMMs at the GPU's peak rate; a peak is within its memory, and not
below what the run holds for certain.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from experiments.runs.configuration import Configuration
from experiments.runs.dialects.dialect import row_of
from experiments.runs.run_row import RunRow
from experiments.runs.sized_models import parameters_of
from mistlab.core.units import GIB_BYTES, TFLOP
from mistlab.cost.confidence import BITS
from mistlab.cost.kernels import gemm_flop
from mistlab.engines.adapters import Base, Train
from mistlab.job.job import Job

# By what factor a GPU's clock may exceed the one that its datasheet's peak rate is for.
ABOVE_DATASHEET = 1.1
# Which share of the GEMM operations of blocks are in forward passes: a third, or half if the only
# weight gradients are those of adapters.
FORWARD_SHARE: Mapping[Train, float] = {"all": 1 / 3, "adapters": 1 / 2}
# By what factor a peak may exceed the memory that programs can use: it may be rounded, and count
# what the driver takes (79.65 GiB where 79.1 were measured to be usable).
ABOVE_MEMORY = 1.02
# By what factor a peak may be below the bytes that a run holds for certain: a table may mix up GB
# and GiB (7 %), and round.
BELOW_HELD = 1.1
# The fewest bytes of a weight, of its gradient, and of its two moments, in training with at least
# this number of bits.
FEWEST_BITS, WEIGHT_BYTES, GRADIENT_BYTES, MOMENTS_BYTES = 16, 2, 2, 4
# The bytes of a frozen weight, without scales.
FROZEN_BYTES: Mapping[Base, float] = {"16bit": 2, "8bit": 1, "4bit": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a job's run on its GPUs: a step takes at least the seconds of its GEMMs at the
    peak rate (``gemms_s``) and of those that recomputation adds (``recomputed_s``), and the memory
    peak is at most a GPU's memory. If all GPUs shared the model, each would hold this number of
    ``parameters``; GEMMs have operands of ``bits`` bits. The pipeline has this number of
    ``stages``.
    """

    hardware: str
    tflops: float
    gemms_s: float
    recomputed_s: float
    memory_gib: float
    parameters: float
    bits: int
    stages: int


def limits_of(run: Configuration, job: Job, times: int, recomputed_share: float) -> Limits | None:
    """The limits of a measured run, whose step consists of ``times`` iterations of the job; None if
    its row does not say on which GPU it ran.
    """
    if run.gpus.note:
        return None
    cluster, workload = job.cluster, job.workload
    peak = cluster.peak_flop_per_s(workload.precision)
    step_s = times / (peak * job.plan.num_gpus)
    forward = FORWARD_SHARE[workload.train] * recomputed_share
    return Limits(
        hardware=cluster.hardware.name,
        tflops=peak / TFLOP,
        gemms_s=step_s * gemm_flop(workload),
        recomputed_s=step_s * forward * gemm_flop(workload, ends=False),
        memory_gib=cluster.memory_bytes / GIB_BYTES,
        parameters=parameters_of(workload.model) / job.plan.num_gpus,
        bits=BITS[workload.precision],
        stages=job.plan.num_stages,
    )


def impossible_figures(
    cells: Mapping[str, str],
    limits: Limits | None,
    measured_s: float | None,
    measured_gib: float | None,
    sequences: int,
) -> Iterator[str]:
    """Yield a reason for each measured figure of a row that no run on the row's GPUs can have.
    ``sequences`` is the number in a predicted step. If the row leaves something open, such as its
    batch, figures that depend on it are not judged.
    """
    row = row_of(cells)
    if limits is None or row.failed:
        return
    if measured_s is not None and _says_step(row):
        is_redone = bool(row.text("recompute") and row.recompute)
        least_s = limits.gemms_s + is_redone * limits.recomputed_s
        batch = row.count("global_batch")
        least_s *= min(1.0, batch / sequences) if batch and sequences else 1.0
        if measured_s < least_s / ABOVE_DATASHEET:
            yield (
                f"step of {measured_s:.3g} s: its GEMMs alone take {least_s:.3g} s at the peak of "
                f"{limits.hardware}, {limits.tflops:g} TFLOP/s"
            )
    if measured_gib is not None and measured_gib > ABOVE_MEMORY * limits.memory_gib:
        has = f"{limits.hardware} has {limits.memory_gib:g} GiB"
        yield f"peak of {measured_gib:g} GiB: {has}"
    if measured_gib is not None and row.text("gpus") and _says_model(row):
        names, held_gib = _held(row, limits)
        if measured_gib * BELOW_HELD < held_gib:
            yield f"peak of {measured_gib:g} GiB: {names} alone take {held_gib:.3g} GiB of each GPU"


def _held(row: RunRow, limits: Limits) -> tuple[str, float]:
    """What of weights, gradients and moments the GPU that a row measured holds for certain, and
    how many GiB of it at least: the mean over all GPUs, in the fewest bits that the row allows.

    What the row leaves open counts nothing. A pipeline's fullest stage holds at least the mean;
    another one, such as the first, may hold less.
    """
    if row.weights_on_host or (limits.stages > 1 and row.peak_of != "fullest"):
        return "weights", 0.0
    if row.adapters:
        is_stated = bool(row.text("base_bits")) or row.base != "16bit"
        frozen = FROZEN_BYTES[row.base] if is_stated else 0.0
        return "frozen weights", frozen * limits.parameters / GIB_BYTES
    sizes = {
        "weights": WEIGHT_BYTES,
        "gradients": 0 if row.gradients_on_host or row.steps_in_backward else GRADIENT_BYTES,
        "moments": MOMENTS_BYTES if row.keeps_moments and not row.optimizer_on_host else 0,
    }
    held = {name: size for name, size in sizes.items() if size and limits.bits >= FEWEST_BITS}
    return ", ".join(held), sum(held.values()) * limits.parameters / GIB_BYTES


def _says_model(row: RunRow) -> bool:
    """Whether a row states the sizes of its model, or names one whose sizes are known."""
    is_like_another = row.near_model is not None or row.billions or row.millions
    return bool(row.text("layers") and row.text("hidden")) or not is_like_another


def _says_step(row: RunRow) -> bool:
    """Whether a row states everything that determines the operations of its measured step: sizes of
    the model, precision, GPUs and sequences of a step, none of whose tokens are dropped.
    """
    is_rate = bool(row.text("tokens_per_s_per_gpu")) and not row.text("step_s")
    has_batch = bool(row.text("global_batch") or row.text("grad_accumulation"))
    return (
        _says_model(row)
        and (is_rate or has_batch)
        and bool(row.text("gpus") and row.text("precision"))
        and not row.drops_tokens
    )
