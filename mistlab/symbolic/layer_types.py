"""Types of layers: kinds of layers, and for blocks how a stage treats them.

A model has an embedding, blocks and a head. Its blocks are of one kind, or of several that follow
one another in a pattern; a stage treats each of its blocks in one way. Layers of one type take
equally long and keep equally much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mistlab.symbolic.treatments import PLAIN, TREATMENTS, Treatment, treatments_of
from mistlab.values.context_ways import RING

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mistlab.symbolic.graph import LayerGraph, ModelGraph

EMBEDDING, HEAD = "embedding", "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTypes:
    """The types of a model whose blocks follow a ``pattern`` of kinds, treated in these ways.

    >>> LayerTypes(pattern=("block",), treatments=("recomputed",)).names
    ('embedding', 'block', 'block_recomputed', 'head')
    """

    pattern: tuple[str, ...]
    treatments: tuple[str, ...]

    @classmethod
    def of(cls, pattern: Sequence[str]) -> LayerTypes:
        """The types with all treatments that there are now."""
        return cls(pattern=tuple(pattern), treatments=tuple(TREATMENTS))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of blocks."""
        return tuple(dict.fromkeys(self.pattern))

    @property
    def names(self) -> tuple[str, ...]:
        """All types."""
        return (EMBEDDING, *self.of_blocks, HEAD)

    @property
    def of_blocks(self) -> tuple[str, ...]:
        """The types of blocks: of each kind the plain one, then the treated ones."""
        ways = (PLAIN, *self.treatments)
        return tuple(type_of(kind, way) for kind in self.kinds for way in ways)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of candidates that decide which layers a stage has."""
        counts = tuple(TREATMENTS[name].dimension for name in self.treatments)
        own = ("layers", *counts, "has_embedding", "has_head")
        return (*own, "first_block") if len(self.pattern) > 1 else own

    def runs(
        self, columns: Mapping[str, NDArray[np.float64]]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Stages (J) as runs of layers of one type: how long each run is (R, J), and the place of
        its type among ``names`` (R, J or R, 1)."""
        if len(self.pattern) > 1:
            return self._runs_of_patterns(columns)
        counts = [columns[TREATMENTS[name].dimension] for name in self.treatments]
        plain = columns["layers"] - sum(counts) if counts else columns["layers"]
        runs = [columns["has_embedding"], plain, *counts, columns["has_head"]]
        return np.stack(runs).astype(np.float64), np.arange(len(runs))[:, None]

    def counts(self, columns: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        """How many layers of each type (T, J) stages of these columns have."""
        sizes, places = self.runs(columns)
        places = np.broadcast_to(places, sizes.shape)
        types = range(len(self.names))
        return np.stack([np.where(places == one, sizes, 0.0).sum(axis=0) for one in types])

    def _runs_of_patterns(
        self, columns: Mapping[str, NDArray[np.float64]]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        stages = self.of_stages(columns.__getitem__)
        longest = max(map(len, stages))
        sizes = np.array([[1.0] * len(one) + [0.0] * (longest - len(one)) for one in stages])
        types = np.array([one + [0] * (longest - len(one)) for one in stages])
        return sizes.T, types.T

    def of_stages(self, column: Callable[[str], NDArray[np.float64]]) -> list[list[int]]:
        """The types of each stage's layers in order, for stages of these columns."""
        rows = zip(*(column(name).tolist() for name in self.columns), strict=True)
        return [self.of_stage(dict(zip(self.columns, row, strict=True))) for row in rows]

    def of_stage(self, values: Mapping[str, float]) -> list[int]:
        """The types of a stage's layers in order, as places among ``names``."""
        first = int(values.get("first_block", 0))
        types = [
            type_of(self.pattern[(first + number) % len(self.pattern)], way)
            for number, way in enumerate(treatments_of(values.__getitem__))
        ]
        own = [EMBEDDING] * bool(values["has_embedding"]) + types
        places = {name: place for place, name in enumerate(self.names)}
        return [places[name] for name in own + [HEAD] * bool(values["has_head"])]


def type_of(kind: str, treatment: str) -> str:
    """The type of a kind's blocks with a treatment."""
    return kind if treatment == PLAIN else f"{kind}_{treatment}"


def graphs_of(
    graph: ModelGraph, treatments: Sequence[tuple[str, Treatment]], exchange: int = RING
) -> dict[str, LayerGraph]:
    """The layer graph of each type of a model's layers, in the order of ``LayerTypes.names``;
    context-parallel ranks exchange keys in the way ``exchange``."""
    from mistlab.symbolic.context import split_over_context  # noqa: PLC0415 (needs SymPy)

    graph = split_over_context(graph, exchange)
    found = {EMBEDDING: graph.embedding}
    for kind in dict.fromkeys(graph.pattern):
        block = graph.kinds[kind]
        found[kind] = block
        found |= {type_of(kind, name): row.graph(block) for name, row in treatments}
    return {**found, HEAD: graph.head}
