"""Ways to split a sequence of GEMMs, or a transformer block, over tensor-parallel ranks, and what
each way costs in communication.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments.cli.commandline import DONE, as_options
from experiments.pages.charts import Bars
from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, table_of
from mistlab.core.values import reject
from mistlab.cost.links import LinkTimes
from mistlab.job.job import hardware_from, model_from
from mistlab.machine.cluster import Cluster

Layout = Literal["whole", "split", "tokens", "partial"]
LAYOUTS: tuple[Layout, ...] = ("whole", "split", "tokens", "partial")

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")
# For each collective, how many times the bytes of an activation pass the link of a rank.
PASSES: Mapping[Collective, float] = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}

# The changes of how a tensor lies on the ranks, each with the collective that makes it; None if a
# rank that has the whole tensor only drops a part.
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
    """A way to split an operator over ranks: how its input must lie on the ranks, and how its
    output then lies on them.
    """

    name: str
    needs: Layout
    gives: Layout


BY_ROWS = Way(name="rows", needs="whole", gives="split")
BY_COLUMNS = Way(name="columns", needs="split", gives="partial")
_TRANSPOSED = {BY_ROWS: BY_COLUMNS, BY_COLUMNS: BY_ROWS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator in a sequence of operators: the ways to split it over ranks, and the size of its
    output as a multiple of M, the bytes of an activation.
    """

    name: str
    ways: tuple[Way, ...]
    output: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A collective before an operator, or after the last one.

    ``size`` is that of the whole activation relative to M, the bytes of the residual stream's
    activation; the cost is the number of times that M bytes pass a link.
    """

    before: str
    collective: Collective
    size: float

    @property
    def cost(self) -> float:
        """The cost of the collective: how often M bytes (those of an activation) pass the link of a
        rank.
        """
        return PASSES[self.collective] * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The way in which each operator of a sequence is split over ranks, and the collectives between
    them.
    """

    ways: tuple[str, ...]
    layouts: tuple[Layout, ...]
    messages: tuple[Message, ...]

    @property
    def cost(self) -> float:
        """The cost of all collectives: how often M bytes (those of an activation) pass the link of
        a rank.
        """
        return sum(message.cost for message in self.messages)

    @property
    def rank(self) -> tuple[float, int]:
        """A sort key: first the cost of all collectives, then their number."""
        return self.cost, len(self.messages)


def weight(name: str, output: float = 1.0) -> Operator:
    """A GEMM with a weight matrix, which can be split over ranks by rows or by columns."""
    return Operator(name=name, ways=(BY_ROWS, BY_COLUMNS), output=output)


def elementwise(name: str, layouts: Sequence[Layout], output: float = 1.0) -> Operator:
    """An operator whose output lies on the ranks as its input does; only the given layouts are
    possible.
    """
    ways = tuple(Way(name=layout, needs=layout, gives=layout) for layout in layouts)
    return Operator(name=name, ways=ways, output=output)


def chain(products: int) -> tuple[Operator, ...]:
    """A sequence of GEMMs with square weights of one size: y = W_n ... W_2 W_1 x."""
    return tuple(weight(f"W{number + 1}") for number in range(products))


def block(stream: Sequence[Layout] = ("whole", "tokens")) -> tuple[Operator, ...]:
    """The operators of a GPT block, with the widths of their outputs as multiples of the residual
    stream's.

    ``stream`` are the layouts that norms and residual sums may have. A norm needs all features of a
    token, attention needs all tokens of a head.
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
    """The way to split a sequence of operators that costs the least communication; if several cost
    the same, the one with the fewest collectives.

    ``collectives`` are those that the library offers. ``start`` and ``end`` are the layouts of the
    residual stream before and after a block.
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
                longer = Partition(
                    ways=(*moved.ways, way.name),
                    layouts=(*moved.layouts, way.gives),
                    messages=moved.messages,
                )
                if way.gives not in after or longer.rank < after[way.gives].rank:
                    after[way.gives] = longer
        best, size = after, operator.output
    ends = [
        moved
        for layout, before in best.items()
        if (moved := _moved(before, changes.get((layout, end)), size, "the end")) is not None
    ]
    if not ends:
        reject(
            f"collectives: {', '.join(collectives) or 'none'} cannot turn the layouts of these "
            f"operators from start {start} into end {end}: give more of {', '.join(COLLECTIVES)}"
        )
    return min(ends, key=lambda partition: partition.rank)


