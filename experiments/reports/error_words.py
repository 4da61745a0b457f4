"""Errors of predictions as a table and sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.frame.tables import table
from mistlab.values.units import GIB_BYTES


def words_of(
    summary: Mapping[str, Any],
    times: Sequence[Mapping[str, Any]],
    memory: Sequence[Mapping[str, Any]],
) -> list[str]:
    """A table of runs, a line for each set, and the memory of stages."""
    words = [
        table(
            ("run", "predicted s", "measured s", "error"),
            [
                (_name(row), f"{row['predicted_s']:.3f}", f"{row['measured_s']:.3f}", _error(row))
                for row in times
                if "node" not in row["set"]
            ],
        ),
        "Mean absolute errors: raw, median, after removing the mean (as the literature does):",
        "\n".join(f"- {_set(one)}" for one in summary["times"]),
    ]
    if not memory:
        return words
    found = summary["memory"]
    return [
        *words,
        (
            f"Allocated memory of {found['stages']} stages: mean error {found['mean_error']:.2%}, "
            f"worst {found['worst_error']:+.2%}; reserved {found['mean_reserved_error']:.2%}, "
            f"worst {found['worst_reserved_error']:+.2%}{_reserved_left_out(found)}."
        ),
        table(
            ("run", "stage", "predicted GiB", "measured GiB", "error"),
            [
                (
                    row["run"],
                    row["stage"],
                    f"{row['predicted_bytes'] / GIB_BYTES:.2f}",
                    f"{row['measured_bytes'] / GIB_BYTES:.2f}",
                    _error(row),
                )
                for row in memory
            ],
        ),
    ]


def _name(row: Mapping[str, Any]) -> str:
    name = f"{row['run']} (approximated)" if row["approximated"] else row["run"]
    return f"{name} (micro-batch {row['micro_batch']})" if "weak" in row["set"] else name


def _error(row: Mapping[str, Any]) -> str:
    return f"{row['error']:+.1%}"


def _set(one: Mapping[str, Any]) -> str:
    return (
        f"{one['set']}: {one['mean_error']:.2%}, {one['median_error']:.2%}, "
        f"{one['mean_error_after_removing_the_mean']:.2%} of {one['runs']} runs, bias "
        f"{one['bias']:+.2%}{_unseen(one)}{_ranks(one)}{_played(one)}; "
        f"{one['runs_said_not_to_fit']} are said not to fit"
    )


def _reserved_left_out(found: Mapping[str, Any]) -> str:
    error = found["mean_reserved_error_left_out"]
    return "" if error is None else f"; {error:.2%} with each run left out of the fit"


def _played(one: Mapping[str, Any]) -> str:
    if "mean_events_error" not in one:
        return ""
    return (
        f"; played task by task {one['mean_events_error']:.2%} of {one['runs_played']} runs, "
        f"{one['events_inside_bounds']:.0%} inside bounds"
    )


def _unseen(one: Mapping[str, Any]) -> str:
    if not one["runs_not_fitted"]:
        return ""
    bounds = f"{one['inside_bounds']:.0%} inside bounds of {one['median_half_width']:.1%}"
    return (
        f"; {one['runs_not_fitted']} left out of the fit: "
        f"{one['mean_error_of_runs_not_fitted']:.2%} and "
        f"{one['median_error_of_runs_not_fitted']:.2%}, {bounds}"
    )


def _ranks(one: Mapping[str, Any]) -> str:
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
            f"{one['telling_pairs_in_wrong_order']} pairs in the wrong order"
        )
    return "".join(f"; {part}" for part in parts)
