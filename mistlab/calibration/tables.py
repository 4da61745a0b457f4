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
from mistlab.errors import InputError, near_matches

ALONE = ("iso_compute_ms", "iso_g2g_ms", "iso_c2g_ms", "iso_g2c_ms")
TOGETHER = "latency_ms"
SHAPE = ("intra_group", "inter_group")
CAMPAIGN = "generation"
MILLISECONDS = 1e-3


class GroupShape(NamedTuple):
    """How the GPUs that communicate are placed."""

    gpus_in_node: int
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OverlapTable:
    """A table of streams that ran together, by shape of the communicating groups.

    ``sha256`` is of the file. Dropped and counted are ``duplicates``, rows that repeat another byte
    for byte, and ``incomplete`` ones, in which a stream's time alone is empty.
    """

    path: Path
    sha256: str
    campaign: str
    duplicates: int
    incomplete: int
    groups: Mapping[GroupShape, OverlapRows]


def read_overlap_table(path: Path, *, campaign: str | None = None) -> OverlapTable:
    """Read a table of streams together; one ``campaign`` of it, if it holds several."""
    content = _content(path)
    rows = _rows(path, content.decode("utf-8", errors="replace"), (*ALONE, TOGETHER, *SHAPE))
    distinct = {tuple(row.items()): (number, row) for number, row in rows}
    chosen = _of_campaign(path, list(distinct.values()), campaign)
    groups: dict[GroupShape, list[tuple[float, ...]]] = defaultdict(list)
    complete = [(number, row) for number, row in chosen if all(row[name] != "" for name in ALONE)]
    for number, row in complete:
        where = f"{path}: line {number}"
        shape = GroupShape(*(round(_positive(where, row, name)) for name in SHAPE))
        alone = [_duration(where, row, name) for name in ALONE]
        groups[shape].append((*alone, _positive(where, row, TOGETHER)))
    return OverlapTable(
        path=path,
        sha256=hashlib.sha256(content).hexdigest(),
        campaign=chosen[0][1].get(CAMPAIGN) or "",
        duplicates=len(rows) - len(distinct),
        incomplete=len(chosen) - len(complete),
        groups={
            shape: overlaps
            for shape, values in sorted(groups.items())
            if len(overlaps := _overlap_rows(values))
        },
    )


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
