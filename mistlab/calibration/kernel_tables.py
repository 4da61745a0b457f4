"""Reads tables of measured kernels and collectives, and fits kernels' rates and collectives'
latencies and bandwidths to them.

A table of kernels has GEMMs by shape (columns ``m``, ``k``, ``n``, ``groups``, ``time_us``), fused
attention (``sequence``, ``heads``, ``tflops``) and the memory bandwidth, each in rows of its own
(docs/reference/measurement-tables.md). Rates are fitted by least squares.

Array axis: C is the number of measurements.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy.optimize import nnls

from mistlab.calibration.fitted_transfers import TransferRows, fit, mean_error
from mistlab.calibration.table_rows import Origin, Row, is_of_machine, read_rows
from mistlab.core.arrays import Floats
from mistlab.core.units import GBYTES, MIB_BYTES, MICROSECONDS, TFLOP
from mistlab.core.values import reject
from mistlab.machine.hardware import Line, OperatorClass, Rate

NEEDED = ("hardware", "op", "m", "k", "n", "groups", "time_us", "efficiency", "tflops", "notes")
# GEMMs with fewer floating-point operations are left out of a fit: they end before a GPU reaches
# its full rate, and layers have few of them.
SMALLEST_PRODUCT = 1e11
# Tables of attention kernels count operations on all attention scores, but causal attention
# computes only half of the scores.
CAUSAL = 0.5
HEADS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelRows:
    """Measured GEMMs: arrays of their floating-point operations, the bytes that they move and their
    seconds.
    """

    flop: Floats
    moved_bytes: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    def every_second(self, start: int) -> "KernelRows":
        """Every second GEMM in order of its operations, from the smallest (``start`` 0) or the
        second smallest (``start`` 1).
        """
        order = np.argsort(self.flop, kind="stable")[start::2]
        return KernelRows(
            flop=self.flop[order],
            moved_bytes=self.moved_bytes[order],
            seconds=self.seconds[order],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelTable:
    """The kernels measured on one machine: its GEMMs by operator class, and all rows of its
    table.
    """

    origin: Origin
    products: dict[OperatorClass, KernelRows]
    rows: Sequence[Row]


def read_kernel_table(path: Path, hardware: str | None) -> KernelTable:
    """Read one machine's measured kernels from a table of kernels."""
    origin, rows = read_rows(path, NEEDED, hardware=hardware)
    plain = [row for _, row in rows]
    products: dict[OperatorClass, KernelRows] = {
        "matmul": _products([row for row in plain if row["op"] == "matmul"]),
        "grouped_matmul": _products([row for row in plain if row["op"] == "group_matmul"]),
    }
    if not all(map(len, products.values())):
        reject(
            f"{path}: no GEMMs of {hardware or 'the GPU'} with more than {SMALLEST_PRODUCT:.0e} "
            "operations: add such rows with op matmul and with op group_matmul"
        )
    return KernelTable(origin=origin, products=products, rows=plain)


def _products(rows: Sequence[Row]) -> KernelRows:
    m, k, n, groups, batch = (_numbers(rows, name) for name in ("m", "k", "n", "groups", "batch"))
    each = 2 * (m * k + k * n) + 2 * m * n
    flop = 2 * m * k * n * groups * batch
    large = flop > SMALLEST_PRODUCT
    return KernelRows(
        flop=flop[large],
        moved_bytes=(each * groups * batch)[large],
        seconds=_numbers(rows, "time_us")[large] * MICROSECONDS,
    )


def _numbers(rows: Sequence[Row], name: str) -> Floats:
    return np.array([float(row.get(name) or 1) for row in rows])


def rate_of(rows: KernelRows, operators: OperatorClass) -> Rate:
    """The rate of one operator class, in operations and bytes per second, fitted to measured GEMMs.

    A GEMM's error in seconds is divided by the square root of its measured seconds, so that the
    predicted sum over all GEMMs is right.
    """
    terms = np.stack([rows.flop / TFLOP, rows.moved_bytes / GBYTES], axis=1)
    weights = rows.seconds**0.5
    (a_tflop, a_gbyte), _ = nnls(terms / weights[:, None], weights)
    return Rate(
        operators=operators,
        tflops=round(float(1 / a_tflop), 1) if a_tflop else None,
        gbytes_per_s=round(float(1 / a_gbyte), 1) if a_gbyte else None,
    )


