"""What a layer saves is taken apart into weights, constants and storages, each kept once."""

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from runtime.engine.saved import Saved, storage_of  # noqa: E402

ROWS, WIDTH = 4, 8
BYTES = ROWS * WIDTH * 4


def kept_by_a_layer() -> list[int]:
    """Bytes of each storage that a product, a product of two views and a scaling keep."""
    arena = torch.ones(2 * WIDTH * WIDTH)
    weights = arena[WIDTH * WIDTH :]
    scale = torch.full((WIDTH,), 2.0)
    parameter = weights.view(WIDTH, WIDTH).requires_grad_()
    saved = Saved(weights=weights, constants=frozenset({storage_of(scale)}))
    with saved.hooks():
        y = torch.ones(ROWS, WIDTH) @ parameter.t()
        y = y * y[:1].clone().expand(ROWS, WIDTH)
        loss = (y * scale).sum()
    kept = [storage.numel() for storage in saved.storages if storage is not None]
    gradient: Tensor
    (gradient,) = torch.autograd.grad(loss, [parameter])
    assert gradient.shape == parameter.shape
    assert saved.size_bytes == 0
    return kept


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode], ids=["real", "fake"])
def test_storages_are_kept_once_whether_they_have_memory_or_not(mode) -> None:
    with mode():
        # The input, the product, its first row; neither weights nor the constant.
        assert sorted(kept_by_a_layer()) == [WIDTH * 4, BYTES, BYTES]


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode], ids=["real", "fake"])
def test_empty_tensors_are_kept_as_they_are(mode) -> None:
    with mode():
        saved = Saved(weights=torch.ones(WIDTH))
        empty = torch.empty(0, WIDTH)
        assert saved.keep(empty)() is empty
        assert saved.storages == []
