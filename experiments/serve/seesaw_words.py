"""The words of Seesaw's evaluation: what the best pairs bring, where their time goes, and why."""

from collections.abc import Sequence
from typing import Any

from experiments.pages.tables import Row, table

PARTS = ("without_resharding", "without_tiers", "without_thresholds")
WHY = (
    "Static layouts mix prompts into steps that decode anyway, so phases save all-reduces of "
    "prompts, and steps that wait for a pipeline: little over NVLink, much over PCIe. Where "
    "prompts are long and the host's tier holds few, phases are short, and each begins and ends "
    "with few running requests."
)


def words_of(
    every: Sequence[Row],
    rows: Sequence[Row],
    summary: dict[str, Any],
    curve: Sequence[tuple[int, float]],
) -> list[str]:
    """The page's paragraphs and tables."""
    lost = [row["case"] for row in rows if row["gain"] < 1]
    unfit = [row["case"] for row in every if not row["fits"]]
    means = [[name, f"{value:.3f}"] for name, value in summary.items() if isinstance(value, float)]
    by_output = ", ".join(f"{tokens}: {value:.2f}" for tokens, value in curve)
    without = f"{': ' if unfit else ''}{'; '.join(unfit)}"
    return [
        f"{len(rows)} cases; of {len(unfit)} more no layout holds the longest request{without}.",
        _gains(summary),
        _rates(rows),
        _ABOUT_PARTS,
        _parts(rows),
        table(["figure", "mean"], means),
        f"Pairs lose in {len(lost)} cases{': ' if lost else ''}{'; '.join(lost)}. {WHY}",
        f"Gain by mean output tokens: {by_output}.",
    ]


_ABOUT_PARTS = (
    "Where the time of the best pair goes, and its gain with one ingredient left out: one layout "
    "for both phases, no more in the host's tier than the GPUs hold, and a change back as soon as "
    "a prompt has room."
)


def _gains(summary: dict[str, Any]) -> str:
    gain, first = summary["gain"], summary["gain over prompts first"]
    return (
        f"The best pair of layouts serves {gain['mean']:.2f} times as many requests a second as "
        "the best static layout under the same batching in the mean "
        f"({gain['least']:.2f} to {gain['most']:.2f}), and {first['mean']:.2f} times as many as "
        f"the best one that reads prompts first ({first['least']:.2f} to {first['most']:.2f}), as "
        "vLLM did by default then. Published over vLLM: 1.36 in the mean, 1.78 at most."
    )


def _rates(rows: Sequence[Row]) -> str:
    head = ["case", "static", "requests/s", "pair", "requests/s", "gain", "over prompts first"]
    lines = [
        [
            row["case"],
            row["static"],
            f"{row['static_per_s']:.2f}",
            row["pair"],
            f"{row['pair_per_s']:.2f}",
            f"{row['gain']:.2f}",
            f"{row['gain_over_prompts_first']:.2f}",
        ]
        for row in rows
    ]
    return table(head, lines)


def _parts(rows: Sequence[Row]) -> str:
    head = ["case", "reading s", "decoding s", "changes", "changing s", "copying s"]
    head += [name.replace("_", " ") for name in PARTS]
    lines = [
        [
            row["case"],
            f"{row['reading_s']:.0f}",
            f"{row['decoding_s']:.0f}",
            row["changes"],
            f"{row['changing_s']:.1f}",
            f"{row['copying_s']:.1f}",
            *(f"{row[name]:.2f}" for name in PARTS),
        ]
        for row in rows
    ]
    return table(head, lines)
