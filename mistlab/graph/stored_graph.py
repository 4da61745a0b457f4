"""How many operators a host issues for one of a graph's, where these differ.

The gated delta rule is one operator of a graph. Megatron's ``GatedDeltaNet`` and the kernels of
flash-linear-attention run it as a chain, each of which Python issues. Forward these are copies in
another order of axes (7 before the rule, 1 after it), norms of queries and keys (2), their copies
for more heads (2), decays and rates (7), the kernels of chunks (6) and a norm apart from its gate
(1). Backward they are the kernels of chunks (9, of which two run the forward pass again and three
add up), decays and rates (9), sums over heads (2), norms (3), copies (3), and gradients that are
joined (2).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import mean
from typing import TYPE_CHECKING, Any

from mistlab.graph.sums import sum_from

if TYPE_CHECKING:
    from mistlab.graph.graph import Condition, LayerGraph, ModelGraph


ISSUED: Mapping[str, int] = {
    # Kernels that make what is converted to 8 bits do it in part.
    "mistlab.cast": 0,
    "mistlab.delta_rule": 26,
    "mistlab.delta_rule_backward": 28,
}


# A layer graph as the text of its file; its expressions are read only when they are needed.
#
# Reading expressions imports SymPy. Two graphs are compared by a digest of their texts, so
# expressions that were compiled before, from the same text, are found again without SymPy.


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGraph:
    """A graph that a file holds; ``where`` names the file in errors.

    ``turns`` are the kinds of a model's blocks, if they are not in the file. Expressions do not
    depend on how often kinds take turns.
    """

    digest: str
    where: str = field(compare=False)
    mapping: Mapping[str, Any] = field(compare=False, repr=False)
    turns: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, mapping: Mapping[str, Any], where: str) -> StoredGraph:
        """The graph in a file's mapping; refuses a mapping that is no graph."""
        if not _has_texts(mapping):
            _from_mapping(mapping, where)
        text = json.dumps(mapping, sort_keys=True)
        return cls(digest=hashlib.sha256(text.encode()).hexdigest(), where=where, mapping=mapping)

    @property
    def graph(self) -> ModelGraph:
        """The graph, with its expressions read."""
        return _read(self)

    @property
    def counts(self) -> ModelGraph:
        """The graph, with sums of products in place of expressions; SymPy does not read them."""
        return _counted(self)

    @property
    def attention(self) -> str:
        """The attention with which the model was traced."""
        return str(self.mapping["attention"])

    @property
    def precision(self) -> str:
        """``half`` (two bytes) or ``single`` (four bytes)."""
        return str(self.mapping["precision"])

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The comparisons on which the traced code branched."""
        return tuple(self.mapping["assumptions"])

    @property
    def pattern(self) -> tuple[str, ...]:
        """The kinds of blocks, which take turns."""
        return self.turns or tuple(self.mapping.get("pattern", ("block",)))

    @property
    def block_operators(self) -> float:
        """The operators of a block's two passes, in the mean over kinds; conversions to 8 bits are
        left out, as kernels that make what is converted do them in part."""
        of_kind = {kind: sum(self.operators_of(kind).values()) for kind in {*self.pattern}}
        return mean(of_kind[kind] for kind in self.pattern)

    def operators_of(self, kind: str) -> Mapping[str, int]:
        """The operators that a host issues for a kind of blocks in each pass, without conversions
        to 8 bits."""
        further = {one["name"]: one for one in self.mapping.get("further_blocks", ())}
        operators = further.get(kind, self.mapping["block"])["operators"]
        issued: Counter[str] = Counter()
        for one in operators:
            issued[one["phase"]] += ISSUED.get(one["name"], 1)
        return issued

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The sizes that must divide."""
        return self.graph.conditions

    @property
    def embedding(self) -> LayerGraph:
        """The embedding."""
        return self.graph.embedding

    @property
    def block(self) -> LayerGraph:
        """One block."""
        return self.graph.block

    @property
    def head(self) -> LayerGraph:
        """The head with the loss."""
        return self.graph.head

    @property
    def layers(self) -> tuple[LayerGraph, LayerGraph, LayerGraph]:
        """The graphs of embedding, block and head."""
        return self.graph.layers


def _has_texts(mapping: object) -> bool:
    """Whether a mapping has the texts that are used without reading expressions."""
    if not isinstance(mapping, Mapping):
        return False
    assumptions = mapping.get("assumptions")
    texts = [mapping.get("attention"), mapping.get("precision")]
    texts += assumptions if isinstance(assumptions, list) else [None]
    return all(isinstance(text, str) for text in texts)


@cache
def _read(stored: StoredGraph) -> ModelGraph:
    return _from_mapping(stored.mapping, stored.where)


@cache
def _counted(stored: StoredGraph) -> ModelGraph:
    from mistlab.graph import graph_text as graphfile  # noqa: PLC0415 (needs SymPy)

    return graphfile.from_mapping(stored.mapping, stored.where, read=sum_from)


def _from_mapping(mapping: Mapping[str, Any], where: str) -> ModelGraph:
    from mistlab.graph import graph_text as graphfile  # noqa: PLC0415 (needs SymPy)

    return graphfile.from_mapping(mapping, where)
