"""A range of a flat vector is boxes of the whole tensor that cover it, element by element."""

from itertools import combinations

import pytest

torch = pytest.importorskip("torch")

from runtime.engine.storage.pieces import Part, Rows, pieces_of  # noqa: E402

# Rows of a rank: whole, in two blocks with others' rows between, with padding, and in columns.
PARTS = {
    "whole": (Part(rows=(Rows(begin=0, end=3, first=0),)), (3, 4), (3, 4)),
    "two blocks": (
        Part(rows=(Rows(begin=0, end=2, first=1), Rows(begin=2, end=3, first=5))),
        (3, 4),
        (7, 4),
    ),
    "padding": (Part(rows=(Rows(begin=0, end=2, first=4),)), (3, 4), (6, 4)),
    "columns": (Part(rows=(Rows(begin=0, end=3, first=0),), column=4), (3, 4), (3, 8)),
    "a vector": (Part(rows=(Rows(begin=1, end=5, first=2),)), (6,), (7,)),
}


@pytest.mark.parametrize("name", PARTS)
def test_boxes_cover_a_range_and_nothing_else(name: str) -> None:
    part, own, whole = PARTS[name]
    columns = own[1] if len(own) == 2 else 1
    # Each element of the rank's tensor lies at a place of the whole, or is padding.
    places = {
        row * columns + column: (rows.first + row - rows.begin, part.column + column)
        for rows in part.rows
        for row in range(rows.begin, rows.end)
        for column in range(columns)
    }
    for low, high in combinations(range(torch.Size(own).numel() + 1), 2):
        found: dict[tuple[int, int], int] = {}
        for piece in pieces_of("w", own, part, low, high, begin=100):
            box = tuple(
                slice(at, at + size) for at, size in zip(piece.offsets, piece.sizes, strict=True)
            )
            assert all(one.stop <= size for one, size in zip(box, whole, strict=True))
            rows, width = box[0], (box[1] if len(box) == 2 else slice(0, 1))
            cells = [
                (row, column)
                for row in range(rows.start, rows.stop)
                for column in range(width.start, width.stop)
            ]
            assert len(cells) == piece.numel
            for number, cell in enumerate(cells):
                assert cell not in found
                found[cell] = piece.begin + number
        assert found == {place: 100 + at - low for at, place in places.items() if low <= at < high}
