"""Iterations drawn one below the other, on one axis of time."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from experiments.reports.lanes import lanes, legend, name_lanes
from mistlab.schedule.slots import Kind
from simulators.events import Simulation


def timelines(played: Mapping[str, Simulation]) -> Figure:
    """Every stage of every iteration as four lanes; each iteration has its name and its length."""
    rows = [
        (name, one, stage)
        for name, one in played.items()
        for stage in sorted({task.action.stage for task in one.tasks()})
    ]
    longest_s = max(one.iteration_s for one in played.values())
    figure = Figure(figsize=(12, 1.2 + 1.2 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, sharex="col", squeeze=False)
    seen: dict[Kind, str] = {}
    for axes, (name, one, stage) in zip(panels[:, 0], rows, strict=True):
        tasks = [task for task in one.tasks() if task.action.stage == stage]
        lanes(axes, tasks, (0.0, longest_s), seen)
        name_lanes(axes, stage)
        if stage == 0:
            axes.set_title(f"{name}: {one.iteration_s:.3f} s", loc="left", fontsize="small")
        axes.axvline(one.iteration_s, color="black", linewidth=0.8, linestyle=":")
    panels[-1, 0].set_xlabel("seconds")
    legend(figure, seen, columns=8)
    return figure
