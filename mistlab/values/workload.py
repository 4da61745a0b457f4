"""The workload of a training step: a model, its batch and its arithmetic."""

from dataclasses import dataclass, field
from typing import Literal

from mistlab.values.errors import refuse
from mistlab.values.limits import MOST_EXPERTS, MOST_TOKENS
from mistlab.values.model import ModelSpec
from mistlab.values.precision import Optimizer, Precision
from mistlab.values.value import bounded, check_fields

Attention = Literal["flash", "math"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training step: ``global_batch`` sequences of ``sequence_length`` tokens.

    ``attention`` is fused in one kernel (flash) or computed product by product (math). The
    precision fp8 is bf16 with 8-bit products of blocks and their weights; with fp4 these products
    take 4-bit operands, but for those of experts, which take 8-bit ones. The optimizer keeps its
    two moments in 32, 16 or 8 bits. In blocks with experts the busiest rank takes
    ``expert_imbalance`` times as many tokens as the mean. With ``expert_capacity`` no expert takes
    more than this many times the mean: further tokens are dropped. With ``expert_padding`` every
    expert takes exactly as many, some of them empty.
    """

    model: ModelSpec
    sequence_length: int = field(metadata=bounded(minimum=1, maximum=MOST_TOKENS))
    global_batch: int = field(metadata=bounded(minimum=1, maximum=MOST_TOKENS))
    attention: Attention
    precision: Precision
    optimizer: Optimizer = "adamw"
    expert_imbalance: float = field(default=1.0, metadata=bounded(minimum=1, most=MOST_EXPERTS))
    expert_capacity: float | None = field(
        default=None, metadata=bounded(above=0, most=MOST_EXPERTS)
    )
    expert_padding: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.expert_capacity is not None and self.model.experts is None:
            problem = f"{self.expert_capacity:g}, but the model has no experts: leave it out"
            refuse("expert_capacity", problem)
        if self.expert_padding and self.expert_capacity is None:
            problem = (
                "True does not go without expert_capacity, to which experts' tokens are padded"
            )
            refuse("expert_padding", f"{problem}: give both, or neither")

    @property
    def tokens(self) -> int:
        """Number of tokens in one step."""
        return self.sequence_length * self.global_batch

    @property
    def expert_load(self) -> tuple[float, float]:
        """How many times the mean number of tokens without a capacity the experts of a rank take:
        of the mean rank, and of the busiest one."""
        if self.expert_capacity is None:
            return 1.0, self.expert_imbalance
        if self.expert_padding:
            return self.expert_capacity, self.expert_capacity
        return min(1.0, self.expert_capacity), min(self.expert_imbalance, self.expert_capacity)
