"""What a run of a plan came to: as JSON, as a measurement, as rows, in words."""

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mistlab.cost.arithmetic import model_flop
from mistlab.errors import InputError
from mistlab.job import Job
from mistlab.measurement import Environment, Measurement, StageMeasurement
from mistlab.predict import Prediction
from mistlab.units import GIB_BYTES
from mistlab.value import to_mapping
from simulators.symbolic import SymbolicPredictor

if TYPE_CHECKING:
    from runtime.engine.executor import Report
    from runtime.session import RankMemory
    from runtime.shortage import Shortage

# Iterations that allocate, compile and connect; left out of the measurement where more follow.
WARM_UP = 2


@dataclass(slots=True, kw_only=True)
class History:
    """What the steps came to, in order."""

    reports: list["Report"] = field(default_factory=list)
    iteration_s: list[float] = field(default_factory=list)

    @property
    def timed_s(self) -> list[float]:
        """The samples after warming up."""
        return sorted(self.iteration_s[min(WARM_UP, len(self.iteration_s) - 1) :])


def result_of(
    job: Job, options: argparse.Namespace, history: History, memory: Sequence["RankMemory"]
) -> dict[str, Any]:
    """What ``--json`` prints."""
    median = statistics.median(history.timed_s)
    predicted = _prediction(job)
    return {
        "plan": str(options.plan),
        "seed": options.seed,
        "losses": [report.loss for report in history.reports],
        "gradient_norms": [report.gradient_norm for report in history.reports],
        "skipped": [report.skipped for report in history.reports],
        "iteration_s": history.iteration_s,
        "predicted_iteration_s": predicted.iteration_s if predicted else None,
        "tokens_per_s": job.workload.tokens / median,
        "mfu": mfu_of(job, median),
        "peak_allocated_bytes": [one.peak_allocated_bytes for one in memory],
        "peak_reserved_bytes": [one.peak_reserved_bytes for one in memory],
        "host_bytes": [one.host_bytes for one in memory],
        "allocator_retries": [one.allocator_retries for one in memory],
    }


def measurement_of(
    job: Job, history: History, memory: Sequence["RankMemory"], environment: Environment
) -> Measurement:
    """The run in the names and units of a prediction."""
    samples = history.timed_s
    median = statistics.median(samples)
    stages, first = [], 0
    for stage in job.plan.stages:
        ranks = memory[first : first + stage.num_gpus]
        first += stage.num_gpus
        stages.append(
            StageMeasurement(
                peak_allocated_bytes=max(one.peak_allocated_bytes for one in ranks),
                peak_reserved_bytes=max(one.peak_reserved_bytes for one in ranks),
                host_bytes=max(one.host_bytes for one in ranks),
            )
        )
    edge = math.ceil(0.05 * len(samples)) - 1
    return Measurement(
        iteration_s=median,
        iteration_s_low=samples[edge],
        iteration_s_high=samples[-1 - edge],
        tokens_per_s=job.workload.tokens / median,
        mfu=mfu_of(job, median),
        fits=True,
        engine=job.plan.engine,
        stages=tuple(stages),
        samples_s=tuple(samples),
        environment=environment,
    )


def rows_of(history: History) -> list[dict[str, Any]]:
    """A row for each step."""
    pairs = zip(history.reports, history.iteration_s, strict=True)
    return [{**to_mapping(report), "iteration_s": seconds} for report, seconds in pairs]


def summary_of(result: dict[str, Any]) -> str:
    """The result in words."""
    predicted = result["predicted_iteration_s"]
    lines = [
        f"losses {' '.join(f'{loss:.6f}' for loss in result['losses'])}",
        f"iteration {statistics.median(result['iteration_s']):.4f} s"
        + (f" (predicted for the plan's hardware: {predicted:.4f} s)" if predicted else ""),
        f"{result['tokens_per_s']:,.0f} tokens/s, MFU {result['mfu']:.2%}",
    ]
    for rank, size in enumerate(result["peak_allocated_bytes"]):
        lines.append(f"rank {rank}: peak {size / GIB_BYTES:.3f} GiB allocated")
    return "\n".join(lines)


def shortage_words(shortage: "Shortage", job: Job) -> str:
    """Which stage ran out of memory doing what; what it held, and what was predicted, by class."""
    held = shortage.held_bytes
    text = f"stage {shortage.stage} is out of memory at {shortage.doing} ({shortage.reason})"
    if held:
        text += f"; held {_gib(held)}"
    predicted = _prediction(job)
    if predicted is None:
        return text
    of_stage = predicted.stages[shortage.stage]
    peak = of_stage.peak_allocated_bytes / GIB_BYTES
    classes = _gib(to_mapping(of_stage.memory))
    return f"{text}; predicted {peak:.2f} GiB ({classes}): offload or checkpoint more"


def _gib(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB_BYTES:.2f}" for name, size in sizes.items())


def mfu_of(job: Job, seconds: float) -> float:
    """Of the hardware that the plan names, wherever it runs."""
    peak = job.cluster.peak_flop_per_s(job.workload.precision)
    return model_flop(job.workload) / (seconds * job.plan.num_gpus * peak)


def _prediction(job: Job) -> Prediction | None:
    """What the closed form says; nothing where the hardware is not calibrated."""
    try:
        return SymbolicPredictor(workload=job.workload, cluster=job.cluster).predict(job.plan)
    except InputError:
        return None
