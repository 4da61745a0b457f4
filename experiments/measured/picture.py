"""The picture of measured runs: predicted over measured seconds, each table with its own look."""

from collections.abc import Sequence
from pathlib import Path

from mistlab.runs.judged import Judged

# Where there are more tables than colours, the next ones have another shape.
COLOURS, SHAPES = 10, "o^sv"


def draw(tables: Sequence[tuple[str, Sequence[Judged]]], path: Path) -> None:
    """Draw predicted over measured seconds of all tables, on logarithmic axes."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (only where something is drawn)

    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.add_subplot()
    ends: list[float] = []
    for number, (name, rows) in enumerate(tables):
        pairs = [
            (one.measured_s, one.predicted_s)
            for one in rows
            if one.measured_s is not None and one.predicted_s is not None
        ]
        if pairs:
            measured, predicted = zip(*pairs, strict=True)
            ends += [*measured, *predicted]
            colour, shape = look(number)
            axes.scatter(
                measured,
                predicted,
                s=9,
                alpha=0.6,
                label=f"{name.replace('_', ' ')} ({len(pairs)})",
                color=colour,
                marker=shape,
            )
    if ends:
        low, high = min(ends) / 1.3, max(ends) * 1.3
        for factor, style in ((1.0, "-"), (1.25, ":"), (0.8, ":")):
            axes.plot([low, high], [low * factor, high * factor], style, color="0.4", linewidth=0.9)
        axes.set(xlim=(low, high), ylim=(low, high))
        axes.legend(fontsize=8, loc="upper left", frameon=False)
    axes.set(xscale="log", yscale="log", xlabel="measured seconds of a step")
    axes.set_ylabel("predicted seconds of a step")
    axes.set_title("Predicted over measured; dotted: 25 % too long or too short")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def look(number: int) -> tuple[str, str]:
    """The colour and shape of a table's points."""
    return f"C{number % COLOURS}", SHAPES[number // COLOURS % len(SHAPES)]
