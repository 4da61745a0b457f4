"""Prediction errors of measured kernels, if each kernel's GPU is treated as unknown and its rates
come from its datasheet.
"""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np

from experiments.measured.from_datasheets import GPUS_OF_UNKNOWN, as_of_datasheet
from experiments.pages.study import beside
from experiments.pages.tables import narrow, number
from experiments.runs.dialects.gpu_names import gpus_of
from mistlab import catalog
from mistlab.calibration.fitted_sureness import spreads_of_kinds
from mistlab.calibration.kernel_tables import CAUSAL, SMALLEST_PRODUCT
from mistlab.calibration.operators import read_operator_table
from mistlab.core.arrays import Bools, Floats
from mistlab.core.values import InputError, reject
from mistlab.cost.confidence import REACH
from mistlab.machine.hardware import Compute, OperatorClass

# The names of 16-bit precisions, to which the comparison is limited, since kernels of other
# precisions differ between GPUs.
HALF = ("bfloat16", "float16", "bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Kernels of one class on one GPU: arrays with the operations, the bytes and the measured
    seconds of each kernel.
    """

    gpu: str
    operators: OperatorClass
    flop: Floats
    moved_bytes: Floats
    seconds: Floats

    def missed(self, compute: Compute) -> Floats:
        """The errors of predictions by a GPU's given rates: for each kernel, the logarithm of
        predicted over measured seconds.
        """
        rate = compute.rate(self.operators)
        predicted_s = self.flop * rate.s_per_flop + self.moved_bytes * rate.s_per_byte
        return np.asarray(np.log(predicted_s / self.seconds))


Table = Sequence[Mapping[str, str]]
Count = Callable[[Mapping[str, str]], tuple[float, float, float]]


def _product(row: Mapping[str, str]) -> tuple[float, float, float]:
    m, n, k = (float(row[name]) for name in ("m", "n", "k"))
    return 2 * m * n * k, 2 * (m * k + k * n + m * n), float(row["latency_ms"]) * 1e-3


def _attention(row: Mapping[str, str]) -> tuple[float, float, float]:
    """The operations and the bytes that a forward pass of causal attention takes."""
    batch, tokens, heads, wide = (
        float(row[name]) for name in ("batch", "isl", "heads", "head_dim")
    )
    flop = 2 * 2 * CAUSAL * batch * heads * wide * tokens**2
    moved = 2 * batch * tokens * wide * 2 * (heads + float(row["kv_heads"]))
    return flop, moved, float(row["latency_ms"]) * 1e-3


# The formats of tables of kernels. A format is recognised by a column that no other format has; it
# has the class of its operators, its column of precisions, and a function that counts a row's
# operations and bytes.
FORMATS: Mapping[str, tuple[OperatorClass, str, Count]] = {
    "k": ("matmul", "dtype", _product),
    "isl": ("attention_forward", "attn_dtype", _attention),
}
PROFILE = "fwd_us"


def kernels_of(path: Path) -> Iterator[Kernels]:
    """The kernels of a table by GPU: GEMMs and attention kernels by shape, or profiles of whole
    blocks.

    GEMMs with too few operations for a GPU to reach its full rate are left out.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [*csv.DictReader(file)]
    columns = rows[0].keys() if rows else ()
    if PROFILE in columns:
        yield from _of_profiles(path, rows)
        return
    column = next((name for name in FORMATS if name in columns), None)
    if column is None:
        names = ", ".join((*FORMATS, PROFILE))
        reject(
            f"{path}: has none of the columns {names}, one of which every table of measured "
            "kernels has: give such a table"
        )
    operators, precision, count = FORMATS[column]
    for name in dict.fromkeys(row["hardware"] for row in rows):
        if (gpu := _gpu_of(name)) is None:
            continue
        mine = [row for row in rows if row["hardware"] == name and row[precision] in HALF]
        counted = np.array([count(row) for row in mine]).reshape(-1, 3)
        flop, moved_bytes, seconds = counted[counted[:, 0] > SMALLEST_PRODUCT].T
        if len(flop):
            yield Kernels(
                gpu=gpu, operators=operators, flop=flop, moved_bytes=moved_bytes, seconds=seconds
            )


def _of_profiles(path: Path, rows: Table) -> Iterator[Kernels]:
    for name in dict.fromkeys(row["hardware"] for row in rows):
        if (gpu := _gpu_of(name)) is None:
            continue
        peaks = catalog.stated_hardware(gpu).gpu.peak_tflops
        table = read_operator_table(path, peaks, hardware=name, without_weight_gradients=True)
        for operators, blocks in table.classes.items():
            yield Kernels(
                gpu=gpu,
                operators=operators,
                flop=blocks.flop,
                moved_bytes=blocks.moved_bytes,
                seconds=blocks.seconds,
            )


def _gpu_of(name: str) -> str | None:
    """The GPU of the catalogue that a table names; None if that GPU's rates were not measured."""
    try:
        gpu = gpus_of(name, "", None).hardware
    except InputError:
        return None
    measured = gpu in catalog.calibrated_names()
    return gpu if measured and catalog.stated_hardware(gpu).provenance.compute else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LentKernels:
    """The kernels of one GPU, with two kinds of prediction errors: by the GPU's own rates, and by
    rates scaled from another GPU.
    """

    kernels: Kernels
    lender: str
    own: Floats
    lent: Floats


def from_datasheets(every: Sequence[Kernels]) -> list[LentKernels]:
    """For each GPU, its kernels predicted by its measured rates, and by rates from its datasheet as
    if it had never been measured.
    """
    return [_lent(kernels) for kernels in every]


def _lent(kernels: Kernels) -> LentKernels:
    measured, stated = catalog.hardware(kernels.gpu), as_of_datasheet(kernels.gpu)
    lender = stated.provenance.compute
    assert measured.compute is not None
    assert stated.compute is not None
    assert lender is not None
    return LentKernels(
        kernels=kernels,
        lender=lender.source,
        own=kernels.missed(measured.compute),
        lent=kernels.missed(stated.compute),
    )


def inside_bounds(every: Sequence[LentKernels]) -> list[Bools]:
    """Which kernels have times inside their bounds, as a mask. The bounds are fitted to kernels of
    the same class on other GPUs, or to kernels of all classes if those are too few.
    """
    sizes = [len(group.lent) for group in every]
    _, gpus = np.unique([group.kernels.gpu for group in every], return_inverse=True)
    of_rows = np.repeat(gpus, sizes)
    missed = np.concatenate([-group.lent for group in every])
    names = [(group.kernels.operators, "any") for group in every]
    kinds = [name for name, size in zip(names, sizes, strict=True) for _ in range(size)]
    spreads = spreads_of_kinds(missed, kinds, of_rows, of_rows, GPUS_OF_UNKNOWN)
    inside: list[Bools] = []
    for group, fold in zip(every, gpus, strict=True):
        spread = spreads[group.kernels.operators]
        reach = REACH * math.sqrt(spread.between[fold] + spread.within[fold])
        inside.append(np.abs(-group.lent - spread.offset[fold]) <= reach)
    return inside


HEAD = ("", "rates of", "kernels", "own rates", "median", "bias", "in bounds")


def kernel_lines(paths: Sequence[Path]) -> Iterator[str]:
    """A section of the page on measured kernels that are predicted from their GPU's datasheet
    alone.
    """
    every = from_datasheets([kernels for path in paths for kernels in kernels_of(path)])
    if not every:
        reject(
            "--kernels: the tables have no kernels of a GPU that has a hardware file in the "
            "catalogue: give tables of such GPUs, or leave --kernels out"
        )
    inside = inside_bounds(every)
    yield "\n\n".join(beside("report_runs-kernels")) + "\n"
    medians = [_median(group.lent) for group in every]
    shares = [float(held.mean()) for held in inside]
    rows = np.concatenate([group.lent for group in every])
    yield (
        f"All {len(rows):,} kernels: median error {_median(rows):.1%}, "
        f"{np.concatenate(inside).mean():.0%} within bounds. Each class on each GPU counted once: "
        f"{mean(medians):.1%} in the mean of {len(medians)}, {median(medians):.1%} in the median; "
        f"{mean(shares):.0%} within bounds.\n"
    )
    lines = (_cells(group, share) for group, share in zip(every, shares, strict=True))
    yield from (*narrow(HEAD, lines), "")


def _median(missed: Floats) -> float:
    return float(np.median(np.abs(np.expm1(missed))))


def _cells(group: LentKernels, inside: float) -> list[object]:
    return [
        f"{group.kernels.gpu}: {group.kernels.operators}",
        group.lender,
        len(group.lent),
        number(_median(group.own), ".1%", none=""),
        number(_median(group.lent), ".1%", none=""),
        f"{float(np.median(np.expm1(group.lent))):+.1%}",
        f"{inside:.0%}",
    ]
