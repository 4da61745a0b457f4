"""Fits the rates of operator classes and of attention kernels to measurement tables."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple, get_args

import numpy as np
from scipy.optimize import nnls

from mistlab.calibration.table_rows import (
    HARDWARE,
    Origin,
    Row,
    duration,
    positive,
    read_rows,
    refuse_row,
    spread_of,
)
from mistlab.core.arrays import Floats
from mistlab.core.columns import ColumnSet
from mistlab.core.units import GBYTES, MICROSECONDS, MILLISECONDS, TFLOP
from mistlab.core.values import one_of
from mistlab.cost.kernels import slowdown_of
from mistlab.cost.layers import work_of
from mistlab.engines.baselines import MEGATRON
from mistlab.engines.engine import Precision
from mistlab.graph.graph import PHASES
from mistlab.graph.library import graph_of
from mistlab.graph.symbols import size_columns
from mistlab.machine.hardware import OperatorClass, PeakTflops, Rate
from mistlab.plan.workload import ModelSpec, Workload

# Fits the rates of attention kernels to a table of measured attention kernels.


BATCHED = ("baddbmm", "bmm")
FUSED: tuple[tuple[OperatorClass, int, str], ...] = (
    ("attention_forward", 2, "fwd_median_ms"),
    ("attention_backward", 5, "bwd_median_ms"),
)
ATTENTION = ("op", "shapes", "batch", "seq", "heads", "head_dim", "fwd_median_ms", "bwd_median_ms")


def read_attention_table(
    path: Path, peaks: PeakTflops, *, campaign: str | None
) -> tuple[Origin, list[Rate]]:
    """The fitted rates of fused attention, and of the batched GEMMs of unfused attention if the
    table has any.
    """
    origin, rows = read_rows(path, ATTENTION, campaign=campaign, campaign_column="db")
    rates: dict[OperatorClass, list[float]] = defaultdict(list)
    products: list[tuple[float, float, float]] = []
    for where, row in rows:
        if "flash_attn" in row["op"]:
            batch, sequence, heads, channels = (
                positive(where, row, name) for name in ("batch", "seq", "heads", "head_dim")
            )
            # Causal attention has two GEMMs forward and five backward, each of which computes half
            # of the attention scores.
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
        refuse_row(where, "op", "flash_attn is missing in all rows", "add rows of fused attention")
    fitted = [
        Rate(operators=operators, tflops=rounded(float(np.median(rates_of_class))))
        for operators, rates_of_class in rates.items()
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
    """The floating-point operations and the bytes of a batched GEMM of an (S, S) with an (S, D)
    matrix in 16 bits, as in attention with sequence length S and head dimension D.

    The larger operand may be the first or the second.
    """
    try:
        shapes = json.loads(row["shapes"])
        batch, sequence, channels = shapes["batch1"] if "batch1" in shapes else shapes["mat2"]
    except (ValueError, KeyError, TypeError):
        problem = f"{row['shapes']!r} has neither batch1 nor mat2 with three sizes"
        refuse_row(where, "shapes", problem, 'write JSON such as {"batch1": [32, 2048, 128]}')
    square = batch * sequence**2
    return 2.0 * square * channels, 2.0 * (square + 2 * batch * sequence * channels)


# Fits a rate to each class of operators (GEMM, attention, ...), from profiles of transformer
# blocks.
#
# A class takes ``flop / rate + bytes / bandwidth`` seconds. Operations and bytes are those of the
# layer graph, as in predictions. The operators of a class are summed, because a block runs all of
# them.
#
# Array axis: C is the number of profiled blocks of different size or precision.


# The operator class of each operator of a profiled transformer block, by the operator's name in the
# profile.
CLASS_OF_OPERATOR: Mapping[str, OperatorClass] = {
    "enc-attention-qkv": "matmul",
    "enc-attention-dense": "matmul",
    "enc-MLP-GEMM-1": "matmul",
    "enc-MLP-GEMM-2": "matmul",
    "enc-attention-score": "batched_matmul",
    "enc-attention-context": "batched_matmul",
    "enc-1st-layernorm": "memory",
    "enc-attention-softmax": "memory",
    "enc-attention-dropout": "memory",
    "enc-post-attention-dropout": "memory",
    "enc-2nd-layernorm": "memory",
    "enc-MLP-gelu": "memory",
    "enc-post-MLP-dropout": "memory",
}
# The profile's name for the optimizer step, which belongs to neither forward nor backward pass.
STEP = "optimizer-step"
# The name that profiles give to attention dropout, which a model without dropout does not have.
OPTIONAL = "enc-attention-dropout"
OPERATORS_OF_CLASS: Mapping[OperatorClass, tuple[str, ...]] = {
    operators: tuple(name for name, one in CLASS_OF_OPERATOR.items() if one == operators)
    for operators in dict.fromkeys(CLASS_OF_OPERATOR.values())
}
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
SIZES = ("hidden", "ffn", "heads", "seq", "vocab", "mbs")
NEEDED = (HARDWARE, *SIZES, "tp", "op", "fwd_us", "bwd_us")
PRECISION = "precision"
COUNTED = ("flop", "bytes")


class Block(NamedTuple):
    """The sizes and the precision of a profiled transformer block."""

    hidden: int
    ffn: int
    heads: int
    sequence_length: int
    vocab: int
    micro_batch: int
    precision: Precision = "fp16"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassRows(ColumnSet):
    """The operators of one class in profiled transformer blocks: arrays of operations, bytes and
    seconds with a row for each block.

    An operation in another precision than 16 bits counts by how many times slower it is.
    """

    flop: Floats
    moved_bytes: Floats
    seconds: Floats
    hidden: Floats

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorTable:
    """Measured profiles of transformer blocks without tensor parallelism: the time of each operator
    class, forward and backward together.

    Rows that failed have no time; they were dropped together with their blocks, and ``failed``
    counts them. ``spread`` is the range of repeated measurements as a share of their median.
    ``step`` is the rate of the optimizer's step; None if the table has no step.
    """

    origin: Origin
    failed: int
    spread: float | None
    classes: Mapping[OperatorClass, ClassRows]
    step: Rate | None


def read_operator_table(
    path: Path, peaks: PeakTflops, *, hardware: str | None, without_weight_gradients: bool
) -> OperatorTable:
    """Read the profiles of transformer blocks in a table.

    With ``without_weight_gradients`` the table's backward times lack the weights' gradients; then
    each GEMM's weight gradient is taken to last as long as its forward pass. Operations and bytes
    are those in the rows, or else those of the layer graph with Megatron-LM's kernels.
    """
    origin, rows = read_rows(path, NEEDED, hardware=hardware)
    times: dict[tuple[Block, str], list[float]] = defaultdict(list)
    counted: dict[tuple[Block, str], tuple[float, float]] = {}
    failed = 0
    steps: list[float] = []
    for where, row in rows:
        if row["op"] == STEP:
            seconds = positive(where, row, "fwd_us") * MICROSECONDS
            steps.append(positive(where, row, "bytes") / GBYTES / seconds)
        if row["op"] not in CLASS_OF_OPERATOR or round(positive(where, row, "tp")) != 1:
            continue
        if row.get("failed") == "1":
            failed += 1
            continue
        forward, backward = (positive(where, row, name) for name in ("fwd_us", "bwd_us"))
        is_product = CLASS_OF_OPERATOR[row["op"]] == "matmul"
        again = 1 + (without_weight_gradients and is_product)
        block_and_row = _block(where, row), row["op"]
        times[block_and_row].append(again * forward + backward)
        if row.get("flop"):
            flop, moved_bytes = (duration(where, row, name) for name in COUNTED)
            counted[block_and_row] = flop, moved_bytes
    blocks = [b for b in dict.fromkeys(b for b, _ in times) if _is_whole(b, times)]
    if not blocks:
        where, row = rows[0]
        needed = ", ".join(CLASS_OF_OPERATOR)
        problem = f"no block was measured with all of {needed} where column tp is 1"
        refuse_row(where, "op", problem, "measure the missing operators of a block")
    return OperatorTable(
        origin=origin,
        failed=failed,
        spread=spread_of(times.values()),
        classes=_classes(blocks, times, counted, peaks),
        step=Rate(operators="step", gbytes_per_s=rounded(median(steps))) if steps else None,
    )


def fit(rows: ClassRows, operators: OperatorClass) -> Rate:
    """The rate of one operator class, fitted by least squares of relative errors to profiled
    blocks.
    """
    terms = np.stack([rows.flop / TFLOP, rows.moved_bytes / GBYTES], axis=1)
    if operators == "memory":
        terms[:, 0] = 0.0
    (s_per_tflop, s_per_gbyte), _ = nnls(terms / rows.seconds[:, None], np.ones(len(rows)))
    return Rate(
        operators=operators,
        tflops=rounded(1 / s_per_tflop) if s_per_tflop > 0 else None,
        gbytes_per_s=rounded(1 / s_per_gbyte) if s_per_gbyte > 0 else None,
    )


def rounded(rate: float) -> float:
    """A rate rounded to two decimals, but never to fewer than four significant digits."""
    return round(rate, max(2, 3 - math.floor(math.log10(rate))))


def errors(rows: ClassRows, rate: Rate) -> Floats:
    """The relative errors of a fitted rate on profiled blocks: predicted over measured seconds,
    minus one.
    """
    seconds = rows.flop * rate.s_per_flop + rows.moved_bytes * rate.s_per_byte
    return np.asarray(seconds / rows.seconds - 1)


def error_of_left_out_widths(rows: ClassRows, operators: OperatorClass) -> float:
    """The mean absolute relative error of fitted rates on left-out blocks: those of each hidden
    size are predicted from the blocks of all others.
    """
    left_out = []
    for width in np.unique(rows.hidden):
        out = rows.hidden == width
        if out.all():
            return float(np.abs(errors(rows, fit(rows, operators))).mean())
        left_out.append(np.abs(errors(rows.chosen(out), fit(rows.chosen(~out), operators))))
    return float(np.concatenate(left_out).mean())


def _block(where: str, row: Row) -> Block:
    hidden, ffn, heads, sequence, vocab, batch = (round(positive(where, row, n)) for n in SIZES)
    return Block(hidden, ffn, heads, sequence, vocab, batch, precision_of(where, row))


def precision_of(where: str, row: Row) -> Precision:
    """The precision in which a row of a table was measured; fp16 if the row does not say."""
    given = row.get(PRECISION) or "fp16"
    precision = next((precision for precision in PRECISIONS if precision == given), None)
    if precision is None:
        refuse_row(where, PRECISION, f"{given!r} is unknown", f"give {one_of(PRECISIONS)}")
    return precision


def _is_whole(block: Block, times: Mapping[tuple[Block, str], Sequence[float]]) -> bool:
    return all((block, operator) in times for operator in CLASS_OF_OPERATOR if operator != OPTIONAL)


def _classes(
    blocks: Sequence[Block],
    times: Mapping[tuple[Block, str], Sequence[float]],
    counted: Mapping[tuple[Block, str], tuple[float, float]],
    peaks: PeakTflops,
) -> Mapping[OperatorClass, ClassRows]:
    """The measured seconds of each operator class in each profiled block: the median of
    repetitions, summed over the class's operators.
    """
    work = [
        _work_in_rows(block, times, counted)
        or _work_of_graph(block, drops=(block, OPTIONAL) in times)
        for block in blocks
    ]
    slowdowns = np.array([slowdown_of(peaks, block.precision) for block in blocks])
    classes: dict[OperatorClass, ClassRows] = {}
    for operators, names in OPERATORS_OF_CLASS.items():
        seconds = [
            sum(float(np.median(times.get((block, name), 0.0))) for name in names) * MICROSECONDS
            for block in blocks
        ]
        classes[operators] = ClassRows(
            flop=np.array([one[f"{operators} flop"] for one in work]) * slowdowns,
            moved_bytes=np.array([one[f"{operators} bytes"] for one in work]),
            seconds=np.array(seconds),
            hidden=np.array([float(block.hidden) for block in blocks]),
        )
    return classes


def _work_in_rows(
    block: Block,
    times: Mapping[tuple[Block, str], Sequence[float]],
    counted: Mapping[tuple[Block, str], tuple[float, float]],
) -> Mapping[str, float]:
    """The operations and bytes of each operator class in a profiled block, from the table's
    columns; empty if the table does not have them for all operators of the block.
    """
    if any((block, name) in times and (block, name) not in counted for name in CLASS_OF_OPERATOR):
        return {}
    return {
        f"{operators} {unit}": sum(counted.get((block, name), (0, 0))[column] for name in names)
        for operators, names in OPERATORS_OF_CLASS.items()
        for column, unit in enumerate(COUNTED)
    }


def _work_of_graph(block: Block, *, drops: bool) -> Mapping[str, float]:
    """The operations and bytes of each operator class in a block's forward and backward pass, from
    the block's layer graph.
    """
    model = ModelSpec.of(
        family="gpt",
        hidden=block.hidden,
        layers=1,
        heads=block.heads,
        ffn=block.ffn,
        vocab=block.vocab,
        biases=True,
        dropout=0.1 if drops else 0.0,
    )
    workload = Workload(
        model=model,
        sequence_length=block.sequence_length,
        global_batch=1,
        attention="math",
        precision=block.precision,
    )
    compiled = work_of(graph_of(workload), MEGATRON.kernels).compiled
    columns = size_columns(workload, {"b": np.array([block.micro_batch]), "tp": np.array([1])})
    values = dict(zip(compiled.names, compiled(columns)[:, 0].tolist(), strict=True))
    names = [f"{operators} {unit}" for operators in OPERATORS_OF_CLASS for unit in COUNTED]
    return {name: sum(values[f"block {phase} {name}"] for phase in PHASES) for name in names}
