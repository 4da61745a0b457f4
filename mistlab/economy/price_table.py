"""A table of GPU prices per hour, and the choice of GPUs that makes a training run cheapest or
fastest.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Self

from mistlab.core.values import bounded, check_fields, from_mapping, refuse, reject, shown
from mistlab.economy.bill import OF_AN_HOUR

# The fields that a file of GPU prices must have, with what to write in each; a price is useless
# without its date.
_NEEDED = {
    "date": "the day of the prices, such as 2026-11-28",
    "source": "where the prices are from, such as the URL of the provider's price page",
    "gpus": "a list of GPUs, such as - {hardware: h100-80gb, usd_per_gpu_hour: 2.5}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPrice:
    """The hourly price of one kind of GPU, of which at most ``most_gpus`` can be rented at once."""

    hardware: str
    usd_per_gpu_hour: float = field(metadata=OF_AN_HOUR)
    most_gpus: int = field(default=8, metadata=bounded(minimum=1, most=1_000_000))

    def __post_init__(self) -> None:
        check_fields(self)

    def counts(self) -> tuple[int, ...]:
        """The numbers of GPUs of this kind to try: powers of two, and the largest that can be
        rented.

        >>> GpuPrice(hardware="l4-24gb", usd_per_gpu_hour=0.8, most_gpus=12).counts()
        (1, 2, 4, 8, 12)
        """
        powers = [1 << power for power in range(self.most_gpus.bit_length())]
        return tuple(dict.fromkeys((*powers, self.most_gpus)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """The hourly prices of kinds of GPUs, with the date and source of the prices."""

    date: str
    source: str
    gpus: tuple[GpuPrice, ...]

    def __post_init__(self) -> None:
        try:
            date.fromisoformat(self.date)
        except ValueError:
            refuse(
                "date",
                f"{shown(self.date)} is not a day: give the day of the prices, such as 2026-11-28",
            )
        if not self.source.strip():
            refuse("source", f"is empty: give {_NEEDED['source']}")
        if not self.gpus:
            refuse("gpus", f"is empty: give {_NEEDED['gpus']}")
        names = [one.hardware for one in self.gpus]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            refuse("gpus", f"{', '.join(twice)} is listed twice: list each hardware once")

    @classmethod
    def of_content(cls, plain: Any) -> Self:
        """The price table that a file's content describes; refuses content without date, source or
        prices.
        """
        if not isinstance(plain, Mapping):
            reject("is not a mapping: give date, source and gpus")
        for name, remedy in _NEEDED.items():
            if plain.get(name) in (None, ""):
                refuse(name, f"missing: give {remedy}")
        if not _is_list_of_mappings(plain["gpus"]):
            kinds = shown(plain["gpus"])
            refuse("gpus", f"{kinds} cannot be read: give {_NEEDED['gpus']}")
        # YAML parses a date as a date object, which is turned back into text.
        return from_mapping(cls, {**plain, "date": str(plain["date"])})


def _is_list_of_mappings(plain: object) -> bool:
    return isinstance(plain, list) and all(isinstance(one, Mapping) for one in plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """A training run on rented GPUs: its predicted hours, with bounds, and its cost in dollars."""

    hardware: str
    gpus: int
    hours: float
    hours_low: float
    hours_high: float
    usd: float


def cheapest_within(rented: Iterable[Rented], hours: float) -> Rented | None:
    """The cheapest of some training runs that take at most ``hours``, or the faster of two equally
    cheap ones; None if all take longer.
    """
    ending = [one for one in rented if one.hours <= hours]
    return min(ending, key=lambda one: (one.usd, one.hours), default=None)


def fastest_under(rented: Iterable[Rented], usd: float) -> Rented | None:
    """The fastest of some training runs that cost at most ``usd`` dollars, or the cheaper of two
    equally fast ones; None if all cost more.
    """
    affordable = [one for one in rented if one.usd <= usd]
    return min(affordable, key=lambda one: (one.hours, one.usd), default=None)
