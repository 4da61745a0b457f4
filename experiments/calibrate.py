"""Fit a hardware file to measurements: transfers, and the interference of streams.

Tables are CSVs (docs/reference/measurement-tables.md). For each shape of communicating group the
command prints the error on rows that the fit did not see, and for interference also the error when
that whole shape is left out and the nearest other one stands in. What is written is fitted on all
rows; what no table was given for stays as it is in --hardware.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.commandline import DONE, parser_of, print_json, progress, run, writable
from mistlab.calibration import interference, transfers
from mistlab.calibration.interference import OverlapRows
from mistlab.calibration.tables import (
    GroupShape,
    Origin,
    read_overlap_table,
    read_transfer_table,
)
from mistlab.datafile import write_yaml
from mistlab.errors import InputError
from mistlab.hardware import Hardware, Source
from mistlab.interference import GroupSlowdowns, Interference
from mistlab.references import hardware_from
from mistlab.transfers import GroupTransfers, Transfers
from mistlab.value import to_mapping

DIGEST_CHARACTERS = 16
FEWEST_ROWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Mean absolute relative errors of one fit on rows that were held out."""

    shape: GroupShape
    what: str
    rows: int
    held_out: float
    shape_left_out: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """One group of a hardware file, fitted: its value, where it comes from, how good it is."""

    group: str
    value: Interference | Transfers
    origin: Origin
    residuals: tuple[Residual, ...]

    @property
    def held_out(self) -> float:
        """The mean of the fits' held-out errors."""
        return float(np.mean([residual.held_out for residual in self.residuals]))

    @property
    def source(self) -> Source:
        """What the hardware file says of it."""
        rows = sum(residual.rows for residual in self.residuals)
        return Source(
            kind="measured",
            source=(
                f"{self.origin.path.name} (sha256 {self.origin.sha256[:DIGEST_CHARACTERS]}), "
                f"campaign {self.origin.campaign or 'unnamed'}, {rows} rows, "
                f"held-out mean error {self.held_out:.2%}"
            ),
        )


def main(arguments: Sequence[str]) -> int:
    """Fit, print the residuals, write the hardware file."""
    options = _parser().parse_args(arguments)
    if options.interference is None and options.bandwidth is None:
        message = "nothing to fit: give --interference TABLE.csv, --bandwidth TABLE.csv or both"
        raise InputError(message)
    hardware = hardware_from(options.hardware, Path())
    fits = []
    if options.bandwidth is not None:
        fits.append(_transfers(options.bandwidth, options.campaign))
    if options.interference is not None:
        fits.append(_interference(options.interference, options.campaign, options.seed))
    out = writable(options.out, "file")
    write_yaml(to_mapping(_calibrated(hardware, fits), omit_defaults=True), out)
    summary = {
        "hardware": options.hardware,
        **{fitted.group: _summary(fitted) for fitted in fits},
        "out": str(out),
    }
    if options.json:
        print_json(summary)
    else:
        print("\n".join(map(_text, fits)))
        print(f"written: {out} (name it as `hardware:` in a plan file)")
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("calibrate", __doc__, hardware="l4-24gb", seed=0, json=False)
    parser.add_argument(
        "--bandwidth", type=Path, metavar="TABLE.csv", help="transfers, one stream alone"
    )
    parser.add_argument(
        "--interference", type=Path, metavar="TABLE.csv", help="streams that ran together"
    )
    parser.add_argument("--campaign", help="one campaign (`generation`) of tables with several")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="HARDWARE.yaml", help="the file to write"
    )
    return parser


def _transfers(path: Path, campaign: str | None) -> Fitted:
    table = read_transfer_table(path, campaign=campaign)
    _report(table.origin.duplicates, "repeat another byte for byte")
    groups, residuals = [], []
    for shape, kinds in table.groups.items():
        lines = {}
        for kind, rows in kinds.items():
            if len(rows) < FEWEST_ROWS:
                message = (
                    f"{path}: {len(rows)} rows of {kind} for {shape.gpus_in_node} GPUs in each of "
                    f"{shape.nodes} nodes: measure at least {FEWEST_ROWS} sizes"
                )
                raise InputError(message)
            lines[kind] = transfers.fit(rows)
            half = transfers.fit(rows.every_second(0))
            error = transfers.mean_error(rows.every_second(1), half)
            residuals.append(Residual(shape=shape, what=kind, rows=len(rows), held_out=error))
        groups.append(GroupTransfers(gpus_in_node=shape.gpus_in_node, nodes=shape.nodes, **lines))
    return Fitted(
        group="transfers",
        value=Transfers(groups=tuple(groups)),
        origin=table.origin,
        residuals=tuple(residuals),
    )


