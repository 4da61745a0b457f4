"""Maps ranges of a rank's flat vectors to rectangular slices of whole tensors, in which checkpoints
are written.

A range of a flat vector is at most three rectangular slices of a tensor: the end of a row, whole
rows, the beginning of a row. There are more slices if the rank's rows are not neighbours in the
whole tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from runtime.models.grouped import ExpertMatrices
from runtime.models.parallel import OF_HEADS, ColumnLinear, RowLinear, VocabularyEmbedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rectangular slice of the whole tensor ``name``, whose elements begin at ``begin`` in the
    flat vector that the rank's optimizer steps.

    Ranks that hold the same part have equal slices: all tensor-parallel ranks if the tensor is not
    split; for experts, the ranks that share the experts.
    """

    name: str
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_split: bool
    is_of_experts: bool = False

    @property
    def numel(self) -> int:
        """The number of elements in the slice."""
        return prod(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Neighbouring rows of a rank's tensor, from ``begin`` to ``end``; ``first`` is the index in
    the whole tensor of the first of these rows.
    """

    begin: int
    end: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which part of a whole tensor (or of each expert's tensor) a rank holds; ``expert`` is the
    index of the rank's first expert.
    """

    rows: tuple[Rows, ...]
    column: int = 0
    is_split: bool = True
    expert: int | None = None


def part_of(
    module: nn.Module, leaf: str, shape: Sequence[int], *, rank: int, ranks: int, used: int
) -> Part:
    """The part of a module's parameter that the rank holds; rows from ``used`` on are padding."""
    size = shape[0]
    if isinstance(module, ExpertMatrices):
        return _part_of_experts(module, leaf, shape)
    if isinstance(module, ColumnLinear):
        return Part(rows=tuple(_blocks(module.blocks, rank, ranks, used)))
    if isinstance(module, VocabularyEmbedding) or leaf in OF_HEADS:
        return Part(rows=tuple(_blocks((size * ranks,), rank, ranks, used)))
    rows = (Rows(begin=0, end=size, first=0),)
    if isinstance(module, RowLinear) and leaf == "weight":
        return Part(rows=rows, column=rank * shape[1])
    return Part(rows=rows, is_split=False)


def _part_of_experts(module: ExpertMatrices, leaf: str, shape: Sequence[int]) -> Part:
    ranks, (experts, outputs, *inputs), splits = module.ranks, shape, module.splits(leaf)
    expert, rows, column = ranks.rank * experts, [Rows(begin=0, end=outputs, first=0)], 0
    if splits and module.blocks:
        size = outputs * ranks.tensor
        blocks = (size // module.blocks,) * module.blocks
        rows = list(_blocks(blocks, ranks.tensor_rank, ranks.tensor, size))
    elif splits:
        column = ranks.tensor_rank * inputs[0]
    return Part(rows=tuple(rows), column=column, is_split=splits, expert=expert)


def _blocks(blocks: Sequence[int], rank: int, ranks: int, used: int) -> Iterator[Rows]:
    begin = before = 0
    for block in blocks:
        share = block // ranks
        first = before + rank * share
        yield Rows(begin=begin, end=begin + max(0, min(share, used - first)), first=first)
        begin, before = begin + share, before + block


def pieces_of(
    name: str, shape: Sequence[int], part: Part, low: int, high: int, begin: int
) -> Iterator[Piece]:
    """The rectangular slices of the whole tensor that contain elements ``low`` to ``high`` of a
    rank's part.

    Element ``low`` is at ``begin`` in the flat vector that the rank's optimizer steps.
    """
    if part.expert is not None:
        yield from _pieces_of_experts(name, shape, part, low, high, begin)
        return
    columns = shape[1] if len(shape) == 2 else 1
    for rows in part.rows:
        at, end = max(low, rows.begin * columns), min(high, rows.end * columns)
        while at < end:
            row, column = divmod(at, columns)
            whole = (end - at) // columns if column == 0 else 0
            width = columns if whole else min(columns - column, end - at)
            height = whole or 1
            offset, size = (rows.first + row - rows.begin, part.column + column), (height, width)
            yield Piece(
                name=name,
                begin=begin + at - low,
                offsets=offset[: len(shape)],
                sizes=size[: len(shape)],
                is_split=part.is_split,
            )
            at += height * width


def _pieces_of_experts(
    name: str, shape: Sequence[int], part: Part, low: int, high: int, begin: int
) -> Iterator[Piece]:
    """The rectangular slices of each expert's tensor, where a rank holds several experts in one
    tensor.
    """
    assert part.expert is not None
    experts, *inner = shape
    size, of_one = prod(inner), replace(part, expert=None)
    for number in range(experts):
        first, last = max(low - number * size, 0), min(high - number * size, size)
        at = begin + number * size + first - low
        for piece in pieces_of(name, inner, of_one, first, last, at) if first < last else ():
            offsets = (part.expert + number, *piece.offsets)
            sizes = (1, *piece.sizes)
            yield replace(piece, offsets=offsets, sizes=sizes, is_of_experts=True)
