"""A block of Llama in torch's own operators: what it keeps, and the bytes that it moves."""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from mistlab import catalog  # noqa: E402
from mistlab.cost.kernels import rule_of  # noqa: E402
from mistlab.cost.layers import bytes_factor  # noqa: E402
from mistlab.engines.engine import ENGINES, Precision  # noqa: E402
from mistlab.graph.graph import Operator  # noqa: E402
from mistlab.graph.library import graph_of  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from runtime.models.config import TYPE_OF_PRECISION  # noqa: E402

B, S, H, N, K, F = 1, 64, 512, 8, 2, 1792
D = H // N


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return scaled.type_as(x) * weight


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


def for_each_query(x: Tensor) -> Tensor:
    wide = x[:, :, :, None, :].expand(B, S, K, N // K, D)
    return wide.reshape(B, S, N, D).transpose(1, 2)


def block(x: Tensor, weights: list[Tensor], turns: Tensor) -> Tensor:
    of_attention, query, key, value, output, of_network, gate, up, down = weights
    y = norm(x, of_attention)
    q = rotated(functional.linear(y, query).view(B, S, N, D), turns)
    k = rotated(functional.linear(y, key).view(B, S, K, D), turns)
    v = functional.linear(y, value).view(B, S, K, D)
    heads = q.transpose(1, 2), for_each_query(k), for_each_query(v)
    seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
    x = x + functional.linear(seen.transpose(1, 2).reshape(B, S, H), output)
    y = norm(x, of_network)
    wide = functional.silu(functional.linear(y, gate)) * functional.linear(y, up)
    return x + functional.linear(wide, down)


SIZES = {"b": B, "s": S, "h": H, "n": N, "k": K, "d": D, "r": D, "f": F, "tp": 1}


PRECISIONS: tuple[Precision, ...] = ("bf16", "fp32")


def given(precision: Precision) -> tuple[Tensor, list[Tensor], Tensor]:
    """A block's input, weights and turns."""
    dtype = TYPE_OF_PRECISION[precision]
    sizes = [(H,), (H, H), (K * D, H), (K * D, H), (H, H), (H,), (F, H), (F, H), (H, F)]
    weights: list[Tensor] = [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]
    turns = torch.polar(torch.ones(S, 1, D // 2), torch.ones(S, 1, D // 2))
    return torch.randn(B, S, H).to(dtype).requires_grad_(), weights, turns


def work(precision: Precision) -> Workload:
    model = replace(
        catalog.model("llama3-8b"), hidden=H, heads=N, kv_heads=K, ffn=F, head_dim=D, name=""
    )
    return Workload(
        model=model, sequence_length=S, global_batch=B, attention="flash", precision=precision
    )


def number(expression: object) -> float:
    return float(eval(str(expression), {"__builtins__": {}}, SIZES))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_eager_torch_keeps_what_the_graph_says(precision: Precision) -> None:
    x, weights, turns = given(precision)
    known = {one.untyped_storage().data_ptr() for one in (*weights, turns)}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, weights, turns)
    kept = sum(one.untyped_storage().nbytes() for at, one in found.items() if at not in known)
    assert kept == number(graph_of(work(precision), "eager").counts.block.saved_bytes)


class Moved(TorchDispatchMode):
    """Counts the bytes that operators read and write, but for products and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        returns = [one.alias_info for one in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returns)
        if not is_view and not any(name in str(func) for name in ("mm", "attention", "view")):
            self.size_bytes += sum(map(_bytes, tree_leaves((args, kwargs, found))))
        return found


def _bytes(one: object) -> int:
    """The bytes of a tensor, of which an expanded part is read once."""
    if not isinstance(one, Tensor):
        return 0
    sizes = (size for size, step in zip(one.shape, one.stride(), strict=True) if step)
    return math.prod(sizes) * one.element_size()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_eager_operators_move_what_the_engine_s_rules_say(precision: Precision) -> None:
    """Within 3 % for both passes together; rules give copies of keys to the backward pass."""
    x, weights, turns = given(precision)
    gradient = torch.ones_like(x)
    with Moved() as moved:
        torch.autograd.backward(block(x, weights, turns), gradient)
    layer = graph_of(work(precision)).counts.block
    rules = ENGINES["fsdp-eager"].rules_in(precision)

    def of(operator: Operator) -> float:
        factor = bytes_factor(rule_of(operator, layer, rules, "flash"))
        return number((operator.read_bytes + operator.written_bytes) * factor)

    left_out = ("matmul", "attention", "accumulate", "collective")
    predicted = sum(of(one) for one in layer.operators if one.kind not in left_out)
    assert predicted == pytest.approx(moved.size_bytes, rel=0.03)
