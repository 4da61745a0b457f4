"""What a layer saves is taken apart into weights, constants and storages, each kept once."""

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from mistlab.plan.plan import Offload, Plan  # noqa: E402
from runtime.engine.storage.saved import LEAST_SHARE, Saved, storage_of  # noqa: E402
from tests.runtime.worlds import alone, ratios, run_step, stage, workload  # noqa: E402

BLOCKS = 3
ROWS, WIDTH = 4, 8
NUMEL = WIDTH * WIDTH
BYTES = ROWS * WIDTH * 4

MODES = pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode], ids=["real", "fake"])


class Layer:
    """A product, a product of views of it, and two scalings; weights are in the second half of an
    arena, whose first has the same."""

    def __init__(self) -> None:
        self.arena = torch.linspace(-1.0, 1.0, NUMEL + WIDTH).repeat(2)
        flat = self.arena[NUMEL + WIDTH :]
        self.matrix = flat[:NUMEL].view(WIDTH, WIDTH).requires_grad_()
        self.vector = flat[NUMEL:].requires_grad_()
        constant = torch.full((WIDTH,), 2.0)
        self.saved = Saved(weights=flat, constants=frozenset({storage_of(constant)}))
        self.x = torch.ones(ROWS, WIDTH).cumsum(1).requires_grad_()
        with self.saved.hooks():
            y = self.x.clone() @ self.matrix.t()
            y = y * y[:1].clone().expand(ROWS, WIDTH)
            self.loss = (y * constant * self.vector).sum()

    def move(self) -> None:
        """Let the weights be where they are not yet, and no longer where they were."""
        flat = self.arena[: NUMEL + WIDTH]
        self.matrix.data, self.vector.data = flat[:NUMEL].view(WIDTH, WIDTH), flat[NUMEL:]
        self.arena[NUMEL + WIDTH :] = float("nan")
        self.saved.move_weights(flat)

    def gradients(self) -> list[Tensor]:
        return list(torch.autograd.grad(self.loss, [self.x, self.matrix, self.vector]))


@MODES
def test_storages_are_kept_once_whether_they_have_memory_or_not(mode) -> None:
    with mode():
        saved = Layer().saved
        # The input, the product, its first row, the square, scaled; no weights, not the constant.
        assert saved.size_bytes == 3 * BYTES + WIDTH * 4
        assert len(saved.largest(saved.size_bytes)) == 4


@MODES
def test_empty_tensors_have_no_storage_to_keep(mode) -> None:
    with mode():
        saved = Saved(weights=torch.ones(WIDTH))
        kept = [saved.keep(torch.empty(0, width)) for width in (WIDTH, 1)]
        assert [found().shape for found in kept] == [(0, WIDTH), (0, 1)]
        assert saved.largest(1.0) == []


def test_a_storage_that_is_too_small_to_be_worth_a_copy_stays() -> None:
    """As attention's random state does: a few bytes of what a layer keeps."""
    saved = Saved(weights=torch.ones(WIDTH))
    for numel in (2 * LEAST_SHARE, LEAST_SHARE, 1, 4):
        saved.keep(torch.zeros(numel))
    assert saved.largest(1e9) == [0, 1, 3]
    whole = Saved(weights=torch.ones(WIDTH))
    whole.keep(torch.zeros(1))
    assert whole.largest(1e9) == [0]


def test_gradients_are_the_same_after_storages_were_away() -> None:
    expected = Layer().gradients()
    layer = Layer()
    saved = layer.saved
    before = saved.size_bytes
    numbers = saved.largest(BYTES + WIDTH * 4)
    copies = [storage.clone() for storage in saved.leave(numbers)]
    assert saved.size_bytes == before - BYTES - WIDTH * 4
    saved.come_back(numbers, copies)
    assert saved.size_bytes == before
    for found, gradient in zip(layer.gradients(), expected, strict=True):
        assert torch.equal(found, gradient)


def test_views_are_where_they_were_whatever_type_and_place_they_have() -> None:
    """Of a storage whose whole tensor is saved, and of one of which only parts are."""
    whole, parts = torch.arange(24.0).view(2, 3, 4), torch.arange(1.0, 25.0)
    tensors = [whole, whole[1:], whole.view(torch.int32)[0, 1:], whole.transpose(0, 1)]
    tensors += [parts[:8], parts[8:20].view(3, 4).t()]
    for saves in (tensors, tensors[::-1]):
        saved = Saved(weights=torch.ones(WIDTH))
        found, numbers = [saved.keep(one) for one in saves], saved.largest(1e9)
        copies = [one.clone() for one in saved.leave(numbers)]
        assert saved.size_bytes == 0
        assert [one.nbytes for one in copies] == [96, 96]
        saved.come_back(numbers, copies)
        for one, again in zip(saves, found, strict=True):
            back = again()
            assert torch.equal(back, one)
            assert back.stride() == one.stride()
            assert any(storage_of(back) == storage_of(copy) for copy in copies)


def test_a_layout_serves_the_micro_batches_that_follow() -> None:
    """It is worked out again only for what is saved otherwise."""
    first = Layer().saved
    later = Saved(weights=first.weights, constants=first.constants, layout=first.arranged())
    tensors = [one for one in first._tensors if one is not None]
    found = [later.keep(one) for one in tensors]
    assert later.arranged() is first.arranged()
    assert [one().data_ptr() for one in found] == [one.data_ptr() for one in tensors]
    other = Saved(weights=first.weights, layout=first.arranged())
    other.keep(torch.ones(WIDTH))
    assert other.arranged() is not first.arranged()
    assert other.size_bytes == WIDTH * 4


def test_what_is_away_is_missed() -> None:
    layer = Layer()
    layer.saved.leave(layer.saved.largest(BYTES)[:1])
    with pytest.raises(AssertionError, match="away"):
        layer.gradients()


def test_weights_are_found_where_they_are_in_the_backward_pass() -> None:
    expected = Layer().gradients()
    layer = Layer()
    layer.move()
    for found, gradient in zip(layer.gradients(), expected, strict=True):
        assert torch.equal(found, gradient)


@pytest.mark.parametrize(
    ("offload", "each_time"),
    [
        (ratios(0, 0, 0, 0), 0),
        (ratios(0, 1, 1, 0), 0),
        (ratios(1, 0, 0, 0), BLOCKS),
        (ratios(0, 0, 0, 1), BLOCKS),
    ],
)
def test_only_layers_of_which_something_moves_are_taken_apart_again_and_again(
    offload: Offload, each_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Saved] = []
    hooks = Saved.hooks

    def noted(saved: Saved) -> object:
        taken.append(saved)
        return hooks(saved)

    monkeypatch.setattr(Saved, "hooks", noted)
    work = workload(layers=BLOCKS)
    plan = Plan(micro_batches=2, stages=(stage(BLOCKS, micro_batch=4, offload=offload),))
    executor = alone(work, plan, "eager")
    counts = []
    for step in range(2):
        taken.clear()
        run_step(executor, work, executor.connections, step)
        counts.append(len(taken))
    # Embedding and head stay; every layer is counted once.
    assert counts == [BLOCKS + 2 + each_time, 2 * each_time]
