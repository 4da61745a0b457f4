"""Whole training runs on a machine: the memory they took beyond tensors, and how sure times are."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mistlab.engines.table import names_for_plans
from mistlab.values.errors import refuse
from mistlab.values.units import MIB_BYTES
from mistlab.values.value import bounded, check_fields, name_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator:
    """What the caching allocator holds beyond the peak of allocated bytes of engine mistlab, and
    what is not torch's.

    The step of layer after layer needs scratch space for the largest one's shard, at a time when
    activations are gone; a head needs some of its own. The blocks that were cut for them seldom
    serve the activations at the peak, so they come on top: bytes for each parameter of either, for
    the head at most ``head_mib``: of the heads that were measured larger ones take no more.
    """

    step_bytes_a_parameter: float = field(metadata=bounded(minimum=0))
    head_bytes_a_parameter: float = field(metadata=bounded(minimum=0))
    head_mib: float = field(metadata=bounded(minimum=0))
    outside_mib: float = field(metadata=bounded(minimum=0))

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def head_bytes(self) -> float:
        """The most bytes on top for a head."""
        return self.head_mib * MIB_BYTES

    @property
    def outside_bytes(self) -> float:
        """Bytes that libraries take outside torch's allocator."""
        return self.outside_mib * MIB_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredAt:
    """Where runs were measured: the model's width, how many GPUs, how long sequences were."""

    hidden: int = field(metadata=bounded(minimum=1))
    gpus: int = field(metadata=bounded(minimum=1))
    sequence_length: int = field(metadata=bounded(minimum=1))

    def __post_init__(self) -> None:
        check_fields(self)

    def ratios(self, other: "MeasuredAt") -> Mapping[str, float]:
        """By what factor each of the three differs, at least 1."""
        pairs = {
            "hidden": (self.hidden, other.hidden),
            "GPUs": (self.gpus, other.gpus),
            "sequence length": (self.sequence_length, other.sequence_length),
        }
        return {name: max(pair) / min(pair) for name, pair in pairs.items()}

    def doublings(self, other: "MeasuredAt") -> float:
        """How far another place is: the doublings of all three."""
        return sum(map(math.log2, self.ratios(other).values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCalibration:
    """One engine's runs on a machine, predicted and measured.

    ``half_width`` is the share of a prediction within which 90 % of measurements lie, of runs that
    were left out of the fit while others ``at`` their place were in it; ``far_half_width`` likewise
    where all runs of their width were left out, and the nearest others were ``reach`` doublings
    away.
    """

    engine: str = field(metadata=name_in(names_for_plans))
    half_width: float = field(metadata=bounded(above=0))
    far_half_width: float = field(metadata=bounded(above=0))
    reach: float = field(metadata=bounded(above=0))
    runs: int = field(metadata=bounded(minimum=0))
    at: tuple[MeasuredAt, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.at:
            refuse("at", "is empty: give at least one place where runs were measured")
        if self.far_half_width < self.half_width:
            problem = (
                f"{self.far_half_width:g} is below half_width: give {self.half_width:g} or more"
            )
            refuse("far_half_width", problem)
