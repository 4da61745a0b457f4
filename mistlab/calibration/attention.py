"""Fits the rates of attention kernels to a measurement table of them."""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np

from mistlab.calibration.operators import ClassRows, fit, precision_of, rounded
from mistlab.calibration.rows import Origin, Row, positive, read_rows, refuse_row
from mistlab.cost.rates import slowdown_of
from mistlab.machine.compute import OperatorClass, Rate
from mistlab.machine.hardware import PeakTflops
from mistlab.values.units import MILLISECONDS, TFLOP

BATCHED = ("baddbmm", "bmm")
FUSED: tuple[tuple[OperatorClass, int, str], ...] = (
    ("attention_forward", 2, "fwd_median_ms"),
    ("attention_backward", 5, "bwd_median_ms"),
)
ATTENTION = ("op", "shapes", "batch", "seq", "heads", "head_dim", "fwd_median_ms", "bwd_median_ms")


def read_attention_table(
    path: Path, peaks: PeakTflops, *, campaign: str | None
) -> tuple[Origin, list[Rate]]:
    """Read a table; return rates of fused attention, and of batched products if it has any."""
    origin, rows = read_rows(path, ATTENTION, campaign=campaign, campaign_column="db")
    rates: dict[OperatorClass, list[float]] = defaultdict(list)
    products: list[tuple[float, float, float]] = []
    for where, row in rows:
        if "flash_attn" in row["op"]:
            batch, sequence, heads, channels = (
                positive(where, row, name) for name in ("batch", "seq", "heads", "head_dim")
            )
            # Two products forward, five backward, each of half of the square of scores.
            product = batch * heads * channels * sequence**2
            slowdown = slowdown_of(peaks, precision_of(where, row))
            for operators, count, name in FUSED:
                seconds = positive(where, row, name) * MILLISECONDS
                rates[operators].append(count * product * slowdown / seconds / TFLOP)
        elif row["op"].split(".")[-1] in BATCHED:
            flop, moved_bytes = _batched_product(where, row)
            for count, name in ((1, "fwd_median_ms"), (2, "bwd_median_ms")):
                seconds = positive(where, row, name) * MILLISECONDS
                products.append((count * flop, count * moved_bytes, seconds))
    if not rates:
        where, row = rows[0]
        refuse_row(where, "op", "the table has no rows of flash_attn")
    fitted = [
        Rate(operators=operators, tflops=rounded(float(np.median(found))))
        for operators, found in rates.items()
    ]
    if not products:
        return origin, fitted
    flop_column, bytes_column, seconds_column = np.array(products).T
    of_products = ClassRows(
        flop=flop_column,
        moved_bytes=bytes_column,
        seconds=seconds_column,
        hidden=np.zeros(len(products)),
    )
    return origin, [*fitted, fit(of_products, "batched_matmul")]


def _batched_product(where: str, row: Row) -> tuple[float, float]:
    """Operations and bytes of a batched product of (S, S) with (S, D) in 16 bits.

    The larger operand may be the first or the second.
    """
    try:
        shapes = json.loads(row["shapes"])
        batch, sequence, channels = shapes["batch1"] if "batch1" in shapes else shapes["mat2"]
    except (ValueError, KeyError, TypeError):
        refuse_row(where, "shapes", f"{row['shapes']!r} has no batch1 or mat2 of three sizes")
    square = batch * sequence**2
    return 2.0 * square * channels, 2.0 * (square + 2 * batch * sequence * channels)
