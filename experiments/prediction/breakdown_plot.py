"""Draws the parts of an iteration's GPU time as one stacked bar."""

from matplotlib.figure import Figure

from experiments.pages.drawing import COLOURS
from experiments.prediction.predict import NEGLIGIBLE, WORDS
from mistlab.job.prediction import PARTS, Breakdown

# The share of the bar below which a part's number is left out.
NARROW = 0.04
# If there are more parts than colours, further parts get lighter shades, each lighter by this much.
LIGHTER = 0.45


def bar(breakdown: Breakdown) -> Figure:
    """Draw the parts of an iteration's GPU time in order, each as wide as its share."""
    whole_s = breakdown.parts.total_s
    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    axes = figure.subplots()
    left = 0.0
    for index, name in enumerate(PARTS):
        share = getattr(breakdown.parts, name) / whole_s
        if share < NEGLIGIBLE:
            continue
        alpha = 1.0 if index < len(COLOURS) else LIGHTER
        colour = COLOURS[index % len(COLOURS)]
        label = f"{WORDS[name]}, {share:.1%}"
        axes.barh(0, 100 * share, left=left, color=colour, alpha=alpha, label=label, height=0.6)
        if share >= NARROW:
            axes.text(
                *(left + 50 * share, 0.4),
                f"{share:.0%}",
                ha="center",
                va="bottom",
                fontsize="small",
            )
        left += 100 * share
    axes.set_xlim(0, 100)
    axes.set_ylim(-0.35, 0.7)
    axes.set_yticks([])
    axes.set_xlabel(f"% of {whole_s:.3f} s, the mean of all GPUs")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize="x-small", frameon=False)
    return figure
