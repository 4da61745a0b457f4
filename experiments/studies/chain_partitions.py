"""Partitions of a chain of products over tensor-parallel ranks, and what their messages cost.

Each rank holds a part of every weight, and each activation has a layout on the ranks:

- ``whole``: every rank has all of it;
- ``split``: every rank has some of its features (or heads);
- ``tokens``: every rank has some of its tokens, with all their features;
- ``partial``: every rank has a summand of all of it.

A product whose weight is split by rows (its outputs) turns whole into split, one by columns (its
inputs) split into partial. Between two operators a collective may change the layout. So a partition
is a path over layouts, and the best partition is a shortest path.

Costs are in messages of M bytes that pass a rank's link: an all-gather or a reduce-scatter of an
activation of M bytes takes M / B seconds at B bytes a second, an all-reduce 2 M / B (Mist, EuroSys
2025; a ring's factor of (n - 1) / n is taken as 1). The backward pass is a chain too, the mirrored
one: a weight that is split by rows is split by columns when it is transposed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from mistlab.core.values import reject

Layout = Literal["whole", "split", "tokens", "partial"]
LAYOUTS: tuple[Layout, ...] = ("whole", "split", "tokens", "partial")

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")
# How often an activation's bytes pass a rank's link.
PASSES: Mapping[Collective, float] = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}

# One change of layout, and the collective that makes it; a rank that has all may drop a part.
CHANGES: Mapping[tuple[Layout, Layout], Collective | None] = {
    ("whole", "split"): None,
    ("whole", "tokens"): None,
    ("split", "whole"): "all_gather",
    ("tokens", "whole"): "all_gather",
    ("partial", "whole"): "all_reduce",
    ("partial", "split"): "reduce_scatter",
    ("partial", "tokens"): "reduce_scatter",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to run an operator: the layout that it needs, and the layout of its output."""

    name: str
    needs: Layout
    gives: Layout


