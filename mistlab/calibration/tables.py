"""Reads measurement tables of transfers, and of overlapping compute and transfers
(docs/reference/measurement-tables.md).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mistlab.calibration.fitted_slowdowns import OverlapRows
from mistlab.calibration.fitted_transfers import TransferRows
from mistlab.calibration.table_rows import (
    HARDWARE,
    Origin,
    duration,
    positive,
    read_rows,
    refuse_row,
    spread_of,
)
from mistlab.core.units import MIB_BYTES, MILLISECONDS
from mistlab.core.values import one_of

ALONE = ("iso_compute_ms", "iso_g2g_ms", "iso_c2g_ms", "iso_g2c_ms")
TOGETHER = "latency_ms"
KIND, BYTES = "kind", "bytes"
TRANSFERS = {
    "all_gather": "all_gather",
    "pinned_h2d": "host_to_device",
    "pinned_d2h": "device_to_host",
}
SHAPE = ("intra_group", "inter_group")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
NANOSECONDS = 1e-9


class GroupShape(NamedTuple):
    """The shape of a group of ranks: how many GPUs it has in a node, and on how many nodes it
    is.
    """

    gpus_in_node: int
    nodes: int


# The group shape of the two GPUs of a send: both in one node, or in two nodes.
SENDS = {
    "intra_node": GroupShape(gpus_in_node=2, nodes=1),
    "inter_node": GroupShape(gpus_in_node=1, nodes=2),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OverlapTable:
    """Measured overlaps of compute and transfers, by the shape of the group of ranks that
    communicates.

    Rows that lack a stream's time alone were dropped; ``incomplete`` counts them.
    """

    origin: Origin
    incomplete: int
    groups: Mapping[GroupShape, OverlapRows]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferTable:
    """Measured transfers with no other work at the same time, by shape of the group of ranks and
    kind of transfer.

    ``spread`` is the range of repeated measurements as a share of their median; None if nothing was
    measured twice.
    """

    origin: Origin
    spread: float | None = None
    groups: Mapping[GroupShape, Mapping[str, TransferRows]]


def read_overlap_table(path: Path, *, campaign: str | None = None) -> OverlapTable:
    """Read a table of overlapping compute and transfers; ``campaign`` chooses a measurement
    campaign if the table holds several.
    """
    origin, chosen = read_rows(path, (*ALONE, TOGETHER, *SHAPE), campaign)
    groups: dict[GroupShape, list[tuple[float, ...]]] = defaultdict(list)
    complete = [(where, row) for where, row in chosen if all(row[name] != "" for name in ALONE)]
    for where, row in complete:
        alone = [duration(where, row, name) for name in ALONE]
        groups[_shape(where, row)].append((*alone, positive(where, row, TOGETHER)))
    return OverlapTable(
        origin=origin,
        incomplete=len(chosen) - len(complete),
        groups={
            shape: overlaps
            for shape, values in sorted(groups.items())
            if len(overlaps := _overlap_rows(values))
        },
    )


def read_transfer_table(path: Path, *, campaign: str | None = None) -> TransferTable:
    """Read a table of transfers with no other work at the same time; ``campaign`` chooses a
    measurement campaign if the table holds several.
    """
    origin, chosen = read_rows(path, (KIND, BYTES, TOGETHER, *SHAPE), campaign)
    groups: dict[GroupShape, dict[str, list[tuple[float, float]]]] = defaultdict(dict)
    for where, row in chosen:
        transfer = TRANSFERS.get(row[KIND])
        if transfer is None:
            refuse_row(where, KIND, f"{row[KIND]!r} is unknown", f"give {one_of([*TRANSFERS])}")
        values = positive(where, row, BYTES), positive(where, row, TOGETHER) * MILLISECONDS
        groups[_shape(where, row)].setdefault(transfer, []).append(values)
    return TransferTable(
        origin=origin,
        groups={
            shape: {kind: _transfer_rows(values) for kind, values in kinds.items()}
            for shape, kinds in sorted(groups.items())
        },
    )


def _shape(where: str, row: Mapping[str, str]) -> GroupShape:
    return GroupShape(*(round(positive(where, row, name)) for name in SHAPE))


def _transfer_rows(values: Sequence[tuple[float, float]]) -> TransferRows:
    size_bytes, seconds = np.array(values).T
    return TransferRows(size_bytes=size_bytes, seconds=seconds)


def _overlap_rows(values: Sequence[tuple[float, ...]]) -> OverlapRows:
    table = np.array(values) * MILLISECONDS
    rows = OverlapRows(alone=table[:, :-1], together=table[:, -1])
    return rows.chosen(rows.shared)


def read_collective_table(path: Path, *, hardware: str | None) -> TransferTable:
    """Read a table of collectives; a row without a kind is an all-reduce, a row without ``nodes``
    was measured inside one node.

    The columns for size and time are ``full_mib`` and ``time_ms``, or ``bytes`` and ``time_ns``.
    """
    origin, rows = read_rows(path, (HARDWARE, "gpus"), hardware=hardware)
    groups: dict[GroupShape, dict[str, list[tuple[float, float]]]] = defaultdict(dict)
    for where, row in rows:
        kind = row.get("collective") or "all_reduce"
        if kind not in COLLECTIVES or row.get("failed_or_skipped") == "1":
            continue
        gpus, nodes = positive(where, row, "gpus"), 1.0
        if row.get("nodes"):
            nodes = positive(where, row, "nodes")
        if gpus % nodes:
            problem = f"{gpus:g} GPUs do not divide evenly over {nodes:g} nodes (column nodes)"
            refuse_row(where, "gpus", problem, "give the GPUs of all nodes together")
        shape = GroupShape(gpus_in_node=round(gpus / nodes), nodes=round(nodes))
        if "time_ns" in row:
            values = positive(where, row, BYTES), positive(where, row, "time_ns") * NANOSECONDS
        else:
            values = (
                positive(where, row, "full_mib") * MIB_BYTES,
                positive(where, row, "time_ms") * MILLISECONDS,
            )
        groups[shape].setdefault(kind, []).append(values)
    return _medians(origin, groups)


def read_point_to_point_table(path: Path, *, hardware: str | None) -> TransferTable:
    """Read a table of sends from one GPU to another, inside a node and across nodes."""
    origin, rows = read_rows(path, (HARDWARE, "link", "mib", "time_ms"), hardware=hardware)
    groups: dict[GroupShape, dict[str, list[tuple[float, float]]]] = defaultdict(dict)
    for where, row in rows:
        if row["link"] not in SENDS:
            refuse_row(where, "link", f"{row['link']!r} is unknown", f"give {one_of([*SENDS])}")
        values = (
            positive(where, row, "mib") * MIB_BYTES,
            positive(where, row, "time_ms") * MILLISECONDS,
        )
        groups[SENDS[row["link"]]].setdefault("send", []).append(values)
    return _medians(origin, groups)


def _medians(
    origin: Origin, groups: Mapping[GroupShape, Mapping[str, Sequence[tuple[float, float]]]]
) -> TransferTable:
    """Replace repeated measurements of equal transfers by their median."""
    samples = {
        (shape, kind, size): [seconds for other, seconds in values if other == size]
        for shape, kinds in groups.items()
        for kind, values in kinds.items()
        for size in sorted({size for size, _ in values})
    }
    return TransferTable(
        origin=origin,
        spread=spread_of(samples.values()),
        groups={
            shape: {
                kind: _transfer_rows(
                    [
                        (size, float(np.median(seconds)))
                        for (of_shape, of_kind, size), seconds in samples.items()
                        if (of_shape, of_kind) == (shape, kind)
                    ]
                )
                for kind in kinds
            }
            for shape, kinds in sorted(groups.items())
        },
    )
