"""How a model is trained: pipeline stages, their parallel degrees and their ways to save memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, Self

from mistlab.core.values import bounded, check_fields, name_in, near_matches, refuse, shown
from mistlab.engines.engine import ENGINES, names_for_plans, names_that_wait
from mistlab.plan import dimension_fields
from mistlab.plan.dimensions import (
    DIMENSIONS,
    counts_of_blocks,
    counts_within,
    dimensions_of_axes,
    names_of,
)
from mistlab.plan.made_fields import DEFAULT_ENGINE
from mistlab.schedule.context_ways import HEADS
from mistlab.schedule.orders import DEFAULT_ORDER, ORDERS, is_order_path

Reader = Callable[[dimension_fields.StageFields], tuple[float, ...]]
Offload = dimension_fields.Offload
NO_OFFLOAD = Offload()


class TokenSplit(NamedTuple):
    """How the ranks of a stage split the tokens of a sequence: the number of context-parallel
    ranks, and the way in which they exchange keys and values (``mistlab.schedule.context_ways``).
    """

    ranks: int
    way: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan(dimension_fields.StageFields):
    """One pipeline stage of a plan: its blocks, its parallel degrees and its ways to save memory.
    The fields are the rows of ``mistlab.plan.dimensions.DIMENSIONS``.

    ``micro_batch`` is the number of sequences on a data-parallel rank; each of ``context_parallel``
    ranks has a part of their tokens, and ``context_exchange`` says how these ranks exchange keys
    (``mistlab.schedule.context_ways``). With ``sequence_parallel`` (1) tensor-parallel ranks split
    tokens wherever they do not split weights. Experts are divided among ``expert_parallel`` ranks,
    and each expert's width among ``expert_tensor_parallel`` ranks; both are neighbours among the
    stage's GPUs, whatever the other degrees.

    ``zero`` shards optimizer states (1), also gradients (2), also weights (3): over all
    data-parallel ranks, or with ``state_replicas`` over each of this number of equal groups of
    them. The last ``products_recomputed_layers`` blocks recompute every second GEMM; the
    ``core_recomputed_layers`` before them recompute attention's core, and the
    ``checkpointed_layers`` before those all activations.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        layers, *counts = _blocks_of(self)
        if sum(counts) > layers:
            self._refuse_counts()

    def _refuse_counts(self) -> None:
        left = self.layers
        for name in counts_of_blocks():
            if (count := self.degree(name)) > left:
                whose = (
                    f"stage's {left} layers"
                    if left == self.layers
                    else f"{left} layers that other recomputation leaves"
                )
                refuse(name, f"{count} is more than the {whose}: give at most {left}")
            left -= count

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Self:
        """A stage from a mapping of dimensions to values; omitted dimensions take their
        defaults.
        """
        own_values, offload = _by_holder(values)
        if any(offload.values()):
            own_values["offload"] = Offload(**offload)
        return cls(**own_values)

    def value(self, name: str) -> float:
        """The stage's value of a dimension, such as its ZeRO level."""
        value: float = _READERS[name](self)
        return value

    def degree(self, name: str) -> int:
        """The stage's value of a dimension whose values are integers."""
        return int(self.value(name))

    def values(self) -> tuple[float, ...]:
        """The stage's values of all dimensions, in the order of ``DIMENSIONS``."""
        return _values_of(self)

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """A copy of the stage with other values of some dimensions."""
        own_values, offload = _by_holder(values)
        if offload:
            own_values["offload"] = replace(self.offload, **offload)
        return replace(self, **own_values)

    @property
    def counts(self) -> dict[str, int]:
        """How many of the stage's blocks are run in each way (recomputed, ...), by the dimension
        that counts them.
        """
        return {name: self.degree(name) for name in counts_of_blocks()}

    def resized(self, layers: int) -> Self:
        """A copy of the stage with another number of blocks: if all blocks were recomputed (or run
        in another way), all of the new number are; other numbers are kept.
        """
        wanted = {
            name: layers if count == self.layers else count for name, count in self.counts.items()
        }
        return self.with_values({"layers": layers, **counts_within(wanted, layers)})

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of the stage."""
        return int(prod(_degrees_of(self)))

    @property
    def token_split(self) -> TokenSplit:
        """The number of the stage's context-parallel ranks, and their way of exchanging keys and
        values.
        """
        return TokenSplit(self.context_parallel, self.context_exchange)

    @property
    def head_ranks(self) -> int:
        """The number of ranks among which the stage divides the heads in attention."""
        exchanges = self.context_exchange == HEADS
        return self.tensor_parallel * (self.context_parallel if exchanges else 1)

    @property
    def splits_tokens(self) -> bool:
        """Whether each tensor-parallel rank holds only its part of a sequence outside GEMMs."""
        return self.sequence_parallel == 1 and self.tensor_parallel > 1

    @property
    def token_parts(self) -> int:
        """The number of equal parts into which each sequence is cut: context-parallel ranks hold
        two parts each.
        """
        return self.tensor_parallel * self.context_parallel * (1 + (self.context_parallel > 1))


def reader_of_values() -> Reader:
    """A function that reads a stage's values of all dimensions, in the order of ``DIMENSIONS``."""
    return _values_of


