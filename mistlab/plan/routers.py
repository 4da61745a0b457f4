"""The routing of tokens to experts, and how training balances the experts."""

from dataclasses import dataclass, field
from typing import Literal

from mistlab.core.values import MOST_EXPERTS, bounded, check_fields, refuse

Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The rule of a router: which experts a token is sent to, and how their outputs are weighted.

    An expert's score is its share in a softmax over all experts' logits, or the sigmoid of its own
    logit. A token takes the experts with the largest scores; with ``groups`` only those in the
    ``active_groups`` best groups, where a group counts as much as the sum of its ``best_of_group``
    best scores. With ``correction`` a number for each expert is added to its score when experts are
    chosen, and only then. Experts' weights are the scores of the chosen experts, ``normalized`` to
    a sum of 1 or not, times ``scale``. They multiply the experts' outputs or, if the router
    ``weighs_inputs``, their inputs.

    In training, each step adds ``correction_rate`` to the corrections of experts that got fewer
    tokens than the mean, and subtracts it from the others'. Two terms are added to the loss. The
    first is ``balance_loss`` times the number of experts, times the sum over experts of their share
    in a sequence's choices times their mean score in the sequence. The second is ``z_loss`` times
    the mean square of the log-sum-exp of a token's logits. No cost depends on any of these fields.
    """

    scores: Scores = "softmax"
    normalized: bool = True
    scale: float = field(default=1.0, metadata=bounded(above=0, most=1e6))
    weighs_inputs: bool = False
    correction: bool = False
    correction_rate: float = field(default=0.0, metadata=bounded(minimum=0, most=1e3))
    groups: int = field(default=1, metadata=bounded(minimum=1, most=MOST_EXPERTS))
    active_groups: int = field(default=1, metadata=bounded(minimum=1, most=MOST_EXPERTS))
    best_of_group: int = field(default=2, metadata=bounded(minimum=1, most=MOST_EXPERTS))
    balance_loss: float = field(default=0.0, metadata=bounded(minimum=0, most=1e6))
    z_loss: float = field(default=0.0, metadata=bounded(minimum=0, most=1e6))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.active_groups > self.groups:
            refuse(
                "active_groups",
                f"{self.active_groups} is more than groups {self.groups}: give at most "
                f"{self.groups}",
            )
        if self.correction_rate and not self.correction:
            refuse(
                "correction_rate",
                f"{self.correction_rate:g} has no effect, because correction is false: give "
                "correction: true, or leave it out",
            )

    @property
    def is_plain(self) -> bool:
        """Whether experts are weighted by a softmax over the chosen experts' scores, as layer
        graphs assume.
        """
        is_usual = self.scores == "softmax" and self.normalized and self.scale == 1.0
        return is_usual and self.groups == 1 and not self.correction

    @property
    def has_losses(self) -> bool:
        """Whether training adds auxiliary losses of the router."""
        return self.balance_loss > 0 or self.z_loss > 0

    def check(self, count: int, active: int) -> None:
        """Refuse groups that do not divide the model's ``count`` experts, or whose active ones have
        fewer than ``active`` experts.
        """
        if count % self.groups:
            refuse(
                "groups",
                f"{self.groups} does not divide count {count}: give a divisor of {count}",
            )
        size = count // self.groups
        if self.groups > 1 and self.best_of_group > size:
            refuse(
                "best_of_group",
                f"{self.best_of_group} is more than a group's {size} experts: give at most {size}",
            )
        if self.active_groups * size < active:
            refuse(
                "active_groups",
                f"{self.active_groups} with {size} experts in each group is too few for {active} "
                f"active experts: give at least {-(-active // size)}",
            )


PLAIN_ROUTER = Router()
