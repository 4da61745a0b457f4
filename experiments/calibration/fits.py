"""The steps of a calibration, each of which fits one group of figures in a hardware file; and the
text of that file.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cli.commandline import print_json, progress
from mistlab.calibration.table_rows import Origin
from mistlab.calibration.tables import GroupShape
from mistlab.core.files import write_yaml
from mistlab.core.values import to_mapping
from mistlab.machine.hardware import (
    LENT,
    Compute,
    Hardware,
    Provenance,
    Rate,
    Source,
    Transfers,
)

# The steps of a calibration: each fits one group of figures in a hardware file, and reports its
# errors.


DIGEST_CHARACTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """The mean absolute relative error of a fit, on rows of the table that were left out of the
    fit.
    """

    what: str
    rows: int
    held_out: float
    shape: GroupShape | None = None
    shape_left_out: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The fit of one table: the group of figures that it fits, the source of the table's rows, and
    the errors of the fit.

    ``spread`` is the median relative difference between repeated measurements.
    """

    group: str
    origin: Origin
    note: str
    residuals: tuple[Residual, ...]
    spread: float | None = None

    @property
    def held_out(self) -> float:
        """The mean error of the fits, on rows that were left out of them."""
        return float(np.mean([residual.held_out for residual in self.residuals]))

    @property
    def source(self) -> str:
        """The text that a hardware file gives as the source of its figures: the table, its digest,
        its number of rows, and the fit's error.
        """
        rows = sum(residual.rows for residual in self.residuals)
        digest = self.origin.sha256[:DIGEST_CHARACTERS]
        return (
            f"{self.origin.path.name} (sha256 {digest}), {self.note}, {rows} rows, "
            f"held-out mean error {self.held_out:.2%}"
        )


Step = Callable[[Hardware], tuple[Hardware, Fitted]]


def applied(steps: Sequence[Step], hardware: Hardware) -> tuple[Hardware, list[Fitted]]:
    """Apply the steps of a calibration to a hardware; returns the new hardware, and what each step
    reports.
    """
    reports = []
    for step in steps:
        hardware, report = step(hardware)
        reports.append(report)
    return hardware, reports


def sourced(hardware: Hardware, group: str, source: Source, *, more: bool = False) -> Provenance:
    """The sources of a hardware's figures, after one group of figures has got a new source;
    ``more`` is added to the end of the text that was there.
    """
    before: Source | None = getattr(hardware.provenance, group)
    if more and before is not None:
        source = replace(source, source=f"{before.source}; {source.source}")
    return replace(hardware.provenance, **{group: source})


def calibrated(
    hardware: Hardware, value: Any, fitted: Fitted, *, more: bool = False
) -> tuple[Hardware, Fitted]:
    """The hardware after one group of its figures has been fitted, and the fit."""
    source = Source(kind="measured", source=fitted.source)
    provenance = sourced(hardware, fitted.group, source, more=more)
    return replace(hardware, **{fitted.group: value}, provenance=provenance), fitted


def report_dropped(count: int, reason: str) -> None:
    """Report how many rows of a table were not used, and why."""
    if count:
        progress(f"{count} rows {reason} and were dropped")


def borrowed(lender: Hardware) -> Callable[[Hardware], Hardware]:
    """Copy from another hardware those groups of figures that a hardware lacks.

    Rates of computation are scaled by the ratios of peak rates and memory bandwidths in the two
    datasheets. The network between nodes is not borrowed: it belongs to the cluster, not to the
    GPU.
    """

    def of(hardware: Hardware) -> Hardware:
        for group in LENT:
            value = getattr(lender, group)
            if getattr(hardware, group) is not None or value is None:
                continue
            if group == "compute":
                value = _scaled(value, lender, hardware)
            if group == "transfers":
                value = _inside(value)
            source = Source(kind="borrowed", source=f"{lender.name}")
            provenance = replace(hardware.provenance, **{group: source})
            hardware = replace(hardware, **{group: value}, provenance=provenance)
        return hardware

    return of


def _inside(transfers_: Transfers) -> Transfers:
    inside = tuple(group for group in transfers_.groups if group.nodes == 1)
    return replace(transfers_, groups=inside, across_nodes=None)


def _scaled(compute: Compute, lender: Hardware, hardware: Hardware) -> Compute:
    arithmetic = hardware.gpu.peak_tflops.fp16 / lender.gpu.peak_tflops.fp16
    memory = hardware.gpu.memory_gbytes_per_s / lender.gpu.memory_gbytes_per_s

    def scaled(rate: Rate) -> Rate:
        tflops, gbytes = rate.tflops, rate.gbytes_per_s
        return replace(
            rate,
            tflops=None if tflops is None else round(tflops * arithmetic, 2),
            gbytes_per_s=None if gbytes is None else round(gbytes * memory, 2),
        )

    return replace(compute, rates=tuple(map(scaled, compute.rates)))


# Writes a fitted hardware file, and reports the error of each fit.


def write_fitted(
    hardware: Hardware, fitted: Sequence[Fitted], out: Path, name: str, *, as_json: bool
) -> None:
    """Write the hardware file, and print the report of each fit; ``name`` is the hardware's name in
    JSON.
    """
    hardware = replace(hardware, measured_with=hardware.figures)
    write_yaml(to_mapping(hardware, omit_defaults=True), out)
    if as_json:
        print_json({"hardware": name, **_by_group(fitted), "out": str(out)})
    else:
        print("\n".join(map(_text, fitted)))
        print(f"written: {out} (name it as `hardware:` in a plan file)")


def _by_group(fitted: Sequence[Fitted]) -> dict[str, Any]:
    """The reports of all fits by group of figures; a group that is fitted to several tables has a
    report for each table.
    """
    groups: dict[str, Any] = {}
    for report in fitted:
        name = (
            report.group
            if report.group not in groups
            else f"{report.group} {report.origin.path.name}"
        )
        groups[name] = _summary(report)
    return groups


def _summary(fitted: Fitted) -> dict[str, Any]:
    return {
        "table": str(fitted.origin.path),
        "sha256": fitted.origin.sha256,
        "duplicates": fitted.origin.duplicates,
        "spread": fitted.spread,
        "held_out_error": fitted.held_out if fitted.residuals else None,
        "fits": [
            {
                "gpus_in_node": r.shape.gpus_in_node if r.shape else None,
                "nodes": r.shape.nodes if r.shape else None,
                "what": r.what,
                "rows": r.rows,
                "held_out_error": r.held_out,
                "shape_left_out_error": r.shape_left_out,
            }
            for r in fitted.residuals
        ],
    }


def _text(fitted: Fitted) -> str:
    """The report of a fit as text."""
    if not fitted.residuals:
        return f"{fitted.group} from {fitted.origin.path.name}"
    lines = [f"{fitted.group}, mean error of rows that were not fitted:"]
    lines += [f"  {_line(residual)}" for residual in fitted.residuals]
    lines.append(f"  all: {fitted.held_out:.2%}")
    if fitted.spread is not None:
        lines.append(f"  repeated measurements differ by {fitted.spread:.2%} of their median")
    return "\n".join(lines)


def _line(residual: Residual) -> str:
    shape, left_out = residual.shape, residual.shape_left_out
    where = f"{shape.gpus_in_node} GPUs in each of {shape.nodes} nodes, " if shape else ""
    note = "" if left_out is None else f", {left_out:.2%} with this shape left out"
    return f"{where}{residual.what}: {residual.held_out:.2%} of {residual.rows} rows{note}"
