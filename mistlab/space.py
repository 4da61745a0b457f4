"""Which plans a search may choose from."""

from dataclasses import dataclass, field, fields

from mistlab.errors import refuse
from mistlab.plan import Engine
from mistlab.value import bounded, check_fields, ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRatios:
    """The ratios that each kind of offloading may take."""

    weights: tuple[float, ...] = field(default=(0.0,), metadata=ratio())
    gradients: tuple[float, ...] = field(default=(0.0,), metadata=ratio())
    optimizer: tuple[float, ...] = field(default=(0.0,), metadata=ratio())
    activations: tuple[float, ...] = field(default=(0.0,), metadata=ratio())

    def __post_init__(self) -> None:
        check_fields(self)
        _check_not_empty(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """Allowed degrees, ratios and features; None allows every degree that divides.

    Without ``partial_checkpointing`` a stage recomputes none or all of its blocks, without
    ``uneven_layers`` stages have equal numbers of blocks (as near as they divide),
    without ``unequal_meshes`` they have the same degrees.
    """

    name: str
    engine: Engine = "mistlab"
    data_parallel: tuple[int, ...] | None = field(default=None, metadata=bounded(minimum=1))
    tensor_parallel: tuple[int, ...] | None = field(default=None, metadata=bounded(minimum=1))
    pipeline: tuple[int, ...] | None = field(default=None, metadata=bounded(minimum=1))
    micro_batches: tuple[int, ...] | None = field(default=None, metadata=bounded(minimum=1))
    micro_batch: tuple[int, ...] | None = field(default=None, metadata=bounded(minimum=1))
    zero: tuple[int, ...] = field(default=(0,), metadata=bounded(minimum=0, maximum=3))
    offload: OffloadRatios = field(default_factory=OffloadRatios)
    partial_checkpointing: bool = False
    uneven_layers: bool = False
    unequal_meshes: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        _check_not_empty(self)


def _check_not_empty(value: OffloadRatios | SearchSpace) -> None:
    for entry in fields(value):
        if getattr(value, entry.name) == ():
            problem = "is empty: give at least one choice"
            refuse(entry.name, problem)
