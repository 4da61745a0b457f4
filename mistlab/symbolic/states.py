"""Expressions for bytes of weights, gradients and optimizer state, by ZeRO level and ratio.

The engine says how many bytes a parameter takes (``mistlab.engines.engine_memory``). A ratio is a
share of the rank's bytes of blocks after sharding. The states of embedding and head stay on the
device, because they are needed first and last in every pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import sympy

from mistlab.engines.engine_memory import EngineMemory
from mistlab.symbolic.symbols import choice_symbol, size_symbol
from mistlab.values.dimensions import DIMENSIONS
from mistlab.values.mesh import AXES, GROUPS, STATE_AXES, Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of one kind of state on one rank, on the device and on the host."""

    device: sympy.Expr
    host: sympy.Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Numbers of parameters on one rank: all of them, and those of experts among them.

    Other ranks have the same experts than those that have the same other parameters.
    """

    every: sympy.Expr
    experts: sympy.Expr

    def __add__(self, other: Self) -> Self:
        return type(self)(every=self.every + other.every, experts=self.experts + other.experts)

    def times(self, factor: sympy.Expr) -> Self:
        """Each number, multiplied by a factor."""
        return type(self)(every=self.every * factor, experts=self.experts * factor)


def weights(blocks: Parameters, ends: Parameters, memory: EngineMemory) -> States:
    """Bytes of weights, which are sharded over data-parallel ranks from ZeRO-3 on."""
    return _states(blocks, ends, memory.weight, level=3, ratio="ww")


def gradients(blocks: Parameters, ends: Parameters, memory: EngineMemory) -> States:
    """Bytes of accumulated gradients, which are sharded from ZeRO-2 on."""
    return _states(blocks, ends, memory.gradient, level=2, ratio="wg")


def optimizer(blocks: Parameters, ends: Parameters, memory: EngineMemory) -> States:
    """Bytes of optimizer state, which is sharded from ZeRO-1 on."""
    return _states(blocks, ends, memory.optimizer, level=1, ratio="wo")


def sharded(whole: Parameters, *, level: int) -> sympy.Expr:
    """A rank's part of a state that data-parallel ranks divide from a ZeRO level on.

    Ranks that have the same experts divide the experts' state.
    """
    zero, ranks = choice_symbol("z"), ranks_that_share()
    same_experts = ranks * size_symbol("tp") / (size_symbol("ep") * size_symbol("et"))
    parts = (whole.every - whole.experts) / ranks + whole.experts / same_experts
    return sympy.Piecewise((parts, zero >= level), (whole.every, True))


def ranks_that_share() -> sympy.Expr:
    """The number of ranks that divide states: those of group ``gather``."""
    others = [axis for name, axis in STATE_AXES.items() if name not in GROUPS["gather"]]
    return _degree(AXES.values()) / _degree(others)


def _degree(axes: Iterable[Axis]) -> sympy.Expr:
    return sympy.Mul(*(choice_symbol(DIMENSIONS[axis.dimension].symbol) for axis in axes))


def _states(blocks: Parameters, ends: Parameters, each: float, *, level: int, ratio: str) -> States:
    local = sharded(blocks, level=level) * each
    kept = sharded(ends, level=level) * each
    share = choice_symbol(ratio)
    return States(device=local * (1 - share) + kept, host=local * share)
