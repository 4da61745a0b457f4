"""Numbers fitted to whole training runs: memory beyond tensors, and bounds of predicted times."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from mistlab.engines.table import names_for_plans
from mistlab.values.errors import refuse
from mistlab.values.units import MIB_BYTES
from mistlab.values.value import bounded, check_fields, name_in, quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocator:
    """Memory of engine ``mistlab`` beyond tensors, in torch's allocator and outside torch.

    Stepping layer after layer needs scratch space for the largest layer's shard, when activations
    are gone; a head needs scratch space too. The allocator's blocks for it can seldom be used for
    activations at the peak, so they come on top: bytes for each parameter of that shard and of the
    head. The head's part is at most ``head_mib``, because larger measured heads took no more.
    """

    step_bytes_a_parameter: float = field(metadata=quantity(zero=True))
    head_bytes_a_parameter: float = field(metadata=quantity(zero=True))
    head_mib: float = field(metadata=quantity(zero=True))
    outside_mib: float = field(metadata=quantity(zero=True))

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
    """A place at which runs were measured: the model's width, GPUs, and sequence length."""

    hidden: int = field(metadata=bounded(minimum=1))
    gpus: int = field(metadata=bounded(minimum=1))
    sequence_length: int = field(metadata=bounded(minimum=1))

    def __post_init__(self) -> None:
        check_fields(self)

    def ratios(self, other: "MeasuredAt") -> Mapping[str, float]:
        """The factor, at least 1, by which each of the three numbers differs."""
        pairs = {
            "hidden size": (self.hidden, other.hidden),
            "number of GPUs": (self.gpus, other.gpus),
            "sequence length": (self.sequence_length, other.sequence_length),
        }
        return {name: max(pair) / min(pair) for name, pair in pairs.items()}

    def doublings(self, other: "MeasuredAt") -> float:
        """The distance to another place: the sum of doublings of the three numbers."""
        return sum(map(math.log2, self.ratios(other).values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCalibration:
    """The bounds of an engine's predicted times, from measured runs on a machine.

    90 % of measurements lie within ``half_width`` of the prediction, as a share of it, for runs
    that were left out of the fit while other runs ``at`` their place were in it. ``far_half_width``
    is the same when all runs of one model width were left out; then the nearest other runs were
    ``reach`` doublings away.
    """

    engine: str = field(metadata=name_in(names_for_plans))
    half_width: float = field(metadata=quantity())
    far_half_width: float = field(metadata=quantity())
    reach: float = field(metadata=quantity())
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
