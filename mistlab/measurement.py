"""What a plan costs, as measured: names and units of ``mistlab.predict``."""

from dataclasses import dataclass, field

from mistlab.errors import refuse
from mistlab.plan import Engine
from mistlab.value import bounded, check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where a measurement was made; what was not found out is empty."""

    device: str
    num_devices: int = field(metadata=bounded(minimum=1))
    python: str = ""
    torch: str = ""
    cuda: str = ""
    driver: str = ""
    revision: str = ""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeasurement:
    """One stage as ``StagePrediction`` has it; None where the run did not tell."""

    stable_s: float | None = field(default=None, metadata=bounded(minimum=0))
    delta_forward_s: float | None = None
    delta_backward_s: float | None = None
    step_s: float | None = field(default=None, metadata=bounded(minimum=0))
    exposed_communication_s: float | None = field(default=None, metadata=bounded(minimum=0))
    peak_allocated_bytes: int | None = field(default=None, metadata=bounded(minimum=0))
    peak_reserved_bytes: int | None = field(default=None, metadata=bounded(minimum=0))
    host_bytes: int | None = field(default=None, metadata=bounded(minimum=0))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Iterations of a plan that were run; a run out of memory does not fit and has no samples.

    ``iteration_s`` is the median of ``samples_s``, the bounds hold 90 % of them.
    """

    iteration_s: float | None = field(metadata=bounded(above=0))
    iteration_s_low: float | None = field(metadata=bounded(above=0))
    iteration_s_high: float | None = field(metadata=bounded(above=0))
    tokens_per_s: float | None = field(metadata=bounded(above=0))
    mfu: float | None = field(metadata=bounded(minimum=0))
    fits: bool
    engine: Engine
    stages: tuple[StageMeasurement, ...]
    samples_s: tuple[float, ...] = field(metadata=bounded(above=0))
    environment: Environment

    def __post_init__(self) -> None:
        check_fields(self)
        if self.fits != bool(self.samples_s):
            remedy = "at least one sample" if self.fits else "no samples, or fits: true"
            problem = f"{len(self.samples_s)} samples with fits {self.fits}: give {remedy}"
            refuse("samples_s", problem)
        for name in ("iteration_s", "iteration_s_low", "iteration_s_high", "tokens_per_s", "mfu"):
            if (getattr(self, name) is None) == self.fits:
                remedy = "give its value" if self.fits else "leave it null"
                problem = f"{getattr(self, name)} with fits {self.fits}: {remedy}"
                refuse(name, problem)
