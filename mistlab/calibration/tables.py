"""Measurement tables: read, checked row by row, and grouped (see docs/reference)."""

import csv
import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from mistlab.calibration.interference import OverlapRows
from mistlab.calibration.transfers import TransferRows
from mistlab.errors import InputError, near_matches

ALONE = ("iso_compute_ms", "iso_g2g_ms", "iso_c2g_ms", "iso_g2c_ms")
TOGETHER = "latency_ms"
KIND, BYTES = "kind", "bytes"
TRANSFERS = {
    "all_gather": "all_gather",
    "pinned_h2d": "host_to_device",
    "pinned_d2h": "device_to_host",
}
SHAPE = ("intra_group", "inter_group")
CAMPAIGN = "generation"
MILLISECONDS = 1e-3


class GroupShape(NamedTuple):
    """How the GPUs that communicate are placed."""

    gpus_in_node: int
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Which rows of which file: ``duplicates`` that repeat another byte for byte were dropped."""

    path: Path
    sha256: str
    campaign: str
    duplicates: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OverlapTable:
    """A table of streams that ran together, by shape of the communicating groups.

    ``incomplete`` rows, in which a stream's time alone is empty, were dropped.
    """

    origin: Origin
    incomplete: int
    groups: Mapping[GroupShape, OverlapRows]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferTable:
    """A table of transfers on one stream alone, by shape of group and kind of transfer."""

    origin: Origin
    groups: Mapping[GroupShape, Mapping[str, TransferRows]]


def read_overlap_table(path: Path, *, campaign: str | None = None) -> OverlapTable:
    """Read a table of streams together; one ``campaign`` of it, if it holds several."""
    origin, chosen = _read(path, (*ALONE, TOGETHER, *SHAPE), campaign)
    groups: dict[GroupShape, list[tuple[float, ...]]] = defaultdict(list)
    complete = [(where, row) for where, row in chosen if all(row[name] != "" for name in ALONE)]
    for where, row in complete:
        alone = [_duration(where, row, name) for name in ALONE]
        groups[_shape(where, row)].append((*alone, _positive(where, row, TOGETHER)))
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
    """Read a table of streams alone; one ``campaign`` of it, if it holds several."""
    origin, chosen = _read(path, (KIND, BYTES, TOGETHER, *SHAPE), campaign)
    groups: dict[GroupShape, dict[str, list[tuple[float, float]]]] = defaultdict(dict)
    for where, row in chosen:
        transfer = TRANSFERS.get(row[KIND])
        if transfer is None:
            _refuse(where, KIND, f"{row[KIND]!r} is not one of {', '.join(TRANSFERS)}")
        values = _positive(where, row, BYTES), _positive(where, row, TOGETHER) * MILLISECONDS
        groups[_shape(where, row)].setdefault(transfer, []).append(values)
    return TransferTable(
        origin=origin,
        groups={
            shape: {kind: _transfer_rows(values) for kind, values in kinds.items()}
            for shape, kinds in sorted(groups.items())
        },
    )


def _read(
    path: Path, needed: Sequence[str], campaign: str | None
) -> tuple[Origin, list[tuple[str, dict[str, str]]]]:
    """Distinct rows of one campaign, each with its place."""
    content = _content(path)
    rows = _rows(path, content.decode("utf-8", errors="replace"), needed)
    distinct = {tuple(row.items()): (number, row) for number, row in rows}
    chosen = _of_campaign(path, list(distinct.values()), campaign)
    origin = Origin(
        path=path,
        sha256=hashlib.sha256(content).hexdigest(),
        campaign=chosen[0][1].get(CAMPAIGN) or "",
        duplicates=len(rows) - len(distinct),
    )
    return origin, [(f"{path}: line {number}", row) for number, row in chosen]


def _shape(where: str, row: Mapping[str, str]) -> GroupShape:
    return GroupShape(*(round(_positive(where, row, name)) for name in SHAPE))


def _transfer_rows(values: Sequence[tuple[float, float]]) -> TransferRows:
    size_bytes, seconds = np.array(values).T
    return TransferRows(size_bytes=size_bytes, seconds=seconds)


def _overlap_rows(values: Sequence[tuple[float, ...]]) -> OverlapRows:
    table = np.array(values) * MILLISECONDS
    rows = OverlapRows(alone=table[:, :-1], together=table[:, -1])
    return rows.chosen(rows.shared)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        message = f"{path}: cannot be read: {error.strerror}: check the path"
        raise InputError(message) from None


def _rows(path: Path, text: str, needed: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        message = (
            f"{path}: column {', '.join(missing)} is missing: give a table with "
            f"{', '.join(needed)} (docs/reference/measurement-tables.md)"
        )
        raise InputError(message)
    rows = [(reader.line_num, row) for row in reader]
    if not rows:
        message = f"{path}: has no rows: give at least one measurement"
        raise InputError(message)
    return rows


def _of_campaign(
    path: Path, rows: list[tuple[int, dict[str, str]]], campaign: str | None
) -> list[tuple[int, dict[str, str]]]:
    names = sorted({row.get(CAMPAIGN) or "" for _, row in rows})
    if campaign is None:
        if len(names) > 1:
            message = (
                f"{path}: holds the campaigns {', '.join(names)}, which do not mix: "
                "give one of them as --campaign"
            )
            raise InputError(message)
        return rows
    if campaign not in names:
        message = f"{path}: --campaign {campaign!r} is unknown{near_matches(campaign, names)}"
        raise InputError(message)
    return [(number, row) for number, row in rows if (row.get(CAMPAIGN) or "") == campaign]


def _positive(where: str, row: Mapping[str, str], name: str) -> float:
    value = _duration(where, row, name)
    if value == 0:
        _refuse(where, name, "0 is not positive")
    return value


def _duration(where: str, row: Mapping[str, str], name: str) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        _refuse(where, name, f"{row[name]!r} is not a number")
    if not math.isfinite(value) or value < 0:
        _refuse(where, name, f"{value:g} is negative or not finite")
    return value


def _refuse(where: str, name: str, problem: str) -> NoReturn:
    message = f"{where}: {name}: {problem}: measure the row again, or remove it"
    raise InputError(message)
