"""Writes docs/results/speed.md from the latest benchmark results, and measures cold starts.

python -m benchmarks.speed_page BENCHMARK.json; ``make benchmark`` does both.
"""

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.cold_starts import cold_starts
from experiments.cli.rundir import PACKAGES, revision
from experiments.pages.page_tables import IN_A_FILE, write_page
from experiments.pages.tables import narrow

PAGE = Path(__file__).parents[1] / "docs" / "results" / "speed.md"
Benchmark = Mapping[str, Any]
# For each benchmark, the values that get a column on the page, each with its heading and format.
RATES: Mapping[str, tuple[str, str]] = {
    "candidates_per_s": ("stage candidates a second", ",.0f"),
    "plans_per_s": ("plans a second", ",.0f"),
    "rows_per_s": ("rows a second", ",.0f"),
    "tasks_per_s": ("tasks a second", ",.0f"),
    "times_bare_simpy": ("times bare SimPy", ".1f"),
    "times_plain": ("times plain", ".2f"),
}
# The curves of the page: benchmarks by the name of their test, and the size with which they grow.
GROWTH: Mapping[str, str] = {
    "test_growth": "tasks",
    "test_growth_with_gpus": "nodes",
    "test_growth_with_blocks": "layers",
}


def main(arguments: Sequence[str]) -> None:
    """Write the page and its picture."""
    (path,) = arguments
    benchmarks = json.loads(Path(path).read_text(encoding="utf-8"))["benchmarks"]
    starts = [*cold_starts()]
    lines = [
        *_head(),
        *_rates(benchmarks),
        *_searches(benchmarks),
        *_starts(starts),
        *_growth(benchmarks),
    ]
    write_page(PAGE, "\n".join(lines) + "\n")
    _draw(benchmarks, PAGE.with_name("growth.svg"))
    sys.stdout.write(f"written: {PAGE}\n")


def _head() -> Iterator[str]:
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES if name != "mistlab")
    today = datetime.now(UTC).date().isoformat()
    yield from ("# Speed", "", f"Made on {today} at revision `{revision()}` by", "")
    yield from ("```", "make benchmark", "```", "")
    yield (
        f"on {os.cpu_count()} cores of {platform.machine()} ({platform.system()}, load "
        f"{os.getloadavg()[2]:.1f}), Python {platform.python_version()}, {versions}. "
        "Seconds are CPU seconds of one process: other "
        "work on the machine makes them longer, so compare rows of one page, and ratios between "
        "pages."
    )


def _rates(benchmarks: Sequence[Benchmark]) -> Iterator[str]:
    yield from ("", "## Rates", "")
    lines = []
    for one in benchmarks:
        told = [
            f"{one['extra_info'][key]:{form}} {words}"
            for key, (words, form) in RATES.items()
            if key in one["extra_info"]
        ]
        if told:
            lines.append((_name(one), _median(one), "; ".join(told)))
    yield from narrow(("benchmark", "median", "rate"), lines)


def _searches(benchmarks: Sequence[Benchmark]) -> Iterator[str]:
    yield from ("", "## Searches by `mist`", "")
    yield "From the question to the proven plan; compiled expressions are kept from earlier runs."
    yield ""
    searches = (
        (one, one["extra_info"])
        for one in benchmarks
        if "stage_evaluations" in one["extra_info"] and one["name"].partition("[")[0] not in GROWTH
    )
    yield from narrow(
        ("problem", "seconds", "stage candidates", "iteration of the plan"),
        (
            (
                *(_name(one), _median(one), f"{found['stage_evaluations']:,}"),
                f"{found['iteration_s']:.3f} s",
            )
            for one, found in searches
        ),
    )


def _starts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from ("", "## From the start of a process to its end", "")
    yield "The first time nothing is compiled; from then on source text is kept"
    yield from ("([decision](../decisions/0020-kept-expressions.md)).", "")
    yield from narrow(
        ("process", "first time", "from then on", "times an empty one"),
        (
            (
                *(row["what"], "" if row["first_s"] is None else _seconds(row["first_s"])),
                *(_seconds(row["warm_s"]), f"{row['times']:.1f}"),
            )
            for row in rows
        ),
    )


def _growth(benchmarks: Sequence[Benchmark]) -> Iterator[str]:
    yield from ("", "## Growth", "", "![Time over size, each beside its smallest](growth.svg)", "")
    yield from (IN_A_FILE, "")
    lines = []
    for test, points in _curves(benchmarks).items():
        (least, least_s), *_ = points
        for size, seconds in points:
            ratio = seconds / size / (least_s / least)
            lines.append((_words(test), f"{size:,.0f}", _seconds(seconds), f"{ratio:.2f}"))
    yield from narrow(("benchmark", "size", "median", "times the smallest's time a size"), lines)


def _curves(benchmarks: Sequence[Benchmark]) -> Mapping[str, list[tuple[float, float]]]:
    """The sizes and seconds of each benchmark that is measured at several sizes."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for one in benchmarks:
        test = one["name"].partition("[")[0]
        if test in GROWTH:
            known = {**(one["params"] or {}), **one["extra_info"]}
            curves.setdefault(test, []).append((known[GROWTH[test]], one["stats"]["median"]))
    return {test: sorted(points) for test, points in curves.items()}


def _draw(benchmarks: Sequence[Benchmark], path: Path) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for test, points in _curves(benchmarks).items():
        least, least_s = points[0]
        sizes, times = zip(*((size / least, s / least_s) for size, s in points), strict=True)
        axes.plot(sizes, times, "o-", label=f"{_words(test)} ({GROWTH[test]})")
    ends = axes.get_xlim()
    axes.plot(ends, ends, ":", color="grey", label="in proportion")
    axes.set(xscale="log", yscale="log", xlabel="times the smallest size", ylabel="times its time")
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def _median(one: Benchmark) -> str:
    return _seconds(one["stats"]["median"])


def _name(one: Benchmark) -> str:
    params = one["name"].partition("[")[2].rstrip("]")
    words = _words(one["name"].partition("[")[0])
    return f"{words} ({params})" if params else words


def _words(test: str) -> str:
    return test.removeprefix("test_").replace("_", " ")


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


if __name__ == "__main__":
    main(sys.argv[1:])
