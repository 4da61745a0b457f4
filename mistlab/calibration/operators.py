"""Fitting the rates of classes of operators to profiles of a block's operators.

Every class takes ``flop / rate + bytes / bandwidth``. Operations and bytes are those of the layer
graph, so that what is fitted is what predictions use; a class's operators are added up, since that
is what a block takes.

Axes: C rows, each a block's worth of one class at one size.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from mistlab.calibration.rows import (
    HARDWARE,
    Origin,
    Row,
    duration,
    positive,
    read_rows,
    refuse_row,
    spread_of,
)
from mistlab.cost.layers import slowdown_of, work_of
from mistlab.machine.compute import OperatorClass, Rate
from mistlab.machine.hardware import PeakTflops
from mistlab.symbolic.graph import PHASES
from mistlab.symbolic.library import graph_of
from mistlab.symbolic.sizes import size_columns
from mistlab.values.model import ModelSpec
from mistlab.values.units import GBYTES, MICROSECONDS, TFLOP
from mistlab.values.workload import Precision, Workload

# The profile's operators of one block, by class.
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
    """The sizes and the precision that a block was profiled at."""

    hidden: int
    ffn: int
    heads: int
    sequence_length: int
    vocab: int
    micro_batch: int
    precision: Precision = "fp16"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassRows:
    """One class's operations, bytes and seconds in a block (C each), and the block's width.

    Operations of another precision than 16 bits count as many times as they are slower.
    """

    flop: NDArray[np.float64]
    moved_bytes: NDArray[np.float64]
    seconds: NDArray[np.float64]
    hidden: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.seconds)

    def chosen(self, rows: NDArray[np.bool_]) -> "ClassRows":
        """Some of the rows."""
        columns = (self.flop, self.moved_bytes, self.seconds, self.hidden)
        flop, moved_bytes, seconds, hidden = (column[rows] for column in columns)
        return ClassRows(flop=flop, moved_bytes=moved_bytes, seconds=seconds, hidden=hidden)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorTable:
    """A profile of blocks: forward and backward of each class, without tensor parallelism.

    ``failed`` rows, which have no time, were dropped, and their blocks with them; ``spread`` is how
    much of their median repeated measurements differ by.
    """

    origin: Origin
    failed: int
    spread: float | None
    classes: Mapping[OperatorClass, ClassRows]


def read_operator_table(
    path: Path, peaks: PeakTflops, *, hardware: str | None, without_weight_gradients: bool
) -> OperatorTable:
    """Read a profile; ``without_weight_gradients`` adds a forward to each product's backward.

    Operations and bytes are those that rows give, or else the layer graph's under Megatron.
    """
    origin, rows = read_rows(path, NEEDED, hardware=hardware)
    times: dict[tuple[Block, str], list[float]] = defaultdict(list)
    counted: dict[tuple[Block, str], tuple[float, float]] = {}
    failed = 0
    for where, row in rows:
        if row["op"] not in CLASS_OF_OPERATOR or round(positive(where, row, "tp")) != 1:
            continue
        if row.get("failed") == "1":
            failed += 1
            continue
        forward, backward = (positive(where, row, name) for name in ("fwd_us", "bwd_us"))
        is_product = CLASS_OF_OPERATOR[row["op"]] == "matmul"
        again = 1 + (without_weight_gradients and is_product)
        place = _block(where, row), row["op"]
        times[place].append(again * forward + backward)
        if row.get("flop"):
            flop, moved_bytes = (duration(where, row, name) for name in COUNTED)
            counted[place] = flop, moved_bytes
    blocks = [b for b in dict.fromkeys(b for b, _ in times) if _is_whole(b, times)]
    if not blocks:
        where, row = rows[0]
        refuse_row(where, "op", f"no block has all of {', '.join(CLASS_OF_OPERATOR)} at tp 1")
    return OperatorTable(
        origin=origin,
        failed=failed,
        spread=spread_of(times.values()),
        classes=_classes(blocks, times, counted, peaks),
    )


def fit(rows: ClassRows, operators: OperatorClass) -> Rate:
    """The rate of one class: least squares of relative errors, nothing negative."""
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
    """Two decimals, and at least four digits that mean something."""
    return round(rate, max(2, 3 - math.floor(math.log10(rate))))


def errors(rows: ClassRows, rate: Rate) -> NDArray[np.float64]:
    """Relative errors (C), signed: predicted over measured, less one."""
    seconds = rows.flop * rate.s_per_flop + rows.moved_bytes * rate.s_per_byte
    return np.asarray(seconds / rows.seconds - 1)


def error_of_left_out_widths(rows: ClassRows, operators: OperatorClass) -> float:
    """Mean absolute relative error of each width by what the other widths give."""
    found = []
    for width in np.unique(rows.hidden):
        out = rows.hidden == width
        if out.all():
            return float(np.abs(errors(rows, fit(rows, operators))).mean())
        found.append(np.abs(errors(rows.chosen(out), fit(rows.chosen(~out), operators))))
    return float(np.concatenate(found).mean())


def _block(where: str, row: Row) -> Block:
    hidden, ffn, heads, sequence, vocab, batch = (round(positive(where, row, n)) for n in SIZES)
    return Block(hidden, ffn, heads, sequence, vocab, batch, precision_of(where, row))


def precision_of(where: str, row: Row) -> Precision:
    """The precision that a row was measured in; 16 bits where it does not say."""
    given = row.get(PRECISION) or "fp16"
    found = next((precision for precision in PRECISIONS if precision == given), None)
    if found is None:
        refuse_row(where, PRECISION, f"{given!r} is not one of {', '.join(PRECISIONS)}")
    return found


def _is_whole(block: Block, times: Mapping[tuple[Block, str], Sequence[float]]) -> bool:
    return all((block, operator) in times for operator in CLASS_OF_OPERATOR)


def _classes(
    blocks: Sequence[Block],
    times: Mapping[tuple[Block, str], Sequence[float]],
    counted: Mapping[tuple[Block, str], tuple[float, float]],
    peaks: PeakTflops,
) -> Mapping[OperatorClass, ClassRows]:
    """Sums over each class's operators; of repeated measurements the median."""
    work = [_counted(block, counted) or _work(block) for block in blocks]
    slowdowns = np.array([slowdown_of(peaks, block.precision) for block in blocks])
    classes: dict[OperatorClass, ClassRows] = {}
    for operators, names in OPERATORS_OF_CLASS.items():
        seconds = [
            sum(float(np.median(times[block, name])) for name in names) * MICROSECONDS
            for block in blocks
        ]
        classes[operators] = ClassRows(
            flop=np.array([one[f"{operators} flop"] for one in work]) * slowdowns,
            moved_bytes=np.array([one[f"{operators} bytes"] for one in work]),
            seconds=np.array(seconds),
            hidden=np.array([float(block.hidden) for block in blocks]),
        )
    return classes


