"""A job's prediction as plain data for the page, with the same figures as ``predict --json``."""

from collections.abc import Mapping
from typing import Any

from experiments.bench.problem import fit_words, fullest_words, peak_bounds_of, room_words
from experiments.live_page.knobs import knobs_of
from experiments.pages.tables import rate_words
from experiments.prediction.predict import WORDS, sentence
from mistlab.core.values import to_mapping
from mistlab.cost.breakdown import breakdown_of
from mistlab.cost.memory import allocator_of, room_of_plan
from mistlab.job.job import Job, job_to_mapping
from mistlab.job.prediction import Prediction, compared
from mistlab.plan.plan_words import plan_line, plan_words
from simulators.symbolic import SymbolicPredictor


def predicted_job(job: Job) -> Prediction:
    """The closed form's prediction of a job."""
    return SymbolicPredictor(workload=job.workload, cluster=job.cluster).predict(job.plan)


def figures_of(job: Job, prediction: Prediction) -> dict[str, Any]:
    """The prediction of a job with all details that the live page shows, as plain data."""
    plain = job_to_mapping(job)
    goes = breakdown_of(job, prediction.iteration_s)
    fit, fits = fit_words(job, prediction)
    return {
        "job": plain,
        "gpus": job.plan.num_gpus,
        "line": plan_line(job.plan),
        "words": plan_words(job.plan),
        "rate": rate_words(job.plan, prediction),
        "prediction": to_mapping(prediction),
        "room": room_words(job.cluster),
        "rooms": room_of_plan(job.cluster, job.plan).tolist(),
        "outside_bytes": allocator_of(job.cluster).outside_bytes,
        "fit": {
            "is": fit,
            "words": fits,
            "probability": peak_bounds_of(job, prediction).fit_probability,
        },
        "fullest": [*fullest_words(job, prediction)],
        "breakdown": to_mapping(goes),
        "goes": sentence(goes),
        "knobs": knobs_of(job.plan),
    }


def part_words() -> Mapping[str, str]:
    """The name that the live page shows for each part of an iteration's time."""
    return WORDS


def comparison_of(first: Job, second: Job) -> dict[str, Any]:
    """A comparison of two predicted jobs, with the parts of the iteration that make one of them
    faster.
    """
    pinned, other = predicted_job(first), predicted_job(second)
    if first.workload.tokens != second.workload.tokens:
        apart = [1 / prediction.tokens_per_s for prediction in (pinned, other)]
        verdict = f"steps differ in tokens: {apart[1] / apart[0]:.2f} times the time for a token"
        return {"verdict": verdict, "ratio": apart[1] / apart[0], "sure": None, "parts": []}
    comparison = compared(pinned, other)
    parts = [
        breakdown_of(job, prediction.iteration_s).parts
        for job, prediction in ((first, pinned), (second, other))
    ]
    rows = [
        {
            "part": WORDS[name],
            "first_s": getattr(parts[0], name),
            "second_s": getattr(parts[1], name),
        }
        for name in WORDS
    ]
    rows.sort(key=lambda row: -abs(row["second_s"] - row["first_s"]))
    ratio = comparison.ratio
    wins = "the pinned plan" if ratio > 1 else "this plan"
    by = max(ratio, 1 / ratio) - 1
    sure = "beyond" if comparison.exceeds_bounds else "within"
    verdict = f"{wins} is {by:.1%} faster, {sure} what the bounds leave open"
    if by < EQUAL:
        verdict = "both take equally long"
    return {"verdict": verdict, "ratio": ratio, "sure": comparison.exceeds_bounds, "parts": rows}


EQUAL = 5e-4
