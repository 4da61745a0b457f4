"""Stand in for the optimizers of DeepSpeed 0.19.8, which compile for a GPU: arguments alone."""

from typing import Any


def fused_adam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> dict[str, Any]:
    """The arguments of DeepSpeed 0.19.8's FusedAdam, as they were given."""
    return {**locals()}


def adam_of_host(
    model_params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> dict[str, Any]:
    """The arguments of DeepSpeed 0.19.8's DeepSpeedCPUAdam, as they were given."""
    return {**locals()}
