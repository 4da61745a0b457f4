"""Predicts measured collectives: prints a row for each as JSON, or errors by cluster, or the
constants of a fit.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from experiments.cli.commandline import batch_status, print_json, progress
from experiments.networks.collective_tables import (
    CollectiveRow,
    RefusedCollective,
    collective_rows,
    columns_of,
)
from experiments.pages.page_tables import write_page
from experiments.pages.tables import table
from mistlab.core.arrays import Bools, Floats
from mistlab.core.files import format_yaml
from mistlab.core.units import MICROSECONDS
from mistlab.core.values import InputError
from mistlab.network.collective_times import (
    SOCKETS,
    CollectiveNumbers,
    Fitted,
    first_guess,
    fitted_collectives,
)

# The standard deviations that the fit assumes, as logarithms: of measurements around their
# predictions, and of each kind of constant around its starting value (general constants, factors of
# GPU generations, factors of networks).
SCATTER, NUMBER_SPREAD, GENERATION_SPREAD, NETWORK_SPREAD = 0.2, 0.5, 0.3, 1.0
# The largest factor by which dividing a transfer into chunks may lengthen it. In general, chunks
# add twice the square root of the product of latency and transfer time.
MOST_CHUNKS = 2.0
# The weight of a cluster in the fit: the number of its rows to this power.
CLUSTER_POWER = 0.3
# The quantiles that become the bounds: 90 % of the errors on clusters that were left out of the fit
# lie between them.
QUANTILES = (0.05, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClustersLeftOut:
    """For each row, measured over predicted seconds, where the constants are fitted without the
    rows of the same cluster.
    """

    rows: Sequence[CollectiveRow]
    over: Floats
    kinds: Sequence[str]

    @property
    def errors(self) -> Floats:
        """The absolute relative errors of the predictions of all rows."""
        return np.abs(1 / self.over - 1)

    def of(self, cluster: str) -> Bools:
        """A mask of the rows that come from one cluster."""
        return np.array([row.cluster == cluster for row in self.rows])


def fit(rows: Sequence[CollectiveRow], start: Fitted) -> Fitted:
    """The constants that fit the measured rows best and stay close to their starting values; bounds
    of times are not fitted.

    Rows of collectives over sockets are not used here, since they have rates of their own.
    """
    rows = [row for row in rows if row.network not in SOCKETS]
    columns = columns_of(rows)
    logs = np.log([_measured_s(row) for row in rows])
    sizes = Counter(row.cluster for row in rows)
    weights = np.array([sizes[row.cluster] ** ((CLUSTER_POWER - 1) / 2) for row in rows])
    generations = sorted({row.links.generation for row in rows})
    networks = sorted({row.network for row in rows if row.nodes > 1})
    names = CollectiveNumbers.names()
    begin = np.log([getattr(start.numbers, name) for name in names])
    begin = np.concatenate([begin, np.zeros(2 * len(generations) + len(networks))])
    spread = np.full(len(begin), GENERATION_SPREAD)
    spread[: len(names)] = NUMBER_SPREAD
    spread[len(begin) - len(networks) :] = NETWORK_SPREAD

    def of_point(point: Floats) -> Fitted:
        values = [float(value) for value in np.exp(point)]
        factors = iter(values[len(names) :])
        return Fitted(
            numbers=CollectiveNumbers(**dict(zip(names, values, strict=False))),
            latency={name: next(factors) for name in generations},
            host={name: next(factors) for name in generations},
            network={name: next(factors) for name in networks},
            bounds=start.bounds,
        )

    def residuals(point: Floats) -> Floats:
        off = weights * (np.log(columns.seconds(of_point(point))) - logs) / SCATTER
        return np.concatenate([off, (point - begin) / spread])

    most = np.full(len(begin), np.inf)
    most[: len(names)] = [np.log(MOST_CHUNKS) if "chunks" in name else np.inf for name in names]
    solution = least_squares(
        residuals, begin, bounds=(-np.inf, most), loss="cauchy", x_scale=0.3, max_nfev=80
    )
    return of_point(solution.x)


def left_out(rows: Sequence[CollectiveRow], start: Fitted) -> ClustersLeftOut:
    """Predictions of each cluster's rows, with constants fitted to all other clusters."""
    over = np.empty(len(rows))
    for cluster in dict.fromkeys(row.cluster for row in rows):
        is_out = np.array([row.cluster == cluster for row in rows])
        others = [row for row in rows if row.cluster != cluster]
        fitted = fit(others, start) if others else start
        of_cluster = [row for row in rows if row.cluster == cluster]
        measured = np.array([_measured_s(row) for row in of_cluster])
        over[is_out] = measured / columns_of(of_cluster).seconds(fitted)
    return ClustersLeftOut(
        rows=rows, over=over, kinds=[str(kind) for kind in columns_of(rows).kinds]
    )


