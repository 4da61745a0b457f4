"""Errors of predictions as a table and sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.frame.numbers_in_words import gib, number
from experiments.frame.tables import table, table_of

INTRODUCTION = (
    "An error is predicted over measured, less one. Mean and median are of absolute errors; *mean "
    "removed* is the mean absolute error once the mean error of the set is subtracted, as some of "
    "the literature reports. *Left out* are errors of runs that the calibration did not see, or "
    "that were left out of its fit, one at a time or in whole groups; then the share of these runs "
    "inside the predicted bounds, and half the width of the bounds."
)
PLAYED = (
    " *Played* is the event simulator, which plays runs with whole numbers of layers: how many, "
    "the mean of absolute errors, and the share inside the same bounds."
)


def words_of(
    summary: Mapping[str, Any],
    times: Sequence[Mapping[str, Any]],
    memory: Sequence[Mapping[str, Any]],
) -> list[str]:
    """A table of sets, the order of runs, tables of runs, and the memory of stages."""
    sets = summary["times"]
    words = [
        INTRODUCTION + (PLAYED if any(map(_is_played, sets)) else ""),
        _sets_table(sets),
        *(["\n".join(orders)] if (orders := [*filter(None, map(_order, sets))]) else []),
        table_of(
            [row for row in times if "node" not in row["set"]],
            ("run", _name),
            ("predicted s", "{predicted_s:.3f}"),
            ("measured s", "{measured_s:.3f}"),
            ("error", "{error:+.1%}"),
        ),
    ]
    if memory:
        words += _memory(summary["memory"], memory)
    if summary["tables"]:
        words += [_tables(summary["tables"])]
    return words


def _tables(tables: Mapping[str, str]) -> str:
    lines = [f"- `{name}`, sha256 `{sha256}`" for name, sha256 in tables.items()]
    return "\n".join(["The tables, which the project does not carry:", "", *lines])


def _sets_table(sets: Sequence[Mapping[str, Any]]) -> str:
    head = ["set", "runs", "said not to fit", "mean", "median", "bias", "mean removed"]
    head += ["left out", "their mean", "their median", "inside bounds", "half-width"]
    with_played = any(map(_is_played, sets))
    head += ["played", "played: mean", "inside bounds"] if with_played else []
    return table(
        head,
        [
            (
                one["set"],
                one["runs"],
                one["runs_said_not_to_fit"],
                *(number(one[name], ".2%") for name in ("mean_error", "median_error")),
                f"{one['bias']:+.2%}",
                number(one["mean_error_after_removing_the_mean"], ".2%"),
                one["runs_not_fitted"],
                number(one["mean_error_of_runs_not_fitted"], ".2%"),
                number(one["median_error_of_runs_not_fitted"], ".2%"),
                number(one["inside_bounds"], ".0%"),
                number(one["median_half_width"], ".1%"),
                *(_played(one) if with_played else ()),
            )
            for one in sets
        ],
    )


def _is_played(one: Mapping[str, Any]) -> bool:
    return "mean_events_error" in one


def _played(one: Mapping[str, Any]) -> tuple[object, ...]:
    if not _is_played(one):
        return 0, "-", "-"
    return (
        one["runs_played"],
        number(one["mean_events_error"], ".2%"),
        number(one["events_inside_bounds"], ".0%"),
    )


def _memory(found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        (
            f"Allocated memory of {found['stages']} stages: mean error {found['mean_error']:.2%}, "
            f"worst {found['worst_error']:+.2%}; reserved {found['mean_reserved_error']:.2%}, "
            f"worst {found['worst_reserved_error']:+.2%}{_reserved_left_out(found)}."
        ),
        table_of(
            rows,
            ("run", "{run}"),
            ("stage", "{stage}"),
            ("predicted GiB", lambda row: gib(row["predicted_bytes"])),
            ("measured GiB", lambda row: gib(row["measured_bytes"])),
            ("error", "{error:+.1%}"),
        ),
    ]


def _name(row: Mapping[str, Any]) -> str:
    name = f"{row['run']} (approximated)" if row["approximated"] else row["run"]
    return f"{name} (micro-batch {row['micro_batch']})" if "weak" in row["set"] else name


def _reserved_left_out(found: Mapping[str, Any]) -> str:
    error = found["mean_reserved_error_left_out"]
    return "" if error is None else f"; {error:.2%} with each run left out of the fit"


def _order(one: Mapping[str, Any]) -> str:
    """Whether runs of one workload are in the right order; empty where none has several runs."""
    parts = []
    if one["median_rank_correlation"] is not None:
        parts.append(
            f"median rank correlation {one['median_rank_correlation']:.3f} over "
            f"{one['workloads']} workloads"
        )
    if one["median_predicted_best_over_measured_best"] is not None:
        parts.append(
            f"the predicted best takes {one['median_predicted_best_over_measured_best']:.1%} more "
            f"than the measured one (median; worst "
            f"{one['worst_predicted_best_over_measured_best']:.1%}, within 5 % in "
            f"{one['predicted_best_within_5_percent']:.0%} of workloads), "
            f"{one['telling_pairs_in_wrong_order']} pairs that differ by over 3 % in the wrong "
            "order"
        )
    return f"- {one['set']}: {'; '.join(parts)}." if parts else ""
