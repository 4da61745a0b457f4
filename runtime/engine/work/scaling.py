"""The loss scale, and whether a step is skipped because gradients of the scaled loss overflow."""

import torch
from torch import Tensor

from runtime.engine.training import Training

GROWTH, BACKOFF = 2.0, 0.5


class Scaling:
    """The loss scale, and the norm and the overflow of the latest gradients."""

    def __init__(self, training: Training, device: torch.device) -> None:
        self._training = training
        self.scale = torch.full((), training.loss_scale or 1.0, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        # What the optimizer step divides gradients by, and whether the step is skipped (1 or 0).
        self.divisor = torch.ones((), device=device)
        self.overflow = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)

    def judge(self, squares: Tensor) -> None:
        """Set the divisor of gradients, the overflow flag and the loss scale, from the sum of
        squares of all scaled gradients.
        """
        training = self._training
        self.norm.copy_(squares.sqrt() / self.scale)
        self.overflow.copy_(~squares.isfinite())
        self.divisor.copy_(self.scale)
        if training.clip_norm is not None:
            # Clip gradients by the same formula as torch.nn.utils.clip_grad_norm_.
            self.divisor.div_((training.clip_norm / (self.norm + 1e-6)).clamp(max=1.0))
        if training.loss_scale is not None:
            torch._amp_update_scale_(
                *(self.scale, self.good_steps, self.overflow),
                *(GROWTH, BACKOFF, training.growth_interval),
            )

    def said(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The divisor of gradients and the overflow flag, copied to the device that runs optimizer
        steps.
        """
        return self.divisor.to(device), self.overflow.to(device)
