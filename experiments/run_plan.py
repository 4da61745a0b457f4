"""Train by a plan: alone, or under torchrun with as many processes as the plan has ranks.

On CUDA devices tasks overlap on streams; on CPUs the same program runs on simulated ones. Weights,
synthetic data and losses depend on the seed and the workload alone, never on the plan.
"""

import argparse
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.commandline import (
    DONE,
    NoAnswerError,
    parser_of,
    print_json,
    progress,
    run,
    writable,
)
from experiments.measured_trace import write_trace
from experiments.rundir import RunDirectory, revision
from mistlab.cost.arithmetic import model_flop
from mistlab.datafile import write_yaml
from mistlab.errors import InputError
from mistlab.job import Job, load_job
from mistlab.measurement import Measurement, StageMeasurement
from mistlab.predict import Prediction
from mistlab.units import GIB_BYTES
from mistlab.value import to_mapping
from simulators.symbolic import SymbolicPredictor

if TYPE_CHECKING:
    from runtime.engine.executor import Report
    from runtime.session import RankMemory, Session, Settings

EXAMPLE = Path(__file__).parent / "plans" / "tiny-gpt.yaml"
# Iterations that allocate, compile and connect; left out of the measurement where more follow.
WARM_UP = 2
FP16_LOSS_SCALE = 2.0**16
MOST_SEED = 2**31


@dataclass(slots=True, kw_only=True)
class History:
    """What the steps came to, in order."""

    reports: list["Report"] = field(default_factory=list)
    iteration_s: list[float] = field(default_factory=list)

    @property
    def timed_s(self) -> list[float]:
        """The samples after warming up."""
        return sorted(self.iteration_s[min(WARM_UP, len(self.iteration_s) - 1) :])


def main(arguments: Sequence[str]) -> int:
    """Run the plan; results go to standard output on the first rank alone."""
    options = _parser().parse_args(arguments)
    from runtime.session import Session  # noqa: PLC0415 (needs torch)

    job = load_job(options.plan)
    history = History()
    with Session.started(job, _settings(options, job)) as session:
        try:
            _train(session, options, history)
        except (RuntimeError, MemoryError) as error:
            _explain(error, session, job, options)
            raise
        _finish(session, options, history)
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("run_plan", __doc__, seed=0, out=None, json=False)
    parser.add_argument("plan", metavar="PLAN.yaml", nargs="?", type=Path, default=EXAMPLE)
    parser.add_argument("--steps", type=int, default=5, help="steps to train (default: 5)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument(
        "--data", default="synthetic", metavar="FILE", help="tokens, or synthetic (default)"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="default: 3e-4")
    parser.add_argument(
        "--decay", choices=("constant", "linear", "cosine"), default="constant", help="of the rate"
    )
    parser.add_argument("--warmup-steps", type=int, default=0, help="of a rising learning rate")
    parser.add_argument("--total-steps", type=int, help="when the rate has fallen (--steps)")
    parser.add_argument("--clip-norm", type=float, help="most norm of all gradients")
    parser.add_argument("--epsilon", type=float, default=1e-8, help="AdamW's (default: 1e-8)")
    parser.add_argument("--loss-scale", type=float, help="the first (fp16: 65536, else none)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on from a checkpoint")
    parser.add_argument("--save-every", type=int, default=0, help="checkpoint so often, in --out")
    parser.add_argument(
        "--export", type=Path, metavar="FILE.safetensors", help="weights at the end"
    )
    parser.add_argument(
        "--serialise", action="store_true", help="one task after another, to compare (cuda)"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds to wait for other ranks"
    )
    return parser


def _settings(options: argparse.Namespace, job: Job) -> "Settings":
    from runtime.engine.training import Training  # noqa: PLC0415 (needs torch)
    from runtime.session import Settings  # noqa: PLC0415 (needs torch)

    for name in ("steps", "timeout"):
        if getattr(options, name) <= 0:
            message = f"--{name} {getattr(options, name):g} is too small: give a number above 0"
            raise InputError(message)
    if not 0 <= options.seed < MOST_SEED:
        message = f"--seed {options.seed}: give a number from 0 to {MOST_SEED - 1}"
        raise InputError(message)
    if options.save_every and options.out is None:
        message = "--save-every needs a folder: give --out DIR too"
        raise InputError(message)
    scale = FP16_LOSS_SCALE if job.workload.precision == "fp16" else None
    return Settings(
        device=options.device,
        data=None if options.data == "synthetic" else Path(options.data),
        seed=options.seed,
        timeout_s=options.timeout,
        serialises=options.serialise,
        training=Training(
            learning_rate=options.learning_rate,
            decay=options.decay,
            warmup_steps=options.warmup_steps,
            total_steps=options.total_steps or options.steps,
            epsilon=options.epsilon,
            clip_norm=options.clip_norm,
            loss_scale=options.loss_scale or scale,
        ),
    )


def _train(session: "Session", options: argparse.Namespace, history: History) -> None:
    if options.resume is not None:
        session.resume(options.resume)
    for _ in range(options.steps):
        report, seconds = session.step()
        history.reports.append(report)
        history.iteration_s.append(seconds)
        if not math.isfinite(report.loss):
            message = (
                f"the loss is {report.loss} at step {session.steps}: give a lower --learning-rate, "
                f"--clip-norm 1 or --warmup-steps; {_last_checkpoint(options)}"
            )
            raise NoAnswerError(message)
        _tell(session, report, seconds)
        if options.save_every and session.steps % options.save_every == 0:
            session.save(_checkpoints(options))


