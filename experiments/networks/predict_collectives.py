"""Measured collectives, predicted: rows as JSON, or errors by cluster; and fits of numbers."""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from experiments.cli.commandline import batch_status, print_json, progress
from experiments.networks.collective_fit import ClustersLeftOut, bounds_of, fit, left_out
from experiments.networks.collective_tables import (
    CollectiveRow,
    RefusedCollective,
    collective_rows,
    columns_of,
)
from experiments.pages.tables import table
from mistlab.core.files import format_yaml
from mistlab.core.units import MICROSECONDS
from mistlab.core.values import InputError
from mistlab.network.collective_times import Fitted, first_guess, fitted_collectives

DIGITS = 4


def predict_collectives(options: argparse.Namespace) -> int:
    """Collectives of tables, predicted from the links that they cross: microseconds with bounds.

    A row is one collective or message: operation, GPUs, nodes, size in bytes, hardware, library
    and network (docs/reference/collective-tables.md). A size that is not said is taken to be a
    gibibyte, and noted. Without --json errors are printed by cluster. With --leave-out each
    cluster is predicted by a fit to all others; --fit writes the numbers that fit all rows, with
    the bounds that left-out clusters give.
    """
    unreadable, rows = 0, list[CollectiveRow | RefusedCollective]()
    for path in options.tables:
        try:
            rows += collective_rows(path)
        except InputError as error:
            progress(f"error: {error}")
            unreadable += 1
    known = [row for row in rows if isinstance(row, CollectiveRow)]
    if options.json:
        for answer in answers(rows, fitted_collectives()):
            print_json(answer)
    else:
        texts = list(_report(rows, options))
        print("\n\n".join(texts))
        if options.page:
            options.page.write_text("\n\n".join([*_head(options), *texts]) + "\n", encoding="utf-8")
    is_answered = bool(known) and len(known) == len(rows) and not unreadable
    return batch_status(len(options.tables), unreadable, all_answered=is_answered)


def _head(options: argparse.Namespace) -> Iterator[str]:
    tables = " ".join(path.name for path in options.tables)
    yield "# Collectives: predicted beside measured"
    more = " --leave-out" if options.leave_out or options.fit else ""
    yield f"Made by `python -m experiments.predict_collectives {tables}{more} --page PAGE.md`."
    yield (
        "Errors are predicted over measured times, less one; those of a cluster are of a fit to "
        "all others where the command has `--leave-out`. Bounds hold 90 % of the rows of such "
        "clusters, each cluster counted by a root of its rows. Kinds: *switched* is NCCL over "
        "NVLink, *direct* an inference engine's own all-reduce, *pcie* NCCL over PCIe, *network* "
        "between nodes, *sockets* between nodes of a cloud."
    )


def answers(
    rows: Sequence[CollectiveRow | RefusedCollective], fitted: Fitted
) -> Iterator[dict[str, object]]:
    """An object a row, in order: what is predicted, or why nothing is."""
    known = [row for row in rows if isinstance(row, CollectiveRow)]
    predicted = iter(_predicted(known, fitted) if known else ())
    for row in rows:
        place: dict[str, object] = {"file": row.where.rsplit(", line ", 1)[0], "row": row.number}
        if isinstance(row, RefusedCollective):
            yield {**place, "error": f"{row.where}: {row.problem}"}
        else:
            yield {**place, **next(predicted), "notes": list(row.notes)}


def _predicted(rows: Sequence[CollectiveRow], fitted: Fitted) -> Iterator[dict[str, object]]:
    columns = columns_of(rows)
    microseconds = columns.seconds(fitted) / MICROSECONDS
    bus = columns.bus_factor * columns.size_bytes / microseconds / 1e3
    for one, rate, kind in zip(microseconds, bus, columns.kinds, strict=True):
        low, high = fitted.bounds[str(kind)]
        yield {
            "time_us": _rounded(one),
            "time_us_low": _rounded(low * one),
            "time_us_high": _rounded(high * one),
            "busbw_gb_s": _rounded(rate),
            "kind": str(kind),
        }


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _report(
    rows: Sequence[CollectiveRow | RefusedCollective], options: argparse.Namespace
) -> Iterator[str]:
    measured = [
        row for row in rows if isinstance(row, CollectiveRow) and row.measured_us is not None
    ]
    refused = [row for row in rows if isinstance(row, RefusedCollective)]
    fitted = fitted_collectives()
    if measured and (options.leave_out or options.fit):
        apart = left_out(measured, first_guess())
    elif measured:
        columns = columns_of(measured)
        took = MICROSECONDS * np.array([row.measured_us for row in measured], dtype=float)
        kinds = [str(kind) for kind in columns.kinds]
        apart = ClustersLeftOut(rows=measured, over=took / columns.seconds(fitted), kinds=kinds)
    if measured:
        bounds = bounds_of(apart) if options.leave_out or options.fit else fitted.bounds
        yield _errors(apart, bounds)
    if measured and options.fit:
        written = fit(measured, first_guess())
        options.fit.write_text(format_yaml(_plain(written, bounds)), encoding="utf-8")
        yield f"fitted to {len(measured)} rows: {options.fit}"
    yield f"{len(rows)} rows, {len(measured)} measured, {len(refused)} refused"
    problems = Counter(row.problem for row in refused)
    first = {row.problem: row.where for row in reversed(refused)}
    yield "\n".join(
        f"{number} rows, the first {first[problem]}: {problem}"
        for problem, number in problems.most_common()
    )


def _errors(apart: ClustersLeftOut, bounds: Mapping[str, tuple[float, float]]) -> str:
    """Errors of each cluster, of each kind of links, and of all rows."""
    groups = [
        *((cluster, apart.of(cluster)) for cluster in dict.fromkeys(r.cluster for r in apart.rows)),
        *((kind, np.array(apart.kinds) == kind) for kind in sorted(set(apart.kinds))),
        ("all", np.full(len(apart.rows), True)),
    ]
    low = np.array([bounds[kind][0] for kind in apart.kinds])
    high = np.array([bounds[kind][1] for kind in apart.kinds])
    is_inside = (apart.over >= low) & (apart.over <= high)
    return table(
        ["rows of", "number", "median error", "bias", "in bounds"],
        [
            (
                name,
                f"{kept.sum()}",
                f"{np.median(apart.errors[kept]):.1%}",
                f"{1 / np.median(apart.over[kept]) - 1:+.1%}",
                f"{is_inside[kept].mean():.0%}",
            )
            for name, kept in groups
        ],
    )


def _plain(fitted: Fitted, bounds: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    factors = {
        name: {key: _rounded(value) for key, value in getattr(fitted, name).items()}
        for name in ("latency", "host", "network")
    }
    return {
        "fitted": {
            "numbers": {key: _rounded(value) for key, value in asdict(fitted.numbers).items()},
            **factors,
            "bounds": {kind: [_rounded(end) for end in ends] for kind, ends in bounds.items()},
        }
    }
