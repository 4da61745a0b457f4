"""How a model is trained: pipeline stages, their parallel degrees and their memory savings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from operator import attrgetter
from typing import Any, Self

from mistlab.engines.table import ENGINES, names_for_plans, names_that_wait
from mistlab.schedule.orders import DEFAULT_ORDER, ORDERS, is_order_path
from mistlab.values.dimensions import (
    BUILT_IN,
    DIMENSIONS,
    added,
    checked_others,
    counts_of_blocks,
    names_of,
)
from mistlab.values.errors import near_matches, refuse
from mistlab.values.field_checks import shown
from mistlab.values.mesh import dimensions_of_axes
from mistlab.values.value import bounded, check_fields, further_keys, name_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Offload ratios: shares of a rank's own bytes, after sharding, that live in host memory.

    For activations it is the share of the bytes that a block saves for its backward pass.
    """

    weights: float = field(default=0.0, metadata=DIMENSIONS["offload_weights"].numbers)
    gradients: float = field(default=0.0, metadata=DIMENSIONS["offload_gradients"].numbers)
    optimizer: float = field(default=0.0, metadata=DIMENSIONS["offload_optimizer"].numbers)
    activations: float = field(default=0.0, metadata=DIMENSIONS["offload_activations"].numbers)

    def __post_init__(self) -> None:
        check_fields(self)


NO_OFFLOAD = Offload()
DEFAULT_ENGINE = "mistlab"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pipeline stage: its blocks, its GPUs and how it saves memory.

    ``micro_batch`` is the number of sequences on a data-parallel rank, of whose tokens each of
    ``context_parallel`` ranks has a part; ``context_exchange`` says how they exchange keys
    (``mistlab.values.context_ways``). With ``sequence_parallel``
    (1) tensor-parallel ranks split tokens wherever they do not split weights. Experts are divided
    among ``expert_parallel`` ranks, and each expert's width among ``expert_tensor_parallel`` ones;
    both are neighbours among the stage's GPUs, whatever the other degrees. ``zero`` shards
    optimizer state (1), also gradients (2), also weights (3). It does so over all data-parallel
    ranks, or with ``state_replicas`` over each of so many equal parts of them. The last
    ``products_recomputed_layers`` blocks recompute every second product,
    ``core_recomputed_layers`` before them attention's core, and ``checkpointed_layers`` before
    those all activations. ``others`` has values of dimensions that were added to
    ``mistlab.values.dimensions.DIMENSIONS``, without default values.
    """

    layers: int = field(metadata=DIMENSIONS["layers"].numbers)
    data_parallel: int = field(metadata=DIMENSIONS["data_parallel"].numbers)
    tensor_parallel: int = field(metadata=DIMENSIONS["tensor_parallel"].numbers)
    micro_batch: int = field(metadata=DIMENSIONS["micro_batch"].numbers)
    context_parallel: int = field(default=1, metadata=DIMENSIONS["context_parallel"].numbers)
    context_exchange: int = field(default=0, metadata=DIMENSIONS["context_exchange"].numbers)
    sequence_parallel: int = field(default=0, metadata=DIMENSIONS["sequence_parallel"].numbers)
    expert_parallel: int = field(default=1, metadata=DIMENSIONS["expert_parallel"].numbers)
    expert_tensor_parallel: int = field(
        default=1, metadata=DIMENSIONS["expert_tensor_parallel"].numbers
    )
    state_replicas: int = field(default=1, metadata=DIMENSIONS["state_replicas"].numbers)
    zero: int = field(default=0, metadata=DIMENSIONS["zero"].numbers)
    checkpointed_layers: int = field(default=0, metadata=DIMENSIONS["checkpointed_layers"].numbers)
    core_recomputed_layers: int = field(
        default=0, metadata=DIMENSIONS["core_recomputed_layers"].numbers
    )
    products_recomputed_layers: int = field(
        default=0, metadata=DIMENSIONS["products_recomputed_layers"].numbers
    )
    offload: Offload = NO_OFFLOAD
    others: tuple[tuple[str, float], ...] = field(default=(), metadata=further_keys(added))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.others:
            object.__setattr__(self, "others", checked_others(dict(self.others)))
        layers, *counts = _reader_of(names_of("layers"))(self)
        if sum(counts) > layers:
            self._refuse_counts()

    def _refuse_counts(self) -> None:
        left = self.layers
        for name in counts_of_blocks():
            if (count := self.degree(name)) > left:
                whose = "stage's layers" if left == self.layers else "layers that are left"
                refuse(name, f"{count} is more than the {whose}: give at most {left}")
            left -= count

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Self:
        """A stage from values by names of dimensions; omitted dimensions have their default."""
        own, offload, others = _by_place(values)
        if any(offload.values()):
            own["offload"] = Offload(**offload)
        return cls(**own, others=tuple(others.items()))

    def value(self, name: str) -> float:
        """The value of a dimension."""
        read = _READERS.get(name)
        if read is not None:
            value: float = read(self)
            return value
        return dict(self.others).get(name, DIMENSIONS[name].default or 0)

    def degree(self, name: str) -> int:
        """The value of a dimension that is a whole number."""
        return int(self.value(name))

    def values(self) -> tuple[float, ...]:
        """The values of all dimensions, in the table's order."""
        return reader_of_values()(self)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """This stage with other values of some dimensions."""
        own, offload, others = _by_place(values)
        if offload:
            own["offload"] = replace(self.offload, **offload)
        if others:
            own["others"] = tuple({**dict(self.others), **others}.items())
        return replace(self, **own)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of the stage."""
        return int(prod(reader_of_degrees()(self)))


def reader_of_values() -> Callable[[StagePlan], tuple[float, ...]]:
    """Reads the values of all dimensions of a stage, in the table's order."""
    return _reader_of(tuple(DIMENSIONS))