BY_ROWS = Way(name="rows", needs="whole", gives="split")
BY_COLUMNS = Way(name="columns", needs="split", gives="partial")
_TRANSPOSED = {BY_ROWS: BY_COLUMNS, BY_COLUMNS: BY_ROWS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator of a chain: its ways to run, and the size of its output relative to M."""

    name: str
    ways: tuple[Way, ...]
    output: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A collective before an operator, or at the end of the chain.

    ``size`` is that of the whole activation relative to M; the cost is in passes of M bytes.
    """

    before: str
    collective: Collective
    size: float

    @property
    def cost(self) -> float:
        """The passes of M bytes over a rank's link."""
        return PASSES[self.collective] * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """How each operator of a chain runs, and the messages between them."""

    ways: tuple[str, ...]
    layouts: tuple[Layout, ...]
    messages: tuple[Message, ...]

    @property
    def cost(self) -> float:
        """The cost of all messages, in passes of M bytes."""
        return sum(message.cost for message in self.messages)

    @property
    def rank(self) -> tuple[float, int]:
        """What partitions are ordered by: the cost, and of equal ones the number of messages."""
        return self.cost, len(self.messages)


def weight(name: str, output: float = 1.0) -> Operator:
    """A product with a weight, which is split by rows or by columns."""
    return Operator(name=name, ways=(BY_ROWS, BY_COLUMNS), output=output)


def elementwise(name: str, layouts: Sequence[Layout], output: float = 1.0) -> Operator:
    """An operator that keeps the layout of its input, which may be one of some."""
    ways = tuple(Way(name=layout, needs=layout, gives=layout) for layout in layouts)
    return Operator(name=name, ways=ways, output=output)


def chain(products: int) -> tuple[Operator, ...]:
    """A chain of products of equal widths: y = W_n ... W_2 W_1 x."""
    return tuple(weight(f"W{number + 1}") for number in range(products))


def block(stream: Sequence[Layout] = ("whole", "tokens")) -> tuple[Operator, ...]:
    """The operators of GPT's block, with their outputs' widths relative to the residual.

    ``stream`` are layouts that norms and residual sums may have. A norm needs all features of a
    token, attention all tokens of a head.
    """
    return (
        elementwise("norm 1", stream),
        weight("QKV", 3.0),
        elementwise("attention", ("split",)),
        weight("projection"),
        elementwise("residual 1", stream),
        elementwise("norm 2", stream),
        weight("up", 4.0),
        elementwise("activation", ("whole", "split", "tokens"), 4.0),
        weight("down"),
        elementwise("residual 2", stream),
    )


def shortest(
    operators: Sequence[Operator],
    *,
    start: Layout = "whole",
    end: Layout = "whole",
    collectives: Sequence[Collective] = COLLECTIVES,
) -> Partition:
    """The partition of a chain whose messages cost least; of equals, one with fewest messages.

    ``collectives`` are those that the library has. The residual stream's layouts of a block are
    those at its ``start`` and ``end``.
    """
    changes = _changes(collectives)
    best: dict[Layout, Partition] = {start: Partition(ways=(), layouts=(start,), messages=())}
    size = 1.0
    for operator in operators:
        after: dict[Layout, Partition] = {}
        for layout, before in best.items():
            for way in operator.ways:
                moved = _moved(before, changes.get((layout, way.needs)), size, operator.name)
                if moved is None:
                    continue
                found = Partition(
                    ways=(*moved.ways, way.name),
                    layouts=(*moved.layouts, way.gives),
                    messages=moved.messages,
                )
                if way.gives not in after or found.rank < after[way.gives].rank:
                    after[way.gives] = found
        best, size = after, operator.output
    ends = [
        moved
        for layout, before in best.items()
        if (moved := _moved(before, changes.get((layout, end)), size, "the end")) is not None
    ]
    if not ends:
        reject(f"no way from {start} to {end} with {', '.join(collectives) or 'no collective'}")
    return min(ends, key=lambda partition: partition.rank)


def partitions(
    operators: Sequence[Operator],
    *,
    start: Layout = "whole",
    end: Layout = "whole",
    collectives: Sequence[Collective] = COLLECTIVES,
) -> Iterator[Partition]:
    """Every partition of a chain's weights, each with its cheapest messages; cheapest first."""
    weights = [operator.name for operator in operators if BY_ROWS in operator.ways]
    found = []
    for ways in product((BY_ROWS, BY_COLUMNS), repeat=len(weights)):
        chosen = dict(zip(weights, ways, strict=True))
        forced = forced_to(operators, {name: way.name for name, way in chosen.items()})
        found.append(shortest(forced, start=start, end=end, collectives=collectives))
    yield from sorted(found, key=lambda partition: partition.rank)


def forced_to(operators: Sequence[Operator], ways: Mapping[str, str]) -> tuple[Operator, ...]:
    """A chain in which some operators, by name, have one way to run."""
    return tuple(
        Operator(
            name=one.name,
            ways=tuple(way for way in one.ways if way.name == ways.get(one.name, way.name)),
            output=one.output,
        )
        for one in operators
    )


def mirrored(operators: Sequence[Operator]) -> tuple[Operator, ...]:
    """The chain of a backward pass, in which weights are transposed and outputs are inputs."""
    inputs = (1.0, *(one.output for one in operators))
    return tuple(
        Operator(
            name=one.name, ways=tuple(_TRANSPOSED.get(way, way) for way in one.ways), output=size
        )
        for one, size in zip(reversed(operators), reversed(inputs[:-1]), strict=True)
    )


def weight_ways(operators: Sequence[Operator], partition: Partition) -> tuple[str, ...]:
    """How a partition splits the weights of a chain, in order."""
    return tuple(
        way
        for operator, way in zip(operators, partition.ways, strict=True)
        if way in (BY_ROWS.name, BY_COLUMNS.name)
    )


def _moved(
    before: Partition, change: tuple[Collective, ...] | None, size: float, name: str
) -> Partition | None:
    """A partition with the messages of a change of layout before an operator, if there is one."""
    if change is None:
        return None
    messages = tuple(
        Message(before=name, collective=collective, size=size) for collective in change
    )
    return Partition(
        ways=before.ways, layouts=before.layouts, messages=(*before.messages, *messages)
    )


def _changes(
    collectives: Sequence[Collective],
) -> dict[tuple[Layout, Layout], tuple[Collective, ...]]:
    """The cheapest collectives from each layout to each other, one after another (Floyd)."""
    found: dict[tuple[Layout, Layout], tuple[Collective, ...]] = {
        (layout, layout): () for layout in LAYOUTS
    }
    for ends, collective in CHANGES.items():
        if collective is None:
            found[ends] = ()
        elif collective in collectives:
            found[ends] = (collective,)

    def cost(ends: tuple[Layout, Layout]) -> float:
        return sum(PASSES[one] for one in found[ends]) if ends in found else float("inf")

    for over, first, last in product(LAYOUTS, repeat=3):
        through = cost((first, over)) + cost((over, last))
        if through < cost((first, last)):
            found[first, last] = (*found[first, over], *found[over, last])
    return found
