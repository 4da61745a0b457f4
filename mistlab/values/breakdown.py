"""Where the GPU-seconds of an iteration go: parts that add up to it."""

from dataclasses import dataclass, field, fields
from typing import Self

from mistlab.values.value import bounded, check_fields

_SECONDS = bounded(minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The seconds of an iteration of one GPU by what they go to; together they are the iteration.

    ``arithmetic_s`` is the model's own arithmetic at the peak rate. Kernels take longer: products
    by ``products_s``, attention by ``attention_s``, and operators that the GPU's memory limits do
    no arithmetic that counts for ``memory_bound_s``. ``recomputation_s`` runs a second time. Of
    communication and copies only what no arithmetic hides is here: exchanges inside layers among
    ranks of each group, reductions and gathers of data parallelism, sends between stages, copies of
    offloading. For ``hosts_s`` GPUs wait because kernels are launched late. A GPU waits for its
    pipeline longer than the busiest stage by ``imbalance_s``, and as long as that by ``bubble_s``.
    """

    arithmetic_s: float = field(metadata=_SECONDS)
    products_s: float = field(metadata=_SECONDS)
    attention_s: float = field(metadata=_SECONDS)
    memory_bound_s: float = field(metadata=_SECONDS)
    recomputation_s: float = field(metadata=_SECONDS)
    tensor_exchange_s: float = field(metadata=_SECONDS)
    context_exchange_s: float = field(metadata=_SECONDS)
    expert_exchange_s: float = field(metadata=_SECONDS)
    data_parallel_s: float = field(metadata=_SECONDS)
    sends_s: float = field(metadata=_SECONDS)
    copies_s: float = field(metadata=_SECONDS)
    hosts_s: float = field(metadata=_SECONDS)
    step_s: float = field(metadata=_SECONDS)
    imbalance_s: float = field(metadata=_SECONDS)
    bubble_s: float = field(metadata=_SECONDS)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def total_s(self) -> float:
        """The sum of all parts."""
        return float(sum(getattr(self, name) for name in PARTS))


PARTS = tuple(entry.name for entry in fields(StepParts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The parts of an iteration: the mean over all GPUs, and those of a GPU of each stage.

    ``busiest_stage`` waits for no other stage but in the bubble, or waits least.
    """

    parts: StepParts
    busiest_stage: int = field(metadata=bounded(minimum=0))
    stages: tuple[StepParts, ...]

    @classmethod
    def of(cls, stages: tuple[StepParts, ...], gpus: tuple[int, ...]) -> Self:
        """The parts of stages that have so many GPUs each."""
        shares = [count / sum(gpus) for count in gpus]
        mean = {
            name: sum(share * getattr(one, name) for share, one in zip(shares, stages, strict=True))
            for name in PARTS
        }
        imbalance = [one.imbalance_s for one in stages]
        return cls(
            parts=StepParts(**mean), busiest_stage=imbalance.index(min(imbalance)), stages=stages
        )