def _counted(
    block: Block, counted: Mapping[tuple[Block, str], tuple[float, float]]
) -> Mapping[str, float]:
    """Operations and bytes of each class as the rows of a block give them; empty if they do not."""
    if any((block, name) not in counted for name in CLASS_OF_OPERATOR):
        return {}
    return {
        f"{operators} {unit}": sum(counted[block, name][place] for name in names)
        for operators, names in OPERATORS_OF_CLASS.items()
        for place, unit in enumerate(COUNTED)
    }


def _work(block: Block) -> Mapping[str, float]:
    """Operations and bytes of each class in a block's forward and backward."""
    model = ModelSpec.of(
        family="gpt",
        hidden=block.hidden,
        layers=1,
        heads=block.heads,
        ffn=block.ffn,
        vocab=block.vocab,
        biases=True,
        dropout=0.1,
    )
    workload = Workload(
        model=model,
        sequence_length=block.sequence_length,
        global_batch=1,
        attention="math",
        precision=block.precision,
    )
    compiled = work_of(graph_of(workload), "megatron").compiled
    columns = size_columns(workload, {"b": np.array([block.micro_batch]), "tp": np.array([1])})
    values = dict(zip(compiled.names, compiled(columns)[:, 0].tolist(), strict=True))
    names = [f"{operators} {unit}" for operators in OPERATORS_OF_CLASS for unit in COUNTED]
    return {name: sum(values[f"block {phase} {name}"] for phase in PHASES) for name in names}
