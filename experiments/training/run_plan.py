"""The command ``run_plan``: trains by a plan for some steps, from initial weights or from a
checkpoint, and writes the results.
"""

import argparse
import math
import os
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from experiments.cli.commandline import DONE, NoAnswerError, as_options, print_json, progress
from experiments.cli.rundir import RunDirectory, revision
from experiments.training.run_endings import in_words, last_checkpoint
from experiments.training.run_options import (
    check_every,
    check_exported,
    check_options,
    check_places,
    check_stage,
    checkpoints_of,
    goes_on,
)
from experiments.training.run_results import WARM_UP, History, measurement_of, result_of, summary_of
from mistlab.core.files import write_yaml
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import reject, to_mapping
from mistlab.cost.kernels import mfu_of
from mistlab.job.job import Job, load_job
from mistlab.plan.lengths import lengths_from

if TYPE_CHECKING:
    from runtime.documents import Documented, Filling
    from runtime.engine.executor import Report
    from runtime.session import Session, Settings
import json
from typing import TYPE_CHECKING, Any

from experiments.training.run_results import stages_run
from mistlab.core.files import naming
from mistlab.core.values import UncalibratedError
from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.slots import Action
from simulators.timeline import MICROSECONDS, WORDS, trace_of

if TYPE_CHECKING:
    from runtime.session import MeasuredTask
import signal
import subprocess
import sys
from contextlib import suppress
from types import FrameType

from experiments.cli.command import CRASHED
from experiments.cli.commandline import INTERRUPTED
from experiments.training.run_options import LATEST
from mistlab.core.values import InputError
from runtime.checkpoints.checkpoint import latest


