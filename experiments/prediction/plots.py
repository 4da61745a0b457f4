"""Pictures that compare predicted with measured runs, from the rows of a report."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.pages.drawing import COLOURS
from experiments.pages.groups import grouped
from mistlab.core.units import GIB_BYTES

# The names of the row fields with the measured and the predicted memory peak.
PEAKS = ("measured_bytes", "predicted_bytes")
TIMES = ("measured_s", "predicted_s")


def frontiers(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draw which numbers of recomputed blocks and which amounts of host memory make a plan fit, in
    a panel for each micro-batch size.
    """
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
    """Draw the predicted against the measured memory peak of each stage, with a diagonal line where
    both are equal.
    """
    title = "Peak allocated memory of a stage (GiB)"
    figure, axes = _axes(title, "measured", "predicted", (5.2, 5.2))
    end = 1.05 * max(max(row[key] for key in PEAKS) for row in rows) / GIB_BYTES
    axes.plot([0, end], [0, end], color="#999999", linewidth=1)
    for index, (name, alike) in enumerate(grouped(rows, lambda row: row["run"]).items()):
        x, y = ([row[key] / GIB_BYTES for row in alike] for key in PEAKS)
        axes.plot(x, y, "o", color=COLOURS[index % len(COLOURS)], label=name)
    axes.set(xlim=(0, end), ylim=(0, end), aspect="equal")
    axes.legend(fontsize="small", frameon=False)
    return figure


def times_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the predicted against the measured iteration time of each run, with lines at plus and
    minus ten per cent.
    """
    title = "Time of an iteration (s); grey lines: 10 %"
    figure, axes = _axes(title, "measured", "predicted", (6.4, 5.6))
    values = [row[key] for row in rows for key in TIMES]
    ends = [0.8 * min(values), 1.25 * max(values)]
    axes.plot(ends, ends, color="#999999", linewidth=1)
    for factor in (0.9, 1.1):
        axes.plot(ends, [factor * end for end in ends], color="#cccccc", linewidth=0.8)
    for index, (name, alike) in enumerate(grouped(rows, lambda row: row["set"]).items()):
        x, y = ([row[key] for row in alike] for key in TIMES)
        colour, is_many = COLOURS[index % len(COLOURS)], len(alike) > 50
        size, alpha = (3, 0.5) if is_many else (5, 1.0)
        label = f"{name} ({len(alike)})"
        axes.plot(x, y, "o", color=colour, markersize=size, alpha=alpha, label=label)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    axes.legend(fontsize="small", frameon=False)
    return figure


def differences(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the difference between the closed form and the event simulator, against the share of
    work that is done once per iteration.
    """
    x = "first and last micro-batches' extras (% of the iteration)"
    title = "Closed form over event simulator: difference in time"
    figure, axes = _axes(title, x, "difference (%)", (7.2, 4.2))
    axes.axhline(0, color="#999999", linewidth=1)
    offloading = [row for row in rows if "offloading" in row["strata"]]
    groups = {
        "offloading, more than 4 stages": [row for row in offloading if row["stages"] > 4],
        "offloading, up to 4 stages": [row for row in offloading if row["stages"] <= 4],
        "nothing offloaded": [row for row in rows if "offloading" not in row["strata"]],
    }
    for colour, (name, alike) in zip(COLOURS, groups.items(), strict=False):
        keys = ("extras_share", "difference")
        shares, percents = ([100 * row[key] for row in alike] for key in keys)
        label = f"{name} ({len(alike)})"
        axes.plot(shares, percents, "o", color=colour, markersize=4, alpha=0.6, label=label)
    axes.legend(fontsize="small", frameon=False, loc="lower right")
    return figure


def _axes(title: str, x: str, y: str, size: tuple[float, float]) -> tuple[Figure, Axes]:
    """An empty figure with the axes of a scatter plot."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def _mesh(row: Mapping[str, Any]) -> str:
    degrees = (row["stages"], row["data_parallel"], row["tensor_parallel"])
    return "pipeline {} · data {} · tensor {}".format(*degrees)
