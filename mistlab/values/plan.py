"""How a model is trained: pipeline stages, their parallel degrees and their memory savings."""

from dataclasses import dataclass, field

from mistlab.engines.table import ENGINES, names_for_plans, names_that_wait
from mistlab.schedule.orders import DEFAULT_ORDER, ORDERS, is_order_path
from mistlab.values.errors import near_matches, refuse
from mistlab.values.field_checks import shown
from mistlab.values.value import bounded, check_fields, name_in, ratio


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

    ``engine`` is the row of ``ENGINES`` that trains by it. ``overlap_communication`` lets an engine
    overlap gradient reduction and parameter gathering where it can; some engines always do.
    ``order`` says in which order stages run their passes: a name, or the path of a file with the
    order's text.
    """

    engine: str = field(default="mistlab", metadata=name_in(names_for_plans))
    micro_batches: int = field(metadata=bounded(minimum=1))
    overlap_communication: bool = True
    order: str = DEFAULT_ORDER
    stages: tuple[StagePlan, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.stages:
            problem = "is empty: give at least one stage"
            refuse("stages", problem)
        problem = ENGINES[self.engine].overlap_problem(
            overlap_communication=self.overlap_communication, others=names_that_wait
        )
        if problem:
            refuse("overlap_communication", problem)
        if self.order not in ORDERS and not is_order_path(self.order):
            path = "or the path of an order file, with a slash or ending in .txt"
            refuse(
                "order", f"{shown(self.order)} is unknown{near_matches(self.order, ORDERS)}, {path}"
            )

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
