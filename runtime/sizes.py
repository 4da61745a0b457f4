"""Symbols with names for the sizes of a model, in a form that PyTorch can compute with.

A ``SizeSpace`` is PyTorch's shape environment, with names for its symbols and a fake-tensor mode. A
model built with these sizes has parameters of symbolic shape, without storage.
"""

from collections.abc import Sequence
from typing import Any

import sympy
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max

from mistlab.symbolic.symbols import size_symbol
from mistlab.values.errors import InputError
from runtime.models.sizes import Size, value_of


class TraceError(InputError):
    """A model cannot be traced; the message names the operator or size, the place and a remedy."""


class SizeSpace(ShapeEnv):
    """Named sizes of one trace; each has a value that decides the branches of traced code."""

    def __init__(self) -> None:
        # An operator whose result depends on values is refused, by name, where it is called.
        super().__init__(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.fake_mode = FakeTensorMode(shape_env=self, allow_non_fake_inputs=False)
        self.names: dict[sympy.Symbol, sympy.Expr] = {}
        self.conditions: list[tuple[sympy.Expr, sympy.Expr]] = []

    def size(self, name: str, value: int) -> Size:
        """A new symbol ``name``; ``value`` stands for it where code needs a number."""
        return self._symbol(size_symbol(name), value)

    def multiple(self, name: str, value: int, of: Size) -> Size:
        """A multiple of another size: a new symbol for the quotient, times the other size.

        Expressions in the size stay polynomials. With a plain symbol they would contain whole
        divisions and remainders.
        """
        divisor = expression_of(of)
        self.conditions.append((size_symbol(name), divisor))
        return of * self._symbol(size_symbol(name) / divisor, value // value_of(of))

    def beyond(self, name: str, value: int, other: Size) -> Size:
        """A size above another: a new symbol for the difference, plus the other size."""
        difference = size_symbol(name) - expression_of(other)
        return other + self._symbol(difference, value - value_of(other))

    def _symbol(self, name: sympy.Expr, value: int) -> Size:
        # With symbols, finding out that an operator ran before takes longer than running it again.
        self.fake_mode.cache_enabled = False
        source = ConstantSource(str(name))
        symbol = self.create_symbol(
            value,
            source=source,
            dynamic_dim=DimDynamic.DYNAMIC,
            constraint_dim=None,
            do_not_specialize_zero_one=True,
        )
        self.names[symbol] = name
        size: Any = self.create_symintnode(symbol, hint=value, source=source)
        return size  # type: ignore[no-any-return]

    def named(self, expression: sympy.Expr) -> sympy.Expr:
        """An expression in PyTorch's symbols, rewritten in this space's names.

        Whole divisions become plain divisions: the trace's conditions say that there is no
        remainder. Every size is taken to be at least one.
        """
        plain = expression.replace(FloorDiv, lambda base, divisor: base / divisor)
        plain = plain.replace(CleanDiv, lambda base, divisor: base / divisor)
        plain = plain.replace(Max, _larger)
        return sympy.expand(plain.xreplace(self.names))

    def refuse_fixed(self, culprit: str, place: str = "") -> None:
        """Raise if traced code has fixed a symbol to a number, or to another symbol."""
        for symbol, name in self.names.items():
            if symbol not in self.replacements:
                continue
            places = [str(guard.sloc) for guard in self.guards if symbol in guard.expr.free_symbols]
            seen = place or (f" {places[-1]}" if places else "")
            message = (
                f"size {name} was fixed to {self.replacements[symbol]} by {culprit}{seen}: "
                "compute with the size itself, not with int(), range() or a comparison on it"
            )
            raise TraceError(message)


def symbols(names: str, values: Sequence[int]) -> tuple[Size, ...]:
    """Named sizes in a new space: ``b, s = symbols("b s", (4, 128))``."""
    space = SizeSpace()
    return tuple(space.size(name, value) for name, value in zip(names.split(), values, strict=True))


def expression_of(size: Size) -> sympy.Expr:
    """A size as a SymPy expression in the names of its space."""
    if isinstance(size, int):
        return sympy.Integer(size)
    space = size.node.shape_env
    assert isinstance(space, SizeSpace)
    return space.named(size.node.expr)


def _larger(*terms: sympy.Expr) -> sympy.Expr:
    others = [term for term in terms if term != 1]
    return others[0] if len(others) == 1 else sympy.Max(*others)