def _tell(session: "Session", report: "Report", seconds: float) -> None:
    """A line of progress, from the first rank."""
    peak = max(memory.peak_allocated_bytes for memory in session.memory())
    if session.is_first:
        norm = "" if report.gradient_norm is None else f"  norm {report.gradient_norm:.3f}"
        left_out = "  overflow, step left out" if report.skipped else ""
        progress(
            f"step {session.steps}  loss {report.loss:.6f}{norm}  {seconds:.3f} s  "
            f"{session.job.workload.tokens / seconds:,.0f} tokens/s  "
            f"MFU {_mfu(session.job, seconds):.2%}  peak {peak / GIB_BYTES:.3f} GiB{left_out}"
        )


def _finish(session: "Session", options: argparse.Namespace, history: History) -> None:
    """Write what is asked for; every rank takes part, the first one speaks."""
    memory, tasks = session.memory(), session.tasks()
    if options.export is not None:
        session.export(writable(options.export, "file"))
    if not session.is_first:
        return
    result = _result(session.job, options, history, memory)
    if options.out is not None:
        others = {name: value for name, value in vars(options).items() if name != "plan"}
        directory = RunDirectory.make(options.out, f"run_plan {options.plan}", others)
        directory.write_rows(_rows(history))
        measured = _measurement(session, history, memory)
        write_yaml(to_mapping(measured), options.out / "measurement.yaml")
        write_trace(session.job, tasks, options.out / "timeline.json")
        progress(f"{options.out}: measurement.yaml, timeline.json (ui.perfetto.dev), rows.jsonl")
    if options.json:
        print_json(result)
    else:
        print(_summary(result))


def _result(
    job: Job, options: argparse.Namespace, history: History, memory: Sequence["RankMemory"]
) -> dict[str, Any]:
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
        "mfu": _mfu(job, median),
        "peak_allocated_bytes": [one.peak_allocated_bytes for one in memory],
        "peak_reserved_bytes": [one.peak_reserved_bytes for one in memory],
        "host_bytes": [one.host_bytes for one in memory],
    }


def _measurement(
    session: "Session", history: History, memory: Sequence["RankMemory"]
) -> Measurement:
    job, samples = session.job, history.timed_s
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
        mfu=_mfu(job, median),
        fits=True,
        engine=job.plan.engine,
        stages=tuple(stages),
        samples_s=tuple(samples),
        environment=session.environment(revision()),
    )


def _rows(history: History) -> list[dict[str, Any]]:
    pairs = zip(history.reports, history.iteration_s, strict=True)
    return [{**to_mapping(report), "iteration_s": seconds} for report, seconds in pairs]


def _summary(result: dict[str, Any]) -> str:
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


def _mfu(job: Job, seconds: float) -> float:
    """Of the hardware that the plan names, wherever it runs."""
    peak = job.cluster.peak_flop_per_s(job.workload.precision)
    return model_flop(job.workload) / (seconds * job.plan.num_gpus * peak)


def _prediction(job: Job) -> Prediction | None:
    """What the closed form says; nothing where the hardware is not calibrated."""
    try:
        return SymbolicPredictor(workload=job.workload, cluster=job.cluster).predict(job.plan)
    except InputError:
        return None


def _checkpoints(options: argparse.Namespace) -> Path:
    folder: Path = options.out / "checkpoints"
    return folder


def _last_checkpoint(options: argparse.Namespace) -> str:
    from runtime.checkpoint import latest  # noqa: PLC0415 (needs torch)

    folder = options.resume if options.out is None else _checkpoints(options)
    path = latest(folder) if folder is not None else None
    return f"the last checkpoint is {path}" if path else "there is no checkpoint"


def _explain(error: Exception, session: "Session", job: Job, options: argparse.Namespace) -> None:
    """Say what ended the run, in words, and end this process if others may hang."""
    from torch import OutOfMemoryError  # noqa: PLC0415

    from runtime.comm.group import RankLostError  # noqa: PLC0415 (needs torch)

    if isinstance(error, RankLostError):
        text = f"rank {session.world.rank} stops: {error}; {_last_checkpoint(options)}"
    elif isinstance(error, OutOfMemoryError | MemoryError):
        text = _shortage(error, session, job)
    else:
        return
    progress(f"error: {options.plan}: {text}")
    sys.stdout.flush()
    # Threads of collectives that will never end must not keep the process.
    os._exit(1)


def _shortage(error: Exception, session: "Session", job: Job) -> str:
    """Which stage, doing what, held how much, and what was predicted of it by class."""
    stage, doing = session.stage, session.now
    actual = session.own_memory().peak_allocated_bytes / GIB_BYTES
    reason = str(error).partition("\n")[0]
    text = f"stage {stage} is out of memory at {doing}: {actual:.2f} GiB allocated ({reason})"
    predicted = _prediction(job)
    if predicted is None:
        return text
    of_stage = predicted.stages[stage]
    classes = ", ".join(
        f"{name} {size / GIB_BYTES:.2f}" for name, size in to_mapping(of_stage.memory).items()
    )
    peak = of_stage.peak_allocated_bytes / GIB_BYTES
    return f"{text}; predicted {peak:.2f} GiB ({classes}): offload or checkpoint more"


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
