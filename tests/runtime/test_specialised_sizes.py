"""Code that turns a symbol into a number is refused, with the size and the place."""

import pytest

torch = pytest.importorskip("torch")

from runtime.tracing.symbolic_sizes import TraceError, symbols  # noqa: E402
from runtime.tracing.traced_run import run_symbolically, tokens  # noqa: E402


class Fixes(torch.nn.Module):
    def forward(self, x):
        return x[:, : int(x.shape[1])]


def test_a_size_made_a_number_is_named() -> None:
    b, s = symbols("b s", (4, 128))
    with pytest.raises(
        TraceError, match=r"size s \(sequence length\) was fixed to 128 .*test_specialised_sizes.py"
    ):
        run_symbolically(Fixes(), tokens(b, s))


def test_numbers_alone_are_refused() -> None:
    with pytest.raises(TraceError, match="no symbolic size"):
        run_symbolically(Fixes(), tokens(2, 3))
