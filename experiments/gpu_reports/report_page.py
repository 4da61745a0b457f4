"""Makes the report on a GPU or a node: its page and its pictures."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.calibration.noted_machine import noted_machine
from experiments.calibration.published import END_TO_END, GRADIENTS, PRECISION
from experiments.cli.commandline import progress
from experiments.gpu_reports.report_checks import (
    LOSS_TOLERANCE,
    ROUNDING,
    Checks,
    Difference,
    checks_of,
)
from experiments.gpu_reports.report_plans import PlanOfReport
from experiments.gpu_reports.report_rows import (
    ERRORS,
    TIMED,
    WARM_UPS,
    ReportRow,
    outside_of,
    row_of,
    summary_of,
    table_row,
)
from experiments.pages.tables import narrow
from experiments.training.plan_runs import Said
from experiments.training.run_results import prediction_of
from mistlab.core.files import naming, read_yaml, write_yaml
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import from_mapping, to_mapping
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
    """The page of the report as text and tables: first the comparison of losses, then whole plans,
    then stages that ran alone.
    """
    name = "this machine" if hardware is None else hardware.name
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
    """Draw measured against predicted iteration times and allocated memory."""
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
    """How many groups of plans had their losses compared, and which of them differ, as text."""
    strict = "losses, and gradients where they are told, must be equal to the bit"
    timed = f"first losses must be equal, later ones within {LOSS_TOLERANCE:.0e}"
    layouts = f"losses of one workload must agree within {ROUNDING:.0e}"
    return [
        "Of plans that differ in offloading or in overlapping alone:",
        "",
        f"- {checks.strict} groups ran strictly: {strict}",
        f"- {checks.timed} groups were timed: {timed}",
        *([f"- {checks.layouts} plans in unlike layouts: {layouts}"] if checks.layouts else []),
        *map(_of_plans, checks.failed_checks),
        *(map(_of_plans, checks.differences) if checks.differences else ["- none differ"]),
    ]


def _of_plans(difference: Difference) -> str:
    return f"- **{difference.words}**: {', '.join(difference.plans)}"


def _overlaps(checks: Checks) -> list[str]:
    return [
        f"- {overlap.plan}: {overlap.overlapped_s:.3f} s, {overlap.serialised_s:.3f} s with one "
        f"task after another ({overlap.serialised_s / overlap.overlapped_s:.2f} times as long)"
        for overlap in checks.overlaps
    ]


def _runs(rows: Sequence[ReportRow], what: str) -> str:
    summary = summary_of(rows)
    return f"{summary['plans']} {what} ({summary['failed']} failed)"


def _findings(rows: Sequence[ReportRow]) -> list[str]:
    """The mean errors of the predictions, and how often the memory allocator had to ask the GPU for
    memory, as text.
    """
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
        *_outside(rows),
    ]


def _outside(rows: Sequence[ReportRow]) -> list[str]:
    """The memory of the fullest GPU that is outside torch's allocator (context, libraries,
    communicators), measured and predicted, as text.
    """
    ran = [row for row in rows if row.get("measured_outside_bytes")]
    if not ran:
        return []
    measured, predicted = (
        [row[f"{way}_outside_bytes"] / GIB_BYTES for row in ran]
        for way in ("measured", "predicted")
    )
    measured_range, predicted_range = (
        f"{min(one):.2f} to {max(one):.2f}" for one in (measured, predicted)
    )
    return [f"- outside torch's allocator: {measured_range} GiB, predicted {predicted_range}"]


def _cells(row: ReportRow) -> list[str]:
    if "error" in row:
        return [row["plan"], row["error"], *[""] * 8]
    cells = [row["plan"]]
    for name, error in zip(("s", "allocated_bytes", "reserved_bytes"), ERRORS, strict=True):
        unit = 1 if name == "s" else GIB_BYTES
        cells += [f"{row[f'{one}_{name}'] / unit:.3f}" for one in ("measured", "predicted")]
        cells.append(f"{row[error]:+.1%}")
    return cells


# Turns the folder of a report into results: fits, predictions, comparisons, and the page.
# This needs neither a GPU nor torch, so a folder that was filled on a machine without SciPy or
# matplotlib can be evaluated on another one. Results that this machine cannot make are left out,
# and the page names them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a report has measured on whole plans and on single stages, with predictions if the
    machine has been profiled; ``left_out`` lists results that this machine cannot make.
    """

    hardware: Hardware | None
    rows: Sequence[ReportRow]
    of_stages: Sequence[ReportRow]
    checks: Checks
    left_out: Sequence[str]

    @property
    def summary(self) -> ReportRow:
        """All results of the report as plain data for JSON."""
        alone = {**summary_of(self.of_stages), "rows": [*self.of_stages]}
        return {
            **summary_of(self.rows),
            **to_mapping(self.checks),
            "rows": [*self.rows],
            "stages": alone,
            "left_out": [*self.left_out],
        }


