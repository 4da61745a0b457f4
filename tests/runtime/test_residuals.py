"""Sums with the residual, and norms of it, as one operator each: values, gradients and traces."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from mistlab.cost.kernels import rule_of  # noqa: E402
from mistlab.cost.layers import bytes_factor  # noqa: E402
from mistlab.engines.engine import ENGINES  # noqa: E402
from mistlab.graph.library import graph_of  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from runtime.models.families import model_of  # noqa: E402
from runtime.models.transformer import Block, let_fuse  # noqa: E402
from runtime.tracing.traced_operators import (  # noqa: E402
    TracedCall,
    kind_of,
    read_bytes,
    written_bytes,
)
from tests.runtime.worlds import workload  # noqa: E402

SMALL = {"layers": 1, "hidden": 64, "heads": 4, "ffn": 96, "sequence_length": 8}
MODELS = {
    "gpt": workload("gpt", biases=True, **SMALL),
    "gpt without biases": workload("gpt", **SMALL),
    "llama": workload("llama", kv_heads=2, **SMALL),
    "falcon": workload("falcon", biases=True, **SMALL),
    "bert": workload("bert", biases=True, **SMALL),
}


def drawn(work: Workload, *, fuses: bool) -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    block = model_of(work).blocks[0]
    assert isinstance(block, Block)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    if fuses:
        let_fuse(block)
    x = torch.randn(2, work.sequence_length, work.model.hidden, dtype=parameter.dtype)
    return block, x.requires_grad_()


def results(block: Block, x: Tensor) -> list[Tensor]:
    y = block(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
    given = [x.grad, *(one.grad for one in block.parameters())]
    return [y, *(one for one in given if one is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_a_block_makes_what_one_with_operators_apart_makes(name: str) -> None:
    own, plain = (results(*drawn(MODELS[name], fuses=fuses)) for fuses in (True, False))
    assert len(own) == len(plain) >= 8
    for one, other in zip(own, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt", "falcon", "bert"])
def test_gradients_are_those_of_differences(name: str) -> None:
    """In 64 bits, which norms by root mean squares do not have."""
    block, x = drawn(MODELS[name], fuses=True)
    block.double()
    wide = x.detach().double().requires_grad_()
    (gradient,) = torch.autograd.grad(block(wide).square().sum(), wide)
    torch.manual_seed(1)
    for _ in range(3):
        step = torch.randn_like(wide) * 1e-5
        with torch.no_grad():
            ends = [block(wide + sign * step).square().sum() for sign in (1, -1)]
        found = (gradient * step).sum()
        torch.testing.assert_close((ends[0] - ends[1]) / 2, found, rtol=1e-5, atol=1e-6)


class Moved(TorchDispatchMode):
    """Counts the bytes of operators of a residual's size, as a trace counts them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.names, self.moved = size, list[str](), {"forward": 0, "backward": 0}
        self.phase = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        call = TracedCall(operator=func, args=args, kwargs=kwargs or {}, result=result)
        if not call.works or kind_of(call) in ("matmul", "attention", "accumulate"):
            return result
        name = call.name
        if name.startswith(("mistlab.", "aten.add", "aten.native_layer_norm")):
            of_residual = [one for one in call.inputs if one.numel() == self.size]
            if of_residual:
                self.names.append(name)
                self.moved[self.phase] += int(read_bytes(call) + written_bytes(call))
        return result


@pytest.mark.parametrize("name", ["gpt", "llama", "falcon", "bert"])
def test_a_trace_sees_one_operator_each_and_moves_the_bytes_that_are_predicted(name: str) -> None:
    work = replace(MODELS[name], precision="bf16")
    block, x = drawn(work, fuses=True)
    with Moved(x.numel()) as moved:
        y = block(x)
        moved.phase = "backward"
        y.backward(torch.ones_like(y))
    assert "mistlab.norm_and_add_backward" in moved.names
    # The first norm of a decoder's block is behind no sum.
    alone = {"aten.native_layer_norm", "mistlab.rms_norm"}
    assert len([one for one in moved.names if one in alone]) == (name != "bert")
    sizes = {"b": 2, "s": work.sequence_length, "tp": 1, "h": work.model.hidden}
    sizes |= dict.fromkeys("nkdrf", 0)
    graph = graph_of(work).counts.block
    for phase, own in moved.moved.items():
        predicted = 0.0
        for one in graph.of_phase(phase):  # type: ignore[arg-type]
            if one.kind not in ("elementwise", "normalization"):
                continue
            rule = rule_of(one, graph, ENGINES["mistlab"].kernels, "flash")
            text = f"({one.read_bytes + one.written_bytes})*({bytes_factor(rule)})"
            predicted += eval(text, {"__builtins__": {}}, dict(sizes))
        # Vectors and numbers of rows are a few thousandths of what is moved in real models.
        few = 12 * (work.model.hidden + 2 * work.sequence_length) * 4
        assert own == pytest.approx(predicted, abs=few), phase
        assert few < 0.5 * own


@pytest.mark.parametrize("frozen", ["norms", "biases"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    block, x = drawn(MODELS["gpt"], fuses=True)
    chosen = [
        one
        for name, one in block.named_parameters()
        if ("norm" in name if frozen == "norms" else name.endswith("bias"))
    ]
    for one in chosen:
        one.requires_grad_(False)
    results(block, x)
    assert all(one.grad is None for one in chosen)
    assert x.grad is not None
