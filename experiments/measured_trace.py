"""A measured iteration beside the predicted one, in the simulators' trace format.

Each stage that ran has two processes in the trace: what the event simulator played, and what its
first rank did. Names and units are the same, and both begin at zero. What is one stream between
GPUs for the simulators is several lanes here, each a track of its own: tasks of different lanes
overlap.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.run_results import stages_run
from mistlab.errors import UncalibratedError
from mistlab.interference import STREAMS
from mistlab.job import Job
from mistlab.schedule import Action
from simulators.events import EventSimulator, Simulation
from simulators.timeline import MICROSECONDS, WORDS, trace_of

if TYPE_CHECKING:
    from runtime.session import MeasuredTask


def write_trace(job: Job, stage: int | None, tasks: Sequence["MeasuredTask"], path: Path) -> None:
    """Write both; the measured one alone where the hardware has no calibration to predict with."""
    stages, run = job.plan.num_stages, stages_run(job, stage)
    try:
        trace = trace_of(_played(job, stage))
    except UncalibratedError:
        trace = {"displayTimeUnit": "ms", "traceEvents": []}
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event["pid"] in run]
    for event in trace["traceEvents"]:
        if event["name"] == "process_name":
            event["args"]["name"] += ", predicted"
    tracks = (*STREAMS, *sorted({task.lane for task in tasks}.difference(STREAMS)))
    trace["traceEvents"] += [event for one in run for event in _named(one, stages, tracks)]
    trace["traceEvents"] += [_event(task, stages, tracks) for task in tasks]
    path.write_text(json.dumps(trace, separators=(",", ":")) + "\n", encoding="utf-8")


def _played(job: Job, stage: int | None) -> Simulation:
    if stage is None:
        return EventSimulator(workload=job.workload, cluster=job.cluster).simulate(job.plan)
    alone = EventSimulator(workload=job.workload, cluster=job.cluster.alone)
    return alone.simulate_stage(job.plan, stage)


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
    words = track.replace("_", "-")
    return words if track in (*STREAMS, "host") else f"gpu-to-gpu: {words}"


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