def bounds_of(apart: ClustersLeftOut) -> Mapping[str, tuple[float, float]]:
    """The bounds of each kind of row, from the errors of clusters left out of the fit, with the
    same weights as in the fit.
    """
    sizes = Counter(row.cluster for row in apart.rows)
    weights = np.array([sizes[row.cluster] ** (CLUSTER_POWER - 1) for row in apart.rows])
    kinds = np.array(apart.kinds)
    return {
        kind: _quantiles(apart.over[kinds == kind], weights[kinds == kind])
        for kind in sorted(set(apart.kinds))
    }


def _quantiles(values: Floats, weights: Floats) -> tuple[float, float]:
    order = np.argsort(values)
    share = np.cumsum(weights[order]) / weights.sum()
    low, high = np.interp(QUANTILES, share, values[order])
    return float(min(low, 1.0)), float(max(high, 1.0))


def _measured_s(row: CollectiveRow) -> float:
    assert row.measured_us is not None
    return 1e-6 * row.measured_us


DIGITS = 4


def predict_collectives(options: argparse.Namespace) -> int:
    """Predict the microseconds of measured collectives, with bounds, from the links that they use.

    A row is one collective or message: operation, GPUs, nodes, size in bytes, hardware, library and
    network (docs/reference/collective-tables.md). A row without a size is predicted for a gibibyte,
    with a note. Without --json, errors are printed by cluster. With --leave-out, each cluster is
    predicted by constants fitted to all others. --fit writes the constants that fit all rows, with
    bounds from the errors on left-out clusters.
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
            page = [*_head(options), *texts[:-1]]
            if len(known) < len(rows):
                page += ["Rows that are not predicted:", _refusal_table(rows)]
            write_page(options.page, "\n\n".join(page) + "\n")
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
        "between nodes, *sockets* between nodes of a cloud, *ethernet* between workstations."
    )


def answers(
    rows: Sequence[CollectiveRow | RefusedCollective], fitted: Fitted
) -> Iterator[dict[str, object]]:
    """An object for each row, in order: its prediction, or the reason why there is none."""
    known = [row for row in rows if isinstance(row, CollectiveRow)]
    predicted = iter(_predicted(known, fitted) if known else ())
    for row in rows:
        where: dict[str, object] = {"file": row.where.rsplit(", line ", 1)[0], "row": row.number}
        if isinstance(row, RefusedCollective):
            yield {**where, "error": f"{row.where}: {row.problem}"}
        else:
            yield {**where, **next(predicted), "notes": list(row.notes)}


def _predicted(rows: Sequence[CollectiveRow], fitted: Fitted) -> Iterator[dict[str, object]]:
    columns = columns_of(rows)
    microseconds = columns.seconds(fitted) / MICROSECONDS
    bus = columns.bus_factor * columns.size_bytes / microseconds / 1e3
    for time_us, rate, kind in zip(microseconds, bus, columns.kinds, strict=True):
        low, high = fitted.bounds[str(kind)]
        yield {
            "time_us": _rounded(time_us),
            "time_us_low": _rounded(low * time_us),
            "time_us_high": _rounded(high * time_us),
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


def _refusal_table(rows: Sequence[CollectiveRow | RefusedCollective]) -> str:
    """A table of the refused rows and the reasons, without remedies."""
    refused = (row for row in rows if isinstance(row, RefusedCollective))
    problems = Counter(row.problem.partition(": give")[0] for row in refused)
    return table(["rows", "reason"], [(count, told) for told, count in problems.most_common()])


def _errors(apart: ClustersLeftOut, bounds: Mapping[str, tuple[float, float]]) -> str:
    """The prediction errors by cluster, by kind of links and by table, and over all rows."""
    tables = np.array([row.cluster.partition(",")[0] for row in apart.rows])
    groups = [
        *((cluster, apart.of(cluster)) for cluster in dict.fromkeys(r.cluster for r in apart.rows)),
        *((kind, np.array(apart.kinds) == kind) for kind in sorted(set(apart.kinds))),
        *((f"table {name}", tables == name) for name in dict.fromkeys(tables.tolist())),
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