def error_of_rate(rows: KernelRows, rate: Rate) -> float:
    """The mean absolute relative error of a fitted rate on measured GEMMs."""
    seconds = rows.flop * rate.s_per_flop + rows.moved_bytes * rate.s_per_byte
    return float(np.abs(seconds / rows.seconds - 1).mean())


def held_out_error(rows: KernelRows, operators: OperatorClass) -> float:
    """The mean relative error of GEMM rates on measurements that their fit left out: each half of
    the table is predicted from the other half.
    """
    halves = rows.every_second(0), rows.every_second(1)
    errors = [
        error_of_rate(left_out, rate_of(fitted, operators))
        for fitted, left_out in (halves, halves[::-1])
    ]
    return float(np.mean(errors))


def attention_rows(table: KernelTable, operators: OperatorClass) -> KernelRows:
    """The measurements of fused causal attention with many heads, given like GEMMs: as operations,
    moved bytes and seconds.
    """
    op = {"attention_forward": "sdp_fwd", "attention_backward": "sdp_bwd"}[operators]
    rows = [row for row in table.rows if row["op"] == op and float(row["heads"]) >= HEADS]
    sequence, heads, keys = (_numbers(rows, name) for name in ("sequence", "heads", "kv_heads"))
    wide, values = _numbers(rows, "qk_dim"), _numbers(rows, "v_dim")
    batch = _numbers(rows, "batch")
    products, passes = _PRODUCTS[operators]
    square = batch * heads * sequence**2
    each = products[0] * wide + products[1] * values
    # The bytes of attention's operands and results in 16 bits; the backward pass reads them all,
    # and writes gradients of the same size.
    operands = batch * sequence * (heads + keys) * (wide + values) * 2
    rates = _numbers(rows, "tflops") * CAUSAL * TFLOP
    flop = square * each
    # Every measurement is scaled to the same time: otherwise long sequences, which are rare in
    # training, would dominate the fit.
    scale = rates / flop
    return KernelRows(
        flop=flop * scale, moved_bytes=operands * passes * scale, seconds=flop / rates * scale
    )


# How attention's operations and bytes are counted, forward and backward: operations per attention
# score for each channel of queries and keys, the same for values, and how often its tensors are
# read or written.
_PRODUCTS = {"attention_forward": ((1.0, 1.0), 1.0), "attention_backward": ((3.0, 2.0), 2.0)}


def memory_rate(table: KernelTable) -> Rate:
    """The achieved memory bandwidth of operators that only move bytes."""
    row = next(row for row in table.rows if row["op"] == "memory bandwidth default")
    base = _number_after("base", row)
    return Rate(operators="memory", gbytes_per_s=round(base * float(row["efficiency"]), 1))


def _number_after(word: str, row: Row) -> float:
    match = re.search(rf"(?:^|, ){word} ([0-9.]+)", row["notes"])
    return float(match[1]) if match else 0.0


# Reads a GPU's fastest measured GEMMs in 16 and in 8 bits.


