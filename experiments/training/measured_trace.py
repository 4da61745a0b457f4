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

from experiments.cli.commandline import progress
from experiments.training.run_results import stages_run
from mistlab.core.files import naming
from mistlab.core.values import UncalibratedError
from mistlab.job.job import Job
from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.slots import Action
from simulators.timeline import MICROSECONDS, WORDS, trace_of

if TYPE_CHECKING:
    from runtime.session import MeasuredTask


def write_trace(job: Job, stage: int | None, tasks: Sequence["MeasuredTask"], path: Path) -> None:
    """Write both; the measured one alone where nothing can be predicted."""
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
    """The iteration as it is played; empty where the hardware has no calibration, or SimPy is not
    there: a machine that trains may lack it."""
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
