"""How a model is trained: pipeline stages, their parallel degrees and their memory savings."""

from dataclasses import dataclass, field
from typing import Literal

from mistlab.values.errors import refuse
from mistlab.values.value import bounded, check_fields, ratio

Engine = Literal["mistlab", "megatron", "deepspeed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Shares of a rank's own bytes, after sharding, that live in host memory.

    For activations, of the bytes that a block saves for its backward pass.
    """

    weights: float = field(default=0.0, metadata=ratio())
    gradients: float = field(default=0.0, metadata=ratio())
    optimizer: float = field(default=0.0, metadata=ratio())
    activations: float = field(default=0.0, metadata=ratio())

    def __post_init__(self) -> None:
        check_fields(self)


NO_OFFLOAD = Offload()


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pipeline stage: its blocks, its GPUs and how it saves memory.

    ``micro_batch`` counts sequences on a data-parallel rank. ``zero`` shards the optimizer state
    (1), the gradients too (2), the weights too (3). The last ``checkpointed_layers`` blocks
    recompute their activations.
    """

    layers: int = field(metadata=bounded(minimum=1))
    data_parallel: int = field(metadata=bounded(minimum=1))
    tensor_parallel: int = field(metadata=bounded(minimum=1))
    micro_batch: int = field(metadata=bounded(minimum=1))
    zero: int = field(default=0, metadata=bounded(minimum=0, maximum=3))
    checkpointed_layers: int = field(default=0, metadata=bounded(minimum=0))
    offload: Offload = NO_OFFLOAD

    def __post_init__(self) -> None:
        check_fields(self)
        if self.checkpointed_layers > self.layers:
            problem = (
                f"{self.checkpointed_layers} is more than the stage's layers: "
                f"give at most {self.layers}"
            )
            refuse("checkpointed_layers", problem)

    @property
    def num_gpus(self) -> int:
        """GPUs that the stage takes."""
        return self.data_parallel * self.tensor_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A training plan: the stages in pipeline order, and how many micro-batches make a step.

    ``engine`` says whose schedule runs it. ``overlap_communication`` lets the baselines overlap
    gradient reduction and parameter gathering; the mistlab engine always does.
    """

    engine: Engine = "mistlab"
    micro_batches: int = field(metadata=bounded(minimum=1))
    overlap_communication: bool = True
    stages: tuple[StagePlan, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.stages:
            problem = "is empty: give at least one stage"
            refuse("stages", problem)
        if self.engine == "mistlab" and not self.overlap_communication:
            problem = (
                "False does not go with engine mistlab, which always overlaps: "
                "leave it out, or give engine: megatron or deepspeed"
            )
            refuse("overlap_communication", problem)

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return len(self.stages)

    @property
    def num_gpus(self) -> int:
        """GPUs of all stages."""
        return sum(stage.num_gpus for stage in self.stages)

    @property
    def layers(self) -> int:
        """Transformer blocks of all stages."""
        return sum(stage.layers for stage in self.stages)
