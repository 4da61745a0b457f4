"""Named symbols for a model's sizes, with which PyTorch computes shapes, and the assumptions that a
trace makes about them.
"""

import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Mod, PythonMod

from mistlab.core.values import InputError
from mistlab.graph.symbols import size_symbol
from runtime.models.ranks import Size, value_of

# Named symbols for the sizes of a model, with which PyTorch computes shapes.
#
# A ``SizeSpace`` is PyTorch's shape environment, with names for its symbols and a fake-tensor mode.
# A model built with these sizes has parameters of symbolic shape, without storage.


class TraceError(InputError):
    """A model cannot be traced; the message names the operator or size, the place in the code, and
    a remedy.
    """


class SizeSpace(ShapeEnv):
    """The named sizes of one trace; each also has a number, by which traced code branches."""

    def __init__(self) -> None:
        # Operators whose result depends on values raise an error that names them, where they are
        # called.
        super().__init__(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.fake_mode = FakeTensorMode(shape_env=self, allow_non_fake_inputs=False)
        self.names: dict[sympy.Symbol, sympy.Expr] = {}
        self.conditions: list[tuple[sympy.Expr, sympy.Expr]] = []

    def size(self, name: str, value: int) -> Size:
        """A new size ``name``; where code needs a number it gets ``value``."""
        return self._symbol(size_symbol(name), value)

    def multiple(self, name: str, value: int, of: Size) -> Size:
        """A new size that is a multiple of the size ``of``: a new symbol times ``of``.

        Expressions then stay polynomials. With a plain symbol they would have integer divisions and
        remainders.
        """
        divisor = expression_of(of)
        self.conditions.append((size_symbol(name), divisor))
        return of * self._symbol(size_symbol(name) / divisor, value // value_of(of))

    def beyond(self, name: str, value: int, other: Size) -> Size:
        """A new size that is larger than the size ``other``: a new symbol plus ``other``."""
        difference = size_symbol(name) - expression_of(other)
        return other + self._symbol(difference, value - value_of(other))

    def _symbol(self, name: sympy.Expr, value: int) -> Size:
        # With symbolic sizes a look-up in the fake mode's cache takes longer than running the
        # operator.
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
        """An expression of PyTorch's symbols, written with the names of this space.

        Integer divisions become plain divisions, because the trace's conditions exclude remainders.
        Every size counts as at least 1.
        """
        plain = expression.replace(FloorDiv, lambda base, divisor: base / divisor)
        plain = plain.replace(CleanDiv, lambda base, divisor: base / divisor)
        plain = plain.replace(Max, _larger)
        return sympy.expand(plain.xreplace(self.names))

    def refuse_fixed(self, culprit: str, where: str = "") -> None:
        """Raise an error if traced code has fixed a symbol to a number, or to another symbol."""
        for symbol, name in self.names.items():
            if symbol not in self.replacements:
                continue
            places = [str(guard.sloc) for guard in self.guards if symbol in guard.expr.free_symbols]
            seen = where or (f" {places[-1]}" if places else "")
            message = (
                f"size {name}{_MEANINGS.get(str(name), '')} was fixed to "
                f"{self.replacements[symbol]} by {culprit}{seen}: compute with the size itself, "
                "not with int(), range() or a comparison on it"
            )
            raise TraceError(message)


_MEANINGS = {
    "b": " (batch size)",
    "s": " (sequence length)",
    "tp": " (tensor-parallel degree)",
}


def symbols(names: str, values: Sequence[int]) -> tuple[Size, ...]:
    """New named sizes, in a space of their own: ``b, s = symbols("b s", (4, 128))``."""
    space = SizeSpace()
    return tuple(space.size(name, value) for name, value in zip(names.split(), values, strict=True))


def expression_of(size: Size) -> sympy.Expr:
    """A size as a SymPy expression, written with the names of the trace's sizes."""
    if isinstance(size, int):
        return sympy.Integer(size)
    space = size.node.shape_env
    assert isinstance(space, SizeSpace)
    return space.named(size.node.expr)


def _larger(*terms: sympy.Expr) -> sympy.Expr:
    others = [term for term in terms if term != 1]
    return others[0] if len(others) == 1 else sympy.Max(*others)


# Errors that end a trace, which name the operator and the line of the user's code.


_OURS = Path(__file__).resolve().parents[1]
_TORCH = Path(torch.__file__).resolve().parent


def refusal(operator: str, module: str, error: Exception) -> TraceError:
    """The error to raise for an operator that failed inside the module ``module``."""
    inside = f" in module {module!r}" if module else ""
    reason = _reason(error)
    return TraceError(f"operator {operator}{inside} cannot be traced: {reason}{running_place()}")


def running_place() -> str:
    """The innermost line of the user's code that is running."""
    return _place(traceback.extract_stack())


def failure(error: Exception) -> TraceError:
    """The error to raise if a model's own code raised ``error``."""
    where = _place(traceback.extract_tb(error.__traceback__))
    return TraceError(
        f"the model's own code raised an error: {_reason(error)}{where}: correct this code, or "
        "trace with a --sequence-length that it takes"
    )


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    if "DataDependent" in kind or "DynamicOutputShape" in kind:
        return (
            "its result depends on the values of a tensor, and a trace has only sizes: "
            "compute without .item(), a mask as an index, or an if on a tensor"
        )
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{kind}: {first}" if first else kind


def _place(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost frame of the stack that belongs neither to torch nor to the tracer."""
    for frame in reversed(list(frames)):
        path = Path(frame.filename).resolve()
        if not path.is_relative_to(_TORCH) and not path.is_relative_to(_OURS / "tracing"):
            return f", at {frame.filename}:{frame.lineno} ({frame.line})"
    return ""


# Collects the comparisons of sizes by which traced code branched, and the divisibility that it
# assumes.
#
# PyTorch records a guard for each comparison. Most guards hold for all sizes (a product of sizes is
# at least each of them), and are dropped. The other guards say for which sizes the graph is valid,
# and are stored with the graph.


def assumptions_of(space: SizeSpace) -> list[str]:
    """The guards that do not hold for all sizes of at least 2, written with the names of sizes."""
    guards = {guard.expr for guard in space.guards if not always(guard.expr, at_least=2)}
    named = {space.named(guard) for guard in guards} - {sympy.true}
    return sorted(set(map(str, named)) - _stated(space))


def conditions_of(space: SizeSpace) -> list[tuple[sympy.Expr, sympy.Expr]]:
    """The divisibility that traced code assumes: pairs of a size and its divisor."""
    divisions = list(space.conditions)
    for guard in space.guards:
        if isinstance(guard.expr, sympy.Eq) and isinstance(guard.expr.lhs, Mod | PythonMod):
            size, divisor = map(space.named, guard.expr.lhs.args)
            if not _divides(size, divisor):
                divisions.append((size, divisor))
    return list(dict.fromkeys(divisions))


def _stated(space: SizeSpace) -> set[str]:
    return {f"Eq(Mod({size}, {divisor}), 0)" for size, divisor in conditions_of(space)}


def always(guard: sympy.Basic, *, at_least: int) -> bool:
    """Whether a comparison provably holds for all sizes of at least ``at_least``."""
    if not isinstance(guard, sympy.core.relational.Relational):
        return bool(guard == sympy.true)
    left, right = (_without_remainders(side) for side in (guard.lhs, guard.rhs))
    above = {symbol: symbol + at_least for symbol in guard.free_symbols}
    difference = sympy.expand((left - right).xreplace(above))
    if difference == 0:
        return isinstance(guard, sympy.Eq | sympy.Ge | sympy.Le)
    signs = {sympy.sign(c) for c in difference.as_coefficients_dict().values()}
    # A difference whose terms all have the same sign, one of them a constant, is never zero.
    apart = len(signs) == 1 and difference.subs(dict.fromkeys(difference.free_symbols, 0)) != 0
    if isinstance(guard, sympy.Ne):
        return apart
    if isinstance(guard, sympy.Gt | sympy.Ge):
        return signs == {1} and (apart or isinstance(guard, sympy.Ge))
    if isinstance(guard, sympy.Lt | sympy.Le):
        return signs == {-1} and (apart or isinstance(guard, sympy.Le))
    return False


def _without_remainders(expression: sympy.Expr) -> sympy.Expr:
    return expression.replace(lambda e: isinstance(e, Mod | PythonMod), _remainder)


def _remainder(mod: sympy.Expr) -> sympy.Expr:
    size, divisor = mod.args
    if _divides(size, divisor):
        return sympy.Integer(0)
    above = {symbol: symbol + 2 for symbol in mod.free_symbols}
    excess = sympy.expand((divisor - size).xreplace(above))
    smaller = all(c > 0 for c in excess.as_coefficients_dict().values())
    return size if smaller else mod


def _divides(size: sympy.Expr, divisor: sympy.Expr) -> bool:
    """Whether ``size / divisor`` is a polynomial with integer coefficients."""
    quotient = sympy.cancel(size / divisor)
    if not quotient.is_polynomial(*quotient.free_symbols):
        return False
    coefficients = sympy.expand(quotient).as_coefficients_dict().values()
    return all(coefficient.is_Integer for coefficient in coefficients)