def reader_of_degrees() -> Callable[[StagePlan], tuple[float, ...]]:
    """Reads a stage's degrees along the axes of its mesh."""
    return _reader_of(dimensions_of_axes())


@cache
def _reader_of(names: tuple[str, ...]) -> Callable[[StagePlan], tuple[float, ...]]:
    """Reads some dimensions of a stage; asked for with every stage or plan."""
    if len(names) > 1 and _PATHS.keys() >= set(names):
        paths = [_PATHS[name] for name in names]
        read: Callable[[StagePlan], tuple[float, ...]] = attrgetter(*paths)
        return read
    return lambda stage: tuple(stage.value(name) for name in names)


def _by_place(
    values: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, float], dict[str, float]]:
    """Values of a stage's own fields, of its offload ratios, and of added dimensions."""
    own: dict[str, Any] = {}
    offload: dict[str, float] = {}
    others: dict[str, float] = {}
    for name, value in values.items():
        row = DIMENSIONS[name]
        if name not in _READERS:
            others[name] = row.number(value)
        elif row.path:
            offload[row.label] = row.number(value)
        else:
            own[name] = row.number(value)
    return own, offload, others


_PATHS = {name: DIMENSIONS[name].path or name for name in BUILT_IN}
_READERS = {name: attrgetter(path) for name, path in _PATHS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A training plan: the stages in pipeline order, and how many micro-batches make a step.

    ``engine`` is the row of ``ENGINES`` that trains by it. ``overlap_communication`` lets an engine
    overlap gradient reduction and parameter gathering where it can; some engines always do.
    ``order`` says in which order stages run their passes: a name, or the path of a file with the
    order's text.
    """

    engine: str = field(default=DEFAULT_ENGINE, metadata=name_in(names_for_plans))
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
        unlike = ENGINES[self.engine].blocks_problem([stage.layers for stage in self.stages])
        if unlike is not None:
            raise unlike
        if self.order not in ORDERS and not is_order_path(self.order):
            no_path = "nor the path of an order file (with a slash, or ending in .txt)"
            near = near_matches(self.order, ORDERS)
            refuse("order", f"{shown(self.order)} is no known order, {no_path}{near}")

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all stages."""
        return sum(stage.num_gpus for stage in self.stages)

    @property
    def layers(self) -> int:
        """Number of transformer blocks of all stages."""
        return sum(stage.layers for stage in self.stages)
