"""Finds the comparisons of sizes on which traced code branched, and the divisions it relied on.

PyTorch notes a guard for each comparison. Most guards hold for all sizes (a product of sizes is not
less than one of them) and are dropped. The others say for which sizes the graph is valid, and are
kept with the graph.
"""

import sympy
from torch.utils._sympy.functions import Mod, PythonMod

from runtime.sizes import SizeSpace


def assumptions_of(space: SizeSpace) -> list[str]:
    """The guards that do not hold for all sizes of at least two, in named symbols."""
    guards = {guard.expr for guard in space.guards if not always(guard.expr, at_least=2)}
    named = {space.named(guard) for guard in guards} - {sympy.true}
    return sorted(set(map(str, named)) - _stated(space))


def conditions_of(space: SizeSpace) -> list[tuple[sympy.Expr, sympy.Expr]]:
    """The divisions that must have no remainder: pairs of a size and its divisor."""
    found = list(space.conditions)
    for guard in space.guards:
        if isinstance(guard.expr, sympy.Eq) and isinstance(guard.expr.lhs, Mod | PythonMod):
            size, divisor = map(space.named, guard.expr.lhs.args)
            if not _divides(size, divisor):
                found.append((size, divisor))
    return list(dict.fromkeys(found))


def _stated(space: SizeSpace) -> set[str]:
    return {f"Eq(Mod({size}, {divisor}), 0)" for size, divisor in conditions_of(space)}


def always(guard: sympy.Basic, *, at_least: int) -> bool:
    """Whether a comparison is known to hold for all sizes from ``at_least`` on."""
    if not isinstance(guard, sympy.core.relational.Relational):
        return bool(guard == sympy.true)
    left, right = (_without_remainders(side) for side in (guard.lhs, guard.rhs))
    above = {symbol: symbol + at_least for symbol in guard.free_symbols}
    difference = sympy.expand((left - right).xreplace(above))
    if difference == 0:
        return isinstance(guard, sympy.Eq | sympy.Ge | sympy.Le)
    signs = {sympy.sign(c) for c in difference.as_coefficients_dict().values()}
    # All terms have one sign, and one term has no symbol: the difference is never zero.
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
    """Whether ``size / divisor`` is a polynomial with whole coefficients."""
    quotient = sympy.cancel(size / divisor)
    if not quotient.is_polynomial(*quotient.free_symbols):
        return False
    coefficients = sympy.expand(quotient).as_coefficients_dict().values()
    return all(coefficient.is_Integer for coefficient in coefficients)
