"""What GPU hours come to: money, energy and carbon, at given prices and intensities."""

from dataclasses import dataclass, field

from mistlab.values.value import bounded, check_fields

WATTS_A_KILOWATT = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The prices of an hour of one GPU.

    ``watts`` is the power of a GPU's board. ``overhead`` is what the whole building draws for each
    watt of its machines (power usage effectiveness), ``kg_per_kwh`` the carbon dioxide of a
    kilowatt hour.
    """

    usd_per_gpu_hour: float = field(metadata=bounded(minimum=0))
    watts: float = field(metadata=bounded(minimum=0))
    overhead: float = field(metadata=bounded(minimum=1))
    kg_per_kwh: float = field(metadata=bounded(minimum=0))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """The money, energy and carbon of a number of GPU hours."""

    gpu_hours: float
    usd: float
    kwh: float
    carbon_kg: float


def bill_of(gpu_hours: float, prices: Prices) -> Bill:
    """The bill of GPU hours."""
    kwh = gpu_hours * prices.watts / WATTS_A_KILOWATT * prices.overhead
    return Bill(
        gpu_hours=gpu_hours,
        usd=gpu_hours * prices.usd_per_gpu_hour,
        kwh=kwh,
        carbon_kg=kwh * prices.kg_per_kwh,
    )


def gpu_hours_of(gpus: int, seconds: float) -> float:
    """The GPU hours of so many GPUs for so many seconds."""
    return gpus * seconds / 3600
