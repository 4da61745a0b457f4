"""The workload of a training step: a model, its batch and its arithmetic."""

from dataclasses import dataclass, field
from typing import Literal

from mistlab.values.model import ModelSpec
from mistlab.values.optimizers import Optimizer
from mistlab.values.value import bounded, check_fields

Attention = Literal["flash", "math"]
Precision = Literal["fp16", "bf16", "fp32", "fp8", "fp4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training step: ``global_batch`` sequences of ``sequence_length`` tokens.

    ``attention`` is fused in one kernel (flash) or computed product by product (math). The
    precision fp8 is bf16 with 8-bit products of blocks and their weights; with fp4 these products
    take 4-bit operands, but for those of experts, which take 8-bit ones. The optimizer keeps its
    two moments in 32, 16 or 8 bits. In blocks with experts the busiest rank takes
    ``expert_imbalance`` times as many tokens as the mean.
    """

    model: ModelSpec
    sequence_length: int = field(metadata=bounded(minimum=1))
    global_batch: int = field(metadata=bounded(minimum=1))
    attention: Attention
    precision: Precision
    optimizer: Optimizer = "adamw"
    expert_imbalance: float = field(default=1.0, metadata=bounded(minimum=1))

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def tokens(self) -> int:
        """Number of tokens in one step."""
        return self.sequence_length * self.global_batch
