"""The command ``predict_operators``: predicts measured kernels of fine-tuning benchmarks, and
prints a JSON row for each, or the errors by kernel of fits that leave out its GPU.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import log, prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import minimize

from experiments.cli.commandline import batch_status, print_json, progress
from experiments.pages.tables import table
from experiments.runs.dialects.gpu_names import gpus_of
from experiments.runs.runs_table import TableRow, number_of, rows_of_table, text_of
from mistlab import catalog
from mistlab.core.files import parse_yaml
from mistlab.core.units import MILLISECONDS
from mistlab.core.values import InputError, one_of, refuse, reject, shown
from mistlab.graph.sums import sum_from
from mistlab.machine.hardware import Hardware

# The columns that every row of a table of kernels needs.
NEEDED = ("kernel", "provider", "pass", "x_name", "x_value", "hardware")
PASSES: Mapping[str, tuple[str, ...]] = {
    "forward": ("forward",),
    "backward": ("backward",),
    "full": ("forward", "backward"),
}
# The bytes of a number, by the name that a benchmark uses for its type; 4 for any other name.
WIDTHS = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0}
# Matches the names of implementations with fused kernels, which read and write their data only once
# or twice.
FUSED = re.compile("liger|(?<!un)fused|tiled|compile")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """The bytes and operations of a kernel's forward and backward pass, whether it is fused, and
    its number of backward passes.
    """

    bytes_moved: float
    flop: float
    is_fused: bool
    backward: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """A row of a table of kernels: the kernel's work and, if they were measured, its seconds."""

    row: TableRow
    kernel: str
    hardware: Hardware
    work: KernelWork
    measured_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedKernel:
    """A row of a table of kernels that cannot be predicted, and the reason."""

    row: TableRow
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRates:
    """The rates of kernels on any GPU: the fractions of the datasheet's bandwidth that fused
    kernels and that torch's operators reach, and the latencies of a launch and of a backward pass.
    """

    fused: float = 0.85
    eager: float = 0.85
    launch_s: float = 6e-6
    backward_s: float = 6e-6

    def seconds(self, hardware: Hardware, work: KernelWork) -> float:
        """The predicted seconds of a kernel; a backward pass takes as long as the host or its own
        work, whichever is longer.
        """
        compute = hardware.compute
        assert compute is not None
        tflops = compute.rate("matmul").tflops
        assert tflops is not None
        share = self.fused if work.is_fused else self.eager
        works_s = work.bytes_moved / (share * hardware.gpu.memory_bytes_per_s)
        works_s += work.flop / (tflops * compute.sustained * 1e12)
        return self.launch_s + max(works_s, work.backward * self.backward_s)


@cache
def described() -> Mapping[str, Any]:
    """The known kernels by name, each with its description in the catalogue, and further names of
    sizes.
    """
    file = files("experiments.measured") / "operators.yaml"
    kernels: Mapping[str, Any] = parse_yaml(file.read_text(encoding="utf-8"), file.name)
    return kernels


def kernel_rows(path: Path) -> Iterator[KernelRow | RefusedKernel]:
    """The rows of a table that are about times, including rows whose time is still empty; rows
    about other quantities, such as memory, are left out.
    """
    for row in rows_of_table(path, NEEDED, NEEDED):
        if text_of(row.cells, "quantity") not in ("", "time"):
            continue
        try:
            yield _read(row)
        except InputError as error:
            yield RefusedKernel(row=row, problem=str(error))


