"""The branch of RMSNorm that CUDA takes gives torch's fused operators what they ask for."""

from collections.abc import Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch._ops import OpOverload  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from runtime.models import operators  # noqa: E402

EPSILON = 0.1


class AsOnCuda(TorchFunctionMode):
    """All tensors say that they are CUDA's."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        is_cuda = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
        return True if func == is_cuda else func(*args, **(kwargs or {}))


class Named(TorchDispatchMode):
    """Notes the arguments of an operator by its schema's names, and makes zeros of its shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, Any] = {}

    def __torch_dispatch__(
        self, operator: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        assert operator is torch.ops.aten._fused_rms_norm_backward.default
        names = [one.name for one in operator._schema.arguments]
        self.given = dict(zip(names, args, strict=True))
        return torch.zeros_like(args[1]), torch.zeros_like(args[4])


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(2, 5, 16, generator=generator) for _ in range(2))
    return x, gradient, torch.rand(16, generator=generator) + 0.5


def test_the_fused_norm_is_the_own_formulas() -> None:
    """torch's operator runs on a CPU too; a large epsilon shows."""
    x, _, weight = drawn()
    own = operators.rms_norm(x, weight, EPSILON)
    with AsOnCuda():
        fused = operators._rms_norm(x, weight, EPSILON)
    for one, other in zip(own, fused, strict=True):
        torch.testing.assert_close(one, other.view_as(one), rtol=1e-6, atol=1e-6)


def test_the_fused_backward_gets_each_argument_in_its_place() -> None:
    """It runs on CUDA alone; its schema says what is what."""
    x, gradient, weight = drawn()
    reciprocal = torch.rand(2, 5, 1)
    named = Named()
    with AsOnCuda(), named:
        operators.rms_norm_backward.__wrapped__(gradient, x, reciprocal, weight)
    given = named.given
    assert list(given.pop("normalized_shape")) == [16]
    assert given.pop("output_mask") == [True, True]
    expected = {"grad_out": gradient, "input": x, "rstd": reciprocal, "weight": weight}
    assert set(given) == set(expected)
    assert all(given[name] is tensor for name, tensor in expected.items())