def all_partitions(
    operators: Sequence[Operator],
    *,
    start: Layout = "whole",
    end: Layout = "whole",
    collectives: Sequence[Collective] = COLLECTIVES,
) -> Iterator[Partition]:
    """Every way to split the weights of a sequence of operators, each with its cheapest
    collectives; cheapest first.
    """
    weights = [operator.name for operator in operators if BY_ROWS in operator.ways]
    every = []
    for ways in product((BY_ROWS, BY_COLUMNS), repeat=len(weights)):
        chosen = dict(zip(weights, ways, strict=True))
        forced = forced_to(operators, {name: way.name for name, way in chosen.items()})
        every.append(shortest(forced, start=start, end=end, collectives=collectives))
    yield from sorted(every, key=lambda partition: partition.rank)


def forced_to(operators: Sequence[Operator], ways: Mapping[str, str]) -> tuple[Operator, ...]:
    """The sequence of operators, in which operators with certain names can only be split in one
    way.
    """
    return tuple(
        Operator(
            name=operator.name,
            ways=tuple(
                way for way in operator.ways if way.name == ways.get(operator.name, way.name)
            ),
            output=operator.output,
        )
        for operator in operators
    )


def mirrored(operators: Sequence[Operator]) -> tuple[Operator, ...]:
    """The sequence of operators of the backward pass: weights are transposed, and the layouts of
    outputs become layouts of inputs.
    """
    inputs = (1.0, *(one.output for one in operators))
    return tuple(
        Operator(
            name=operator.name,
            ways=tuple(_TRANSPOSED.get(way, way) for way in operator.ways),
            output=size,
        )
        for operator, size in zip(reversed(operators), reversed(inputs[:-1]), strict=True)
    )


def weight_ways(operators: Sequence[Operator], partition: Partition) -> tuple[str, ...]:
    """In which way each weight of a sequence is split, in order, as text."""
    return tuple(
        way
        for operator, way in zip(operators, partition.ways, strict=True)
        if way in (BY_ROWS.name, BY_COLUMNS.name)
    )


def _moved(
    before: Partition, change: tuple[Collective, ...] | None, size: float, name: str
) -> Partition | None:
    """A partial solution extended by the collectives that change the layout before an operator;
    None if no collectives can.
    """
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
    """The cheapest sequence of collectives from each layout to each other one (by the
    Floyd-Warshall algorithm).
    """
    cheapest: dict[tuple[Layout, Layout], tuple[Collective, ...]] = {
        (layout, layout): () for layout in LAYOUTS
    }
    for ends, collective in CHANGES.items():
        if collective is None:
            cheapest[ends] = ()
        elif collective in collectives:
            cheapest[ends] = (collective,)

    def cost(ends: tuple[Layout, Layout]) -> float:
        return sum(PASSES[one] for one in cheapest[ends]) if ends in cheapest else float("inf")

    for over, first, last in product(LAYOUTS, repeat=3):
        through = cost((first, over)) + cost((over, last))
        if through < cost((first, last)):
            cheapest[first, last] = (*cheapest[first, over], *cheapest[over, last])
    return cheapest


# The collectives of a library that has no reduce-scatter.
WITHOUT_SCATTER: tuple[Collective, ...] = ("all_reduce", "all_gather")
PUBLISHED = ("rows", "columns", "rows", "columns")
BYTES_A_NUMBER = 2
MICROSECONDS_A_SECOND = 1e6
SHORT = {"rows": "r", "columns": "c"}

# A sequence of operators to split: its name, the operators, the layout of its input and output, and
# the collectives that may be used.
Chain = tuple[str, Sequence[Operator], Layout, Sequence[Collective]]
CHAINS: tuple[Chain, ...] = (
    ("three products", chain(3), "whole", WITHOUT_SCATTER),
    ("three products, with reduce-scatter", chain(3), "whole", COLLECTIVES),
    ("block", block(["whole"]), "whole", COLLECTIVES),
    ("block, sequence parallel", block(["tokens"]), "tokens", COLLECTIVES),
)


def partitions(options: argparse.Namespace) -> int:
    """Find the way to split a sequence of GEMMs over tensor-parallel ranks that costs the least
    communication.

    A weight is split by rows or by columns; on the ranks, an activation is whole, split, or a
    partial sum. So a partition is a path over layouts, and the best one is a shortest path. It is
    found for a chain of three GEMMs, and for a transformer block with and without sequence
    parallelism.
    """
    with as_options():
        model = model_from(options.model, Path())
        hardware = hardware_from(options.hardware, Path())
        ranks = _ranks(options.tensor_parallel, hardware.node.gpus)
        cluster = Cluster(hardware=hardware, nodes=1, gpus_per_node=ranks)
    if options.sequence_length < 1:
        reject(f"--sequence-length {options.sequence_length}: is too short: give at least 1")
    message_bytes = options.sequence_length * model.hidden * BYTES_A_NUMBER
    study = Study.begin("partitions", options)
    for chain_row in CHAINS[:: 2 if options.quick else 1]:
        study.add_all(_rows(chain_row, LinkTimes.of(cluster), ranks, message_bytes))
    where = (
        f"M is an activation of {options.sequence_length} tokens of {options.model} "
        f"({message_bytes / 2**20:.0f} MiB); times are for {ranks} ranks of a node of "
        f"{hardware.name}, one message after another."
    )
    return study.end(_report(study.rows, where), DONE)


