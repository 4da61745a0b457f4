"""Pictures of search results: the progress of searches, time against memory, and what fills the
memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.pages.drawing import COLOURS
from mistlab.core.units import GIB_BYTES
from mistlab.job.prediction import MemoryByClass, Prediction
from searchers.strategy import STAGES_A_PLAN

Rows = Sequence[Mapping[str, Any]]

SIZE = (6.4, 3.8)
LINES = ("solid", "dashed", "dotted")


def convergence(rows: Rows, *, over_seconds: bool) -> Figure:
    """Draw the best plan that each searcher had found so far, over evaluations or over seconds."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    styled = _styled(rows)
    for style, row in styled:
        spent = _spent(row, over_seconds=over_seconds)
        best_s = [one["iteration_s"] for one in (*row["history"], row["history"][-1])]
        axes.step(spent, best_s, where="post", label=row["searcher"], **style)
        axes.plot(spent[-1], best_s[-1], "o", color=style["color"], markersize=4)
    ends_s = [row["history"][-1]["iteration_s"] for _, row in styled]
    # The first plans of a search are left out of the picture, since they are so slow that all
    # others would look alike.
    axes.set_ylim(0.97 * min(ends_s), 1.5 * max(ends_s))
    axes.set_xlabel("seconds" if over_seconds else "evaluations of plans (1,000 stages as one)")
    axes.set_ylabel("best iteration so far (s)")
    axes.set_xscale("log")
    _finish(axes)
    return figure


def _spent(row: Mapping[str, Any], *, over_seconds: bool) -> list[float]:
    """The number of evaluations or seconds that a search had used when it found each plan, and at
    its end. They are above zero, since the axis is logarithmic.
    """
    if over_seconds:
        spent = [*row["timing"]["history_wall_s"], row["wall_s"]]
    else:
        spent = [
            point["plan_evaluations"] + point["stage_evaluations"] / STAGES_A_PLAN
            for point in (*row["history"], row)
        ]
    return [max(1e-3, one) for one in spent]


def fronts(rows: Rows, limit_bytes: int) -> Figure:
    """Draw the Pareto frontier of time and memory of each searcher's plans."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    for style, row in _styled(rows):
        memory = [point["memory_bytes"] / GIB_BYTES for point in row["front"]]
        seconds = [point["iteration_s"] for point in row["front"]]
        axes.plot(
            *(memory, seconds),
            marker="o",
            markersize=2,
            linewidth=1,
            drawstyle="steps-pre",
            label=row["searcher"],
            **style,
        )
        taken = (limit_bytes - row["headroom_bytes"]) / GIB_BYTES
        axes.plot(taken, row["predicted_s"], "*", color=style["color"], markersize=11)
    limit = limit_bytes / GIB_BYTES
    axes.axvline(limit, color="#D55E00", linestyle="--", linewidth=1, label="limit")
    axes.set_xlim(0, 2 * limit)
    axes.set_xlabel("memory of the fullest GPU (GiB)")
    axes.set_ylabel("iteration (s)")
    _finish(axes)
    return figure


def memory(prediction: Prediction, outside_bytes: float, limit_bytes: int) -> Figure:
    """Draw what fills the memory of a GPU of each stage at its peak (weights, activations, ...),
    beside the GPU's capacity.
    """
    stages = prediction.stages
    figure = Figure(figsize=(6.4, 1.6 + 0.4 * len(stages)), layout="constrained")
    axes = figure.subplots()
    held = {
        entry.name: [getattr(stage.memory, entry.name) for stage in stages]
        for entry in fields(MemoryByClass)
    }
    held["allocator"] = [s.peak_reserved_bytes - s.peak_allocated_bytes for s in stages]
    held["outside torch"] = [round(outside_bytes)] * len(stages)
    left = [0.0] * len(stages)
    colours = (*COLOURS[:6], "#F0E442", *COLOURS[6:])
    for colour, (name, sizes) in zip(colours, held.items(), strict=True):
        widths = [size / GIB_BYTES for size in sizes]
        axes.barh(range(len(stages)), widths, left=left, color=colour, label=name, height=0.7)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    limit = limit_bytes / GIB_BYTES
    axes.axvline(limit, color="#D55E00", linestyle="--", linewidth=1.5, label="limit")
    axes.set_yticks(range(len(stages)), [f"stage {index}" for index in range(len(stages))])
    axes.invert_yaxis()
    axes.set_xlabel("GiB at the peak")
    _finish(axes)
    return figure


def _styled(rows: Rows) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
    """The result rows that have a plan, each with the colour and line style of its searcher."""
    return [
        (
            {
                "color": COLOURS[number % len(COLOURS)],
                "linestyle": LINES[number // len(COLOURS) % len(LINES)],
            },
            row,
        )
        for number, row in enumerate(rows)
        if row["history"]
    ]


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)
