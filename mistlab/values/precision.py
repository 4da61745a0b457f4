"""Precisions of a training run: of its arithmetic, and of the two moments that AdamW keeps."""

from collections.abc import Mapping
from typing import Literal

Precision = Literal["fp16", "bf16", "fp32", "fp8", "fp4"]
Optimizer = Literal["adamw", "adamw-bf16", "adamw-8bit"]

# Moments of 8 bits share a 32-bit scale among 256 (Dettmers et al. 2021, arXiv 2110.02861).
_SCALED_TOGETHER = 256
# Bytes of both moments of a parameter. The 32-bit master weights stay as they are.
MOMENTS_BYTES: Mapping[Optimizer, float] = {
    "adamw": 8.0,
    # As DeepSeek V3 was trained (arXiv 2412.19437, section 3.3.3).
    "adamw-bf16": 4.0,
    "adamw-8bit": 2.0 + 2 * 4 / _SCALED_TOGETHER,
}


def saved_bytes(optimizer: Optimizer) -> float:
    """Bytes of a parameter's moments that an optimizer saves beside 32-bit ones."""
    return MOMENTS_BYTES["adamw"] - MOMENTS_BYTES[optimizer]
