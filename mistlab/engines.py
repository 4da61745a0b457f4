"""Engines: what each can do, and what whole training runs showed of a machine under each: memory
beyond tensors, and how sure times are."""

from dataclasses import dataclass, field

from mistlab.errors import refuse
from mistlab.plan import Engine
from mistlab.units import MIB_BYTES
from mistlab.value import bounded, check_fields


def highest_zero(engine: Engine, *, in_pipeline: bool) -> int:
    """The highest ZeRO level that an engine has, in a pipeline of several stages or without one.

    Megatron-LM's distributed optimizer shards optimizer state alone. DeepSpeed's pipeline engine
    accumulates whole gradients over a stage's micro-batches and asserts a level below 2
    (deepspeed/runtime/pipe/engine.py; deepspeedai/DeepSpeed, issues 1110 and 4164).
    """
    if engine == "megatron":
        return 1
    return 1 if engine == "deepspeed" and in_pipeline else 3


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
class Measured:
    """From the least to the most of some quantity among the runs that an engine was compared on."""

    least: float = field(metadata=bounded(minimum=0))
    most: float = field(metadata=bounded(minimum=0))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.most < self.least:
            problem = f"{self.most:g} is below least: give at least {self.least:g}"
            refuse("most", problem)

    def excess(self, value: float) -> float:
        """By what factor a value lies outside; 1 inside."""
        return max(1.0, value / self.most, self.least / value if value else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCalibration:
    """One engine's runs on a machine, predicted and measured.

    ``half_width`` is the share of a prediction within which 90 % of measurements lie that were left
    out of the fit. The ranges say which runs these were.
    """

    engine: Engine
    half_width: float = field(metadata=bounded(above=0))
    runs: int = field(metadata=bounded(minimum=0))
    hidden: Measured
    gpus: Measured
    sequence_length: Measured

    def __post_init__(self) -> None:
        check_fields(self)
