"""A table of GPU kinds with prices per hour, and the best choice of GPUs for a training."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Self

from mistlab.core.values import bounded, check_fields, from_mapping, refuse, reject, shown, within

# The fields that a price table needs, and what each has to hold; a price is useless without its
# date.
_NEEDED = {
    "date": "the day that the prices are of, as 2026-11-28",
    "source": "where they are from, as a page of the provider's",
    "gpus": "a list of kinds, as - {hardware: h100-80gb, usd_per_gpu_hour: 2.5}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPrice:
    """The hourly price of one GPU of a kind, of which at most ``most_gpus`` can be rented."""

    hardware: str
    usd_per_gpu_hour: float = field(metadata=bounded(minimum=0, most=1e6))
    most_gpus: int = field(default=8, metadata=bounded(minimum=1, most=1_000_000))

    def __post_init__(self) -> None:
        check_fields(self)

    def counts(self) -> tuple[int, ...]:
        """The numbers of GPUs to try: powers of two, and the largest that can be rented.

        >>> GpuPrice(hardware="l4-24gb", usd_per_gpu_hour=0.8, most_gpus=12).counts()
        (1, 2, 4, 8, 12)
        """
        powers = [1 << power for power in range(self.most_gpus.bit_length())]
        return tuple(dict.fromkeys((*powers, self.most_gpus)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """Prices of GPU kinds, with their date and source."""

    date: str
    source: str
    gpus: tuple[GpuPrice, ...]

    def __post_init__(self) -> None:
        try:
            date.fromisoformat(self.date)
        except ValueError:
            refuse("date", f"{shown(self.date)} is not a day: give {_NEEDED['date']}")
        if not self.source.strip():
            refuse("source", f"is empty: give {_NEEDED['source']}")
        if not self.gpus:
            refuse("gpus", f"is empty: give {_NEEDED['gpus']}")
        names = [one.hardware for one in self.gpus]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            refuse("gpus", f"{', '.join(twice)} is listed twice: give each kind one price")

    @classmethod
    def of_file(cls, plain: Any, where: str) -> Self:
        """The price table in a file's content; refuses one without date, source or prices."""
        with within(where):
            if not isinstance(plain, Mapping):
                reject("is not a mapping: give date, source and gpus")
            for name, remedy in _NEEDED.items():
                if plain.get(name) in (None, ""):
                    refuse(name, f"missing: give {remedy}")
            # The date becomes a text, since YAML parses it as a date object.
            return from_mapping(cls, {**plain, "date": str(plain["date"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """A training on some rented GPUs: its hours, with bounds, and its cost in dollars."""

    hardware: str
    gpus: int
    hours: float
    hours_low: float
    hours_high: float
    usd: float


def cheapest_within(rented: Iterable[Rented], hours: float) -> Rented | None:
    """The cheapest option that takes at most this many hours, the faster of equally cheap ones;
    None if there is none.
    """
    ending = [one for one in rented if one.hours <= hours]
    return min(ending, key=lambda one: (one.usd, one.hours), default=None)


def fastest_under(rented: Iterable[Rented], usd: float) -> Rented | None:
    """The fastest option that costs at most this many dollars, the cheaper of equally fast ones;
    None if there is none.
    """
    affordable = [one for one in rented if one.usd <= usd]
    return min(affordable, key=lambda one: (one.hours, one.usd), default=None)