def figures_of(
    folder: Path, plans: Sequence[PlanOfReport], outcomes: Mapping[str, Said]
) -> Figures:
    """Compare the runs of a report with predictions, and write the page and its pictures; returns
    all results.
    """
    left_out: list[str] = []
    hardware = _hardware(folder, plans, outcomes, left_out)
    rows: list[ReportRow] = []
    of_stages: list[ReportRow] = []
    if hardware is not None:
        compared = [plan for plan in plans if plan.is_compared]
        rows = _rows([plan for plan in compared if plan.stage is None], hardware, outcomes)
        of_stages = _rows([plan for plan in compared if plan.stage is not None], hardware, outcomes)
    figures = Figures(
        hardware=hardware,
        rows=rows,
        of_stages=of_stages,
        checks=checks_of(plans, outcomes),
        left_out=left_out,
    )
    try:
        draw(rows, folder)
    except ModuleNotFoundError as error:
        left_out.append(f"pictures: {error.name} is not installed")
    page = page_of(rows, of_stages, figures.checks, hardware, left_out)
    with naming(folder / "README.md"):
        (folder / "README.md").write_text(page, encoding="utf-8")
    for missing in left_out:
        progress(f"left out: {missing}")
    return figures


def _hardware(
    folder: Path, plans: Sequence[PlanOfReport], outcomes: Mapping[str, Said], left_out: list[str]
) -> Hardware | None:
    """The profiled hardware with constants fitted to the report's runs; without these constants as
    long as runs are missing. None if the machine is not profiled, or a package for the fits is
    missing.
    """
    try:
        profile = _profile(folder)
        if profile is None:
            left_out.append("predictions: the machine is not profiled yet")
            return None
        return _calibrated(folder, [plan for plan in plans if plan.is_fitted], profile, outcomes)
    except ModuleNotFoundError as error:
        left_out.append(f"predictions: {error.name} is not installed")
        return None


def _profile(folder: Path) -> Hardware | None:
    """The hardware fitted to the tables of the profile; None while tables are incomplete."""
    path, tables = folder / "profile.yaml", folder / "tables"
    if not path.exists():
        if not is_profiled(folder):
            return None
        from experiments.calibration.profiled import Request, profiled  # noqa: PLC0415 (needs SciPy)

        request = Request(name=path.stem, tables=tables, datasheet=None, seed=0)
        hardware, _ = profiled(request, noted_machine(tables))
        write_yaml(to_mapping(hardware, omit_defaults=True), path)
    return from_mapping(Hardware, read_yaml(path))


def is_profiled(folder: Path) -> bool:
    """Whether the machine was profiled: all tables are complete, or its hardware file exists."""
    tables = folder / "tables"
    has_tables = (tables / "machine.yaml").exists() and noted_machine(tables).is_measured
    return has_tables or (folder / "profile.yaml").exists()


def _calibrated(
    folder: Path, plans: Sequence[PlanOfReport], profile: Hardware, outcomes: Mapping[str, Said]
) -> Hardware:
    if any(plan.name not in outcomes for plan in plans):
        return profile
    from experiments.calibration.fit_runs import FEWEST_RUNS, whole_runs  # noqa: PLC0415 (needs SciPy)

    path = folder / "runs.csv"
    ran = [plan for plan in plans if "error" not in outcomes[plan.name]]
    if len(ran) < FEWEST_RUNS:
        progress(f"{len(ran)} of the plans to fit ran: predictions are the profile's alone")
        return profile
    with naming(path), path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, (*END_TO_END, PRECISION, GRADIENTS), lineterminator="\n")
        writer.writeheader()
        for plan, measured in zip(ran, _rows(ran, profile, outcomes), strict=True):
            writer.writerow(table_row(plan.job(profile), measured, plan.model))
    hardware, _ = whole_runs(path)(profile)
    write_yaml(to_mapping(hardware, omit_defaults=True), folder / "hardware.yaml")
    return hardware


def _rows(
    plans: Sequence[PlanOfReport], hardware: Hardware, outcomes: Mapping[str, Said]
) -> list[ReportRow]:
    """The report's result rows of the plans that have run."""
    return [
        {
            **row_of(plan, prediction_of(job, plan.stage), outcomes[plan.name]),
            "predicted_outside_bytes": outside_of(job, plan.stage),
        }
        for plan in plans
        if plan.name in outcomes
        for job in (plan.job(hardware),)
    ]
