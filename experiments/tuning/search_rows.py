"""Converts search results to rows of JSON, and back.

A gap is the share of a plan's time by which another plan could be faster, according to a lower
bound. The bound is the searcher's or, if it has none, the highest that another searcher of the same
engine and space has proven.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.bench.bench import BASELINE, Bench, Entry, PlayedRival, Point
from mistlab.core.values import to_mapping
from mistlab.job.job import job_from_mapping, job_to_mapping
from mistlab.job.search import Improvement, SearchResult
from mistlab.plan.space import SearchSpace


def rows_of(entries: Sequence[Entry], bench: Bench) -> list[dict[str, Any]]:
    """A row for each search result, in order."""
    baseline = next((e.answer for e in entries if e.searcher == BASELINE), None)
    baseline_s = None if baseline is None else baseline[1].iteration_s
    return [
        _row(entry, bench, gap=_gap(entry, entries), baseline_s=baseline_s) for entry in entries
    ]


def _row(
    entry: Entry, bench: Bench, *, gap: float | None, baseline_s: float | None
) -> dict[str, Any]:
    result, answer = entry.result, entry.answer
    return {
        "searcher": entry.searcher,
        "engine": ",".join(entry.space.engines),
        "space": entry.space.name,
        "status": result.status,
        "reason": result.reason,
        **_answer(entry, bench),
        "speedup": baseline_s / answer[1].iteration_s if baseline_s and answer else None,
        "plan_evaluations": result.plan_evaluations,
        "stage_evaluations": result.stage_evaluations,
        "wall_s": result.wall_s,
        "lower_bound_s": result.lower_bound_s,
        "gap": gap,
        "plan": job_to_mapping(bench.job(answer[0])) if answer else None,
        "rivals": [
            {
                "predicted_s": rival.prediction.iteration_s,
                "simulated_s": rival.simulated_s,
                "plan": job_to_mapping(bench.job(rival.plan)),
            }
            for rival in entry.rivals
        ],
        "faster_rival": entry.rivals.index(entry.faster) if entry.faster else None,
        "faster_rival_by": entry.faster_by,
        "history": [_improvement(one) for one in result.history],
        "front": [
            {"iteration_s": point.iteration_s, "memory_bytes": point.memory_bytes}
            for point in entry.front
        ],
        "timing": {
            "history_wall_s": [one.wall_s for one in result.history],
            "playing_s": entry.playing_s,
        },
    }


def _answer(entry: Entry, bench: Bench) -> dict[str, Any]:
    """The columns of a row that are about the best plan; all are null if there is none."""
    names = ("predicted_s", "predicted_s_low", "predicted_s_high", "simulated_s")
    if entry.answer is None:
        return dict.fromkeys((*names, "headroom_bytes"))
    plan, prediction = entry.answer
    seconds = (prediction.iteration_s, prediction.iteration_s_low, prediction.iteration_s_high)
    reserved = np.array([stage.peak_reserved_bytes for stage in prediction.stages])
    headroom = round(float((bench.room_bytes(plan) - reserved).min()))
    return {
        **dict(zip(names, (*seconds, entry.answer_simulated_s), strict=True)),
        "headroom_bytes": headroom,
    }


def _improvement(improvement: Improvement) -> dict[str, Any]:
    return {name: value for name, value in to_mapping(improvement).items() if name != "wall_s"}


def bounded_by_all(entry: Entry, entries: Sequence[Entry]) -> Entry:
    """A search result with the highest lower bound that any search of the same search space has
    proven.
    """
    result, gap = entry.result, _gap(entry, entries)
    if result.gap is not None or gap is None or result.prediction is None:
        return entry
    bound_s = (1 - gap) * result.prediction.iteration_s
    return replace(entry, result=replace(result, gap=gap, lower_bound_s=bound_s))


def _gap(entry: Entry, entries: Sequence[Entry]) -> float | None:
    if entry.answer is None:
        return None
    best_s = entry.answer[1].iteration_s
    bounds = [
        compared_entry.result.lower_bound_s
        for compared_entry in entries
        if compared_entry.space == entry.space and compared_entry.result.lower_bound_s is not None
    ]
    of_search = entry.result.lower_bound_s
    bound = of_search if of_search is not None else max(bounds, default=None)
    return None if bound is None else max(0.0, 1 - bound / best_s)


def _rival(rival: Mapping[str, Any], bench: Bench) -> PlayedRival:
    plan = job_from_mapping(rival["plan"]).plan
    return PlayedRival(
        plan=plan, prediction=bench.predictor.predict(plan), simulated_s=rival["simulated_s"]
    )


def entry_of(row: Mapping[str, Any], space: SearchSpace, bench: Bench, seed: int) -> Entry:
    """The search result from which a row was written."""
    plan = None if row["plan"] is None else job_from_mapping(row["plan"]).plan
    prediction = None if plan is None else bench.predictor.predict(plan)
    history = zip(row["history"], row["timing"]["history_wall_s"], strict=True)
    bound_s, gap = row["lower_bound_s"], None
    if bound_s is not None and prediction is not None:
        gap = max(0.0, 1 - bound_s / prediction.iteration_s)
    return Entry(
        searcher=row["searcher"],
        space=space,
        result=SearchResult(
            status=row["status"],
            plan=plan,
            prediction=prediction,
            plan_evaluations=row["plan_evaluations"],
            stage_evaluations=row["stage_evaluations"],
            wall_s=row["wall_s"],
            lower_bound_s=bound_s,
            gap=gap,
            history=tuple(Improvement(**one, wall_s=wall_s) for one, wall_s in history),
            seed=seed,
            reason=row["reason"],
        ),
        simulated_s=row["simulated_s"],
        rivals=tuple(_rival(rival, bench) for rival in row["rivals"]),
        playing_s=row["timing"]["playing_s"],
        front=tuple(Point(**point) for point in row["front"]),
    )
