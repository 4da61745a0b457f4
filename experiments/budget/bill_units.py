"""The units in which a bill is shown (days or hours, millions of dollars or dollars), chosen by the
largest value of a column.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.pages.tables import Row, number

# For each column of totals, its units for large values and for small ones: the row's field, the
# least value that counts as large, and for both units a heading, a factor and a format.
UNITS: tuple[tuple[str, float, tuple[str, float, str], tuple[str, float, str]], ...] = (
    ("days", 2.0, ("days", 1.0, ",.1f"), ("hours", 24.0, ",.1f")),
    ("gpu_hours", 1e3, ("GPU hours", 1.0, ",.0f"), ("GPU hours", 1.0, ",.1f")),
    ("usd", 1e5, ("M$", 1e-6, ",.2f"), ("$", 1.0, ",.2f")),
    ("kwh", 1e4, ("MWh", 1e-3, ",.0f"), ("kWh", 1.0, ",.2f")),
    ("carbon_kg", 1e4, ("t CO2", 1e-3, ",.0f"), ("kg CO2", 1.0, ",.2f")),
)


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit in which a column of estimates is shown: its heading, the factor by which values are
    multiplied, and the format of a number.
    """

    head: str
    factor: float
    form: str

    def text(self, value: float | None) -> str:
        """A value of the column as text; empty if it is missing."""
        return number(None if value is None else value * self.factor, self.form, none="")


def units_of(rows: Sequence[Row]) -> dict[str, Unit]:
    """The unit of each column of totals, chosen so that the largest value is not a tiny fraction:
    hours in place of days, dollars in place of millions.
    """
    largest = {name: max((row.get(name) or 0.0 for row in rows), default=0.0) for name, *_ in UNITS}
    return {
        name: Unit(*(long if largest[name] >= least else short))
        for name, least, long, short in UNITS
    }
