"""Fits the links in a hardware file: the times of transfers and collectives, and how much streams
that run at the same time slow one another down.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.calibration.fits import Fitted, Residual, Step, calibrated, report_dropped, sourced
from experiments.cli.commandline import progress
from mistlab.calibration import fitted_slowdowns as interference
from mistlab.calibration import fitted_transfers as transfers
from mistlab.calibration.fitted_slowdowns import OverlapRows
from mistlab.calibration.table_rows import Origin
from mistlab.calibration.tables import (
    GroupShape,
    TransferTable,
    read_collective_table,
    read_overlap_table,
    read_point_to_point_table,
    read_transfer_table,
)
from mistlab.core.files import about
from mistlab.core.units import GBYTES, GIB_BYTES, MICROSECONDS
from mistlab.core.values import reject
from mistlab.cost.kernels import slowdowns_of_group
from mistlab.machine.hardware import GroupTransfers, Hardware, Line, Source, Transfers
from mistlab.machine.slowdowns import GroupSlowdowns, Interference

FEWEST_ROWS = 4
# The groups of GPUs, each a number of nodes and of GPUs in a node, for which latencies and
# bandwidths are published.
PUBLISHED_SIZES = (1, 2, 4, 8)


def bandwidth(path: Path, campaign: str | None) -> Step:
    """Fit the bandwidth of transfers, for each shape of group (number of nodes, and of GPUs in a
    node). The fits replace the hardware's figures.
    """

    def step(hardware: Hardware) -> tuple[Hardware, Fitted]:
        table = read_transfer_table(path, campaign=campaign)
        groups, fitted = _lines(path, table)
        value = _with_groups(hardware.transfers, _merged((), groups))
        return calibrated(hardware, value, fitted)

    return step


def collectives(path: Path, table_hardware: str | None) -> Step:
    """Fit the times of reduce-scatters and all-reduces, inside a node and across nodes; all-gathers
    get the same times if they were not measured.
    """

    def step(hardware: Hardware) -> tuple[Hardware, Fitted]:
        table = read_collective_table(path, hardware=table_hardware)
        groups, fitted = _lines(path, table)
        have = hardware.transfers.groups if hardware.transfers is not None else ()
        value = _with_groups(hardware.transfers, _merged(have, groups))
        return calibrated(hardware, value, fitted, more=True)

    return step


def point_to_point(path: Path, table_hardware: str | None) -> Step:
    """Fit the times of sends between two GPUs, inside a node and across nodes."""

    def step(hardware: Hardware) -> tuple[Hardware, Fitted]:
        table = read_point_to_point_table(path, hardware=table_hardware)
        groups, fitted = _lines(path, table)
        lines = {shape.nodes: of_shape["send"] for shape, of_shape in groups.items()}
        transfers_ = _transfers_of(hardware, path)
        value = replace(transfers_, in_node=lines.get(1), across_nodes=lines.get(2))
        return calibrated(hardware, value, fitted, more=True)

    return step


def published_lines(path: Path, name: str) -> Step:
    """The times of all-gathers across nodes from published latencies and bandwidths, for groups of
    GPUs that were not measured.
    """

    def step(hardware: Hardware) -> tuple[Hardware, Fitted]:
        try:
            content = path.read_bytes()
            parameters = json.loads(content)["templates"][name]["hardware"]["gpu_gpu_comm_params"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = error.strerror if isinstance(error, OSError) else type(error).__name__
            reject(
                f"{path}: templates.{name}.hardware.gpu_gpu_comm_params cannot be read "
                f"({problem}): give a JSON file with this field, and a template that it has"
            )
        transfers_ = _transfers_of(hardware, path)
        have = {(group.gpus_in_node, group.nodes) for group in transfers_.groups}
        pairs = list(zip(parameters[::2], parameters[1::2], strict=True))
        unfitted = pairs[0]
        groups = [
            GroupTransfers(
                gpus_in_node=gpus, nodes=nodes, all_gather=_published_line(*pair, nodes * gpus)
            )
            for (nodes, gpus), pair in zip(product(PUBLISHED_SIZES, repeat=2), pairs, strict=True)
            if nodes > 1 and pair != unfitted and (gpus, nodes) not in have
        ]
        value = replace(transfers_, groups=(*transfers_.groups, *groups))
        source = Source(
            kind="measured",
            source=f"across nodes the published fit of {path.name}, {name}: {len(groups)} shapes",
        )
        with_lines = replace(
            hardware,
            transfers=value,
            provenance=sourced(hardware, "transfers", source, more=True),
        )

        return with_lines, Fitted(
            group="transfers",
            origin=Origin(path=path, sha256=hashlib.sha256(content).hexdigest()),
            note=name,
            residuals=(),
        )

    return step


def streams(path: Path, campaign: str | None, seed: int) -> Step:
    """Fit by how much streams that run at the same time (compute, collectives, copies to and from
    the host) slow one another down.
    """

    def step(hardware: Hardware) -> tuple[Hardware, Fitted]:
        value, fitted = _interference(path, campaign, seed)
        return calibrated(hardware, value, fitted)

    return step


def _lines(path: Path, table: TransferTable) -> tuple[dict[GroupShape, dict[str, Line]], Fitted]:
    """Straight lines of a message's time over its bytes, fitted for each kind of message, number of
    nodes and number of GPUs in a group.
    """
    report_dropped(table.origin.duplicates, "repeat another byte for byte")
    groups: dict[GroupShape, dict[str, Line]] = {}
    residuals = []
    for shape, kinds in table.groups.items():
        lines = groups.setdefault(shape, {})
        for kind, rows in kinds.items():
            if len(rows) < FEWEST_ROWS:
                reject(
                    f"{path}: {len(rows)} rows of {kind} for {shape.gpus_in_node} GPUs in each of "
                    f"{shape.nodes} nodes: measure at least {FEWEST_ROWS} sizes"
                )
            with about(f"{path}: {kind}"):
                lines[kind] = transfers.fit(rows)
                half = transfers.fit(rows.every_second(0))
            error = transfers.mean_error(rows.every_second(1), half)
            residuals.append(Residual(shape=shape, what=kind, rows=len(rows), held_out=error))
    return groups, Fitted(
        group="transfers",
        origin=table.origin,
        note=f"campaign {table.origin.campaign or 'unnamed'}",
        residuals=tuple(residuals),
        spread=table.spread,
    )


def _with_groups(before: Transfers | None, groups: tuple[GroupTransfers, ...]) -> Transfers:
    return Transfers(groups=groups) if before is None else replace(before, groups=groups)


def _merged(
    have: Sequence[GroupTransfers], groups: dict[GroupShape, dict[str, Line]]
) -> tuple[GroupTransfers, ...]:
    """Groups of GPUs with newly fitted lines of time over bytes in place of the old ones; an
    existing line for all-gathers is kept.
    """
    merged = {GroupShape(group.gpus_in_node, group.nodes): group for group in have}
    for shape, lines in groups.items():
        before = merged.get(shape) or GroupTransfers(
            gpus_in_node=shape.gpus_in_node, nodes=shape.nodes
        )
        kept = {"all_gather"} if before.all_gather is not None else set()
        new: dict[str, Any] = {k: line for k, line in lines.items() if k not in kept}
        merged[shape] = replace(before, **new)
    return tuple(merged[shape] for shape in sorted(merged))


def _transfers_of(hardware: Hardware, path: Path) -> Transfers:
    if hardware.transfers is None:
        reject(f"{path}: {hardware.name} has no transfer times yet: give --bandwidth TABLE.csv too")
    return hardware.transfers


def _published_line(gib_per_s: float, latency_s: float, ranks: int) -> Line:
    """A line of time over the bytes of a whole message. The given bandwidth is the rate at which
    one rank's part of the message passes a link.
    """
    whole = gib_per_s * GIB_BYTES / GBYTES * ranks / (ranks - 1)
    return Line(
        latency_us=round(latency_s / MICROSECONDS, 2),
        gbytes_per_s=round(whole, 4),
        smallest_mib=64,
        largest_mib=512,
    )


def _interference(path: Path, campaign: str | None, seed: int) -> tuple[Interference, Fitted]:
    table = read_overlap_table(path, campaign=campaign)
    report_dropped(table.origin.duplicates, "repeat another byte for byte")
    report_dropped(table.incomplete, "lack the time of a stream alone")
    if not table.groups:
        reject(f"{path}: each row has at most one busy stream: add rows with several at once")
    fitted = [_fitted(shape, rows) for shape, rows in table.groups.items()]
    machine = interference.combined(fitted, list(table.groups.values()))
    residuals = [_residual(shape, rows, machine, seed) for shape, rows in table.groups.items()]
    fit = Fitted(
        group="interference",
        origin=table.origin,
        note=f"campaign {table.origin.campaign or 'unnamed'}",
        residuals=tuple(residuals),
    )
    return machine, fit


def _fitted(shape: GroupShape, rows: OverlapRows) -> GroupSlowdowns:
    progress(f"fitting {shape.gpus_in_node} GPUs in each of {shape.nodes} nodes: {len(rows)} rows")
    return interference.fit(rows, gpus_in_node=shape.gpus_in_node, nodes=shape.nodes)


def _residual(shape: GroupShape, rows: OverlapRows, machine: Interference, seed: int) -> Residual:
    order = np.random.default_rng(seed).permutation(len(rows))
    seen, unseen = rows.chosen(order[::2]), rows.chosen(order[1::2])
    half = interference.fit(seen, gpus_in_node=shape.gpus_in_node, nodes=shape.nodes)
    left_out = None
    if len(machine.groups) > 1:
        measured = slowdowns_of_group(machine, gpus_in_node=shape.gpus_in_node, nodes=shape.nodes)
        left_out = _mean_error(rows, interference.left_out(machine, measured))
    return Residual(
        shape=shape,
        what="streams together",
        rows=len(rows),
        held_out=_mean_error(unseen, half),
        shape_left_out=left_out,
    )


def _mean_error(rows: OverlapRows, group: GroupSlowdowns) -> float:
    return float(np.abs(interference.errors(rows, group)).mean())
