"""Partitions of a chain of three products and of a transformer block, and what they cost."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cli.commandline import DONE, as_options
from experiments.pages.charts import Bars
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, table_of
from experiments.studies.chain_partitions import (
    BY_COLUMNS,
    BY_ROWS,
    COLLECTIVES,
    Collective,
    Layout,
    Operator,
    Partition,
    block,
    chain,
    forced_to,
    mirrored,
    shortest,
    weight_ways,
)
from experiments.studies.chain_partitions import partitions as all_partitions
from mistlab.core.values import reject
from mistlab.cost.links import LinkTimes
from mistlab.job.job import hardware_from, model_from
from mistlab.machine.cluster import Cluster

# Libraries that reduce to every rank, or not at all.
WITHOUT_SCATTER: tuple[Collective, ...] = ("all_reduce", "all_gather")
PUBLISHED = ("rows", "columns", "rows", "columns")
BYTES_A_NUMBER = 2
MICROSECONDS_A_SECOND = 1e6
SHORT = {"rows": "r", "columns": "c"}

# The chains: their operators, the layout of their ends, and the collectives of the library.
Chain = tuple[str, Sequence[Operator], Layout, Sequence[Collective]]
CHAINS: tuple[Chain, ...] = (
    ("three products", chain(3), "whole", WITHOUT_SCATTER),
    ("three products, with reduce-scatter", chain(3), "whole", COLLECTIVES),
    ("block", block(["whole"]), "whole", COLLECTIVES),
    ("block, sequence parallel", block(["tokens"]), "tokens", COLLECTIVES),
)


def partitions(options: argparse.Namespace) -> int:
    """Which way to split a chain of products over tensor-parallel ranks costs the fewest messages.

    A weight is split by rows or by columns, and an activation is whole, split, or a sum in
    parts on the ranks. So a partition is a path over layouts, and the best is a shortest path:
    for a chain of three products, and for a transformer block, with and without sequence
    parallelism.
    """
    with as_options():
        model = model_from(options.model, Path())
        hardware = hardware_from(options.hardware, Path())
        ranks = _ranks(options.tensor_parallel, hardware.node.gpus)
        cluster = Cluster(hardware=hardware, nodes=1, gpus_per_node=ranks)
    if options.sequence_length < 1:
        reject(f"--sequence-length {options.sequence_length}: give at least 1")
    message_bytes = options.sequence_length * model.hidden * BYTES_A_NUMBER
    study = Study.begin("partitions", options)
    for one in CHAINS[:: 2 if options.quick else 1]:
        study.add_all(_rows(one, LinkTimes.of(cluster), ranks, message_bytes))
    where = (
        f"M is an activation of {options.sequence_length} tokens of {options.model} "
        f"({message_bytes / 2**20:.0f} MiB); times are for {ranks} ranks of a node of "
        f"{hardware.name}, one message after another."
    )
    return study.end(_report(study.rows, where), DONE)


def _ranks(asked: int, most: int) -> int:
    if not 2 <= asked <= most:
        reject(f"--tensor-parallel {asked}: give 2 to {most}, the GPUs of a node")
    return asked


def _rows(one: Chain, links: LinkTimes, ranks: int, message_bytes: float) -> Iterator[Row]:
    name, operators, ends, collectives = one
    for found in all_partitions(operators, start=ends, end=ends, collectives=collectives):
        ways = weight_ways(operators, found)
        weights = [each.name for each in operators if BY_ROWS in each.ways]
        forced = forced_to(operators, dict(zip(weights, ways, strict=True)))
        back = shortest(mirrored(forced), start=ends, end=ends, collectives=collectives)
        yield {
            "chain": name,
            "ways": "".join(SHORT[way] for way in ways),
            "forward": found.cost,
            "backward": back.cost,
            "messages": [f"{each.collective} before {each.before}" for each in found.messages],
            "forward_us": _microseconds(found, links, ranks, message_bytes),
            "backward_us": _microseconds(back, links, ranks, message_bytes),
        }


def _microseconds(found: Partition, links: LinkTimes, ranks: int, message_bytes: float) -> float:
    """What a partition's messages take on a machine, one after another."""
    seconds = 0.0
    for each in found.messages:
        link = links.collective(each.collective, gpus_in_node=ranks, nodes=1)
        seconds += float(link(np.array([each.size * message_bytes]))[0])
    return seconds * MICROSECONDS_A_SECOND


def _report(rows: Sequence[Row], where: str) -> Report:
    words = []
    for name in dict.fromkeys(row["chain"] for row in rows):
        mine = [row for row in rows if row["chain"] == name]
        words += [f"## {name[0].upper()}{name[1:]}", _table(mine)]
    published = [row for row in rows if row["ways"] == "".join(SHORT[way] for way in PUBLISHED)]
    return Report(
        title="Partitions of products over tensor-parallel ranks",
        words=[KEY, where, *words],
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
