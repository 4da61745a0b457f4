"""Operators that keep less: gradients of plain ones, bytes counted, masks that any plan draws."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtime.models.dropout import MaskRows, drop, kept_by_position, key_of
from runtime.models.lean_operators import lean_core, lean_gelu, lean_layer_norm, lost_channels

F = nn.functional


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def kept_bytes(make: Callable[[], Tensor], *aside: Tensor) -> int:
    """Bytes that a graph keeps for its backward pass, each storage once, without those of given
    tensors."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        make()
    for tensor in aside:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_s_gradient_is_read_off_its_output(approximate: str) -> None:
    x = torch.cat([torch.linspace(-12, 12, 40_001), torch.randn(100_000) * 2]).requires_grad_()
    plain = F.gelu(x, approximate=approximate)
    (expected,) = torch.autograd.grad(plain.sum(), x)
    lean = lean_gelu(x, approximate)
    (slope,) = torch.autograd.grad(lean.sum(), x)
    assert torch.equal(plain, lean)
    error = (slope - expected).abs()
    # At the minimum the output tells the input to half its digits.
    near = (x.detach() + 0.7518).abs() < 0.01
    assert error[~near].max() < 1e-5
    assert error.max() < 2e-3
    assert error.mean() < 1e-6


def test_gelu_in_16_bits_is_right_to_their_rounding() -> None:
    x = torch.randn(50_000, dtype=torch.bfloat16).requires_grad_()
    (slope,) = torch.autograd.grad(lean_gelu(x).float().sum(), x)
    exact = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(F.gelu(exact).sum(), exact)
    error = slope.double() - expected
    assert error.abs().mean() < 4e-3
    assert error.mean().abs() < 4e-4


def test_a_network_keeps_gelu_s_output_and_a_byte() -> None:
    x = torch.randn(64, 32, requires_grad=True)
    up, down = nn.Linear(32, 128), nn.Linear(128, 32)
    weights = (x, up.weight, down.weight)
    plain = kept_bytes(lambda: down(F.gelu(up(x))), *weights)
    lean = kept_bytes(lambda: down(lean_gelu(up(x))), *weights)
    assert plain == 2 * 64 * 128 * 4
    assert lean == 64 * 128 * (4 + 1)


@pytest.mark.parametrize("gain", ["ones", "drawn", "some zero", "all zero"])
def test_layer_norm_s_gradients_are_those_of_its_input(gain: str) -> None:
    weight = {
        "ones": torch.ones(32),
        "drawn": torch.randn(32),
        "some zero": torch.randn(32) * (torch.arange(32) % 3 > 0),
        "all zero": torch.zeros(32),
    }[gain].requires_grad_()
    x = (3 + 2 * torch.randn(40, 32)).requires_grad_()
    bias, seen = torch.randn(32, requires_grad=True), torch.randn(40, 32)
    inputs = (x, weight, bias)
    plain = torch.autograd.grad((F.layer_norm(x, (32,), weight, bias) * seen).sum(), inputs)
    lost = lost_channels(weight)
    lean = torch.autograd.grad(
        (lean_layer_norm(x, weight, bias, channels=max(8, lost)) * seen).sum(), inputs
    )
    for expected, found in zip(plain, lean, strict=True):
        assert found == pytest.approx(expected, abs=2e-4, rel=1e-3)


def test_a_gain_that_is_lost_and_not_kept_makes_no_numbers() -> None:
    weight = (torch.arange(32) > 8).float().requires_grad_()
    x, bias = torch.randn(40, 32), torch.zeros(32)
    y = lean_layer_norm(x, weight, bias)
    (gradient,) = torch.autograd.grad(y.sum(), weight)
    # The first eight of nine are kept.
    assert gradient.isnan().nonzero().view(-1).tolist() == [8]


def test_layer_norm_keeps_nothing_that_the_next_product_does_not() -> None:
    source = torch.randn(64, 32, requires_grad=True)
    weight, bias = torch.randn(32, requires_grad=True), torch.randn(32, requires_grad=True)
    product = nn.Linear(32, 8)
    aside = (source, weight, bias, product.weight)

    def kept(norm: Callable[[Tensor], Tensor]) -> int:
        return kept_bytes(lambda: product(norm(source * 2)), *aside)

    plain = kept(lambda x: F.layer_norm(x, (32,), weight, bias))
    lean = kept(lambda x: lean_layer_norm(x, weight, bias))
    rows, values = 64 * 4, 64 * 32 * 4
    assert plain == 2 * values + 2 * rows
    assert lean == values + rows + 8 * rows


