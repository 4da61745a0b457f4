"""How a layer's parameters lie in one flat vector, who owns which part, and where ratios cut.

Parameters begin at multiples of ``ALIGNMENT`` elements; the end is padded so that data-parallel
ranks own equal, aligned parts. Cuts fall on the same multiple, so that arithmetic on the two sides
of a cut is, bit for bit, that of the whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

from torch import Tensor, nn

ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A parameter in the flat vector of its layer."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Its elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A layer's flat vector, and this rank's part of it where ``parts`` ranks share it out."""

    entries: tuple[Entry, ...]
    numel: int
    parts: int
    part: int

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], *, parts: int, part: int) -> Self:
        """Lay parameters out in order."""
        entries, offset = [], 0
        for name, shape in shapes.items():
            entries.append(Entry(name=name, shape=tuple(shape), offset=offset))
            offset = _up(offset + entries[-1].numel, ALIGNMENT)
        return cls(
            entries=tuple(entries),
            numel=_up(offset, ALIGNMENT * parts),
            parts=parts,
            part=part,
        )

    @property
    def own(self) -> slice:
        """This rank's part."""
        size = self.numel // self.parts
        return slice(self.part * size, (self.part + 1) * size)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters in a flat tensor, by name."""
        return {e.name: flat[e.offset : e.offset + e.numel].view(e.shape) for e in self.entries}


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a module's parameters, by name."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def kept_elements(numel: int, ratio: float) -> int:
    """How many of ``numel`` elements stay on the device when ``ratio`` of them leaves.

    >>> kept_elements(640, 0.37)
    448
    """
    return numel - int(ratio * numel / ALIGNMENT) * ALIGNMENT


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
