"""Errors of predictions, summed up for each set of measured runs."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from experiments.calibration.published import PublishedRun
from experiments.calibration.whole_runs import fit_allocator
from experiments.pages.groups import grouped
from mistlab.calibration.fitted_sureness import misses

# Two runs that differ by less than this can be in either order.
TELLING = 0.03


def summary_of(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The errors of a set's runs in a few figures."""
    errors = np.array([row["error"] for row in rows])
    unseen = [row for row in rows if not row["fitted"] or row["error_left_out"] is not None]
    of_unseen = np.array(
        [row["error"] if row["error_left_out"] is None else row["error_left_out"] for row in unseen]
    )
    inside = misses(of_unseen) <= np.array([row["half_width"] for row in unseen])
    ranks, best, disordered = _order(rows)
    return {
        "set": name,
        "runs": len(rows),
        "runs_said_not_to_fit": sum(not row["fits"] for row in rows),
        "mean_error": float(np.abs(errors).mean()),
        "median_error": float(np.median(np.abs(errors))),
        "bias": float(errors.mean()),
        "mean_error_after_removing_the_mean": float(np.abs(errors - errors.mean()).mean()),
        "runs_not_fitted": len(unseen),
        "mean_error_of_runs_not_fitted": float(np.abs(of_unseen).mean()) if unseen else None,
        "median_error_of_runs_not_fitted": float(np.median(np.abs(of_unseen))) if unseen else None,
        "inside_bounds": float(np.mean(inside)) if unseen else None,
        "median_half_width": float(np.median([r["half_width"] for r in unseen]))
        if unseen
        else None,
        "workloads": len(ranks),
        "median_rank_correlation": float(np.median(ranks)) if ranks else None,
        "median_predicted_best_over_measured_best": float(np.median(best)) if best else None,
        "worst_predicted_best_over_measured_best": max(best) if best else None,
        "predicted_best_within_5_percent": float(np.mean(np.array(best) <= 0.05)) if best else None,
        "telling_pairs_in_wrong_order": disordered,
        **_events_summary(rows),
    }


def _events_summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    played = [row for row in rows if "events_error" in row]
    if not played:
        return {}
    errors = np.array([row["events_error"] for row in played])
    inside = misses(errors) <= np.array([row["half_width"] for row in played])
    return {
        "runs_played": len(played),
        "mean_events_error": float(np.abs(errors).mean()),
        "events_inside_bounds": float(np.mean(inside)),
    }


def _order(rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[float], int]:
    """Of each workload with several runs: rank correlation, how much the run that is predicted
    fastest takes beyond the fastest, and pairs that differ tellingly and are in the wrong order."""
    ranks, best, disordered = [], [], 0
    for alike in grouped(rows, lambda row: row["workload"]).values():
        predicted, measured = (
            np.array([row[key] for row in alike]) for key in ("predicted_s", "measured_s")
        )
        if len(alike) > 1:
            best.append(float(measured[np.argmin(predicted)] / measured.min() - 1))
            longer = np.log(measured[:, None] / measured[None, :])
            predicted_longer = np.log(predicted[:, None] / predicted[None, :])
            telling = longer > math.log(1 + TELLING)
            disordered += int((telling & (predicted_longer <= 0)).sum())
        if len(alike) > 3:
            ranks.append(float(spearmanr(predicted, measured).statistic))
    return ranks, best, disordered


def memory_summary(
    rows: Sequence[dict[str, Any]], runs: Sequence[PublishedRun]
) -> dict[str, Any] | None:
    """The errors of all stages' memory in a few figures; none where no run has peaks."""
    if not rows:
        return None
    with_peaks = [one for one in runs if one.reserved_bytes and one.plan is not None]
    left_out = fit_allocator(with_peaks)[1] if len(with_peaks) > 1 else None
    allocated = np.array([row["error"] for row in rows])
    reserved = np.array([row["reserved_error"] for row in rows])
    return {
        "stages": len(rows),
        "mean_error": float(np.abs(allocated).mean()),
        "worst_error": float(allocated[np.argmax(np.abs(allocated))]),
        "mean_reserved_error": float(np.abs(reserved).mean()),
        "worst_reserved_error": float(reserved[np.argmax(np.abs(reserved))]),
        "mean_reserved_error_left_out": None
        if left_out is None
        else float(np.abs(left_out).mean()),
    }
