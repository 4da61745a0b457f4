"""The page of a sweep: how its cells ended, a table with a line each, and a picture."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from experiments.frame.charts import Lines
from experiments.frame.numbers_in_words import gib, number
from experiments.frame.study import Report
from experiments.frame.tables import TIMING, Row, table_of

# Columns that say what was asked, and their heads; those with one value in all rows are left out.
ASKED = {
    "model": "model",
    "hardware": "hardware",
    "nodes": "nodes",
    "gpus_per_node": "GPUs a node",
    "memory_gib": "GiB a GPU",
    "keep_free_gib": "GiB kept free",
    "host_memory_gib": "GiB a host",
    "intra_node_gbytes_per_s": "GB/s in a node",
    "inter_node_gbytes_per_s": "GB/s of a node",
    "sequence_length": "tokens",
    "global_batch": "batch",
    "attention": "attention",
    "precision": "precision",
    "space": "space",
    "searcher": "searcher",
}
# Numbers that may be the horizontal axis, the first one with most values is.
AXES = ("global_batch", "gpus", "sequence_length")
# Curves that a picture can tell apart.
MOST_CURVES = 16


def report(rows: Sequence[Row], cells: int, *, is_interrupted: bool = False) -> Report:
    """The page of the rows that there are, of so many cells."""
    varied = [name for name in ASKED if len({row.get(name) for row in rows}) > 1]
    return Report(
        title="Sweep",
        words=[*_words(rows, cells, varied, is_interrupted), _table(rows, varied)],
        summary={
            "cells": cells,
            "done": len(rows),
            "interrupted": is_interrupted,
            "statuses": dict(sorted(Counter(row["status"] for row in rows).items())),
            TIMING: {name: sum(row[TIMING][name] for row in rows) for name in ("wall_s", "cpu_s")},
        },
        pictures=_pictures(rows, varied),
    )


def _words(
    rows: Sequence[Row], cells: int, varied: Sequence[str], is_interrupted: bool
) -> Iterator[str]:
    if is_interrupted:
        yield f"Interrupted: {len(rows)} of {cells} cells are done. The same command goes on."
    elif len(rows) < cells:
        yield (
            f"{cells - len(rows)} of {cells} cells have no row: the workers that tried them were "
            "killed, perhaps for memory. The same command tries them again: give fewer --jobs."
        )
    statuses = Counter(row["status"] for row in rows)
    ended = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    if rows:
        yield f"{len(rows)} cells: {ended}."
        alone = [name for name in ASKED if name in rows[0] and name not in varied]
        same = [f"{ASKED[name]} {rows[0][name]}" for name in alone]
        if same:
            yield f"In all rows: {', '.join(same)}."


def _table(rows: Sequence[Row], varied: Sequence[str]) -> str:
    return table_of(
        rows,
        *((ASKED[name], lambda row, name=name: row.get(name, "-")) for name in varied),
        ("status", "{status}"),
        ("predicted s", lambda row: number(row.get("predicted_s"), ".3f")),
        ("played s", lambda row: number(row.get("simulated_s"), ".3f")),
        ("tokens/s a GPU", lambda row: number(row.get("tokens_per_s_per_gpu"), ",.0f")),
        ("GiB", lambda row: gib(row.get("memory_bytes"), ".1f")),
        ("plan, or why there is none", _plan_or_reason),
    )


def _plan_or_reason(row: Row) -> str:
    return (row.get("plan") or row.get("reason") or "").replace("|", "/")


def _pictures(rows: Sequence[Row], varied: Sequence[str]) -> list[Lines]:
    """Tokens a second of a GPU against the number that varies most, a curve for each combination of
    what varies else."""
    points = [(_numbers(row), row) for row in rows if row.get("tokens_per_s_per_gpu")]
    if not points:
        return []
    axis = max(AXES, key=lambda name: len({numbers[name] for numbers, _ in points}))
    names = [name for name in varied if name not in (axis, "nodes", "gpus_per_node")]
    if axis != "gpus" and {"nodes", "gpus_per_node"} & {*varied}:
        names.append("gpus")
    curves: dict[str, list[tuple[float, float]]] = {}
    for numbers, row in points:
        label = _label({**row, **numbers}, names)
        curves.setdefault(label, []).append((numbers[axis], row["tokens_per_s_per_gpu"]))
    if len(curves) > MOST_CURVES:
        curves = {}
        for numbers, row in points:
            point = (numbers[axis], row["tokens_per_s_per_gpu"])
            curves.setdefault(row["model"], []).append(point)
    curves = {label: sorted(own) for label, own in curves.items()}
    is_many = any(a[0] == b[0] for own in curves.values() for a, b in pairwise(own))
    return [
        Lines(
            name="sweep",
            caption="What a GPU does by the best plan of each cell.",
            curves=curves,
            x={"gpus": "GPUs", "global_batch": "global batch"}.get(axis, "tokens of a sequence"),
            y="tokens/s a GPU",
            log_x=True,
            log_y=True,
            dots=[*curves] if is_many else (),
        )
    ]


def _numbers(row: Row) -> dict[str, int]:
    gpus = row["nodes"] * row["gpus_per_node"]
    return {"gpus": gpus, **{name: row[name] for name in AXES if name != "gpus"}}


def _label(row: dict[str, Any], names: Sequence[str]) -> str:
    words = (f"{row[name]} GPUs" if name == "gpus" else str(row.get(name)) for name in names)
    return ", ".join(words)
