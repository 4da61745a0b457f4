"""The rows of a report: the measured and predicted figures of each plan, and their means over
plans.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from experiments.gpu_reports.report_plans import PlanOfReport
from experiments.training.plan_runs import Said
from mistlab.core.units import MIB_BYTES
from mistlab.cost.memory import allocator_of, communicator_bytes
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction
from mistlab.stages.stage_batch import StageBatch

WARM_UPS, TIMED = 2, 5
# How many steps a check of losses runs: the gradients of the first three steps affect the last
# loss.
CHECKED = 4
ERRORS = {
    "time_error": "times",
    "allocated_error": "allocated memory",
    "reserved_error": "reserved memory",
}

ReportRow = Mapping[str, Any]


def steps_of(plan: PlanOfReport) -> int:
    """The number of iterations that a plan runs for."""
    return CHECKED if plan.is_check else WARM_UPS + TIMED


def outside_of(job: Job, stage: int | None) -> float:
    """The predicted bytes of the fullest GPU that are outside torch's allocator."""
    outside = allocator_of(job.cluster).outside_bytes
    if stage is not None:
        return outside
    return outside + float(communicator_bytes(job.cluster, StageBatch.of_plan(job.plan)).max())


def row_of(plan: PlanOfReport, prediction: Prediction, outcome: Said) -> ReportRow:
    """The row of one plan, with measured and predicted figures of its fullest GPU; for a failed run
    only the reason.
    """
    row: dict[str, Any] = {
        "plan": plan.name,
        "predicted_s": prediction.iteration_s,
        "predicted_allocated_bytes": max(one.peak_allocated_bytes for one in prediction.stages),
        "predicted_reserved_bytes": prediction.peak_reserved_bytes,
    }
    if "error" in outcome:
        return {**row, "error": outcome["error"]}
    measured = {
        "measured_s": median_s(outcome),
        "measured_allocated_bytes": max(outcome["peak_allocated_bytes"]),
        "measured_reserved_bytes": max(outcome["peak_reserved_bytes"]),
        "allocator_retries": sum(outcome["allocator_retries"]),
        "measured_outside_bytes": max(outcome.get("outside_bytes", [0])),
    }
    names = zip(ERRORS, ("s", "allocated_bytes", "reserved_bytes"), strict=True)
    errors = {
        error: row[f"predicted_{name}"] / measured[f"measured_{name}"] - 1 for error, name in names
    }
    return {**row, **measured, **errors}


def table_row(job: Job, measured: ReportRow, model: str) -> dict[str, object]:
    """A run as a row of the table of whole iterations (docs/reference/measurement-tables.md)."""
    (stage,) = job.plan.stages
    workload, offload = job.workload, stage.offload
    ratios = (offload.weights, offload.gradients, offload.optimizer, offload.activations)
    return {
        "id": measured["plan"],
        "hardware": job.cluster.hardware.name,
        "nodes": 1,
        "gpus": 1,
        "system": "mistlab",
        "model": model,
        "precision": workload.precision,
        "gradients": workload.gradients,
        "flash": workload.attention == "flash",
        "seq": workload.sequence_length,
        "vocab": workload.model.vocab,
        "dropout": workload.model.dropout,
        "global_batch": workload.global_batch,
        "grad_accum": job.plan.micro_batches,
        "num_stages": 1,
        "layers": stage.layers,
        "ckpt_layers": stage.checkpointed_layers,
        "mbs": stage.micro_batch,
        "dp": 1,
        "tp": 1,
        "zero_wgo": "000",
        "offload_wgoa": "/".join(f"{ratio:g}" for ratio in ratios),
        "iter_s": measured["measured_s"],
        "peak_alloc_mb": measured["measured_allocated_bytes"] / MIB_BYTES,
        "peak_reserved_mb": measured["measured_reserved_bytes"] / MIB_BYTES,
    }


def summary_of(rows: Sequence[ReportRow]) -> ReportRow:
    """The mean absolute errors of the predictions over all plans that have run, with the numbers of
    plans, of failed runs and of the allocator's retries.
    """
    ran = [row for row in rows if "error" not in row]
    means = {f"mean_{name}": fmean(abs(row[name]) for row in ran) for name in ERRORS if ran}
    retries = sum(row["allocator_retries"] for row in ran)
    failed = len(rows) - len(ran)
    return {"plans": len(rows), "failed": failed, "allocator_retries": retries, **means}


def median_s(outcome: Said) -> float:
    """The median seconds of an iteration, without the warm-up iterations."""
    seconds: float = median(outcome["iteration_s"][WARM_UPS:])
    return seconds
