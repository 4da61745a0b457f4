"""Fit a hardware file's interference to measurements of streams that ran together.

The table is a CSV (docs/reference/measurement-tables.md). For each shape of communicating group the
command prints the error on rows that the fit did not see, and the error when that whole shape is
left out and the nearest other one stands in. What is written is fitted on all rows.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.commandline import DONE, parser_of, print_json, progress, run, writable
from mistlab.calibration import interference
from mistlab.calibration.interference import OverlapRows
from mistlab.calibration.tables import GroupShape, OverlapTable, read_overlap_table
from mistlab.datafile import write_yaml
from mistlab.errors import InputError
from mistlab.hardware import Hardware, Source
from mistlab.interference import GroupSlowdowns, Interference
from mistlab.references import hardware_from
from mistlab.value import to_mapping

DIGEST_CHARACTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Mean absolute relative errors of one shape of group on rows that were held out."""

    shape: GroupShape
    rows: int
    held_out: float
    shape_left_out: float | None


def main(arguments: Sequence[str]) -> int:
    """Fit, print the residuals, write the hardware file."""
    options = _parser().parse_args(arguments)
    hardware = hardware_from(options.hardware, Path())
    table = read_overlap_table(options.interference, campaign=options.campaign)
    for count, reason in (
        (table.duplicates, "repeat another byte for byte"),
        (table.incomplete, "lack the time of a stream alone"),
    ):
        if count:
            progress(f"{count} rows {reason} and were dropped")
    if not table.groups:
        message = f"{table.path}: no row has more than one stream busy: nothing can be fitted"
        raise InputError(message)
    fitted = {shape: _fitted(shape, rows) for shape, rows in table.groups.items()}
    residuals = [
        _residual(shape, rows, fitted, options.seed) for shape, rows in table.groups.items()
    ]
    out = writable(options.out, "file")
    write_yaml(to_mapping(_calibrated(hardware, table, fitted, residuals), omit_defaults=True), out)
    summary = _summary(options, table, residuals, out)
    if options.json:
        print_json(summary)
    else:
        print(_text(summary))
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("calibrate", __doc__, hardware="l4-24gb", seed=0, json=False)
    parser.add_argument(
        "--interference", type=Path, required=True, metavar="TABLE.csv", help="the measurements"
    )
    parser.add_argument("--campaign", help="one campaign (`generation`) of a table with several")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="HARDWARE.yaml", help="the file to write"
    )
    return parser


def _fitted(shape: GroupShape, rows: OverlapRows) -> GroupSlowdowns:
    progress(f"fitting {shape.gpus_in_node} GPUs in each of {shape.nodes} nodes: {len(rows)} rows")
    return interference.fit(rows, gpus_in_node=shape.gpus_in_node, nodes=shape.nodes)


def _residual(
    shape: GroupShape, rows: OverlapRows, fitted: dict[GroupShape, GroupSlowdowns], seed: int
) -> Residual:
    order = np.random.default_rng(seed).permutation(len(rows))
    seen, unseen = rows.chosen(order[::2]), rows.chosen(order[1::2])
    half = interference.fit(seen, gpus_in_node=shape.gpus_in_node, nodes=shape.nodes)
    others = tuple(group for other, group in fitted.items() if other != shape)
    left_out = None
    if others:
        nearest = Interference(groups=others).of_group(
            gpus_in_node=shape.gpus_in_node, nodes=shape.nodes
        )
        left_out = _mean_error(rows, nearest)
    return Residual(
        shape=shape, rows=len(rows), held_out=_mean_error(unseen, half), shape_left_out=left_out
    )


def _mean_error(rows: OverlapRows, group: GroupSlowdowns) -> float:
    return float(np.abs(interference.errors(rows, group)).mean())


def _calibrated(
    hardware: Hardware,
    table: OverlapTable,
    fitted: dict[GroupShape, GroupSlowdowns],
    residuals: Sequence[Residual],
) -> Hardware:
    rows = sum(residual.rows for residual in residuals)
    error = float(np.mean([residual.held_out for residual in residuals]))
    source = Source(
        kind="measured",
        source=(
            f"{table.path.name} (sha256 {table.sha256[:DIGEST_CHARACTERS]}), "
            f"campaign {table.campaign or 'unnamed'}, {rows} rows, "
            f"held-out mean error {error:.2%}"
        ),
    )
    return replace(
        hardware,
        interference=Interference(groups=tuple(fitted.values())),
        provenance=replace(hardware.provenance, interference=source),
    )


def _summary(
    options: argparse.Namespace, table: OverlapTable, residuals: Sequence[Residual], out: Path
) -> dict[str, Any]:
    left_out = [r.shape_left_out for r in residuals if r.shape_left_out is not None]
    return {
        "hardware": options.hardware,
        "table": str(table.path),
        "sha256": table.sha256,
        "duplicates": table.duplicates,
        "incomplete": table.incomplete,
        "held_out_error": float(np.mean([r.held_out for r in residuals])),
        "shape_left_out_error": float(np.mean(left_out)) if left_out else None,
        "groups": [
            {
                "gpus_in_node": r.shape.gpus_in_node,
                "nodes": r.shape.nodes,
                "rows": r.rows,
                "held_out_error": r.held_out,
                "shape_left_out_error": r.shape_left_out,
            }
            for r in residuals
        ],
        "out": str(out),
    }


def _text(summary: dict[str, Any]) -> str:
    lines = ["interference, mean error of rows that were not fitted:"]
    for group in summary["groups"]:
        left_out = group["shape_left_out_error"]
        alone = "" if left_out is None else f", {left_out:.2%} with this shape left out"
        lines.append(
            f"  {group['gpus_in_node']} GPUs in each of {group['nodes']} nodes: "
            f"{group['held_out_error']:.2%} of {group['rows']} rows{alone}"
        )
    lines.append(f"  all shapes: {summary['held_out_error']:.2%}")
    lines.append(f"written: {summary['out']} (name it as `hardware:` in a plan file)")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
