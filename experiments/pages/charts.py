"""Charts as data: what is drawn, without the library that draws it.

Each has the name of its file without an ending, and a caption that says what it shows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Curves of points; those named in ``dots`` are drawn without the line between them. ``marks``
    are horizontal lines at values that are not measured here, such as a published one. ``names``
    are those of the places 0, 1, 2, ... where curves run over things and not over a number."""

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
    """Bars in groups, a bar of each series in every group, beside one another or stacked; a None is
    a bar that is not there. ``marks`` are lines at values to compare with."""

    name: str
    caption: str
    groups: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    y: str
    stacked: bool = False
    log_y: bool = False
    # Of a few bars, what stands above each: such as ".2f".
    number: str = ""
    marks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Any other picture, by a function that draws it."""

    name: str
    caption: str
    draw: Callable[[], "Figure"]


Picture = Lines | Bars | Drawn