def _read(row: TableRow) -> KernelRow:
    if row.problem:
        reject(row.problem)
    kernel, provider = (text_of(row.cells, name) for name in ("kernel", "provider"))
    kernels = described()["kernels"]
    if kernel not in kernels:
        refuse("kernel", f"{shown(kernel)} cannot be predicted: give {one_of([*kernels])}")
    if provider not in (known := [*_providers(kernels[kernel])]):
        refuse(
            "provider", f"{shown(provider)} of {kernel} cannot be predicted: give {one_of(known)}"
        )
    hardware = catalog.hardware(gpus_of(text_of(row.cells, "hardware")).hardware)
    unit = text_of(row.cells, "unit")
    if unit not in ("", "ms"):
        refuse("unit", f"{shown(unit)} is not known: give ms, or leave it empty")
    took = number_of(row.cells, "p50")
    return KernelRow(
        row=row,
        kernel=kernel,
        hardware=hardware,
        work=_work(row, kernels[kernel], provider),
        measured_s=None if took is None else took * MILLISECONDS,
    )


def _providers(kernel: Mapping[str, Any]) -> Iterator[str]:
    return (name for name, value in kernel.items() if isinstance(value, dict))


def _work(row: TableRow, kernel: Mapping[str, Any], provider: str) -> KernelWork:
    phase = text_of(row.cells, "pass")
    if phase not in PASSES:
        refuse("pass", f"{shown(phase)} is unknown: give {one_of([*PASSES])}")
    sizes, width = _sizes(row)
    passes = [kernel[provider][name] for name in PASSES[phase]]
    elements = _number(kernel["elements"], sizes) * (kernel.get("bytes") or width)
    return KernelWork(
        bytes_moved=sum(
            one["moves"] * elements + _number(one.get("more", 0), sizes) for one in passes
        ),
        flop=sum(_number(one.get("flop", 0), sizes) for one in passes),
        is_fused=bool(FUSED.search(provider)),
        backward=PASSES[phase].count("backward"),
    )


def _sizes(row: TableRow) -> tuple[dict[str, float], float]:
    """The sizes of a row's kernel under all their names, and the bytes of a number."""
    text = text_of(row.cells, "extra")
    try:
        extra = json.loads(text) if text.startswith("{") else {}
    except ValueError:
        refuse(
            "extra",
            f"{shown(text)} is not JSON: give the other sizes as an object, or leave it empty",
        )
    dtype = str(extra.get("dtype", "float32")).removeprefix("torch.")
    if dtype not in WIDTHS:
        refuse("extra", f"dtype {shown(dtype)} is unknown: give {one_of([*WIDTHS])}")
    number = number_of(row.cells, "x_value")
    if number is None:
        refuse("x_value", "is empty: give the size that varies")
    sizes = {name: float(one) for name, one in extra.items() if type(one) in (int, float)}
    sizes[text_of(row.cells, "x_name")] = number
    for name, others in described()["names"].items():
        for other in others:
            if name in sizes:
                sizes.setdefault(other, sizes[name])
    return sizes, WIDTHS[dtype]


def _number(expression: object, sizes: Mapping[str, float]) -> float:
    """The value of an expression in a kernel's sizes; refused if the row does not state one of the
    sizes.
    """
    terms = sum_from(str(expression)).terms
    needed = {name for powers in terms for name, _ in powers}
    if missing := sorted(needed - sizes.keys()):
        refuse(
            "extra",
            f"lacks {missing[0]}, a size on which the kernel's work depends: add it, as in "
            f'{{"{missing[0]}": 4096}}',
        )
    return sum(
        float(number) * prod(sizes[name] ** power for name, power in powers)
        for powers, number in terms.items()
    )


# Fits the rates of kernels to measurements, and tabulates errors by kernel.

LEAST, MOST = (0.3, 0.3, 1e-6, 1e-6), (1.0, 1.0, 5e-5, 1e-3)


def fit(rows: Sequence[KernelRow]) -> KernelRates:
    """The rates that fit the rows best, where each kernel counts once: they have the least mean
    absolute logarithm of predicted over measured times.
    """
    weights = defaultdict[str, int](int)
    for row in rows:
        weights[row.kernel] += 1

    def miss(point: Sequence[float]) -> float:
        rates = _rates(point)
        return sum(
            abs(log(rates.seconds(row.hardware, row.work) / row.measured_s)) / weights[row.kernel]
            for row in rows
            if row.measured_s is not None
        )

    begin = np.log([0.8, 0.8, 6e-6, 1e-4])
    bounds = [*zip(np.log(LEAST), np.log(MOST), strict=True)]
    optimum = minimize(miss, begin, method="Nelder-Mead", bounds=bounds, options={"maxiter": 400})
    return _rates(optimum.x)


