"""A range of a flat vector is boxes of the whole tensor that cover it, element by element."""

from collections.abc import Callable
from itertools import combinations

import pytest

torch = pytest.importorskip("torch")

from mistlab.plan.plan import Plan  # noqa: E402
from runtime.checks.recorded_library import RecordedLibrary  # noqa: E402
from runtime.comm.topology import connected  # noqa: E402
from runtime.engine.executor import Executor  # noqa: E402
from runtime.engine.storage.pieces import Part, Rows, pieces_of  # noqa: E402
from runtime.engine.streams.device_streams import SimulatedStreams  # noqa: E402
from runtime.models.families import model_of  # noqa: E402
from tests.runtime.worlds import CPU, TRAINING, stage, workload  # noqa: E402

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


class Silent:
    """Ranks that do nothing."""

    def all_reduce(self, *_: object) -> None: ...
    def all_gather(self, *_: object) -> None: ...
    def reduce_scatter(self, *_: object) -> None: ...
    def exchange(self, *_: object) -> None: ...
    def all_to_all(self, *_: object) -> None: ...

    def aside(self, _group: object, call: Callable[[], None]) -> "Silent":
        return self

    def wait(self) -> None: ...


@pytest.mark.parametrize("zero", [0, 1])
def test_one_rank_writes_each_element_of_a_model(zero: int) -> None:
    """Of two replicas and two tensor-parallel ranks one writes what they share."""
    work = workload("llama", layers=1, batch=4)
    one = stage(1, data_parallel=2, tensor_parallel=2, zero=zero)
    plan = Plan(micro_batches=1, stages=(one,))
    written = {name: torch.zeros(each.shape) for name, each in model_of(work).named_parameters()}
    for rank in range(plan.num_gpus):
        connections = connected(plan, rank, RecordedLibrary(rank, plan.num_gpus, Silent()).maker())
        executor = Executor(
            *(work, plan, connections, SimulatedStreams(), TRAINING), device=CPU, seed=None
        )
        for layer in executor.layers:
            for piece in executor.parameters.pieces(layer):
                if executor.parameters.writes(piece):
                    box = zip(piece.offsets, piece.sizes, strict=True)
                    written[piece.name][tuple(slice(at, at + size) for at, size in box)] += 1
    assert [name for name, counts in written.items() if not counts.eq(1).all()] == []
