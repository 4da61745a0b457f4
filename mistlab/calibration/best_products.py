"""Reads the best measured products of a GPU in 16 and in 8 bits."""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from mistlab.calibration.table_rows import Origin, Row, is_of_machine, read_rows
from mistlab.core.values import reject

NEEDED = ("hardware", "operation", "precision", "tflops")


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """How many times as fast the best 8-bit product is as the best 16-bit product.

    ``held_out`` is how far the ratios of the other machines are from it, in the mean.
    """

    origin: Origin
    ratio: float
    machines: int
    held_out: float


def read_best_products(path: Path, hardware: str) -> Best:
    """The ratio of one machine; its name in the table is a beginning of the GPU's name."""
    origin, rows = read_rows(path, NEEDED, all_hardware=True)
    plain = [row for _, row in rows]
    found = {precision: _best(plain, hardware, precision) for precision in ("bf16", "fp8")}
    for precision, best in found.items():
        if best is None:
            reject(f"{path}: no {precision} gemm of {hardware}: give its name in the table")
    ratio: float = found["fp8"] / found["bf16"]  # type: ignore[operator]
    others = [one for one in _ratios(plain) if one != ratio]
    return Best(
        origin=origin,
        ratio=ratio,
        machines=len(others),
        held_out=fmean(abs(one / ratio - 1) for one in others) if others else 0.0,
    )


def _ratios(rows: list[Row]) -> list[float]:
    """The ratios of all machines with both products."""
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
