"""Pictures of predicted and measured runs, from the rows of a report."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.frame.drawing import COLOURS
from mistlab.values.units import GIB_BYTES


def frontiers(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """What it takes to fit: blocks recomputed over host memory used, a panel a micro-batch."""
    fitting = [row for row in rows if row["frontier"]]
    meshes = list(dict.fromkeys(map(_mesh, rows)))
    batches = sorted({row["micro_batch"] for row in rows})
    ends = [row["frontier"][-1]["host_bytes"] / GIB_BYTES for row in fitting]
    right = max([1.0, *ends]) * 1.04
    figure = Figure(figsize=(1.5 + 2.6 * len(batches), 4.2), layout="constrained")
    panels = figure.subplots(1, len(batches), sharex=True, sharey=True, squeeze=False)[0]
    for axes, batch in zip(panels, batches, strict=True):
        axes.set_title(f"micro-batch {batch}", fontsize="medium")
        axes.set_xlabel("host memory (GiB a GPU)")
        axes.set_xlim(-0.02 * right, right)
        axes.set_ylim(-3, 103)
        axes.grid(alpha=0.3)
        for row in fitting:
            if row["micro_batch"] == batch:
                _frontier(axes, row, right, COLOURS[meshes.index(_mesh(row)) % len(COLOURS)])
    figure.suptitle(f"What it takes to fit: {title}", x=0.01, ha="left")
    panels[0].set_ylabel("blocks computed again (%)")
    lines = [Line2D([], [], color=COLOURS[i % len(COLOURS)]) for i in range(len(meshes))]
    figure.legend(
        lines, meshes, loc="outside lower center", ncols=3, fontsize="small", frameon=False
    )
    return figure


def _frontier(axes: Axes, row: Mapping[str, Any], right: float, colour: str) -> None:
    x = [point["host_bytes"] / GIB_BYTES for point in row["frontier"]]
    y = [100 * point["recomputed_share"] for point in row["frontier"]]
    axes.step([*x, right], [*y, y[-1]], where="post", color=colour)
    axes.plot(x[0], y[0], "o", color=colour, markersize=4)


def memory_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Each stage's peak as predicted over as measured, with the line where they are equal."""
    figure = Figure(figsize=(5.2, 5.2), layout="constrained")
    axes = figure.subplots()
    highest = max(max(row["predicted_bytes"], row["measured_bytes"]) for row in rows) / GIB_BYTES
    axes.plot([0, 1.05 * highest], [0, 1.05 * highest], color="#999999", linewidth=1)
    for i, name in enumerate(dict.fromkeys(row["run"] for row in rows)):
        mine = [row for row in rows if row["run"] == name]
        axes.plot(
            [row["measured_bytes"] / GIB_BYTES for row in mine],
            [row["predicted_bytes"] / GIB_BYTES for row in mine],
            "o",
            color=COLOURS[i % len(COLOURS)],
            label=name,
        )
    axes.set_title("Peak allocated memory of a stage (GiB)", loc="left")
    axes.set_xlabel("measured")
    axes.set_ylabel("predicted")
    axes.set_xlim(0, 1.05 * highest)
    axes.set_ylim(0, 1.05 * highest)
    axes.set_aspect("equal")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
    return figure


def times_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Each run's iteration as predicted over as measured, with lines a tenth to either side."""
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    axes = figure.subplots()
    values = [row[key] for row in rows for key in ("predicted_s", "measured_s")]
    ends = [0.8 * min(values), 1.25 * max(values)]
    axes.plot(ends, ends, color="#999999", linewidth=1)
    for factor in (0.9, 1.1):
        axes.plot(ends, [factor * end for end in ends], color="#cccccc", linewidth=0.8)
    for i, name in enumerate(dict.fromkeys(row["set"] for row in rows)):
        mine = [row for row in rows if row["set"] == name]
        axes.plot(
            [row["measured_s"] for row in mine],
            [row["predicted_s"] for row in mine],
            "o",
            color=COLOURS[i % len(COLOURS)],
            markersize=3 if len(mine) > 50 else 5,
            alpha=0.5 if len(mine) > 50 else 1.0,
            label=f"{name} ({len(mine)})",
        )
    axes.set_title("Time of an iteration (s); grey lines: 10 %", loc="left")
    axes.set_xlabel("measured")
    axes.set_ylabel("predicted")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_aspect("equal")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
    return figure


def differences(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """How far the closed form is from the event simulator, over what comes once an iteration."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="#999999", linewidth=1)
    offloading = [row for row in rows if "offloading" in row["strata"]]
    groups = {
        "offloading, more than 4 stages": [row for row in offloading if row["stages"] > 4],
        "offloading, up to 4 stages": [row for row in offloading if row["stages"] <= 4],
        "nothing offloaded": [row for row in rows if "offloading" not in row["strata"]],
    }
    for colour, (name, mine) in zip(COLOURS, groups.items(), strict=False):
        axes.plot(
            [100 * row["extras_share"] for row in mine],
            [100 * row["difference"] for row in mine],
            "o",
            color=colour,
            markersize=4,
            alpha=0.6,
            label=f"{name} ({len(mine)})",
        )
    axes.set_title("Closed form over event simulator: difference in time", loc="left")
    axes.set_xlabel("first and last micro-batches' extras (% of the iteration)")
    axes.set_ylabel("difference (%)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False, loc="lower right")
    return figure


def _mesh(row: Mapping[str, Any]) -> str:
    degrees = (row["stages"], row["data_parallel"], row["tensor_parallel"])
    return "pipeline {} · data {} · tensor {}".format(*degrees)
