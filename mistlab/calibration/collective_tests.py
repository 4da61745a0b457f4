"""Fits lines of collectives to tables of their bus bandwidth by size, as NCCL's tests print it.

The bus bandwidth of an all-reduce over R ranks is 2 (R - 1) / R times its bytes a second. Gathers
and scatters do not reduce in the switch, so they are as slow as an all-reduce over rings. A table
that has all-reduces by size, and one size with and without rings, says how fast both are.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mistlab.calibration.fitted_transfers import TransferRows, fit, mean_error
from mistlab.calibration.table_rows import Origin, Row, is_of_machine, read_rows
from mistlab.core.units import GBYTES, MIB_BYTES
from mistlab.core.values import reject
from mistlab.machine.hardware import Line

NEEDED = ("hardware", "operation", "group_size", "nodes", "bytes", "algorithm", "busbw_GBps")
# The messages of training: layers exchange tens of mebibytes, steps gibibytes.
SMALLEST, LARGEST = 4 * MIB_BYTES, 2048 * MIB_BYTES
FEWEST_SIZES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedGroup:
    """The lines over a group of ranks, and their mean errors on every second size, left out."""

    gpus_in_node: int
    nodes: int
    all_reduce: Line
    half: Line
    rows: int
    held_out: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTests:
    """The groups of one machine, inside a node first."""

    origin: Origin
    groups: tuple[TestedGroup, ...]


def read_collective_tests(path: Path, hardware: str) -> CollectiveTests:
    """The collectives of a machine; its name is the table's, or whole words at its beginning."""
    origin, rows = read_rows(path, NEEDED, all_hardware=True)
    own = [
        row
        for _, row in rows
        if is_of_machine(row, hardware)
        and row["operation"] == "all_reduce"
        and row["bytes"]
        and row["busbw_GBps"]
    ]
    shapes = sorted({(int(row["nodes"] or 1), int(row["group_size"])) for row in own})
    over_ring = _over_ring(own)
    groups = [_group(own, nodes, ranks, over_ring) for nodes, ranks in shapes]
    found = tuple(group for group in groups if group is not None)
    if not found:
        reject(f"{path}: no all_reduce of {hardware} at {FEWEST_SIZES} sizes: give its name")
    return CollectiveTests(origin=origin, groups=found)


def _over_ring(rows: list[Row]) -> float:
    """How much slower an all-reduce over rings is than one that the switch reduces."""
    rates: dict[bool, float] = {}
    for row in rows:
        if "nccl-tests" in row.get("software", "") and row["nodes"] == "1":
            is_ring = "ring" in row["algorithm"].casefold()
            rates[is_ring] = max(rates.get(is_ring, 0.0), float(row["busbw_GBps"]))
    return rates[False] / rates[True] if len(rates) == len((True, False)) else 1.0


def _group(rows: list[Row], nodes: int, ranks: int, over_ring: float) -> TestedGroup | None:
    own = [
        row
        for row in rows
        if (int(row["nodes"] or 1), int(row["group_size"])) == (nodes, ranks)
        and SMALLEST <= float(row["bytes"]) <= LARGEST
    ]
    if len(own) < FEWEST_SIZES:
        return None
    sizes = np.array([float(row["bytes"]) for row in own])
    rates = np.array([float(row["busbw_GBps"]) for row in own]) * GBYTES
    seconds = sizes * 2 * (ranks - 1) / ranks / rates
    points = TransferRows(size_bytes=sizes, seconds=seconds)
    halves = points.every_second(0), points.every_second(1)
    errors = [mean_error(left, fit(used)) for used, left in (halves, halves[::-1])]
    slower = over_ring if nodes == 1 else 1.0
    half = TransferRows(size_bytes=sizes, seconds=seconds / 2 * slower)
    return TestedGroup(
        gpus_in_node=ranks // nodes,
        nodes=nodes,
        all_reduce=fit(points),
        half=fit(half),
        rows=len(own),
        held_out=float(np.mean(errors)),
    )