def _interference(path: Path, campaign: str | None, seed: int) -> Fitted:
    table = read_overlap_table(path, campaign=campaign)
    _report(table.origin.duplicates, "repeat another byte for byte")
    _report(table.incomplete, "lack the time of a stream alone")
    if not table.groups:
        message = f"{path}: no row has more than one stream busy: nothing can be fitted"
        raise InputError(message)
    fitted = {shape: _fitted(shape, rows) for shape, rows in table.groups.items()}
    return Fitted(
        group="interference",
        value=Interference(groups=tuple(fitted.values())),
        origin=table.origin,
        residuals=tuple(_residual(s, rows, fitted, seed) for s, rows in table.groups.items()),
    )


def _report(count: int, reason: str) -> None:
    if count:
        progress(f"{count} rows {reason} and were dropped")


def _fitted(shape: GroupShape, rows: OverlapRows) -> GroupSlowdowns:
    progress(f"fitting {shape.gpus_in_node} GPUs in each of {shape.nodes} nodes: {len(rows)} rows")
    return interference.fit(rows, gpus_in_node=shape.gpus_in_node, nodes=shape.nodes)


def _residual(
    shape: GroupShape, rows: OverlapRows, fitted: Mapping[GroupShape, GroupSlowdowns], seed: int
) -> Residual:
    order = np.random.default_rng(seed).permutation(len(rows))
    seen, unseen = rows.chosen(order[::2]), rows.chosen(order[1::2])
    half = interference.fit(seen, gpus_in_node=shape.gpus_in_node, nodes=shape.nodes)
    others = tuple(group for other, group in fitted.items() if other != shape)
    left_out = None
    if others:
        stand_in = Interference(groups=others).of_group(
            gpus_in_node=shape.gpus_in_node, nodes=shape.nodes
        )
        left_out = _mean_error(rows, stand_in)
    return Residual(
        shape=shape,
        what="streams together",
        rows=len(rows),
        held_out=_mean_error(unseen, half),
        shape_left_out=left_out,
    )


def _mean_error(rows: OverlapRows, group: GroupSlowdowns) -> float:
    return float(np.abs(interference.errors(rows, group)).mean())


def _calibrated(hardware: Hardware, fits: Sequence[Fitted]) -> Hardware:
    values: dict[str, Any] = {fitted.group: fitted.value for fitted in fits}
    sources = {fitted.group: fitted.source for fitted in fits}
    return replace(hardware, **values, provenance=replace(hardware.provenance, **sources))


def _summary(fitted: Fitted) -> dict[str, Any]:
    return {
        "table": str(fitted.origin.path),
        "sha256": fitted.origin.sha256,
        "duplicates": fitted.origin.duplicates,
        "held_out_error": fitted.held_out,
        "fits": [
            {
                "gpus_in_node": r.shape.gpus_in_node,
                "nodes": r.shape.nodes,
                "what": r.what,
                "rows": r.rows,
                "held_out_error": r.held_out,
                "shape_left_out_error": r.shape_left_out,
            }
            for r in fitted.residuals
        ],
    }


def _text(fitted: Fitted) -> str:
    lines = [f"{fitted.group}, mean error of rows that were not fitted:"]
    for residual in fitted.residuals:
        left_out = residual.shape_left_out
        note = "" if left_out is None else f", {left_out:.2%} with this shape left out"
        lines.append(
            f"  {residual.shape.gpus_in_node} GPUs in each of {residual.shape.nodes} nodes, "
            f"{residual.what}: {residual.held_out:.2%} of {residual.rows} rows{note}"
        )
    return "\n".join([*lines, f"  all: {fitted.held_out:.2%}"])


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
