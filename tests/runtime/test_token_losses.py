"""Losses in two passes are those of torch's own operators in 64 bits, and their gradients lie where
the logits were."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from runtime.models import operators  # noqa: E402
from runtime.models.parallel import eager_losses, token_losses  # noqa: E402
from runtime.models.ranks import OneRank, TensorParallel  # noqa: E402
from tests.runtime.allocations import Allocations  # noqa: E402

TOKENS, VOCAB, RANKS = 37, 96, 3


class Together(OneRank):
    """A rank that reduces with others, each in a thread of its own."""

    size = RANKS

    def __init__(self, rank: int, shown: list[Tensor | None], barrier: Barrier) -> None:
        self.rank, self.shown, self.barrier = rank, shown, barrier  # type: ignore[misc]

    def all_reduce_(self, tensor: Tensor, operation: str = "sum") -> None:
        self.shown[self.rank] = tensor.clone()
        self.barrier.wait()
        every = torch.stack([one for one in self.shown if one is not None])
        tensor.copy_(every.amax(0) if operation == "max" else every.sum(0))
        self.barrier.wait()


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets of which two have no token, and the gradient of losses."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(TOKENS, VOCAB, generator=generator).mul_(4).to(dtype)
    targets = torch.randint(0, VOCAB - 5, (TOKENS,), generator=generator)
    gradient = torch.rand(TOKENS, generator=generator)
    targets[3], targets[4] = -1, -100
    gradient[3] = gradient[4] = 0.0
    return logits, targets, gradient


def expected(logits: Tensor, targets: Tensor, gradient: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """Losses and the gradient of logits by torch's function, in 64 bits."""
    wide = logits[:, :used].double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(wide, targets.clamp_min(0), reduction="none")
    losses.backward(gradient.double())
    whole = torch.zeros(logits.shape, dtype=torch.float64)
    assert wide.grad is not None
    whole[:, :used] = wide.grad
    return losses.detach(), whole


def passed(
    logits: Tensor, targets: Tensor, gradient: Tensor, ranks: TensorParallel, unused: int
) -> tuple[Tensor, Tensor]:
    own = logits.clone().requires_grad_()
    whole = own.clone()
    losses = token_losses(whole, targets, ranks, unused)
    losses.backward(gradient)
    assert own.grad is not None
    # The gradient took the logits' place.
    assert torch.equal(whole.detach(), own.grad)
    return losses.detach(), own.grad


@pytest.mark.parametrize("unused", [0, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("together", [1, 7 * VOCAB, operators.LOGITS_TOGETHER])
def test_losses_and_gradients_are_those_of_64_bits(
    dtype: torch.dtype, unused: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "LOGITS_TOGETHER", together)
    logits, targets, gradient = drawn(dtype)
    targets.clamp_max_(VOCAB - unused - 1)
    losses, of_logits = passed(logits, targets, gradient, OneRank(), unused)
    wanted, wanted_of = expected(logits, targets, gradient, VOCAB - unused)
    kept = targets >= 0
    assert losses.dtype == torch.float32
    # Logits of 16 bits are exact numbers of 32: so are their losses, to the rounding of sums.
    torch.testing.assert_close(losses[kept], wanted[kept].float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(of_logits, wanted_of.to(dtype))


def test_torch_s_own_operators_in_16_bits_miss_a_loss_by_hundredths() -> None:
    logits, targets, gradient = drawn(torch.bfloat16)
    wanted, _ = expected(logits, targets, gradient, VOCAB)
    eager = eager_losses(logits, targets.clamp_min(0), OneRank(), 0)
    assert 0.005 < (eager - wanted).abs().max() < 0.1


@pytest.mark.parametrize("unused", [0, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_that_split_the_vocabulary_give_the_losses_of_one(
    dtype: torch.dtype, unused: int
) -> None:
    """With 40 tokens unused the last of three ranks has none that is used."""
    logits, targets, gradient = drawn(dtype)
    targets.clamp_max_(VOCAB - unused - 1)
    shown, barrier = list[Tensor | None]([None] * RANKS), Barrier(RANKS, timeout=60)

    def on(rank: int) -> tuple[Tensor, Tensor]:
        part = logits.chunk(RANKS, 1)[rank].contiguous()
        return passed(part, targets, gradient, Together(rank, shown, barrier), unused)

    with ThreadPoolExecutor(RANKS) as threads:
        found = list(threads.map(on, range(RANKS)))
    losses, of_logits = passed(logits, targets, gradient, OneRank(), unused)
    for own, _ in found:
        torch.testing.assert_close(own, losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.cat([one for _, one in found], 1), of_logits)


def test_nothing_of_the_logits_size_comes_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "LOGITS_TOGETHER", 1024)
    logits = torch.randn(512, 256).to(torch.bfloat16).requires_grad_()
    targets = torch.zeros(512, dtype=torch.int64)

    def most(losses_of: object) -> int:
        with Allocations() as counted:
            own = logits.clone()
            before = counted.now_bytes
            losses_of(own, targets, OneRank(), 0).sum().backward()  # type: ignore[operator]
        return counted.most_bytes - before

    size = logits.nbytes
    assert most(token_losses) < size / 4
    assert size < most(eager_losses)