def run_plan(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Train by a plan: alone, or under torchrun with as many processes as the plan has ranks.

    On CUDA devices tasks overlap on streams; on CPUs the same program runs on simulated ones.
    Weights, synthetic data and losses depend on the seed and the workload alone, never on the
    plan. With --stage a stage runs by itself, as in its pipeline; what its neighbours would
    send is drawn at random.
    """
    check_options(options)
    if options.restarts:
        return restarted(arguments, options)
    from runtime.determinism import strictly_deterministic  # noqa: PLC0415 (needs torch)
    from runtime.session import Session  # noqa: PLC0415 (needs torch)

    job, began_s = load_job(options.plan), perf_counter()
    history = History()
    settings = _settings(options, job)
    check_places(options)
    _warn(options)
    try:
        with (
            strictly_deterministic() if options.deterministic else nullcontext(),
            Session.started(job, settings) as session,
        ):
            history.start_s = perf_counter() - began_s
            _resume(session, options)
            directory = _directory(session, options, history)
            _train(session, options, history, directory)
            _finish(session, options, history, directory)
    except RuntimeError as error:
        explained = in_words(error, job, options)
        if explained is None:
            raise
        raise explained from error
    return DONE


def _settings(options: argparse.Namespace, job: Job) -> "Settings":
    from runtime.engine.training import FP16_LOSS_SCALE, Training  # noqa: PLC0415 (needs torch)
    from runtime.session import Settings  # noqa: PLC0415 (needs torch)

    check_stage(options)
    check_every(job, options.steps)
    check_exported(options, job)
    scale = FP16_LOSS_SCALE if job.workload.precision == "fp16" else None
    with as_options():
        training = Training(
            learning_rate=options.learning_rate,
            decay=options.decay,
            warmup_steps=options.warmup_steps,
            total_steps=options.steps if options.total_steps is None else options.total_steps,
            epsilon=options.epsilon,
            clip_norm=options.clip_norm,
            loss_scale=scale if options.loss_scale is None else options.loss_scale,
            steps_on_host=options.step_on_cpu,
        )
    return Settings(
        device=options.device,
        data=None if options.data == "synthetic" else Path(options.data),
        seed=options.seed,
        timeout_s=options.timeout,
        serialises=options.serialise,
        stage=options.stage,
        kernel=options.attention_kernel,
        draws_on_device=options.draw_on_device,
        weights=options.weights,
        captures=options.cuda_graphs,
        documents=_documents(options, job),
        training=training,
    )


def _documents(options: argparse.Namespace, job: Job) -> "Documented | None":
    """How the run arranges documents into sequences; None if it does not train on documents."""
    from runtime.documents import Documented  # noqa: PLC0415 (needs torch)

    if options.lengths is None:
        for name in ("cut", "filling"):
            if getattr(options, name):
                reject(
                    f"--{name}: has an effect only on packed documents: give --lengths too, or "
                    f"leave --{name} out"
                )
        return None
    filling: Filling = options.filling or "packed"
    even_tokens = _even_tokens(job) if filling == "balanced" else 0
    kind, _, end = options.lengths.partition(":")
    if kind != "ends":
        with as_options():
            drawn = lengths_from(options.lengths)
        return Documented(filling=filling, lengths=drawn, cuts=options.cut, even_tokens=even_tokens)
    if not end.isdigit():
        reject(
            f"--lengths {options.lengths}: {end!r} is not the number of a token: give ends:TOKEN, "
            "where TOKEN is the token that ends a document, such as ends:0"
        )
    return Documented(filling=filling, end=int(end), cuts=options.cut, even_tokens=even_tokens)


def _even_tokens(job: Job) -> int:
    """The length of a document at which attention takes as long as all other operators, as
    predicted for the plan.
    """
    from simulators.events import EventSimulator  # noqa: PLC0415 (needs SimPy)
    from simulators.lengths import LengthCosts  # noqa: PLC0415 (needs SimPy)

    simulator = EventSimulator(workload=job.workload, cluster=job.cluster)
    return LengthCosts.of(simulator, job.plan).even_tokens


def _warn(options: argparse.Namespace) -> None:
    """Warn, once on each node, of what may make its ranks hang, run slowly or lack memory."""
    from runtime.profiling.node_checks import slow_settings  # noqa: PLC0415 (needs torch)

    if options.device == "cuda" and os.environ.get("LOCAL_RANK", "0") == "0":
        for warning in slow_settings(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
            progress(f"warning: {warning}")


def _resume(session: "Session", options: argparse.Namespace) -> None:
    """Resume from the checkpoint that the options name; if they name the run's own newest one,
    there need not be any.
    """
    if goes_on(options):
        folder = checkpoints_of(options)
        path = session.resume_latest(folder, progress)
        if session.is_first:
            progress(f"going on from {path}" if path else f"{folder}: no checkpoint yet")
    elif options.resume is not None:
        session.resume(Path(options.resume))


def _directory(
    session: "Session", options: argparse.Namespace, history: History
) -> RunDirectory | None:
    """The results folder of the run; None for all ranks but the first, and without ``--out``. If
    the run is resumed, the rows of steps before the checkpoint are kept, and all others are
    deleted.
    """
    if options.out is None or not session.is_first:
        return None
    others = {name: value for name, value in vars(options).items() if name != "plan"}
    directory = RunDirectory.make(options.out, f"run_plan {shlex.quote(str(options.plan))}", others)
    if goes_on(options):
        history.go_on_from(
            [row for row in directory.rows() if row.get("step", math.inf) <= session.steps]
        )
    directory.write_rows(history.rows)
    return directory


def _train(
    session: "Session",
    options: argparse.Namespace,
    history: History,
    directory: RunDirectory | None,
) -> None:
    last = options.steps + (0 if goes_on(options) else session.steps)
    warned: set[int] = set()
    while session.steps < last:
        report, seconds = session.step()
        row = history.add(session.steps, report, seconds, session.tokens)
        if report.loss is not None and not math.isfinite(report.loss):
            message = (
                f"the loss is {report.loss} at step {session.steps}: give a lower --learning-rate, "
                f"--clip-norm 1 or --warmup-steps; {last_checkpoint(options)}"
            )
            raise NoAnswerError(message)
        if directory is not None:
            directory.add_row(row)
        _tell(session, report, seconds)
        if session.is_first:
            _warn_of_routers(report, warned)
        steps_here = len(history.rows) - history.earlier
        if session.is_first and (steps_here == WARM_UP or session.steps == last):
            history.note_clocks(session.clocks())
        if options.save_every and session.steps % options.save_every == 0:
            session.save(checkpoints_of(options))


def _tell(session: "Session", report: "Report", seconds: float) -> None:
    """Print a line of progress; only the first rank does."""
    peak = max(memory.peak_allocated_bytes for memory in session.memory())
    stage = session.settings.stage
    if session.is_first:
        share = session.tokens / session.job.workload.tokens
        loss = "" if report.loss is None else f"  loss {report.loss:.6f}"
        if report.router_loss is not None:
            loss += f"  routers' loss {report.router_loss:.6f}"
        norm = "" if report.gradient_norm is None else f"  norm {report.gradient_norm:.3f}"
        left_out = "  overflow, step left out" if report.skipped else ""
        progress(
            f"step {session.steps}{loss}{norm}  {seconds:.3f} s  "
            f"{session.tokens / seconds:,.0f} tokens/s  "
            f"MFU {mfu_of(session.job, stage, seconds) * share:.2%}  "
            f"peak {peak / GIB_BYTES:.3f} GiB{left_out}"
        )


def _warn_of_routers(report: "Report", warned: set[int]) -> None:
    """Warn that nearly all tokens are routed to one expert, once for each block."""
    for router in report.lopsided:
        if router.block not in warned:
            warned.add(router.block)
            progress(f"warning: {router}")


def _finish(
    session: "Session",
    options: argparse.Namespace,
    history: History,
    directory: RunDirectory | None,
) -> None:
    """Write the results that the options ask for; all ranks take part, and the first one prints."""
    memory, tasks = session.memory(), session.tasks()
    if history.moved_clocks:
        progress(f"warning: {history.moved_clocks}: times are not of one speed")
    environment = session.environment(revision())
    if session.is_first and history.rows:
        result = result_of(session.job, options, history, memory, environment)
        if options.json:
            print_json(result)
        else:
            print(summary_of(result), flush=True)
    if options.export is not None:
        session.export(options.export)
    if options.export_weights is not None:
        session.export_checkpoint(options.export_weights)
    if directory is not None and tasks:
        job, stage = session.job, options.stage
        measured = measurement_of(job, stage, history, memory, tasks, environment)
        write_yaml(to_mapping(measured), options.out / "measurement.yaml")
        write_trace(job, stage, tasks, options.out / "timeline.json")
        progress(f"{options.out}: measurement.yaml, timeline.json (ui.perfetto.dev), rows.jsonl")


# Writes a measured iteration and the predicted one as one trace file, in the simulators' format.
#
# Each stage that ran is shown as two processes of the trace: as the event simulator predicts it,
# and as its first rank ran it. Names and units are the same, and both begin at zero. For the
# simulator's single stream between GPUs, the runtime has several queues, each shown as a track of
# its own, since their tasks overlap.


def write_trace(job: Job, stage: int | None, tasks: Sequence["MeasuredTask"], path: Path) -> None:
    """Write the trace with the measured and the predicted iteration; if no prediction is possible,
    only with the measured one.
    """
    stages, run = job.plan.num_stages, stages_run(job, stage)
    trace = _predicted(job, stage)
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event["pid"] in run]
    for event in trace["traceEvents"]:
        if event["name"] == "process_name":
            event["args"]["name"] += ", predicted"
    tracks = (*STREAMS, *sorted({task.lane for task in tasks}.difference(STREAMS)))
    trace["traceEvents"] += [event for one in run for event in _named(one, stages, tracks)]
    trace["traceEvents"] += [_event(task, stages, tracks) for task in tasks]
    with naming(path):
        path.write_text(json.dumps(trace, separators=(",", ":")) + "\n", encoding="utf-8")


def _predicted(job: Job, stage: int | None) -> dict[str, Any]:
    """The iteration by the event simulator; empty if the hardware is not calibrated or SimPy is
    missing, as on a machine used only for training.
    """
    try:
        from simulators.events import EventSimulator  # noqa: PLC0415 (needs SimPy)

        if stage is None:
            of_plan = EventSimulator(workload=job.workload, cluster=job.cluster)
            return trace_of(of_plan.simulate(job.plan))
        alone = EventSimulator(workload=job.workload, cluster=job.cluster.alone)
        return trace_of(alone.simulate_stage(job.plan, stage))
    except UncalibratedError:
        pass
    except ModuleNotFoundError as error:
        progress(f"{error.name} is not installed: timeline.json has the measured iteration alone")
    return {"displayTimeUnit": "ms", "traceEvents": []}


def _named(stage: int, stages: int, tracks: Sequence[str]) -> list[dict[str, Any]]:
    process = {"ph": "M", "pid": stages + stage}
    names = [{**process, "name": "process_name", "args": {"name": f"stage {stage}, measured"}}]
    return names + [
        {
            **process,
            "tid": thread,
            "name": "thread_name",
            "args": {"name": _label(track)},
        }
        for thread, track in enumerate(tracks)
    ]


def _label(track: str) -> str:
    name = track.replace("_", "-")
    return name if track in (*STREAMS, "host") else f"gpu-to-gpu: {name}"


def _event(task: "MeasuredTask", stages: int, tracks: Sequence[str]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": str(task.task),
        "cat": WORDS[task.task.kind] if isinstance(task.task, Action) else task.task,
        "pid": stages + task.stage,
        "tid": tracks.index(task.lane),
        "ts": task.start_s * MICROSECONDS,
        "dur": (task.end_s - task.start_s) * MICROSECONDS,
    }


# Restarts a run from its newest checkpoint if its process is lost.
#
# Errors that would occur again, and ends that somebody asked for, are final: wrong usage, lack of
# memory, a loss that is not a number, a full disk, an interrupt. Only crashes of the process or of
# a device lead to a restart, and kills, such as by the kernel when host memory runs out.


COMMAND = (sys.executable, "-m", "experiments.run_plan")
PARTING_S = 10.0
_ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def restarted(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Run in a child process, and start it again after each crash, at most ``options.restarts``
    times.
    """
    _check(options)
    # The new options come last, since the later one of two equal options counts.
    command = [*COMMAND, *arguments, "--restarts", "0", "--resume", LATEST]
    for left in range(options.restarts, -1, -1):
        status = _status_of(command)
        if not left or not _is_crash(status):
            break
        progress(
            f"the run {_ending_text(status)}: {last_checkpoint(options)}; it starts again "
            f"({left - 1} restarts left)"
        )
    return status if status >= 0 else 128 - status


def _check(options: argparse.Namespace) -> None:
    message = None
    if os.environ.get("WORLD_SIZE", "1") != "1":
        message = (
            "--restarts is for a run of one process: give torchrun --max-restarts "
            f"{options.restarts}, and the run --resume {LATEST}"
        )
    elif not options.save_every:
        message = "--restarts needs checkpoints: give --save-every N and --out DIR too"
    elif options.resume not in (None, LATEST):
        message = (
            f"--restarts goes on from the run's own checkpoints, not from --resume "
            f"{options.resume}: give --resume {LATEST}, or leave --resume out"
        )
    elif options.resume is None and latest(checkpoints_of(options)):
        message = (
            f"--out {options.out}: has checkpoints of a run before: give --resume {LATEST} to go "
            "on from them, or another folder"
        )
    if message is not None:
        raise InputError(message)


def _is_crash(status: int) -> bool:
    return status == CRASHED or (status < 0 and -status not in _ASKED)


def _ending_text(status: int) -> str:
    if status == CRASHED:
        return "crashed"
    return f"was ended by {signal.Signals(-status).name}"


def _status_of(command: Sequence[str]) -> int:
    """The exit status of a process, to which signals that this process gets are passed on."""
    with subprocess.Popen(command) as process:

        def pass_on(number: int, _: FrameType | None) -> None:
            process.send_signal(number)

        before = signal.signal(signal.SIGTERM, pass_on)
        try:
            return process.wait()
        except KeyboardInterrupt:
            # A terminal sends the signal to the child, too, which then gets some time to end.
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(PARTING_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return INTERRUPTED
        finally:
            signal.signal(signal.SIGTERM, before)