def _rates(logarithms: Sequence[float]) -> KernelRates:
    fused, eager, launch_s, backward_s = (float(one) for one in np.exp(logarithms))
    return KernelRates(fused=fused, eager=eager, launch_s=launch_s, backward_s=backward_s)


def left_out(rows: Sequence[KernelRow]) -> Mapping[str, KernelRates]:
    """For each GPU, the kernel rates that are fitted to all other GPUs; the default rates if no
    other GPU was measured.
    """
    measured = [one for one in rows if one.measured_s is not None]
    rates = {}
    for name in {one.hardware.name for one in rows}:
        others = [one for one in measured if one.hardware.name != name]
        rates[name] = fit(others) if others else KernelRates()
    return rates


def predict_operators(options: argparse.Namespace) -> int:
    """Predict the kernels in tables of measurements: norms, activations, rotary embedding and
    losses, fused or not.

    A row is one kernel (docs/reference/measured-runs.md): its name, its implementation, its pass,
    its sizes, and its GPU. The bytes and operations of a kernel are counted from its source. Two
    things are fitted to the rows of other GPUs: the share of a GPU's bandwidth that kernels reach,
    and the time before a backward pass begins. Without --json, the errors are printed by kernel.
    """
    unreadable, rows = 0, list[KernelRow | RefusedKernel]()
    for path in options.tables:
        try:
            rows += kernel_rows(path)
        except InputError as error:
            progress(f"error: {error}")
            unreadable += 1
    known = [one for one in rows if isinstance(one, KernelRow)]
    rates = left_out(known)
    if options.json:
        for row in rows:
            print_json(_mapping(row, rates))
    else:
        print("\n".join(_report(rows, known, rates)))
    return batch_status(len(options.tables), unreadable, all_answered=bool(known))


def _mapping(
    row: KernelRow | RefusedKernel, rates: Mapping[str, KernelRates]
) -> Mapping[str, object]:
    where: dict[str, object] = {"file": row.row.file, "row": row.row.number}
    if isinstance(row, RefusedKernel):
        return {**where, "refused": f"{row.row.where}: {row.problem}"}
    milliseconds = rates[row.hardware.name].seconds(row.hardware, row.work) / MILLISECONDS
    return {**where, "kernel": row.kernel, "time_ms": float(f"{milliseconds:.4g}")}


def _report(
    rows: Sequence[KernelRow | RefusedKernel],
    known: Sequence[KernelRow],
    rates: Mapping[str, KernelRates],
) -> Iterator[str]:
    errors = defaultdict[str, list[float]](list)
    for row in known:
        if row.measured_s is not None:
            took = rates[row.hardware.name].seconds(row.hardware, row.work)
            errors[row.kernel].append(took / row.measured_s - 1)
    lines = [
        (
            name,
            len(kernel_errors),
            f"{median(map(abs, kernel_errors)):.1%}",
            f"{median(kernel_errors):+.1%}",
        )
        for name, kernel_errors in sorted(errors.items())
    ]
    yield table(("kernel", "rows", "median error", "bias"), lines)
    if errors:
        kernels = median(median(map(abs, some)) for some in errors.values())
        every = median(abs(error) for some in errors.values() for error in some)
        yield (
            f"{len(errors)} kernels, each GPU left out: median error {kernels:.1%} in the median "
            f"of kernels, {every:.1%} in that of rows."
        )
    refused = [one.problem for one in rows if isinstance(one, RefusedKernel)]
    yield f"{len(known)} rows predicted, {len(refused)} refused"
    yield from (f"{refused.count(one)} x {one}" for one in dict.fromkeys(refused))
