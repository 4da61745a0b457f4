"""The layout of a layer's parameters in one flat vector, and its division over ranks and host.

Parameters begin at multiples of ``ALIGNMENT`` elements (of a whole block where the optimizer's
moments are quantised in blocks). The end is padded, so that data-parallel ranks hold equal, aligned
parts. Offloading cuts the vector at such a multiple too, so that arithmetic on the two pieces gives
the same bits as on the whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

from torch import Tensor, nn

ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The name, shape and position of a parameter in the flat vector of its layer."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """The number of the parameter's elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The positions of a layer's parameters in one flat vector; if ``parts`` ranks shard the
    vector, this rank holds part number ``part``.
    """

    entries: tuple[Entry, ...]
    numel: int
    parts: int
    part: int

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, Sequence[int]],
        *,
        parts: int,
        part: int,
        alignment: int = ALIGNMENT,
    ) -> Self:
        """The layout of parameters in the order of ``shapes``, a mapping from names; each begins at
        a multiple of ``alignment``.
        """
        entries, offset = [], 0
        for name, shape in shapes.items():
            entries.append(Entry(name=name, shape=tuple(shape), offset=offset))
            offset = _rounded_up(offset + entries[-1].numel, alignment)
        return cls(
            entries=tuple(entries),
            numel=_rounded_up(offset, alignment * parts),
            parts=parts,
            part=part,
        )

    @property
    def part_numel(self) -> int:
        """The number of elements in each rank's part of the vector."""
        return self.numel // self.parts

    @property
    def own(self) -> slice:
        """The slice of the flat vector of parameters that this rank holds."""
        return slice(self.part * self.part_numel, (self.part + 1) * self.part_numel)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of the parameters in a flat tensor, by name."""
        return {e.name: flat[e.offset : e.offset + e.numel].view(e.shape) for e in self.entries}


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of a module's parameters, by name."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def kept_elements(numel: int, ratio: float, alignment: int = ALIGNMENT) -> int:
    """How many of ``numel`` elements stay on the device if the share ``ratio`` is offloaded, in
    multiples of ``alignment``.

    >>> kept_elements(640, 0.37)
    448
    """
    return numel - int(ratio * numel / alignment) * alignment


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
