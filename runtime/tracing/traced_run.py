"""Runs a model on tokens of symbolic shape, to derive the shape of its output."""

from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher

from mistlab.graph.graph import Shape
from runtime.models.ranks import Size, construction, space_of, value_of
from runtime.tracing.symbolic_sizes import TraceError, expression_of


@dataclass(frozen=True, slots=True)
class SymbolicTensor:
    """A tensor's shape, in symbols and in the numbers behind them."""

    shape: Shape
    concrete_shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"symbolic shape {sympy.sstr(self.shape)}, concrete {self.concrete_shape}"


def tokens(batch: Size, sequence: Size) -> Tensor:
    """A tensor of tokens (batch, sequence) with a shape but no values."""
    with construction((batch, sequence)):
        return torch.empty(batch, sequence, dtype=torch.int64)


def run_symbolically(model: nn.Module, inputs: Tensor) -> SymbolicTensor:
    """Run a model's forward pass on an input that ``tokens`` made; returns the output's shape in
    symbols.
    """
    space = space_of(inputs.shape)
    if space is None:
        message = "the inputs have no symbolic size: make them with tokens(b, s) of symbols"
        raise TraceError(message)
    with space.fake_mode, enable_python_dispatcher(), torch.no_grad():
        output: Tensor = model(inputs)
    space.refuse_fixed("the model's own code")
    sizes = tuple(output.shape)
    return SymbolicTensor(tuple(map(expression_of, sizes)), tuple(map(value_of, sizes)))
