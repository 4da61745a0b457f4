"""Draws a simulated iteration as a picture with four rows (one per stream) for each stage and a bar
per task; and as a trace for Perfetto.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.cli.commandline import progress
from experiments.pages.drawing import save
from mistlab.core.files import naming
from mistlab.cost.memory import reserved_bytes, room_of_plan
from mistlab.engines.engine import ENGINES
from mistlab.graph.stage_model import StageModel
from mistlab.job.job import Job
from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.slots import Kind
from mistlab.stages.stage_batch import StageBatch
from simulators.events import PlayedTask, Simulation
from simulators.graph import SENDS
from simulators.memory import MemoryOverTime, memory_of
from simulators.timeline import WORDS, trace_text

# Draws the tasks of a simulated iteration: four rows (one per stream) for each stage, and a bar per
# task.


# The colour for each kind of task, row by row.
TASK_COLOURS: Mapping[Kind, str] = {
    "F": "#56B4E9",
    "B": "#0072B2",
    "W": "#004C6D",
    "S": "#000000",
    "U": "#E69F00",
    "R": "#D55E00",
    "P": "#009E73",
    "G": "#CC79A7",
    "O": "#999999",
    "A": "#F0E442",
    "X": "#8C564B",
    "Y": "#C49C94",
}
MOST_TASKS = 40_000
# Sends are drawn in the row of collectives, since they use the same links.
_STREAM_OF = {SENDS: "gpu_to_gpu"}


def timeline(simulation: Simulation, path: Path, title: str) -> None:
    """Draw one iteration into a file: four rows (one per stream) for each stage, with a bar per
    task and gaps where a stream waits.

    Only the beginning and the end of a long iteration are drawn, since its middle repeats.
    """
    tasks = list(simulation.tasks())
    stages = 1 + max(task.action.stage for task in tasks)
    end = max(task.end_s for task in tasks)
    spans = _spans(tasks, end)
    figure = Figure(figsize=(14, 1.2 + 1.15 * stages), layout="constrained")
    panels = figure.subplots(
        stages, len(spans), sharex="col", squeeze=False, width_ratios=[b - a for a, b in spans]
    )
    seen: dict[Kind, str] = {}
    for stage, row in enumerate(panels):
        for axes, span in zip(row, spans, strict=True):
            lanes(axes, [t for t in tasks if t.action.stage == stage], span, seen)
        name_lanes(row[0], stage)
    for axes in panels[-1]:
        axes.set_xlabel("seconds")
    figure.suptitle(f"{title}: one iteration, {end:.3f} s", x=0.01, ha="left")
    legend(figure, seen, columns=11)
    save(figure, path)


def _spans(tasks: Sequence[PlayedTask], end: float) -> list[tuple[float, float]]:
    """The spans of time that are drawn: the whole iteration, or only its beginning and its end."""
    if len(tasks) <= MOST_TASKS // 10:
        return [(0.0, end)]
    share = max(0.02, MOST_TASKS / 20 / len(tasks))
    return [(0.0, share * end), ((1 - share) * end, end)]


def lanes(
    axes: Axes, tasks: Sequence[PlayedTask], span: tuple[float, float], seen: dict[Kind, str]
) -> None:
    """Draw a bar for each task within a span of time, in four rows, one per stream; ``seen``
    collects the kinds of tasks drawn.
    """
    start, end = span
    for lane, stream in enumerate(STREAMS):
        bars: dict[Kind, list[tuple[float, float]]] = {}
        for task in tasks:
            if (
                _STREAM_OF.get(task.lane, task.lane) == stream
                and task.end_s >= start
                and task.start_s <= end
            ):
                bars.setdefault(task.action.kind, []).append(
                    (task.start_s, task.end_s - task.start_s)
                )
        for kind, spans in bars.items():
            seen.setdefault(kind, WORDS[kind])
            axes.broken_barh(
                spans,
                (lane - 0.42, 0.84),
                facecolors=TASK_COLOURS[kind],
                edgecolor="white",
                linewidth=0.15,
            )
    axes.set_xlim(start, end)
    axes.set_ylim(len(STREAMS) - 0.5, -0.5)
    axes.set_yticks([])
    axes.tick_params(labelsize="x-small")


def name_lanes(axes: Axes, stage: int) -> None:
    """Write the name of a stage, and those of its four streams, beside their rows."""
    axes.set_ylabel(f"stage {stage}", rotation=0, ha="right", va="center")
    axes.set_yticks(range(len(STREAMS)), [name.replace("_", " ") for name in STREAMS])
    axes.tick_params(axis="y", labelsize="xx-small")


def legend(figure: Figure, seen: Mapping[Kind, str], *, columns: int) -> None:
    """Below a figure, name the kinds of tasks that were drawn."""
    figure.legend(
        [Line2D([], [], color=TASK_COLOURS[kind], linewidth=6) for kind in seen],
        [*seen.values()],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize="x-small",
    )


# Draws one simulated iteration of a plan: as a trace for Perfetto, and as a picture.


def draw(job: Job, simulation: Simulation, name: str, folder: Path) -> None:
    """Draw one iteration as a trace and as a picture."""
    trace, picture = folder / f"{name}.trace.json", folder / f"{name}.svg"
    with naming(trace):
        trace.write_text(trace_text(simulation, _memory(job, simulation)), encoding="utf-8")
    timeline(simulation, picture, name)
    progress(f"{trace} (open it at ui.perfetto.dev), {picture}")


def _memory(job: Job, simulation: Simulation) -> list[MemoryOverTime]:
    """The memory of each stage's GPU during the iteration; if a GPU runs out of memory, that is
    reported.
    """
    model = StageModel.of(job.workload, job.plan.engine)
    batch = StageBatch.of_plan(job.plan)
    figures = model.figures(batch)
    reserved = reserved_bytes(figures, batch, job.cluster, ENGINES[job.plan.engine])
    beyond = reserved - figures.peak_bytes
    memory = memory_of(simulation, job.plan, model, room_of_plan(job.cluster, job.plan) - beyond)
    for stage in memory:
        if stage.overflow:
            progress(stage.overflow)
    return memory
