"""Linear layers add the gradients of their weights up themselves, beside the reduction of their
input's gradient."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from mistlab.plan.plan import Plan  # noqa: E402
from runtime.comm.group import Pending  # noqa: E402
from runtime.engine.streams.device_streams import SimulatedStreams  # noqa: E402
from runtime.engine.streams.lanes import StreamedRanks  # noqa: E402
from runtime.engine.work.products import add_product_, add_up_inside, adding_up  # noqa: E402
from runtime.models.config import ModelConfig, config_of, structure_of  # noqa: E402
from runtime.models.transformer import Block  # noqa: E402
from tests.runtime.worlds import alone, sequences, stage, workload  # noqa: E402

Event = str


class Ranks:
    """A group of two ranks that notes when its reductions begin and are waited for."""

    size, rank = 2, 0

    def __init__(self, events: list[Event]) -> None:
        self.events = events

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Pending:
        self.events.append("begins")
        return self  # type: ignore[return-value]

    def is_ready(self) -> bool:
        return True

    def finish(self) -> None:
        self.events.append("ends")


class Operators(TorchDispatchMode):
    """Notes products and sums by their results' shapes."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.addmm_,
            torch.ops.aten.add_,
        ):
            name = operator.overloadpacket.__name__
            self.events.append(f"{name} {tuple(result.shape)}")
        return result


def now(product: Callable[[], object]) -> None:
    product()


@pytest.mark.parametrize("biased", [False, True])
def test_gradients_are_added_to_those_that_are_there(biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, gradient, before = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((6, 3), (5, 3), (5,), (6, 5), (5, 3))
    )
    found, expected = [], []
    for made, multiply in ((expected, nn.functional.linear), (found, adding_up)):
        leaves = [one.clone().requires_grad_() for one in (x, weight, bias)]
        leaves[1].grad = place = before.clone()
        more = {} if multiply is nn.functional.linear else {"schedule": now}
        y = multiply(leaves[0], leaves[1], leaves[2] if biased else None, **more)
        y.backward(gradient)
        assert leaves[1].grad is place
        made += [y, *(one.grad for one in leaves if one.grad is not None)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda = True


def test_a_gpu_adds_products_of_16_bits_to_sums_of_32(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS rounds nothing; the operator that asks for it has no kernel for CPUs."""
    schema = torch.ops.aten.addmm.dtype_out._schema

    def product(total: Tensor, left: Tensor, right: Tensor, dtype: Any, *, out: Tensor) -> Tensor:
        return out.copy_(total + left.to(dtype) @ right.to(dtype))

    names = [argument.name for argument in schema.arguments]
    assert names[:4] == ["self", "mat1", "mat2", "out_dtype"]
    assert "out" in names
    monkeypatch.setattr(torch.ops.aten.addmm, "dtype_out", product)
    generator = torch.Generator().manual_seed(0)
    before, left, right = (
        torch.randn(*shape, generator=generator) for shape in ((5, 3), (5, 6), (6, 3))
    )
    left, right = left.bfloat16(), right.bfloat16()
    total = before.clone().as_subclass(OnGpu)
    add_product_(total, left, right)
    torch.testing.assert_close(total.as_subclass(Tensor), before + left.float() @ right.float())


def test_two_products_with_one_weight_add_to_one_place() -> None:
    """As embeddings tied to a head do, or a layer that is used twice."""
    x, weight = torch.randn(4, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    parameter = nn.Parameter(weight)
    parameter.grad = torch.zeros_like(weight)
    x.requires_grad_()
    for factor in (1.0, 2.0):
        adding_up(x, parameter, None, now).mul(factor).sum().backward()
    torch.testing.assert_close(parameter.grad, 3 * x.sum(0).expand(5, 3))


def passes(family: str) -> list[Event]:
    """Products and reductions of a block's backward pass on one of two ranks."""
    work = workload(family)
    config: ModelConfig = config_of(work, tensor_parallel=2)
    events: list[Event] = []
    streams = SimulatedStreams()
    ranks = StreamedRanks(Ranks(events), streams)  # type: ignore[arg-type]
    rotary = None
    if structure_of(work.model).position == "rotary":
        from runtime.models.attention import RotaryTables  # noqa: PLC0415

        rotary = RotaryTables(config)
    block = Block(config, structure_of(work.model), ranks, rotary)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.zeros_like(parameter)
    add_up_inside(block, ranks)
    x = torch.randn(2, work.sequence_length, work.model.hidden, requires_grad=True)
    y = block(x)
    events.clear()
    with Operators(events):
        y.backward(torch.ones_like(y))
    assert not ranks._put_off
    return events


# A block of 32 channels, 4 heads and 64 inner ones, over two ranks: query, key and value have 48
# rows, and the inner product as many as its activation takes.
@pytest.mark.parametrize(("family", "inner"), [("gpt", 32), ("llama", 64)])
def test_weights_gradients_are_made_while_their_inputs_is_reduced(family: str, inner: int) -> None:
    mine = [one for one in passes(family) if not one.startswith("add_ ")]
    assert mine == [
        *("addmm_ (32, 32)", "mm (32, 32)", "mm (32, 32)"),
        *("begins", f"addmm_ ({inner}, 32)", "ends"),
        *("addmm_ (32, 16)", "mm (32, 16)", "mm (32, 32)"),
        *("begins", "addmm_ (48, 32)", "ends"),
    ]


def test_a_parallel_block_makes_both_beside_its_one_reduction() -> None:
    events = passes("falcon")
    begins, ends = events.index("begins"), events.index("ends")
    assert sorted(events[begins + 1 : ends]) == ["addmm_ (32, 32)", "addmm_ (48, 32)"]
    assert events.count("begins") == 1


@pytest.mark.parametrize("family", ["gpt", "llama", "falcon"])
def test_no_weights_gradient_is_made_by_itself(family: str) -> None:
    """A backward pass of the executor adds nothing to weights of linear layers, and makes no other
    tensor of their shapes; unlike sizes tell weights from activations."""
    sizes = {"hidden": 24, "ffn": 40, "vocab": 56, "heads": 2, "sequence_length": 9}
    work = workload(family, layers=1, batch=2, **sizes)
    executor = alone(work, Plan(micro_batches=1, stages=(stage(1),)), "eager")
    weights = {
        tuple(one.shape)
        for layer in (1, 2)
        for one in executor.layers[layer].module.parameters()
        if one.dim() > 1
    }
    events: list[Event] = []
    with Operators(events):
        whole = sequences(work, 0)
        executor.iterate([(whole[:, :-1], whole[:, 1:])])
    made = {one for shape in weights for one in events if one == f"mm {shape}"}
    added = {one for shape in weights for one in events if one == f"add_ {shape}"}
    assert made == set()
    # The table of tokens has the shape of the head's weight.
    assert added == {"add_ (56, 24)"}
    assert {f"addmm_ {shape}" for shape in weights} <= set(events)