BEST_NEEDED = ("hardware", "operation", "precision", "tflops")


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The ratio of a GPU's fastest 8-bit GEMM to its fastest 16-bit GEMM.

    ``held_out`` is the mean relative difference between this ratio and those of the other machines.
    """

    origin: Origin
    ratio: float
    machines: int
    held_out: float


def read_best_products(path: Path, hardware: str) -> Best:
    """Read the ratio of a GPU's fastest 8-bit GEMM to its fastest 16-bit GEMM; ``hardware`` is the
    GPU's name in the table, or the first words of that name.
    """
    origin, rows = read_rows(path, BEST_NEEDED, all_hardware=True)
    plain = [row for _, row in rows]
    ratios = {precision: _best(plain, hardware, precision) for precision in ("bf16", "fp8")}
    for precision, best in ratios.items():
        if best is None:
            reject(
                f"{path}: no {precision} GEMM of {hardware}: give --table-hardware, a name in the "
                "column hardware"
            )
    ratio: float = ratios["fp8"] / ratios["bf16"]  # type: ignore[operator]
    others = [one for one in _ratios(plain) if one != ratio]
    return Best(
        origin=origin,
        ratio=ratio,
        machines=len(others),
        held_out=fmean(abs(one / ratio - 1) for one in others) if others else 0.0,
    )


def _ratios(rows: list[Row]) -> list[float]:
    """The ratio of the fastest 8-bit to the fastest 16-bit GEMM of each machine whose table has
    both.
    """
    machines = sorted({row["hardware"] for row in rows})
    both = [[_best(rows, one, precision) for precision in ("bf16", "fp8")] for one in machines]
    return [eight / half for half, eight in both if half is not None and eight is not None]


def _best(rows: list[Row], hardware: str, precision: str) -> float | None:
    rates = [
        float(row["tflops"])
        for row in rows
        if is_of_machine(row, hardware)
        and row["operation"] == "gemm"
        and row["precision"] == precision
    ]
    return max(rates, default=None)


# Fits latency and bandwidth of collectives to tables of bus bandwidth by size, as NCCL's tests
# print them.
#
# The bus bandwidth of an all-reduce over R ranks is 2 (R - 1) / R times its bytes per second.
# NVLink switches can compute an all-reduce, but no all-gather or reduce-scatter: each of these
# takes half as long as an all-reduce by the ring algorithm. So all-reduces of several sizes, and
# all-reduces of one size with and without rings, determine all three collectives.


TESTS_NEEDED = ("hardware", "operation", "group_size", "nodes", "bytes", "algorithm", "busbw_GBps")
# The smallest and the largest message that a fit uses: messages of training have tens of mebibytes
# in layers, and up to gibibytes in optimizer steps.
SMALLEST, LARGEST = 4 * MIB_BYTES, 2048 * MIB_BYTES
FEWEST_SIZES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedGroup:
    """The fitted latency and bandwidth of an all-reduce and of an all-gather over groups of one
    shape, and the mean error on messages that a fit did not use.
    """

    gpus_in_node: int
    nodes: int
    all_reduce: Line
    half: Line
    rows: int
    held_out: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTests:
    """The fitted latencies and bandwidths of one machine's collectives for each shape of group;
    groups inside a node first.
    """

    origin: Origin
    groups: tuple[TestedGroup, ...]


def read_collective_tests(path: Path, hardware: str) -> CollectiveTests:
    """Fit the collectives of one machine from a table; ``hardware`` is the machine's name in the
    table, or the first words of that name.
    """
    origin, rows = read_rows(path, TESTS_NEEDED, all_hardware=True)
    of_machine = [
        row
        for _, row in rows
        if is_of_machine(row, hardware)
        and row["operation"] == "all_reduce"
        and row["bytes"]
        and row["busbw_GBps"]
    ]
    shapes = sorted({(int(row["nodes"] or 1), int(row["group_size"])) for row in of_machine})
    over_ring = _over_ring(of_machine)
    groups = [_group(of_machine, nodes, ranks, over_ring) for nodes, ranks in shapes]
    tested = tuple(group for group in groups if group is not None)
    if not tested:
        reject(
            f"{path}: no all_reduce of {hardware} at {FEWEST_SIZES} sizes: give "
            "--table-hardware, a name in the column hardware, or measure more sizes"
        )
    return CollectiveTests(origin=origin, groups=tested)


def _over_ring(rows: list[Row]) -> float:
    """How many times as long a ring all-reduce takes as one that the NVLink switch computes; 1 if
    the table lacks either.
    """
    rates: dict[bool, float] = {}
    for row in rows:
        if "nccl-tests" in row.get("software", "") and row["nodes"] == "1":
            is_ring = "ring" in row["algorithm"].casefold()
            rates[is_ring] = max(rates.get(is_ring, 0.0), float(row["busbw_GBps"]))
    return rates[False] / rates[True] if len(rates) == len((True, False)) else 1.0


def _group(rows: list[Row], nodes: int, ranks: int, over_ring: float) -> TestedGroup | None:
    of_shape = [
        row
        for row in rows
        if (int(row["nodes"] or 1), int(row["group_size"])) == (nodes, ranks)
        and SMALLEST <= float(row["bytes"]) <= LARGEST
    ]
    if len(of_shape) < FEWEST_SIZES:
        return None
    sizes = np.array([float(row["bytes"]) for row in of_shape])
    rates = np.array([float(row["busbw_GBps"]) for row in of_shape]) * GBYTES
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
        rows=len(of_shape),
        held_out=float(np.mean(errors)),
    )
