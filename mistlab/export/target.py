"""An export target: a framework, which choices of a plan it can say, and the text of its file."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from mistlab.export.given import Given, Imported
from mistlab.values.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How a target says some choices of a plan.

    ``nearest`` gives the nearest job whose ``choices`` the target can say; ``because`` says in
    words why a job may have to change. Choices are names of dimensions, of fields of a plan, or of
    fields of a workload.
    """

    choices: tuple[str, ...]
    nearest: Callable[[Job], Job]
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A framework to which plans go, and from which they come back.

    ``rows`` are taken in order; a dimension without a row cannot be said. ``engines`` are the
    engines that may stand for the framework when its plans are predicted, the best first. ``write``
    makes the text of a job that needs no row any more, ``read`` the job of a text. ``notes`` tells
    what a user must know about the text. ``package`` is the pinned distribution. With
    ``always_overlaps`` communication cannot be left to the end of an iteration. ``own_engines`` are
    engines of which the framework runs plans as they are: for each, the one that stands for the
    framework then. ``words_for_8_bits`` are to be added to the text for 8-bit products.
    """

    name: str
    title: str
    package: str
    engines: tuple[str, ...]
    rows: tuple[Row, ...]
    write: Callable[[Job], str]
    read: Callable[[str, Given], Imported]
    notes: Callable[[Job], Iterator[str]]
    always_overlaps: bool = False
    own_engines: Mapping[str, str] = field(default_factory=dict)
    words_for_8_bits: str = ""

    def engines_for(self, engine: str) -> tuple[str, ...]:
        """The engines that may stand for the framework where a plan of ``engine`` is exported."""
        own = self.own_engines.get(engine)
        return self.engines if own is None else (own, *self.engines)

    @property
    def said(self) -> frozenset[str]:
        """The choices that have a row."""
        return frozenset(choice for row in self.rows for choice in row.choices)
