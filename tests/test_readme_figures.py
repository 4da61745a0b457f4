"""Figures in README, and in the pages that it leads to first, equal those of their sources."""

import csv
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Pages that say figures of others; index, tutorials and how-tos, too, must say none of their own.
NAMES = (
    *("README.md", "docs/how-good.md", "docs/questions.md"),
    *(
        path.relative_to(ROOT).as_posix()
        for folder in ("explanation", "how-to", "tutorials")
        for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    ),
    *("docs/architecture.md", "docs/glossary.md", "docs/index.md"),
)
TEXTS = {name: " ".join((ROOT / name).read_text(encoding="utf-8").split()) for name in NAMES}
README = TEXTS["README.md"]
# What README shows elsewhere are answers of commands, which its own test holds.
SAID = TEXTS | {"README.md": README.split("## How true it is")[1].split("**What it is not.**")[0]}
FIGURE = r"(\d+(?:\.\d+)?)"
PERCENT = re.compile(rf"{FIGURE}(?: %| to \d+ %|, \d+ %)|\d\.\d+x")
# What a figure is called, what users ask for, and what tests hold peaks of memory to.
NO_RESULT = re.compile(
    r"90 % (?:means|of measurements)|what 90 %|51 % MFU|within 5 % of|"
    r"peaks of memory agree with predictions within 1 %|clocks moved by more than 3 %"
)


def cells(page: str, section: str = "") -> dict[str, dict[str, str]]:
    """Rows of the tables of a page and its files by their first cell, each by column; the first of
    a name counts."""
    results = ROOT / "docs" / "results"
    text = (results / f"{page}.md").read_text(encoding="utf-8")
    rows: dict[str, dict[str, str]] = {}
    header: list[str] | None = None
    for line in text[text.index(section) :].splitlines():
        if apart := re.search(r"\[all [\d,]+\]\(([\w.-]+\.csv)\)", line):
            with (results / apart[1]).open(encoding="utf-8", newline="") as file:
                for named in csv.DictReader(file):
                    rows.setdefault(next(iter(named.values())), named)
        if not line.startswith("|"):
            header = None
        elif not re.fullmatch(r"[|:\- ]+", line):
            row = [cell.strip() for cell in line.strip("|").split("|")]
            header = header or row
            rows.setdefault(row[0], dict(zip(header, row, strict=True)))
    return rows


def cell(page: str, row: str, column: str, section: str = "") -> Callable[[], float]:
    return lambda: float(cells(page, section)[row][column].rstrip("%x"))


def told(page: str, pattern: str) -> Callable[[], float]:
    """A figure of a page's text, where the pattern has its group."""

    def figure() -> float:
        results = ROOT / "docs" / "results"
        text = (results / f"{page}.md").read_text("utf-8")
        # A page shows the first rows of long tables, and has all of them in files.
        for path in sorted(results.glob(f"{page}-[0-9]*.csv")):
            with path.open(encoding="utf-8", newline="") as file:
                text += "".join(f"| {' | '.join(row)} |\n" for row in csv.reader(file))
        match = re.search(pattern, " ".join(text.split()))
        assert match, pattern
        return float(match[1])

    return figure


def inside(least: int, most: int, extreme: Callable[[list[float]], float]) -> Callable[[], float]:
    """The extreme share inside bounds, of the tables with so many runs."""

    def figure() -> float:
        rows = cells("runs", "## Bounds of runs that were left out").values()
        tables = [
            row for row in rows if row.get("runs", "").isdigit() and "without its model" in row
        ]
        chosen = [row for row in tables if least <= int(row["runs"]) <= most]
        cards = "nvidia_megatron_bridge_cards"
        return extreme(
            [float(row["without its model"].rstrip("%")) for row in chosen if row[""] != cards]
        )

    return figure


def errors(row: str) -> tuple[Callable[[], float], Callable[[], float]]:
    return cell("predictor-error", row, "their mean"), cell("predictor-error", row, "their median")


def median(row: str, section: str = "## All tables") -> Callable[[], float]:
    return cell("runs", row, "median", section)


WITHOUT_PROFILE = "## Parts of the runs of nanotron, without a profile"
UNDER_PROFILE = "## Under the profile ultrascale"
PAIR = rf"{FIGURE} % \| {FIGURE} %"
SPEEDUP = "Over Megatron-LM, {}: " + FIGURE + "x on average"
AVERAGES = {
    case: told("speedups", SPEEDUP.format(case))
    for case in ("l4-24gb flash", "l4-24gb math", "a100-40gb flash", "a100-40gb math")
}


def averaged(hardware: str) -> Callable[[], float]:
    """The mean over both kinds of attention, which have equally many workloads."""
    return lambda: sum(AVERAGES[f"{hardware} {kind}"]() for kind in ("flash", "math")) / 2


def on_published(gpu: str) -> Callable[[], float]:
    """The mean speedup over Megatron-LM as published, on the published runtime."""
    row = rf"\| Megatron-LM as published +\| {gpu}-\d+gb flash +\| +15 "
    return told("end-to-end", row + r"(?:\| +[\d.]+ ){4}\| +" + FIGURE)


