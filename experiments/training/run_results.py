"""The results of a plan's run: as JSON, as a measurement with the times of stages, as rows, and as
text.
"""

import argparse
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from experiments.training.moved_clocks import moved_words
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError, UncalibratedError, to_mapping
from mistlab.cost.kernels import mfu_of
from mistlab.job.job import Job
from mistlab.job.prediction import Clocks, Environment, Measurement, Prediction, StageMeasurement
from mistlab.schedule.slots import Action
from simulators.symbolic import SymbolicPredictor

if TYPE_CHECKING:
    from runtime.comm.group import Shortage
    from runtime.engine.executor import Report
    from runtime.session import MeasuredTask, RankMemory

# The measured times of a stage's passes in an iteration, with the same names as in a prediction.
#
# As in a prediction, the times of a micro-batch in several model chunks are summed, and weight
# gradients count in its backward pass.


# For each kind of task, the kind of pass to which its time is added; a layer's optimizer step
# belongs to the first forward pass.
_PASSES = {"F": "F", "S": "F", "B": "B", "W": "W"}


def stage_times(tasks: Iterable["MeasuredTask"]) -> Mapping[str, float]:
    """The fields of a ``StageMeasurement``; empty if there is no steady-state pass, as with a
    single micro-batch.

    A pass lasts from the start of its first task that computes to the end of its last.
    """
    forwards, backwards = _pass_seconds(tasks)
    if len(forwards) < 2:
        return {}
    first_s, *steady_forwards = forwards
    *steady_backwards, last_s = backwards
    forward_s, backward_s = median(steady_forwards), median(steady_backwards)
    return {
        "stable_s": forward_s + backward_s,
        "delta_forward_s": first_s - forward_s,
        "delta_backward_s": last_s - backward_s,
    }


def _pass_seconds(tasks: Iterable["MeasuredTask"]) -> tuple[list[float], list[float]]:
    """For each micro-batch, the seconds of its forward passes, and of its backward passes."""
    seconds: dict[bool, dict[int, float]] = {True: {}, False: {}}
    for kind, micro_batch, lasting_s in _passes(tasks):
        of_way = seconds[kind == "F"]
        of_way[micro_batch] = of_way.get(micro_batch, 0.0) + lasting_s
    forwards, backwards = ([of for _, of in sorted(way.items())] for way in seconds.values())
    return forwards, backwards


def _passes(tasks: Iterable["MeasuredTask"]) -> Iterator[tuple[str, int, float]]:
    """The kind, the micro-batch and the seconds of each pass, whose tasks are consecutive, layer by
    layer.
    """
    running: tuple[str, int] | None = None
    begin_s = end_s = 0.0
    layer: int | None = None
    for measured in tasks:
        task = measured.task
        if measured.lane != "compute" or not isinstance(task, Action):
            continue
        assert task.layer is not None
        key = _PASSES[task.kind], task.micro_batch
        computes = task.kind != "S"
        jumps = computes and layer is not None and abs(task.layer - layer) > 1
        if key != running or jumps:
            if running is not None:
                yield *running, end_s - begin_s
            running, begin_s, layer = key, measured.start_s, None
        end_s = measured.end_s
        layer = task.layer if computes else layer
    if running is not None:
        yield *running, end_s - begin_s


# The results of a plan's run: as JSON, as a measurement, as rows, and as text.
#
# ``stage`` is the index of a stage that ran alone, or None if all stages ran.


# The number of iterations in which memory is allocated, code compiled and connections made; if
# there are more, these are not measured.
WARM_UP = 2


