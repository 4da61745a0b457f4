"""Bytes of weights, gradients and optimizer state under every ZeRO level and offload ratio.

Mixed precision as the published systems do it: two bytes a weight and a gradient, twelve of
optimizer state (32-bit master weight and two Adam moments). In full precision the weight is its
own master. A ratio takes its share of the rank's bytes of blocks after sharding; the embedding and
the head, whose states are needed first and last in every pass, stay on the device.
"""

from dataclasses import dataclass

import sympy

from mistlab.symbolic.symbols import choice_symbol
from mistlab.workload import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """Bytes a parameter."""

    weight: int
    gradient: int
    optimizer: int


HALF = StateSizes(weight=2, gradient=2, optimizer=12)
SINGLE = StateSizes(weight=4, gradient=4, optimizer=8)


def sizes_of(precision: Precision) -> StateSizes:
    """The bytes a parameter that training in a precision takes."""
    return SINGLE if precision == "fp32" else HALF


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of one kind of state on one rank, on the device and on the host."""

    device: sympy.Expr
    host: sympy.Expr


def weights(blocks: sympy.Expr, ends: sympy.Expr, sizes: StateSizes) -> States:
    """Weights: sharded over data-parallel ranks from ZeRO-3."""
    return _states(blocks * sizes.weight, ends * sizes.weight, level=3, ratio="ww")


def gradients(blocks: sympy.Expr, ends: sympy.Expr, sizes: StateSizes) -> States:
    """Accumulated gradients: sharded from ZeRO-2."""
    return _states(blocks * sizes.gradient, ends * sizes.gradient, level=2, ratio="wg")


def optimizer(blocks: sympy.Expr, ends: sympy.Expr, sizes: StateSizes) -> States:
    """Optimizer state: sharded from ZeRO-1."""
    return _states(blocks * sizes.optimizer, ends * sizes.optimizer, level=1, ratio="wo")


def sharded(whole: sympy.Expr, *, level: int) -> sympy.Expr:
    """A rank's part of what data-parallel ranks share out from a ZeRO level on."""
    data_parallel, zero = choice_symbol("dp"), choice_symbol("z")
    return whole / sympy.Piecewise((data_parallel, zero >= level), (1, True))


def _states(blocks: sympy.Expr, ends: sympy.Expr, *, level: int, ratio: str) -> States:
    local, share = sharded(blocks, level=level), choice_symbol(ratio)
    return States(device=local * (1 - share) + sharded(ends, level=level), host=local * share)
