"""AdamW's step on flat vectors, with moments in 32, 16 or 8 bits."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from runtime.engine.storage.moment_codes import CODES, read_moments, write_moments
from runtime.engine.training import Training

# A learning rate: a number, or a scalar tensor on the device, which steps in a CUDA graph read.
Rate = float | Tensor
# The data types of the optimizer's moments, by the optimizer's name.
MOMENTS: Mapping[str, torch.dtype] = {
    "adamw": torch.float32,
    "adamw-bf16": torch.bfloat16,
    "adamw-8bit": CODES,
}


def step_adamw(
    training: Training,
    vectors: Sequence[Tensor],
    gradient: Tensor,
    step: Tensor,
    learning_rate: Rate,
    scaling: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """Update master weights and moments in place; ``scaling`` is the divisor of gradients, and
    whether the step is skipped.

    Moments of 16 or 8 bits are stepped as 32-bit copies and rounded back; in a skipped step they
    stay as they were.
    """
    master, *moments = vectors
    are_codes = moments[0].dtype == CODES
    wide = read_moments(moments) if are_codes else [one.float() for one in moments]
    first, second = wide
    torch._fused_adamw_(
        *([master], [gradient], [first], [second], [], [step]),
        lr=learning_rate,
        beta1=training.beta1,
        beta2=training.beta2,
        weight_decay=training.weight_decay,
        eps=training.epsilon,
        amsgrad=False,
        maximize=False,
        grad_scale=scaling[0],
        found_inf=scaling[1],
    )
    if are_codes:
        write_moments(moments, wide)
        return
    for moment, updated in zip(moments, wide, strict=True):
        if moment.dtype != torch.float32:
            moment.copy_(updated)
