"""Prints expressions as the source text of one NumPy function of columns of sizes.

Common parts are computed once, under a name. Of several NumPy functions the fastest is printed.
"""

from collections.abc import Mapping, Sequence

import sympy
from sympy.printing.numpy import NumPyPrinter

from mistlab.graph.sums import largest


def source_of(
    expressions: Sequence[sympy.Expr], columns: tuple[str, ...], constants: Mapping[str, int]
) -> str:
    """The source text of a function of ``columns`` that returns the values of some expressions."""
    substituted = [with_constants(e, constants) for e in expressions]
    free = {symbol.name for e in substituted for symbol in e.free_symbols}
    unknown = sorted(free - set(columns))
    if unknown:
        message = f"symbols {', '.join(unknown)} are neither columns nor constants"
        raise ValueError(message)
    printer = _Printer({"fully_qualified_modules": True, "inline": True})
    common, values = sympy.cse([_unevaluated(e) for e in substituted], list=False)
    lines = [f"def compiled({', '.join(columns)}):"]
    lines += [f"    {name} = {printer.doprint(value)}" for name, value in common]
    lines.append(f"    return [{', '.join(map(printer.doprint, values))}]")
    return "\n".join(lines)


def with_constants(expression: sympy.Expr, constants: Mapping[str, int]) -> sympy.Expr:
    """Replace the symbols that have constant values by numbers in an expression."""
    known = {
        symbol: sympy.Integer(constants[symbol.name])
        for symbol in expression.free_symbols
        if symbol.name in constants
    }
    if not known:
        return expression
    # With numbers in place of the model's sizes, fewer terms of a maximum can still be the largest.
    return sympy.expand(expression.subs(known)).replace(sympy.Max, lambda *terms: largest(terms))


class _Maximum(sympy.Function):  # type: ignore[misc]
    """SymPy's ``Max`` without simplification."""


class _Minimum(sympy.Function):  # type: ignore[misc]
    """SymPy's ``Min`` without simplification."""


_UNEVALUATED = {sympy.Max: _Maximum, sympy.Min: _Minimum}


def _unevaluated(expression: sympy.Basic) -> sympy.Basic:
    """Rebuild an expression such that its maxima and minima are not simplified.

    SymPy compares all terms of a maximum whenever it makes one, which takes most of the time of
    finding common parts.
    """
    if not expression.has(sympy.Max, sympy.Min):
        return expression
    parts = [_unevaluated(part) for part in expression.args]
    return _UNEVALUATED.get(expression.func, expression.func)(*parts)


class _Printer(NumPyPrinter):  # type: ignore[misc]
    """Prints expressions as NumPy source text, with maxima and case distinctions as two-argument
    functions, which are fastest.
    """

    def _print__Maximum(self, expression: sympy.Expr) -> str:  # noqa: N802
        return self._in_pairs("maximum", expression)

    def _print__Minimum(self, expression: sympy.Expr) -> str:  # noqa: N802
        return self._in_pairs("minimum", expression)

    def _in_pairs(self, function: str, expression: sympy.Expr) -> str:
        first, *others = map(self._print, expression.args)
        for other in others:
            first = f"numpy.{function}({first}, {other})"
        return str(first)

    def _print_Piecewise(self, expression: sympy.Expr) -> str:  # noqa: N802
        *choices, (last, _) = expression.args
        if last == 0 and len(choices) == 1:
            # Multiplying a value by a condition (0 or 1) takes a fifth of the time of
            # ``numpy.where``.
            ((value, condition),) = choices
            return f"(({self._print(value)})*({self._print(condition)}))"
        text = self._print(last)
        for value, condition in reversed(choices):
            text = f"numpy.where({self._print(condition)}, {self._print(value)}, {text})"
        return str(text)