def _ranks(asked: int, most: int) -> int:
    if not 2 <= asked <= most:
        reject(
            f"--tensor-parallel {asked}: must divide layers within a node of {most} GPUs: give 2 "
            f"to {most}"
        )
    return asked


def _rows(row_of_chain: Chain, links: LinkTimes, ranks: int, message_bytes: float) -> Iterator[Row]:
    name, operators, ends, collectives = row_of_chain
    for partition in all_partitions(operators, start=ends, end=ends, collectives=collectives):
        ways = weight_ways(operators, partition)
        weights = [each.name for each in operators if BY_ROWS in each.ways]
        forced = forced_to(operators, dict(zip(weights, ways, strict=True)))
        back = shortest(mirrored(forced), start=ends, end=ends, collectives=collectives)
        yield {
            "chain": name,
            "ways": "".join(SHORT[way] for way in ways),
            "forward": partition.cost,
            "backward": back.cost,
            "messages": [f"{each.collective} before {each.before}" for each in partition.messages],
            "forward_us": _microseconds(partition, links, ranks, message_bytes),
            "backward_us": _microseconds(back, links, ranks, message_bytes),
        }


def _microseconds(
    partition: Partition, links: LinkTimes, ranks: int, message_bytes: float
) -> float:
    """The microseconds that all collectives of a solution take on a machine, one after another."""
    seconds = 0.0
    for each in partition.messages:
        link = links.collective(each.collective, gpus_in_node=ranks, nodes=1)
        seconds += float(link(np.array([each.size * message_bytes]))[0])
    return seconds * MICROSECONDS_A_SECOND


# The page shows the solutions for this sequence of operators; files have all other solutions.
SHOWN = "three products"


def _report(rows: Sequence[Row], where: str) -> Report:
    paragraphs = []
    for name in dict.fromkeys(row["chain"] for row in rows):
        mine = [row for row in rows if row["chain"] == name]
        apart = [IN_A_FILE] if name != SHOWN else []
        paragraphs += [f"## {name[0].upper()}{name[1:]}", *apart, _table(mine)]
    published = [row for row in rows if row["ways"] == "".join(SHORT[way] for way in PUBLISHED)]
    return Report(
        title="Partitions of products over tensor-parallel ranks",
        words=[KEY, where, *paragraphs],
        summary={"best": _best(rows), "published_forward": [row["forward"] for row in published]},
        pictures=[_picture(rows, name) for name in ("three products", "block")],
    )


def _best(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        name: min(row["forward"] for row in rows if row["chain"] == name)
        for name in dict.fromkeys(row["chain"] for row in rows)
    }


def _table(rows: Sequence[Row]) -> str:
    return table_of(
        rows,
        ("weights", "{ways}"),
        ("forward", "{forward:g}"),
        ("backward", "{backward:g}"),
        ("forward us", "{forward_us:.0f}"),
        ("both us", lambda row: f"{row['forward_us'] + row['backward_us']:.0f}"),
        ("messages of the forward pass", lambda row: "; ".join(row["messages"])),
    )


def _picture(rows: Sequence[Row], about: str) -> Bars:
    chains = [name for name in dict.fromkeys(row["chain"] for row in rows) if about in name]
    ways = [row["ways"] for row in rows if row["chain"] == chains[0]]
    cost = {(row["chain"], row["ways"]): row["forward"] for row in rows}
    return Bars(
        name=f"partitions-{about.replace(' ', '-')}",
        caption=f"Messages of the forward pass of each partition: {about}.",
        groups=ways,
        series={name: [cost.get((name, way)) for way in ways] for name in chains},
        y="messages (M / B)",
    )


assert (BY_ROWS.name, BY_COLUMNS.name) == tuple(SHORT)

KEY = (
    "A letter for each weight, the first product's first: r by rows (its outputs), c by columns "
    "(its inputs). Costs are in M / B: an all-gather or a reduce-scatter of an activation of M "
    "bytes counts 1, an all-reduce 2."
)
