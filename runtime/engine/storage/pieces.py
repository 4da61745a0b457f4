"""Maps ranges of a rank's flat vectors to boxes, which are rectangular parts of whole tensors.

A range of a flat vector is at most three boxes of a tensor: the end of a row, whole rows, the
beginning of a row. There are more if the rank's rows are not neighbours in the whole tensor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from runtime.models.parallel import ColumnLinear, RowLinear, VocabularyEmbedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of the whole tensor ``name``; it lies at ``begin`` in the vector that the rank steps.

    If the tensor is not split, all tensor-parallel ranks have the same piece.
    """

    name: str
    begin: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_split: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        rows, columns = self.sizes if len(self.sizes) == 2 else (*self.sizes, 1)
        return rows * columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows ``begin`` to ``end`` of a rank's tensor, which are rows from ``first`` of the whole."""

    begin: int
    end: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The place of a rank's part in the whole tensor."""

    rows: tuple[Rows, ...]
    column: int = 0
    is_split: bool = True


def part_of(
    module: nn.Module, leaf: str, shape: Sequence[int], *, rank: int, ranks: int, used: int
) -> Part:
    """The rank's part of a module's parameter; rows from ``used`` on are padding."""
    size = shape[0]
    if isinstance(module, ColumnLinear):
        return Part(rows=tuple(_blocks(module.blocks, rank, ranks, used)))
    if isinstance(module, VocabularyEmbedding):
        return Part(rows=tuple(_blocks((size * ranks,), rank, ranks, used)))
    rows = (Rows(begin=0, end=size, first=0),)
    if isinstance(module, RowLinear) and leaf == "weight":
        return Part(rows=rows, column=rank * shape[1])
    return Part(rows=rows, is_split=False)


def _blocks(blocks: Sequence[int], rank: int, ranks: int, used: int) -> Iterator[Rows]:
    begin = before = 0
    for block in blocks:
        own = block // ranks
        first = before + rank * own
        yield Rows(begin=begin, end=begin + max(0, min(own, used - first)), first=first)
        begin, before = begin + own, before + block


def pieces_of(
    name: str, shape: Sequence[int], part: Part, low: int, high: int, begin: int
) -> Iterator[Piece]:
    """The boxes of elements ``low`` to ``high`` of a rank's tensor.

    Element ``low`` lies at ``begin`` in the vector that the rank steps.
    """
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
