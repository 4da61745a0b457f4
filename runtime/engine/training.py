"""Training settings: AdamW, learning-rate schedule, gradient clipping, loss scaling, and dropout's
seed.
"""

import math
from dataclasses import dataclass, field
from typing import Literal

from mistlab.core.values import Checked, bounded

Decay = Literal["constant", "linear", "cosine"]
# The loss scale for fp16 gradients, whose 5 exponent bits would round small values to zero.
FP16_LOSS_SCALE = 2.0**16
# The upper limit of factors such as the learning rate and the clipping norm, far above any sensible
# value, because torch multiplies 32-bit numbers by them.
MOST_FACTOR = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(Checked):
    """Training settings, which do not depend on the plan.

    The learning rate rises over ``warmup_steps``. Then it stays or, if ``total_steps`` is given,
    falls to a tenth of ``learning_rate`` by that step. Gradients are clipped to the norm
    ``clip_norm``, if given. ``loss_scale`` is the initial factor of the loss; it doubles after
    ``growth_interval`` good steps, and halves after an overflow, whose step is skipped. With
    ``steps_on_host`` the host steps the offloaded optimizer states. ``dropout_seed`` determines the
    masks of dropout.
    """

    learning_rate: float = field(default=3e-4, metadata=bounded(minimum=0, most=MOST_FACTOR))
    decay: Decay = "constant"
    warmup_steps: int = field(default=0, metadata=bounded(minimum=0))
    total_steps: int = field(default=0, metadata=bounded(minimum=0))
    beta1: float = field(default=0.9, metadata=bounded(minimum=0, maximum=1))
    beta2: float = field(default=0.95, metadata=bounded(minimum=0, maximum=1))
    epsilon: float = field(default=1e-8, metadata=bounded(above=0, most=MOST_FACTOR))
    weight_decay: float = field(default=0.1, metadata=bounded(minimum=0, most=MOST_FACTOR))
    clip_norm: float | None = field(default=None, metadata=bounded(above=0, most=MOST_FACTOR))
    loss_scale: float | None = field(default=None, metadata=bounded(above=0, most=MOST_FACTOR))
    growth_interval: int = field(default=2000, metadata=bounded(minimum=1))
    steps_on_host: bool = False
    dropout_seed: int = 0

    @property
    def needs_norm(self) -> bool:
        """Whether a step must wait for the norm of all gradients, for clipping or to detect
        overflow.
        """
        return bool(self.norm_option)

    @property
    def norm_option(self) -> str:
        """The option because of which a step waits for the norm of all gradients; empty if none
        does.
        """
        if self.clip_norm is not None:
            return "--clip-norm"
        return "" if self.loss_scale is None else "--loss-scale"

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step; steps count from zero."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.decay == "constant" or self.total_steps <= self.warmup_steps:
            return self.learning_rate
        gone = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        gone = min(1.0, gone)
        left = 1 - gone if self.decay == "linear" else (1 + math.cos(math.pi * gone)) / 2
        return self.learning_rate * (0.1 + 0.9 * left)
