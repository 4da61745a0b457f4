"""Writes a fitted hardware file, and says how well each table was fitted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.calibrating.fits import Fitted, Residual
from experiments.cli.commandline import print_json
from mistlab.core.files import write_yaml
from mistlab.core.values import to_mapping
from mistlab.machine.hardware import Hardware


def write_fitted(
    hardware: Hardware, fitted: Sequence[Fitted], out: Path, name: str, *, as_json: bool
) -> None:
    """Write the hardware file, and print the report of each fit; ``name`` is what the hardware is
    called in JSON."""
    write_yaml(to_mapping(hardware, omit_defaults=True), out)
    if as_json:
        print_json({"hardware": name, **_by_group(fitted), "out": str(out)})
    else:
        print("\n".join(map(_text, fitted)))
        print(f"written: {out} (name it as `hardware:` in a plan file)")


def _by_group(fitted: Sequence[Fitted]) -> dict[str, Any]:
    """A group's report; of several tables for one group, under their names."""
    groups: dict[str, Any] = {}
    for report in fitted:
        name = report.group if report.group not in groups else f"{report.group} {report.table.name}"
        groups[name] = _summary(report)
    return groups


def _summary(fitted: Fitted) -> dict[str, Any]:
    return {
        "table": str(fitted.table),
        "sha256": fitted.sha256,
        "duplicates": fitted.duplicates,
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
    """The report of a fit, for people."""
    if not fitted.residuals:
        return f"{fitted.group} from {fitted.table.name}"
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
