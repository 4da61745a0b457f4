"""Draws charts, and writes pictures whose bytes are the same in every run."""

from pathlib import Path
from textwrap import fill
from typing import Any, TextIO

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.pages.charts import Bars, Drawn, Lines, Picture

# The palette of Okabe and Ito (2008), whose colours can be told apart with red-green colour
# blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")

# Settings of matplotlib for SVG files: text stays text, and equal pictures have equal bytes.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "mistlab"}

SIZE = (6.4, 3.8)
# The names below a bar chart are slanted if there are more groups than the first number, or if all
# names together have more letters than the second.
FEW_GROUPS, FEW_LETTERS = 8, 70
# The number of letters from which a slanted name is split into two lines.
LETTERS_A_LINE = 24
# The number of powers of ten from which a logarithmic axis has labels at the powers only.
FEW_POWERS = 3
NUMBER_WIDTH = 0.34


def drawn(picture: Picture) -> Figure:
    """Draw a chart as a picture."""
    match picture:
        case Lines():
            return _lines(picture)
        case Bars():
            return _bars(picture)
        case Drawn():
            return picture.draw()


def _lines(chart: Lines) -> Figure:
    """Draw the curves of a chart, each through its points."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    for index, (name, points) in enumerate(chart.curves.items()):
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker="o" if len(points) <= 40 or name in chart.dots else "",
            markersize=6 if name in chart.dots else 4,
            color=COLOURS[index % len(COLOURS)],
            linestyle="" if name in chart.dots else ("-", "--", ":")[index // len(COLOURS) % 3],
            label=name,
        )
    if chart.log_x:
        axes.set_xscale("log")
    axes.set_xlabel(chart.x)
    if chart.names:
        axes.set_xticks(range(len(chart.names)), chart.names)
    _finish(axes, chart, len(chart.curves))
    return figure


def _bars(chart: Bars) -> Figure:
    """Draw the groups of bars of a chart."""
    many = len(chart.groups) > FEW_GROUPS or len("".join(chart.groups)) > FEW_LETTERS
    # Groups are widened for the numbers above their bars, which are wider than the bars.
    group_width = max(0.45, NUMBER_WIDTH * len(chart.series) if chart.number else 0)
    figure = Figure(
        figsize=(max(SIZE[0], 2 + group_width * len(chart.groups)), SIZE[1] + many),
        layout="constrained",
    )
    axes = figure.subplots()
    places = range(len(chart.groups))
    width = 0.8 if chart.stacked else 0.8 / max(1, len(chart.series))
    bottom = [0.0] * len(chart.groups)
    for index, (name, values) in enumerate(chart.series.items()):
        heights = [value or 0.0 for value in values]
        shift = 0.0 if chart.stacked else (index - (len(chart.series) - 1) / 2) * width
        group = axes.bar(
            [x + shift for x in places],
            heights,
            width=0.95 * width,
            bottom=bottom if chart.stacked else None,
            color=COLOURS[index % len(COLOURS)],
            label=name,
        )
        if chart.number:
            texts = ["" if value is None else f"{value:{chart.number}}" for value in values]
            axes.bar_label(group, texts, fontsize="x-small", padding=1)
        if chart.stacked:
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks([*places], [*chart.groups], fontsize="small")
    if many:
        axes.set_xticklabels([fill(name, LETTERS_A_LINE) for name in chart.groups])
        for text in axes.get_xticklabels():
            text.set(rotation=40, ha="right", rotation_mode="anchor")
    _finish(axes, chart, len(chart.series))
    return figure


def _finish(axes: Axes, chart: Lines | Bars, named: int) -> None:
    for index, (name, value) in enumerate(chart.marks.items()):
        axes.axhline(
            *(value,),
            color=COLOURS[-1 - index % 2],
            linestyle=("--", ":")[index // 2 % 2],
            linewidth=1,
            label=name,
        )
    if chart.log_y:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        between = "25" if high <= low * 10**FEW_POWERS else ""
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.yaxis.set_minor_formatter(lambda x, _: f"{x:,.10g}" if f"{x:e}"[0] in between else "")
    axes.set_ylabel(chart.y)
    axes.grid(alpha=0.3, axis="y" if isinstance(chart, Bars) else "both")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if named + len(chart.marks) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)


def save(figure: Figure, path: Path | TextIO) -> None:
    """Write a picture to a file (or, as SVG, into a text) whose bytes are the same in every run."""
    form = None if isinstance(path, Path) else "svg"
    with mpl.rc_context(STYLE):
        figure.savefig(path, format=form, metadata={"Date": None})
