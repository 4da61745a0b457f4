"""The report on one GPU as a page and as pictures."""

from collections.abc import Sequence
from pathlib import Path

from experiments.gpu_reports.report_checks import LOSS_TOLERANCE, Checks, Difference
from experiments.gpu_reports.report_rows import ERRORS, TIMED, WARM_UPS, ReportRow, summary_of
from experiments.pages.tables import narrow
from mistlab.core.units import GIB_BYTES
from mistlab.machine.hardware import Hardware

HEAD = (
    *("plan", "time (s)", "predicted", "", "allocated (GiB)", "predicted", ""),
    *("reserved (GiB)", "predicted", ""),
)


def page_of(
    rows: Sequence[ReportRow],
    of_stages: Sequence[ReportRow],
    checks: Checks,
    hardware: Hardware | None,
    left_out: Sequence[str],
) -> str:
    """The report, in words and as tables: losses, whole plans, then stages by themselves."""
    name = "one GPU" if hardware is None else hardware.name
    lines = [f"# {name}: predicted beside measured", ""]
    lines += [f"- left out here: {one}" for one in left_out]
    lines += [f"- run on {one}" for one in checks.machines]
    lines += ["", "## Losses", "", *_losses(checks)]
    if hardware is not None:
        about = (
            f"{hardware.description}. {_runs(rows, 'plans')} that no number was fitted to; the "
            f"median of {TIMED} iterations after {WARM_UPS}."
        )
        lines += ["", "## Whole plans", "", about, "", *_findings(rows)]
        lines += [*map(_of_plans, checks.moved_clocks), *_overlaps(checks)]
        lines += ["", *narrow(HEAD, map(_cells, rows))]
    if of_stages:
        about = (
            f"{_runs(of_stages, 'stages')}, each by itself with as many micro-batches in flight as "
            "in its pipeline; nothing is sent. The figures above leave them out."
        )
        lines += ["", "## Single stages of pipelines", "", about, "", *_findings(of_stages)]
        lines += ["", *narrow(HEAD, map(_cells, of_stages))]
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[ReportRow], folder: Path) -> None:
    """Times and allocated memory, predicted over measured."""
    ran = [row for row in rows if "error" not in row]
    if not ran:
        return
    from experiments.pages.drawing import save  # noqa: PLC0415 (needs matplotlib)
    from experiments.prediction import plots  # noqa: PLC0415

    models = [row["plan"].split("-s")[0] for row in ran]
    times = [
        {"set": model, "measured_s": row["measured_s"], "predicted_s": row["predicted_s"]}
        for model, row in zip(models, ran, strict=True)
    ]
    memory = [
        {
            "run": model,
            "measured_bytes": row["measured_allocated_bytes"],
            "predicted_bytes": row["predicted_allocated_bytes"],
        }
        for model, row in zip(models, ran, strict=True)
    ]
    save(plots.times_figure(times), folder / "times.svg")
    save(plots.memory_figure(memory), folder / "memory.svg")


def _losses(checks: Checks) -> list[str]:
    """Which groups of plans were compared, and which of them differ."""
    strict = "losses, and gradients where they are told, must be equal to the bit"
    timed = f"first losses must be equal, later ones within {LOSS_TOLERANCE:.0e}"
    return [
        "Of plans that differ in offloading or in overlapping alone:",
        "",
        f"- {checks.strict} groups ran strictly: {strict}",
        f"- {checks.timed} groups were timed: {timed}",
        *map(_of_plans, checks.failed_checks),
        *(map(_of_plans, checks.differences) if checks.differences else ["- none differ"]),
    ]


def _of_plans(found: Difference) -> str:
    return f"- **{found.words}**: {', '.join(found.plans)}"


def _overlaps(checks: Checks) -> list[str]:
    return [
        f"- {one.plan}: {one.overlapped_s:.3f} s, {one.serialised_s:.3f} s with one task after "
        f"another ({one.serialised_s / one.overlapped_s:.2f} times as long)"
        for one in checks.overlaps
    ]


def _runs(rows: Sequence[ReportRow], what: str) -> str:
    summary = summary_of(rows)
    return f"{summary['plans']} {what} ({summary['failed']} failed)"


def _findings(rows: Sequence[ReportRow]) -> list[str]:
    """Mean errors, and what the allocator had to do."""
    summary = summary_of(rows)
    count = summary["allocator_retries"]
    times = "once" if count == 1 else f"{count} times"
    return [
        *(
            f"- mean absolute error of {what}: {summary[f'mean_{error}']:.2%}"
            for error, what in ERRORS.items()
            if f"mean_{error}" in summary
        ),
        f"- the allocator had to give back what it cached {times}",
    ]


def _cells(row: ReportRow) -> list[str]:
    if "error" in row:
        return [row["plan"], row["error"], *[""] * 8]
    cells = [row["plan"]]
    for name, error in zip(("s", "allocated_bytes", "reserved_bytes"), ERRORS, strict=True):
        unit = 1 if name == "s" else GIB_BYTES
        cells += [f"{row[f'{one}_{name}'] / unit:.3f}" for one in ("measured", "predicted")]
        cells.append(f"{row[error]:+.1%}")
    return cells
