"""The number of training steps until the mean squared gradient falls to a goal, from convergence
bounds in the literature.

The bounds are for smooth functions that need not be convex, with noise of standard deviation
``noise`` on each rank's gradients and ranks whose data differ by ``unlike``. After T steps, each
kind of reduction reaches ``noise / sqrt(n T)``, as averaging in every step does, and a transient
term that falls faster. Constants that bounds leave open (smoothness, distance from the optimum) are
1. So figures compare kinds; they are no forecast of a loss.
"""

import math
from dataclasses import dataclass, field

from mistlab.core.values import Checked, bounded
from mistlab.reduction.graphs import contraction, contraction_of
from mistlab.reduction.reduction_costs import Reduction

ASSUMPTIONS = (
    "bounds for smooth functions that need not be convex; smoothness and the first distance from "
    "the optimum are 1; compare kinds by them, not losses"
)
# The largest number of training steps that the search for the goal tries.
MOST_STEPS = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise(Checked):
    """The noise of gradients that convergence bounds assume: the standard deviation on each rank,
    and how much the ranks' data differ.
    """

    noise: float = field(default=1.0, metadata=bounded(minimum=0))
    unlike: float = field(default=0.0, metadata=bounded(minimum=0))

    def linear_term(self, ranks: int, steps: float) -> float:
        """The term of the convergence bound that all kinds of reduction share, ``noise / sqrt(ranks
        x steps)``: with twice the ranks it takes half the steps.
        """
        return self.noise / math.sqrt(ranks * steps)

    def transient_term(self, how: Reduction, ranks: int, values: int, steps: float) -> float:
        """The term of the convergence bound that a kind of reduction adds: for ranks' distance from
        their average, drift between exchanges, and compression errors.
        """
        # With an asynchronous server, gradients are computed from weights that are as many steps
        # old as there are other ranks.
        whole = (ranks if how.asynchronous else 1) / steps
        spread = 0.0
        if how.kind == "gossip":
            offsets = how.offsets and how.neighbours(ranks)
            rate = contraction_of(offsets, ranks) if offsets else contraction(how.topology, ranks)
            gap = 1 - rate
            spread += (rate * self.noise) ** (2 / 3) / gap ** (1 / 3)
            spread += (rate * self.unlike) ** (2 / 3) / gap ** (2 / 3)
        if how.kind in ("local", "outer"):
            drift = how.every - 1
            spread += (drift * self.noise**2) ** (1 / 3) + (drift * self.unlike) ** (2 / 3)
        if how.compressor.kind != "none":
            if how.compressor.is_unbiased:
                kept = 1 / (1 + how.compressor.omega(values))
            else:
                kept = how.compressor.delta(values)
            spread += (self.noise**2 / kept) ** (1 / 3) + ((self.unlike + 1e-12) / kept) ** (2 / 3)
        return float(whole + spread / steps ** (2 / 3))

    def steps_to(self, goal: float, how: Reduction, ranks: int, values: int) -> float:
        """The number of steps after which the convergence bound (the sum of both terms) reaches
        ``goal``.
        """
        low, high = 1.0, 2.0
        while self._sum(high, how, ranks, values) > goal and high < MOST_STEPS:
            low, high = high, 2 * high
        while high / low > 1 + 1e-9:
            middle = math.sqrt(low * high)
            if self._sum(middle, how, ranks, values) > goal:
                low = middle
            else:
                high = middle
        return high

    def _sum(self, steps: float, how: Reduction, ranks: int, values: int) -> float:
        return self.linear_term(ranks - 2 * how.trimmed, steps) + self.transient_term(
            how, ranks, values, steps
        )