def test_attention_s_core_has_the_gradients_and_keeps_a_third_less() -> None:
    scores = torch.randn(6, 16, 16, requires_grad=True)
    value, seen = torch.randn(6, 16, 8, requires_grad=True), torch.randn(6, 16, 8)
    mask = torch.rand(6, 16, 16) > 0.2

    def plain() -> Tensor:
        return (torch.softmax(scores, dim=-1) * mask / 0.8) @ value

    def lean() -> Tensor:
        return lean_core(scores, value, mask, 0.2)

    assert torch.allclose(plain(), lean(), atol=1e-6)
    expected = torch.autograd.grad((plain() * seen).sum(), (scores, value))
    found = torch.autograd.grad((lean() * seen).sum(), (scores, value))
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    each = scores.numel()
    assert kept_bytes(lean, value, mask) == 4 * each
    assert kept_bytes(plain, value, mask) == 2 * 4 * each
    without = lean_core(scores, value)
    assert torch.allclose(without, torch.softmax(scores, dim=-1) @ value, atol=1e-6)


class Block(nn.Module):
    """A post-norm encoder block with written-out attention, by plain or by lean operators."""

    def __init__(self, *, lean: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.norms = nn.ModuleList([nn.LayerNorm(32), nn.LayerNorm(32)])
        self.lean = lean

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(x).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        query, key, value = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        scores = query @ key.transpose(-1, -2) / 8**0.5
        rows = torch.arange(batch * 4 * length).view(batch, 4, length)
        mask = kept_by_position(rows, length, 0.1, key_of(0))
        mixed = self._core(scores, value, mask).transpose(1, 2).reshape(batch, length, 32)
        x = self._norm(0, x + self._dropped(self.out(mixed), 1))
        inner = self.up(x)
        inner = lean_gelu(inner) if self.lean else F.gelu(inner)
        return self._norm(1, x + self._dropped(self.down(inner), 2))

    def _core(self, scores: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        if self.lean:
            return lean_core(scores, value, mask, 0.1)
        return (torch.softmax(scores, dim=-1) * mask / 0.9) @ value

    def _dropped(self, x: Tensor, layer: int) -> Tensor:
        batch, length, _ = x.shape
        positions = torch.arange(length)
        rows = MaskRows(key=key_of(layer), sequence=0, length=length, positions=positions)
        if self.lean:
            return drop(x, rows, 0.1)
        return x * kept_by_position(rows.numbers(batch), 32, 0.1, rows.key) / 0.9

    def _norm(self, number: int, x: Tensor) -> Tensor:
        norm: Any = self.norms[number]
        if self.lean:
            return lean_layer_norm(x, norm.weight, norm.bias)
        normal: Tensor = norm(x)
        return normal


def losses(*, lean: bool) -> list[float]:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(50, 32), *(Block(lean=lean) for _ in range(3)))
    head = nn.Linear(32, 50)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    tokens = torch.randint(50, (50, 4, 12))
    found = []
    for step in tokens:
        loss = F.cross_entropy(head(model(step)).view(-1, 50), step.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_fifty_steps_have_the_losses_of_plain_operators() -> None:
    plain, lean = losses(lean=False), losses(lean=True)
    assert plain[-1] < 0.8 * plain[0]
    assert lean == pytest.approx(plain, abs=1e-5)


def test_a_block_keeps_less_to_the_byte() -> None:
    batch, length, hidden, inner, heads = 4, 64, 32, 128, 4
    x = torch.randn(batch, length, hidden)
    sizes = {}
    for lean in (False, True):
        torch.manual_seed(0)
        block = Block(lean=lean)
        sizes[lean] = kept_bytes(lambda block=block: block(x), *block.parameters())
    tokens = batch * length
    gelu = (4 - 1) * tokens * inner
    # The input and the mean give way to the values of eight channels.
    norms = 2 * (4 * tokens * hidden + 4 * tokens - 4 * 8 * tokens)
    # Masks of a byte a value.
    dropouts = 2 * tokens * hidden
    core = 4 * batch * heads * length**2
    # The block's output, which the next block's first product would keep anyway.
    output = 4 * tokens * hidden
    assert sizes[False] - sizes[True] == gelu + norms + dropouts + core - output
