"""Operators of this package are functions where nobody sees them, else operators."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from runtime.models import operators  # noqa: E402
from runtime.models.operators import RMSNormed, SwiGLU, rms_norm, swiglu  # noqa: E402
from runtime.models.ranks import is_watched  # noqa: E402


class Seen(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(operator._schema.name)
        return operator(*args, **(kwargs or {}))


def both_passes(x: Tensor, weight: Tensor) -> Tensor:
    loss = SwiGLU.apply(RMSNormed.apply(x, weight, 1e-5)[0]).sum()
    loss.backward()
    return loss


def drawn() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 3, 8).requires_grad_(), torch.rand(8).requires_grad_()


def test_a_trace_sees_each_as_one_operator() -> None:
    with Seen() as seen:
        both_passes(*drawn())
    own = [name for name in seen.names if name.startswith("mistlab::")]
    assert own == [f"mistlab::{n}" for n in ("rms_norm", "swiglu", "swiglu_backward")] + [
        "mistlab::rms_norm_backward"
    ]


def test_nobody_pays_for_an_operator_that_nobody_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """No way through the dispatcher: the operator itself is never called."""
    for one in (rms_norm, swiglu, operators.rms_norm_backward, operators.swiglu_backward):
        assert isinstance(one.operator, torch.library.CustomOpDef)  # type: ignore[attr-defined]
    called: list[object] = []
    plain: Callable[..., Any] = torch.library.CustomOpDef.__call__

    def noted(self: Any, *arguments: Any, **named: Any) -> Any:
        called.append(self)
        return plain(self, *arguments, **named)

    monkeypatch.setattr(torch.library.CustomOpDef, "__call__", noted)
    both_passes(*drawn())
    assert not called
    with Seen():
        both_passes(*drawn())
    assert len(called) == 4


def test_values_and_gradients_are_the_same_either_way() -> None:
    found = []
    for watched in (False, True):
        x, weight = drawn()
        if watched:
            with Seen():
                loss = both_passes(x, weight)
        else:
            loss = both_passes(x, weight)
        found.append((loss, x.grad, weight.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_tensors_without_values_are_watched_outside_of_their_mode_too() -> None:
    with FakeTensorMode():
        fake = torch.empty(2, 8)
        assert is_watched(fake)
    assert is_watched(fake)
    assert not is_watched(torch.empty(2))
    assert not is_watched(torch.nn.Parameter(torch.empty(2)))
    assert swiglu(fake).shape == (2, 4)
