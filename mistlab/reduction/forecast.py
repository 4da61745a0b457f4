"""What a gradient reduction does to convergence: the number of steps to a goal by convergence
bounds, and the loss with outer steps (DiLoCo) by published scaling laws, with their assumptions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mistlab.reduction.calculators import OuterClock
from mistlab.reduction.convergence import ASSUMPTIONS, Noise
from mistlab.reduction.reduction_costs import PLAIN_REDUCTION, Reduction

HOURS = 3600.0
# The default goal of a forecast: training ends when the mean squared gradient falls to this value.
GOAL = 0.01
# A and alpha of the evaluation loss A N^-alpha of a model with N parameters after 20 tokens per
# parameter, for each number of replicas with an outer step every 30 steps; 0 stands for training
# without outer steps. From table 8 of arXiv 2503.09799.
LOSS_OF_OUTER: Mapping[int, tuple[float, float]] = {
    0: (18.129, 0.0953),
    1: (18.363, 0.0961),
    2: (18.768, 0.0969),
    4: (19.762, 0.0992),
    8: (21.051, 0.1018),
}
# A, alpha and beta of the same loss for any number M of replicas, A N^-alpha M^beta, fitted to all
# of these runs together: table 11 of arXiv 2503.09799.
LOSS_OF_REPLICAS = (19.226, 0.0985, 0.0116)
TOKENS_A_PARAMETER = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A training run under a gradient reduction among ``ranks`` ranks or replicas: its step takes
    ``step_s`` and reads ``tokens`` tokens; with an all-reduce in every step it would take
    ``plain_step_s``.
    """

    how: Reduction
    ranks: int
    parameters: int
    tokens: int
    step_s: float
    plain_step_s: float
    noise: Noise = field(default_factory=Noise)
    goal: float = GOAL

    def steps_to_goal(self, how: Reduction) -> float:
        """The number of steps to ``goal`` by the convergence bound of a gradient reduction."""
        return self.noise.steps_to(self.goal, how, self.ranks, self.parameters)

    def mapping(self) -> Mapping[str, Any]:
        """The forecast of steps, hours and loss of a training run, as plain data."""
        steps, plain = self.steps_to_goal(self.how), self.steps_to_goal(PLAIN_REDUCTION)
        linear = self.noise.linear_term(self.ranks - 2 * self.how.trimmed, steps)
        row = {
            "goal": self.goal,
            "ranks": self.ranks,
            "steps": steps,
            "hours": steps * self.step_s / HOURS,
            "linear_term": linear,
            "transient_term": self.noise.transient_term(
                self.how, self.ranks, self.parameters, steps
            ),
            "plain_steps": plain,
            "plain_hours": plain * self.plain_step_s / HOURS,
            "assumptions": ASSUMPTIONS,
        }
        return row | (self._of_outer() if self.how.kind == "outer" else {})

    def lines(self) -> Iterator[str]:
        """The forecast of steps, hours and loss of a training run, as lines of text."""
        row = self.mapping()
        yield (
            f"Convergence by bounds: {row['steps']:,.0f} steps ({row['hours']:,.3g} h) to a mean "
            f"square gradient of {self.goal:g}, of which sigma / sqrt(n T) is "
            f"{row['linear_term']:.2g} and the transient term {row['transient_term']:.2g}; sums in "
            f"every step need {row['plain_steps']:,.0f} ({row['plain_hours']:,.3g} h)"
        )
        yield (
            f"  assumes {ASSUMPTIONS}; n = {self.ranks}, sigma = {self.noise.noise:g}, unlike data "
            f"{self.noise.unlike:g}"
        )
        if "loss" in row:
            yield (
                f"Loss by published laws: {row['loss']:.3f} with {row['replicas']} replicas after "
                f"{TOKENS_A_PARAMETER} tokens a parameter, {row['loss_hours'] / 24:,.3g} days; "
                f"sums in every step {row['plain_loss']:.3f}, "
                f"{row['plain_loss_hours'] / 24:,.3g} days"
            )
            yield (
                "  assumes the power laws of arXiv 2503.09799 (1 to 8 replicas, inner AdamW, tuned "
                "rates, an outer step every 30 steps); a token every "
                f"{self.how.every} steps is worth {row['token_worth']:.3f} by the calculators"
            )

    def _of_outer(self) -> dict[str, Any]:
        """The loss with this number of replicas by the scaling law, and the hours until training
        has read its tokens.
        """
        steps = TOKENS_A_PARAMETER * self.parameters / self.tokens
        clock = OuterClock(
            parameters=self.parameters,
            nodes=self.ranks,
            bits_per_s=1.0,
            every=self.how.every,
            step_s=self.step_s,
        )
        return {
            "replicas": self.ranks,
            "loss": _law(self.ranks, self.parameters),
            "loss_hours": steps * self.step_s / HOURS,
            "plain_loss": _law(0, self.parameters),
            "plain_loss_hours": steps * self.plain_step_s / HOURS,
            "token_worth": clock.worth,
        }


def _law(replicas: int, parameters: int) -> float:
    if replicas in LOSS_OF_OUTER:
        factor, power = LOSS_OF_OUTER[replicas]
        return float(factor * parameters**-power)
    factor, power, of_replicas = LOSS_OF_REPLICAS
    return float(factor * parameters**-power * replicas**of_replicas)
