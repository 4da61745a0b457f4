"""Expressions for bytes of weights, gradients and optimizer state, by ZeRO level and ratio.

The engine says how many bytes a parameter takes (``mistlab.engines.engine_memory``). A ratio is a
share of the rank's bytes of blocks after sharding. The states of embedding and head stay on the
device, because they are needed first and last in every pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from mistlab.engines.engine_memory import EngineMemory
from mistlab.symbolic.lazily import sympy
from mistlab.symbolic.symbols import choice_symbol
from mistlab.values.dimensions import DIMENSIONS
from mistlab.values.mesh import AXES, GROUPS


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of one kind of state on one rank, on the device and on the host."""

    device: sympy.Expr
    host: sympy.Expr


def weights(blocks: sympy.Expr, ends: sympy.Expr, memory: EngineMemory) -> States:
    """Bytes of weights, which are sharded over data-parallel ranks from ZeRO-3 on."""
    return _states(blocks * memory.weight, ends * memory.weight, level=3, ratio="ww")


def gradients(blocks: sympy.Expr, ends: sympy.Expr, memory: EngineMemory) -> States:
    """Bytes of accumulated gradients, which are sharded from ZeRO-2 on."""
    return _states(blocks * memory.gradient, ends * memory.gradient, level=2, ratio="wg")


def optimizer(blocks: sympy.Expr, ends: sympy.Expr, memory: EngineMemory) -> States:
    """Bytes of optimizer state, which is sharded from ZeRO-1 on."""
    return _states(blocks * memory.optimizer, ends * memory.optimizer, level=1, ratio="wo")


def sharded(whole: sympy.Expr, *, level: int) -> sympy.Expr:
    """A rank's part of a state that data-parallel ranks divide from a ZeRO level on."""
    ranks, zero = ranks_that_share(), choice_symbol("z")
    return whole / sympy.Piecewise((ranks, zero >= level), (1, True))


def ranks_that_share() -> sympy.Expr:
    """The number of ranks that divide states: those of group ``gather``."""
    return sympy.Mul(*(choice_symbol(DIMENSIONS[name].symbol) for name in _axes_that_share()))


def _axes_that_share() -> list[str]:
    return [AXES[axis].dimension for axis in GROUPS["gather"]]


def _states(blocks: sympy.Expr, ends: sympy.Expr, *, level: int, ratio: str) -> States:
    local, share = sharded(blocks, level=level), choice_symbol(ratio)
    return States(device=local * (1 - share) + sharded(ends, level=level), host=local * share)
