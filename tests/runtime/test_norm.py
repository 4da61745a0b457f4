"""The norm of gradients: the sum of the squares of the ranges that count, in 32 bits."""

import pytest

torch = pytest.importorskip("torch")

from runtime.engine.work.parameters import ROW, Squares  # noqa: E402
from tests.runtime.allocations import Allocations  # noqa: E402
from tests.runtime.worlds import CPU  # noqa: E402

# In double precision the sum of their squares is exact.
NUMEL = 2**22 + 5
PARTS = [slice(0, 2 * ROW), slice(3 * ROW, 3 * ROW + 7), slice(4 * ROW, NUMEL)]


def gradients(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranges_that_count_are_summed_up_exactly(dtype: torch.dtype) -> None:
    squares = Squares({3: PARTS, 4: []}, CPU, wanted=True)
    whole = gradients(dtype)
    for _ in range(2):
        squares.take(3, whole)
        squares.take(4, whole)
        squares.take_table(whole[:ROW], counts=False)
    expected = sum(whole[part].double().square().sum() for part in PARTS)
    assert squares.total().item() == pytest.approx(expected.item(), rel=1e-6)
    squares.take_table(whole[:ROW], counts=True)
    expected += whole[:ROW].double().square().sum()
    assert squares.total().item() == pytest.approx(expected.item(), rel=1e-6)


def test_squares_that_overflow_are_seen() -> None:
    squares = Squares({0: [slice(0, NUMEL)]}, CPU, wanted=True)
    whole = gradients(torch.float32)
    whole[ROW + 1] = 2.0**65
    squares.take(0, whole)
    assert squares.total().isinf()


def test_nothing_of_the_gradients_size_is_allocated() -> None:
    squares, whole = Squares({0: PARTS}, CPU, wanted=True), gradients(torch.float32)
    with Allocations() as allocations:
        # What is only looked at is counted as if it were new.
        squares.take(0, whole)
    assert allocations.most_bytes < whole.nbytes + 2 * whole.nbytes / ROW + 4 * ROW


def test_no_norm_is_taken_where_none_is_wanted() -> None:
    squares = Squares({0: PARTS}, CPU, wanted=False)
    squares.take(0, gradients(torch.float32))
    squares.take_table(gradients(torch.float32), counts=True)
    assert squares.total().item() == 0.0
