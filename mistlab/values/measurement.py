"""The measured cost of a plan that was run, in the names and units of a prediction."""

from dataclasses import dataclass, field

from mistlab.engines.table import names_for_plans
from mistlab.values.errors import refuse
from mistlab.values.value import bounded, check_fields, name_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The device and the software of a measurement; an unknown field is empty."""

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
class Clocks:
    """A GPU's clock rates at a moment, the maximum of its SM clock, and its power limit."""

    sm_mhz: float = field(metadata=bounded(above=0))
    memory_mhz: float = field(metadata=bounded(above=0))
    most_sm_mhz: float | None = field(default=None, metadata=bounded(above=0))
    power_limit_w: float | None = field(default=None, metadata=bounded(above=0))

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def words(self) -> str:
        """The numbers with their units, for people."""
        most = "" if self.most_sm_mhz is None else f" of {self.most_sm_mhz:g}"
        power = "" if self.power_limit_w is None else f", at most {self.power_limit_w:g} W"
        return f"SM {self.sm_mhz:g}{most} MHz, memory {self.memory_mhz:g} MHz{power}"

    def moved_from(self, earlier: "Clocks") -> float:
        """The largest relative change of a clock since an earlier moment."""
        sm, memory = self.sm_mhz / earlier.sm_mhz, self.memory_mhz / earlier.memory_mhz
        return max(abs(sm - 1), abs(memory - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeasurement:
    """The measured numbers of a stage, named as in ``StagePrediction``; None if unknown."""

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
    """The measured iterations of a plan; a run that ran out of memory has no samples.

    ``iteration_s`` is the median of ``samples_s``, and 90 % of the samples lie between the two
    bounds. ``clocks`` are the first GPU's clocks before and after the samples, if its driver tells
    them.
    """

    iteration_s: float | None = field(metadata=bounded(above=0))
    iteration_s_low: float | None = field(metadata=bounded(above=0))
    iteration_s_high: float | None = field(metadata=bounded(above=0))
    tokens_per_s: float | None = field(metadata=bounded(above=0))
    mfu: float | None = field(metadata=bounded(minimum=0))
    fits: bool
    engine: str = field(metadata=name_in(names_for_plans))
    stages: tuple[StageMeasurement, ...]
    samples_s: tuple[float, ...] = field(metadata=bounded(above=0))
    environment: Environment
    clocks: tuple[Clocks, ...] = ()

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