@dataclass(slots=True, kw_only=True)
class History:
    """The results of a run's training steps in order, one row for each. If the run was resumed, the
    rows of previous processes are in ``earlier``.

    It also has the first GPU's clock rates after the warm-up and at the end, and the seconds until
    the first step.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    earlier: int = 0
    clocks: list[Clocks] = field(default_factory=list)
    start_s: float = 0.0

    def go_on_from(self, rows: Sequence[dict[str, Any]]) -> None:
        """Begin with the rows that previous processes of the run have written."""
        self.rows, self.earlier = [*rows], len(rows)

    def add(self, step: int, report: "Report", seconds: float, tokens: int) -> dict[str, Any]:
        """Record the results of a training step on so many tokens; returns its row."""
        row = {"step": step, **to_mapping(report), "iteration_s": seconds, "tokens": tokens}
        self.rows.append(row)
        return row

    def share(self, job: Job) -> float:
        """The mean share of a step's positions that are not padding, over the steps of this
        process, or of previous processes if it had no step to run.
        """
        rows, tokens = self.rows[self.earlier :] or self.rows, job.workload.tokens
        return statistics.fmean(row.get("tokens", tokens) for row in rows) / tokens

    def note_clocks(self, clocks: Clocks | None) -> None:
        """Record the clock rates of the first GPU, if its driver reports any."""
        if clocks is not None:
            self.clocks.append(clocks)

    @property
    def moved_clocks(self) -> str:
        """A warning if clock rates have changed since the warm-up; empty if they have not, or are
        unknown.
        """
        return moved_words(self.clocks[0], self.clocks[-1]) if self.clocks else ""

    @property
    def timed_s(self) -> list[float]:
        """The seconds of the steps that this process ran after the warm-up; if it had no step to
        run, those of previous processes.
        """
        samples = self._column("iteration_s")
        samples_after = samples[self.earlier :] or samples
        return sorted(samples_after[min(WARM_UP, len(samples_after) - 1) :])

    def columns(self) -> dict[str, list[Any]]:
        """The losses and the other figures of all steps as columns, with the names that ``--json``
        uses.
        """
        return {
            "losses": self._column("loss"),
            "gradient_norms": self._column("gradient_norm"),
            "skipped": self._column("skipped"),
            "iteration_s": self._column("iteration_s"),
        }

    def _column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]


def result_of(
    job: Job,
    options: argparse.Namespace,
    history: History,
    memory: Sequence["RankMemory"],
    environment: Environment,
) -> dict[str, Any]:
    """The object that ``run_plan --json`` prints."""
    median = statistics.median(history.timed_s)
    return {
        "plan": str(options.plan),
        "stage": options.stage,
        "seed": options.seed,
        "deterministic": options.deterministic,
        "attention_kernel": options.attention_kernel if job.workload.attention == "flash" else None,
        "start_s": history.start_s,
        **history.columns(),
        **_predicted(job, options.stage),
        "tokens_per_s": history.share(job) * job.workload.tokens / median,
        "mfu": history.share(job) * mfu_of(job, options.stage, median),
        "peak_allocated_bytes": [one.peak_allocated_bytes for one in memory],
        "peak_reserved_bytes": [one.peak_reserved_bytes for one in memory],
        "outside_bytes": [one.outside_bytes for one in memory],
        "host_bytes": [one.host_bytes for one in memory],
        "allocator_retries": [one.allocator_retries for one in memory],
        "clocks": [to_mapping(one) for one in history.clocks],
        "environment": to_mapping(environment),
    }


def measurement_of(
    job: Job,
    stage: int | None,
    history: History,
    memory: Sequence["RankMemory"],
    tasks: Sequence["MeasuredTask"],
    environment: Environment,
) -> Measurement:
    """The measured iteration, with the names and units of a prediction."""
    samples = history.timed_s
    median = statistics.median(samples)
    stages, first = [], 0
    for number in stages_run(job, stage):
        num_gpus = job.plan.stages[number].num_gpus
        ranks = memory[first : first + num_gpus]
        first += num_gpus
        stages.append(
            StageMeasurement(
                **stage_times(task for task in tasks if task.stage == number),
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
        tokens_per_s=history.share(job) * job.workload.tokens / median,
        mfu=history.share(job) * mfu_of(job, stage, median),
        fits=True,
        engine=job.plan.engine,
        stages=tuple(stages),
        samples_s=tuple(samples),
        environment=environment,
        clocks=tuple(history.clocks),
    )


def summary_of(result: dict[str, Any]) -> str:
    """The results of the run as text."""
    predicted = result["predicted_iteration_s"]
    losses = [f"{loss:.6f}" for loss in result["losses"] if loss is not None]
    lines = [] if result["stage"] is None else [f"stage {result['stage']} by itself"]
    lines += [f"losses {' '.join(losses)}"] if losses else []
    lines += [
        f"iteration {statistics.median(result['iteration_s']):.4f} s"
        + (f" (predicted for the plan's hardware: {predicted:.4f} s)" if predicted else ""),
        f"{result['tokens_per_s']:,.0f} tokens/s, MFU {result['mfu']:.2%}",
    ]
    for rank, size in enumerate(result["peak_allocated_bytes"]):
        line = f"rank {rank}: peak {size / GIB_BYTES:.3f} GiB allocated"
        if predicted:
            expected = result["predicted_peak_allocated_bytes"][rank]
            line += f" (predicted: {expected / GIB_BYTES:.3f} GiB)"
        if outside := result["outside_bytes"][rank]:
            line += f", {outside / GIB_BYTES:.3f} GiB outside torch's allocator"
        lines.append(line)
    return "\n".join(lines)


def shortage_words(shortage: "Shortage", job: Job, stage: int | None) -> str:
    """The message that a run is out of memory: it names the stage and the task, and gives allocated
    and predicted bytes of weights, activations, ...
    """
    held = shortage.held_bytes
    text = f"stage {shortage.stage} is out of memory at {shortage.doing} ({shortage.reason})"
    if held:
        text += f"; GiB allocated: {_gib(held)}"
    if shortage.outside_bytes:
        size = shortage.outside_bytes / GIB_BYTES
        text += f"; {size:.2f} GiB of the device taken outside torch's allocator"
    try:
        predicted = _prediction(job, stage)
    except InputError as error:
        return f"{text}; not predicted: {error}"
    if predicted is None:
        return text
    of_stage = predicted.stages[stages_run(job, stage).index(shortage.stage)]
    peak = of_stage.peak_allocated_bytes / GIB_BYTES
    classes = _gib(to_mapping(of_stage.memory))
    return (
        f"{text}; GiB predicted at the peak: {peak:.2f} ({classes}): give "
        f"plan.stages[{shortage.stage}] more offload or checkpointed_layers, or a smaller "
        "micro_batch"
    )


def _gib(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB_BYTES:.2f}" for name, size in sizes.items())


def stages_run(job: Job, stage: int | None) -> Sequence[int]:
    """The indices of the stages that ran."""
    return range(job.plan.num_stages) if stage is None else range(stage, stage + 1)


def prediction_of(job: Job, stage: int | None) -> Prediction:
    """The closed form's prediction of the plan or, if a single stage ran, of that stage alone on a
    GPU.
    """
    if stage is None:
        return SymbolicPredictor(workload=job.workload, cluster=job.cluster).predict(job.plan)
    alone = SymbolicPredictor(workload=job.workload, cluster=job.cluster.alone)
    return alone.predict_stage(job.plan, stage)


def _predicted(job: Job, stage: int | None) -> dict[str, Any]:
    """The predicted figures of a run, with the memory peak of each rank; null if there is no
    prediction.
    """
    prediction = _prediction(job, stage)
    pairs = zip(
        stages_run(job, stage), prediction.stages if prediction else (), strict=bool(prediction)
    )
    ranks = [one for number, one in pairs for _ in range(job.plan.stages[number].num_gpus)]
    return {
        "predicted_iteration_s": prediction.iteration_s if prediction else None,
        "predicted_peak_allocated_bytes": [one.peak_allocated_bytes for one in ranks] or None,
        "predicted_peak_reserved_bytes": [one.peak_reserved_bytes for one in ranks] or None,
    }


def _prediction(job: Job, stage: int | None) -> Prediction | None:
    """The prediction of a run; None if the hardware is not calibrated."""
    try:
        return prediction_of(job, stage)
    except UncalibratedError:
        return None