def reader_of_degrees() -> Reader:
    """A function that reads a stage's parallel degrees, whose product is its number of GPUs."""
    return _degrees_of


def _reader_of(names: Sequence[str]) -> Reader:
    read: Reader = attrgetter(*(DIMENSIONS[name].path or name for name in names))
    return read


def _by_holder(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """Divide a mapping of dimensions to values into fields of the stage itself and fields of its
    part ``offload``.
    """
    own_values: dict[str, Any] = {}
    offload: dict[str, float] = {}
    for name, value in values.items():
        row = DIMENSIONS[name]
        if row.holder:
            offload[row.label] = row.number(value)
        else:
            own_values[name] = row.number(value)
    return own_values, offload


# Readers of all dimensions are made once, since every stage of every plan is read with them.
_READERS = {name: attrgetter(row.path or name) for name, row in DIMENSIONS.items()}
_values_of = _reader_of([*DIMENSIONS])
_degrees_of = _reader_of(dimensions_of_axes())
_blocks_of = _reader_of(names_of("layers"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A training plan: the stages in pipeline order, and the number of micro-batches in an
    optimizer step.

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
            refuse("stages", "is empty: give at least one stage")
        problem = ENGINES[self.engine].overlap_problem(
            overlap_communication=self.overlap_communication, others=names_that_wait
        )
        if problem:
            refuse("overlap_communication", problem)
        unlike = ENGINES[self.engine].blocks_problem([stage.layers for stage in self.stages])
        if unlike is not None:
            raise unlike
        if self.order not in ORDERS and not is_order_path(self.order):
            near = near_matches(self.order, ORDERS)
            refuse(
                "order",
                f"{shown(self.order)} is not a known order, nor the path of an order file "
                f"(with a slash, or ending in .txt){near}",
            )

    @classmethod
    def of_one_gpu(
        cls,
        layers: int,
        sequences: int,
        engine: str,
        values: Mapping[str, float],
        replicas: int = 1,
    ) -> Self:
        """A single-GPU plan whose optimizer step is one micro-batch of ``sequences`` sequences;
        ``values`` are other dimensions of its stage. Several ``replicas`` are data-parallel.
        """
        alone = {"data_parallel": replicas, "tensor_parallel": 1}
        stage_values = {**alone, "layers": layers, "micro_batch": sequences, **values}
        return cls(engine=engine, micro_batches=1, stages=(StagePlan.of_values(stage_values),))

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages of the plan."""
        return len(self.stages)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in all stages."""
        return sum(stage.num_gpus for stage in self.stages)

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The number of data-parallel ranks of each stage."""
        return tuple(stage.data_parallel for stage in self.stages)

    def of_replica(self, replicas: int) -> "Plan":
        """The plan for one of ``replicas`` replicas of the model, each with an equal share of the
        data-parallel ranks.
        """
        stages = [
            replace(stage, data_parallel=stage.data_parallel // replicas) for stage in self.stages
        ]
        return replace(self, stages=tuple(stages))

    @property
    def recomputed_share(self) -> float:
        """The share of the GEMMs of the plan's blocks that are computed a second time in the
        backward pass: all of a checkpointed block, half of one that recomputes every second GEMM.
        """
        again = (
            stage.checkpointed_layers + stage.degree("products_recomputed_layers") / 2
            for stage in self.stages
        )
        return sum(again) / self.layers

    @property
    def layers(self) -> int:
        """Number of transformer blocks in all stages."""
        return sum(stage.layers for stage in self.stages)
