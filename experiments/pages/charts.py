"""Charts as plain data, independent of the library that draws them.

Each chart has a file name without an ending, and a caption that says what it shows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A chart of curves through points. Curves named in ``dots`` are drawn as points without a
    line; ``marks`` are horizontal reference lines, such as published values; ``names`` label the
    positions 0, 1, 2, ... of an axis of categories.
    """

    name: str
    caption: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    dots: Sequence[str] = ()
    names: Sequence[str] = ()
    marks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """A bar chart: in every group a bar for each series, side by side or stacked; None leaves a bar
    out. ``marks`` are reference lines.
    """

    name: str
    caption: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    y: str
    stacked: bool = False
    log_y: bool = False
    # The format of the number above each bar, such as ".2f"; empty for charts with many bars.
    number: str = ""
    marks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A picture that is neither curves nor bars, given by the function that draws it."""

    name: str
    caption: str
    draw: Callable[[], "Figure"]


Picture = Lines | Bars | Drawn
