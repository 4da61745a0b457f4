"""Fits each serving kernel's minimum time and its achieved shares of peak rates to tables of
measured kernels.

A table has one kernel in each row: GEMMs, feed-forward networks of experts, attention of one layer
in prefill and in decoding, or all-reduces. Each group of rows (GPU, engine, kind) gives one row of
``mistlab/catalog/serving_kernels.yaml``. The fit minimises relative errors; outliers count little.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from mistlab.core.arrays import Floats
from mistlab.core.files import read_csv
from mistlab.core.units import GBYTES, MICROSECONDS, MILLISECONDS, NANOSECONDS
from mistlab.serving.gpu_facts import (
    EVENNESS,
    FORMATS,
    ROOFS,
    ROW_BYTES,
    KernelRate,
    ServingGpu,
    gpu_named,
    reached_share,
)

Row = Mapping[str, str]
# The precisions of serving (keys of ``FORMATS``) by the names that kernel tables give them.
PRECISIONS = {
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "nvfp4": "nvfp4",
    "int4_wo": "int4",
    "w4a16_mxfp4": "mxfp4",
}
# GEMMs with fewer weights are left out of the fit: they are routers, or the smallest sizes of a
# sweep.
SMALLEST_WEIGHTS = 1e6
# Attention over shorter contexts is left out: requests have longer ones, and in batches of
# thousands of short contexts a request takes a constant time, however many keys and values it has.
SHORTEST_CONTEXT = 512
# The constants of a kernel rate to fit, each with its initial, smallest and largest value. Only
# GEMMs have ``depth_s``, the seconds per value that is summed into an output. Only experts have
# ``rows_share``, the share of memory bandwidth at which tokens are moved.
_FITTED: Mapping[str, tuple[float, float, float]] = {
    "floor_s": (3e-6, 1e-7, 1e-3),
    "memory_share": (0.7, 0.02, 2.0),
    "arithmetic_share": (0.5, 0.004, 1.5),
    "depth_s": (1e-9, 1e-13, 1e-7),
    "rows_share": (0.3, 0.02, 2.0),
}
_SOFT = 0.2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelGroup:
    """Measurements of one kind of kernel on one GPU: arrays of the seconds at full memory
    bandwidth, the seconds at peak arithmetic and the measured seconds.
    """

    gpu: str
    engine: str
    work: str
    kind: str
    memory_s: Floats
    arithmetic_s: Floats
    measured_s: Floats
    depth: Floats | None = None
    rows_s: Floats | None = None

    def predicted(self, rate: KernelRate) -> Floats:
        """The seconds that a fitted kernel rate predicts, one for each measurement of the
        kernel.
        """
        roofs = (self.memory_s / rate.memory_share) ** ROOFS
        roofs = roofs + (self.arithmetic_s / rate.arithmetic_share) ** ROOFS
        if self.depth is not None:
            roofs = roofs + (self.depth * rate.depth_s) ** ROOFS
        total_s = rate.floor_s + roofs ** (1 / ROOFS)
        if self.rows_s is not None and rate.rows_share is not None:
            total_s = total_s + self.rows_s / rate.rows_share
        return np.asarray(total_s)


def fitted_kernels(folder: Path) -> Iterator[list[str | float]]:
    """The rows of the catalogue's table of kernel rates: for each kind of kernel its minimum time,
    its achieved shares of memory bandwidth and peak arithmetic, and the median error of the fit.
    """
    for group in kernel_groups(folder):
        yield _fitted(group)


def kernel_groups(folder: Path) -> Iterator[KernelGroup]:
    """The measurements in all kernel tables of a folder, grouped by GPU and kind of kernel."""
    for name, of_rows in _TABLES.items():
        path = folder / f"kernel_{name}.csv"
        yield from of_rows(read_csv(path, "the folder of the kernel tables"))


def _fitted(group: KernelGroup) -> list[str | float]:
    unused = {"depth_s"} if group.depth is None else set()
    unused |= {"rows_share"} if group.rows_s is None else set()
    names = [name for name in _FITTED if name not in unused]
    start, least, most = np.log([_FITTED[name] for name in names]).T

    def rate_of(logs: Floats) -> KernelRate:
        return KernelRate(**dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def residuals(logs: Floats) -> Floats:
        return np.asarray(np.log(group.predicted(rate_of(logs)) / group.measured_s))

    fit = least_squares(
        residuals,
        start,
        loss="soft_l1",
        f_scale=_SOFT,
        bounds=(least, most),
    )
    rate = rate_of(fit.x)
    error = float(np.median(np.abs(group.predicted(rate) / group.measured_s - 1)))
    shares = [round(rate.memory_share, 3), round(rate.arithmetic_share, 3)]
    floor_us, depth_ns = rate.floor_s / MICROSECONDS, rate.depth_s / NANOSECONDS
    of_rows = round(rate.rows_share or 0.0, 3)
    numbers = [round(floor_us, 2), *shares, round(depth_ns, 2), of_rows]
    where = [group.gpu, group.engine, group.work, group.kind]
    return [*where, *numbers, round(error, 3), len(group.measured_s)]


def _grouped(rows: Sequence[Row], *names: str) -> Iterator[tuple[tuple[str, ...], list[Row]]]:
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row)
    yield from sorted(groups.items())


def _column(rows: Sequence[Row], name: str) -> Floats:
    return np.array([float(row[name]) for row in rows])


def _products(rows: Sequence[Row]) -> Iterator[KernelGroup]:
    large = [row for row in rows if float(row["n"]) * float(row["k"]) >= SMALLEST_WEIGHTS]
    for (hardware, engine, dtype), group in _grouped(large, "hardware", "engine", "dtype"):
        gpu, kind = gpu_named(hardware), PRECISIONS[dtype]
        m, n, k = (_column(group, name) for name in "mnk")
        moved = k * n * FORMATS[kind].bytes_each + 2 * m * (n + k)
        of_kind = _group((gpu, engine, "products", kind), group, moved, 2 * m * n * k)
        yield replace(of_kind, depth=k)


def _experts(rows: Sequence[Row]) -> Iterator[KernelGroup]:
    # Unevenly routed tokens over several ranks are left out: tables time the fullest rank, but do
    # not give its number of tokens.
    known = [row for row in rows if row["moe_ep"] == "1" or row["distribution"] == "balanced"]
    # On GPUs with 4-bit GEMMs, GEMMs of 4-bit weights with 16-bit activations are left out, since
    # serving engines use the 4-bit GEMMs there.
    known = [row for row in known if not (_is_unpacked(row["dtype"]) and _has_four_bits(row))]
    for (hardware, engine, dtype), group in _grouped(known, "hardware", "engine", "dtype"):
        gpu, kind = gpu_named(hardware), PRECISIONS[dtype]
        tokens, experts, active = (_column(group, name) for name in ("tokens", "experts", "topk"))
        ranks, parts = _column(group, "moe_ep"), _column(group, "moe_tp")
        hidden, rows_on_rank = _column(group, "hidden"), tokens * active / ranks
        each = 3 * hidden * _column(group, "inter") / parts
        evenness = [np.inf if row["distribution"] == "balanced" else EVENNESS for row in group]
        reached = experts / ranks * reached_share(active / experts, tokens, np.array(evenness))
        moved = reached * each * FORMATS[kind].bytes_each
        of_kind = _group((gpu, engine, "experts", kind), group, moved, 2 * each * rows_on_rank)
        yield replace(of_kind, rows_s=rows_on_rank * hidden * ROW_BYTES / gpu.bytes_per_s)


def _is_unpacked(dtype: str) -> bool:
    return dtype.startswith("w4a16")


def _has_four_bits(row: Row) -> bool:
    return gpu_named(row["hardware"]).fp4_tflops is not None


def _decode(rows: Sequence[Row]) -> Iterator[KernelGroup]:
    long = [row for row in rows if float(row["kv_len"]) >= SHORTEST_CONTEXT]
    for (hardware, engine, dtype), group in _grouped(long, "hardware", "engine", "kv_dtype"):
        kind = PRECISIONS[dtype]
        looked = _column(group, "batch") * _column(group, "kv_len") * _column(group, "head_dim")
        moved = 2 * looked * _column(group, "kv_heads") * (1 if kind == "fp8" else 2)
        flop = 4 * looked * _column(group, "heads")
        yield _group((gpu_named(hardware), engine, "decode", kind), group, moved, flop, "fp16")


def _prefill(rows: Sequence[Row]) -> Iterator[KernelGroup]:
    plain = [row for row in rows if row["attn_dtype"] == "bfloat16"]
    for (hardware, engine, dtype), group in _grouped(plain, "hardware", "engine", "kv_dtype"):
        tokens = _column(group, "batch") * _column(group, "isl") * _column(group, "head_dim")
        heads, keys = _column(group, "heads"), _column(group, "kv_heads")
        flop = 2 * tokens * _column(group, "isl") * heads
        moved = 4 * tokens * (heads + keys)
        gpu, kind = gpu_named(hardware), PRECISIONS[dtype]
        yield _group((gpu, engine, "prefill", kind), group, moved, flop, "fp16")


def _all_reduce(rows: Sequence[Row]) -> Iterator[KernelGroup]:
    plain = [
        row
        for row in rows
        if row["op"] == "all_reduce" and row["dtype"] != "int8" and "eager" not in row["kernel"]
    ]
    for (hardware, engine, ranks), of_all in _grouped(plain, "hardware", "lib", "gpus"):
        # Of each kernel library only the oldest version is fitted, which the measured serving runs
        # use too. Versions were measured on different machines, with and without peer access over
        # PCIe, so no fit matches several versions.
        oldest = min((row["version"] for row in of_all), key=_version)
        group = [row for row in of_all if row["version"] == oldest]
        gpu, count = gpu_named(hardware), int(ranks)
        moved = 4 * _column(group, "elements") * (count - 1) / count
        link_s = moved / (gpu.intra_node_gbytes_per_s * GBYTES)
        yield KernelGroup(
            gpu=gpu.name,
            engine=engine,
            work="all_reduce",
            kind=ranks,
            memory_s=link_s,
            arithmetic_s=np.zeros(len(group)),
            measured_s=_column(group, "latency_ms") * MILLISECONDS,
        )


def _version(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _group(
    where: tuple[ServingGpu, str, str, str],
    rows: Sequence[Row],
    moved_bytes: Floats,
    flop: Floats,
    runs_in: str = "",
) -> KernelGroup:
    gpu, engine, work, kind = where
    peak = gpu.flop_per_s(runs_in or FORMATS[kind].runs_in)
    return KernelGroup(
        gpu=gpu.name,
        engine=engine,
        work=work,
        kind=kind,
        memory_s=moved_bytes / gpu.bytes_per_s,
        arithmetic_s=flop / peak,
        measured_s=_column(rows, "latency_ms") * MILLISECONDS,
    )


_TABLES: Mapping[str, Callable[[Sequence[Row]], Iterator[KernelGroup]]] = {
    "gemm": _products,
    "moe": _experts,
    "attention_decode": _decode,
    "attention_prefill": _prefill,
    "collectives": _all_reduce,
}
