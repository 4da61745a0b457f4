"""Reads the best measured products of a GPU in 16 and in 8 bits."""

from dataclasses import dataclass
from pathlib import Path

from mistlab.calibration.rows import Origin, Row, read_rows
from mistlab.values.errors import InputError

NEEDED = ("hardware", "operation", "precision", "tflops")


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """How many times as fast the best 8-bit product is as the best 16-bit product."""

    origin: Origin
    ratio: float


def read_best_products(path: Path, hardware: str) -> Best:
    """The ratio of one machine; its name in the table is a beginning of the GPU's name."""
    origin, rows = read_rows(path, NEEDED, all_hardware=True)
    plain = [row for _, row in rows]
    found = {precision: _best(plain, hardware, precision) for precision in ("bf16", "fp8")}
    for precision, best in found.items():
        if best is None:
            message = f"{path}: no {precision} gemm of {hardware}: give its name in the table"
            raise InputError(message)
    return Best(origin=origin, ratio=found["fp8"] / found["bf16"])  # type: ignore[operator]


def _best(rows: list[Row], hardware: str, precision: str) -> float | None:
    rates = [
        float(row["tflops"])
        for row in rows
        if row["hardware"].startswith(hardware)
        and row["operation"] == "gemm"
        and row["precision"] == precision
    ]
    return max(rates, default=None)
