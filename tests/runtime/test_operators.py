"""Operations of products of groups, and what becomes of operators that no table knows."""

import pytest

torch = pytest.importorskip("torch")

from runtime.tracing.traced_operators import TracedCall, flop_of, kind_of  # noqa: E402

GROUPED = torch.ops.aten._grouped_mm.default


@pytest.mark.parametrize(
    ("left", "right", "flop"),
    [
        # Rows of one matrix, each with its own group's factor: mixtures of experts, forward.
        ((96, 16), (4, 16, 32), 2 * 96 * 16 * 32),
        # Ragged inner dimension: the gradient of the factors.
        ((16, 96), (96, 32), 2 * 16 * 96 * 32),
        # Equal groups.
        ((4, 24, 16), (4, 16, 32), 2 * 4 * 24 * 16 * 32),
    ],
)
def test_a_grouped_product_counts_each_row_once(
    left: tuple[int, ...], right: tuple[int, ...], flop: int
) -> None:
    tensors = (torch.empty(left, device="meta"), torch.empty(right, device="meta"))
    call = TracedCall(GROUPED, tensors, {}, torch.empty(1, device="meta"))
    assert kind_of(call) == "matmul"
    assert flop_of(call) == flop


def test_what_pytorch_has_a_formula_for_is_a_product() -> None:
    x, w = torch.empty(1, 8, 10, device="meta"), torch.empty(4, 8, 3, device="meta")
    options = (None, [1], [0], [1], False, [0], 1)
    call = TracedCall(
        torch.ops.aten.convolution.default,
        (x, w, *options),
        {},
        torch.empty(1, 4, 8, device="meta"),
    )
    assert kind_of(call) == "matmul"
    assert flop_of(call) == 2 * 8 * 3 * 4 * 8


def test_an_operator_that_no_table_knows_counts_its_elements() -> None:
    x = torch.empty(7, 3, device="meta")
    call = TracedCall(torch.ops.aten.sort.default, (x,), {}, (x, x))
    assert kind_of(call) == "other"
    assert flop_of(call) == 21
