"""Writes a simulated iteration as a trace file for Perfetto or chrome://tracing.

The format is Chrome's Trace Event Format, with times in microseconds. In the trace a stage is a
process, and its lanes (queues of tasks) are threads. A task is a complete event. A send is a flow
from its task to the task that waited for it. Memory is a counter for each class of content, such as
weights.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mistlab.core.units import GIB_BYTES
from mistlab.schedule.slots import Kind
from simulators.graph import LANES
from simulators.memory import CLASSES, MemoryOverTime

if TYPE_CHECKING:
    from simulators.events import Simulation

Event = dict[str, Any]

MICROSECONDS = 1e6

WORDS: Mapping[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "W": "gradients of weights",
    "S": "optimizer step",
    "U": "parameter gather",
    "R": "gradient reduction",
    "P": "parameter swap",
    "G": "gradient swap",
    "O": "optimizer state swap",
    "A": "activation swap",
    "X": "send",
    "Y": "receive",
}


def trace_of(simulation: "Simulation", memory: Sequence[MemoryOverTime] = ()) -> dict[str, Any]:
    """The events of the trace as JSON values: first the names of its tracks, then the tasks by
    time.
    """
    events = _tasks(simulation) + _flows(simulation) + _counters(memory)
    events.sort(key=lambda event: event["ts"])
    return {"displayTimeUnit": "ms", "traceEvents": _tracks(simulation) + events}


def trace_text(simulation: "Simulation", memory: Sequence[MemoryOverTime] = ()) -> str:
    """The trace of a simulated iteration as the text of a file."""
    return json.dumps(trace_of(simulation, memory), separators=(",", ":")) + "\n"


def _tracks(simulation: "Simulation") -> list[Event]:
    events = []
    for stage in range(simulation.graph.stages):
        of_stage = {"ph": "M", "pid": stage}
        events += [
            {**of_stage, "name": "process_name", "args": {"name": f"stage {stage}"}},
            {**of_stage, "name": "process_sort_index", "args": {"sort_index": stage}},
        ]
        for thread, lane in enumerate(LANES):
            of_thread = {**of_stage, "tid": thread}
            events += [
                {**of_thread, "name": "thread_name", "args": {"name": lane.replace("_", "-")}},
                {**of_thread, "name": "thread_sort_index", "args": {"sort_index": thread}},
            ]
    return events


def _tasks(simulation: "Simulation") -> list[Event]:
    return [
        {
            "ph": "X",
            "name": str(task.action),
            "cat": WORDS[task.action.kind],
            "pid": task.action.stage,
            "tid": LANES.index(task.lane),
            "ts": task.start_s * MICROSECONDS,
            "dur": (task.end_s - task.start_s) * MICROSECONDS,
        }
        for task in simulation.tasks()
    ]


def _counters(memory: Sequence[MemoryOverTime]) -> list[Event]:
    return [
        {
            "ph": "C",
            "name": "memory (GiB)",
            "pid": stage.stage,
            "ts": time * MICROSECONDS,
            "args": {name: size / GIB_BYTES for name, size in zip(CLASSES, sizes, strict=True)},
        }
        for stage in memory
        for time, sizes in zip(stage.times_s.tolist(), stage.by_class.tolist(), strict=True)
    ]


def _flows(simulation: "Simulation") -> list[Event]:
    events = []
    for number, (send, receiver) in enumerate(simulation.graph.sends):
        for phase, task in (("s", send), ("f", receiver)):
            event = {
                "ph": phase,
                "id": number,
                "name": "activations or gradients",
                "cat": "send",
                "pid": simulation.graph.stage(task),
                "tid": LANES.index(simulation.graph.lane(task)),
                "ts": simulation.times.starts_s[task] * MICROSECONDS,
            }
            # ``bp: e`` makes an arrow end at the task that runs at its end, rather than at the next
            # task.
            events.append({**event, "bp": "e"} if phase == "f" else event)
    return events