# What the pages say, and where each of its figures comes from.
SOURCES: dict[str, tuple[Callable[[], float], ...]] = {
    rf"on L4: five, six and two \| mean {FIGURE} %, {FIGURE} %, {FIGURE} %": tuple(
        errors(f"l4-24gb, {name}")[0] for name in ("mist", "megatron-lm", "deepspeed")
    ),
    rf"one A100 node; 26 on 64 A100 \| mean {FIGURE} %; {FIGURE} %": (
        errors("a100-80gb, megatron, one node")[0],
        errors("a100-80gb, megatron, many nodes")[0],
    ),
    rf"GB300, 16 to 4 bits \| median {FIGURE} %": (median("nvidia_megatron_bridge_summary"),),
    rf"torchtitan, eager and compiled \| median {FIGURE} %": (median("torchtitan"),),
    rf"a cluster that nobody described \| median {FIGURE} %; {FIGURE} %": (
        median("no pipeline, tp to 8, to 128 GPUs", WITHOUT_PROFILE),
        median("hf_ultrascale_h100"),
    ),
    rf"of tiny models \| median {FIGURE} %": (median("megatron_core_ci_golden"),),
    rf"five of Mist on L4 \| {PAIR}": errors("l4-24gb, mist"),
    rf"two of DeepSpeed on L4 \| {FIGURE} %, {FIGURE} % \| {FIGURE} %, {FIGURE} %": tuple(
        pair[place]
        for place in (0, 1)
        for pair in (errors("l4-24gb, megatron-lm"), errors("l4-24gb, deepspeed"))
    ),
    rf"540 of Megatron on one A100 node \| {PAIR}": errors("a100-80gb, megatron, one node"),
    rf"26 of Megatron on 64 A100 \| {PAIR}": errors("a100-80gb, megatron, many nodes"),
    rf"weak scaling to 3,072 A100 \| {PAIR}": errors("a100-80gb, megatron, weak scaling"),
    rf"are approximated \| {FIGURE} %, {FIGURE} % \| {FIGURE} %, {FIGURE} %": tuple(
        pair[place]
        for place in (0, 1)
        for pair in (errors("a100-40gb, aceso"), errors("a10g-24gb, megatron"))
    ),
    rf"llm-foundry on A100 and H100 \| {FIGURE} %": (median("mosaic_llm_foundry"),),
    rf"DGX Cloud, H100 and GB200 \| {FIGURE} %": (median("nvidia_dgxc_weak_scaling"),),
    rf"in 16 to 4 bits \| {FIGURE} %": (median("nvidia_megatron_bridge_summary"),),
    rf"without a pipeline, to 128 GPUs \| {FIGURE} %": (
        median("no pipeline, tp to 8, to 128 GPUs", WITHOUT_PROFILE),
    ),
    rf"with that cluster's profile \| {FIGURE} %, {FIGURE} %": (
        median("hf_ultrascale_h100"),
        median("hf_ultrascale_h100", UNDER_PROFILE),
    ),
    rf"torchtitan, eager and compiled \| {FIGURE} %": (median("torchtitan"),),
    rf"Megatron-core, of tiny models \| {FIGURE} %": (median("megatron_core_ci_golden"),),
    rf"contain {FIGURE} to {FIGURE} % of the measurements of sets of 59 runs and more": (
        inside(59, 10**9, min),
        inside(59, 10**9, max),
    ),
    rf"{FIGURE} to {FIGURE} % of smaller ones": (inside(0, 58, min), inside(0, 58, max)),
    rf"and {FIGURE} % of 14 checks": (
        cell(
            "runs",
            "nvidia_megatron_bridge_cards",
            "without its model",
            "## Bounds of runs that were left out",
        ),
    ),
    rf"told apart in {FIGURE} %": (
        told("runs", rf"## Runs under the profile .*? told apart in {FIGURE}%"),
    ),
    rf"Peaks of memory: {FIGURE} % for nine stages": (
        told("predictor-error", rf"Allocated memory of 9 stages: mean error {FIGURE}%"),
    ),
    rf"{FIGURE} to {FIGURE} % over Megatron-core's tests and nanotron": (
        cell("runs", "megatron_core_ci_golden", "memory", "## All tables"),
        cell("runs", "hf_ultrascale_h100", "memory", "## All tables"),
    ),
    rf"differ by {FIGURE} % \(median\) and at most {FIGURE} % over 1,000 plans": (
        cell("cross-check", "all", "median"),
        cell("cross-check", "all", "largest"),
    ),
    rf"{FIGURE}x over Megatron-LM on L4 and on A100 on the published runtime": (
        on_published("l4"),
    ),
    rf"{FIGURE}x over Megatron-LM on L4 and on A100 on": (on_published("a100"),),
    rf"published: {FIGURE}x, {FIGURE}x\)": (
        told("speedups", rf"l4-24gb flash: .*?published {FIGURE}x"),
        told("speedups", rf"a100-40gb flash: .*?published {FIGURE}x"),
    ),
    rf"they differ by {FIGURE} % in the median": (cell("cross-check", "all", "median"),),
    rf"over Aceso {FIGURE}x on equal terms": (
        told("end-to-end", rf"\| Aceso +\| all +\| +40 \| {FIGURE}"),
    ),
    rf"it is {FIGURE}x on L4 and {FIGURE}x on A100 40 GB": (
        averaged("l4-24gb"),
        averaged("a100-40gb"),
    ),
    rf"on two cores {FIGURE} % apart in the median": (
        told("whole-loop", rf"Predicted beside measured: {FIGURE}% in the median"),
    ),
}


@pytest.mark.parametrize("pattern", SOURCES)
def test_a_figure_is_that_of_its_source(pattern: str) -> None:
    """Equal but for rounding to the digits that the page has."""
    match = re.search(pattern, " ".join(TEXTS.values()))
    assert match, f"no page says it like this: {pattern}"
    for written, source in zip(match.groups(), SOURCES[pattern], strict=True):
        digit = 10.0 ** -len(written.partition(".")[2])
        assert float(written) == pytest.approx(source(), abs=0.5001 * digit)


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_of_a_result_has_a_source(name: str) -> None:
    rest = NO_RESULT.sub("", SAID[name])
    for pattern in SOURCES:
        rest = re.sub(pattern, "", rest)
    assert [match[0] for match in PERCENT.finditer(rest)] == []
