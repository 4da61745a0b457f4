"""The command ``improve``: finds the few changes of a plan with the largest predicted gains, each
alone, and then one on top of another.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.problem import numbers_of, on_cluster_with, order_of, predicted_each
from experiments.cli.commandline import DONE, NoAnswerError, print_json, progress
from experiments.cli.rundir import file_at
from experiments.interchange.single_changes import SingleChange, single_changes
from experiments.pages.tables import brief_words
from mistlab.job.job import Job, dump_job, load_job
from mistlab.job.prediction import Prediction, compared
from simulators.symbolic import SymbolicPredictor

# How many changes are reported each by itself.
ALONE = 5
# How many changes are combined at most.
STEPS = 6
# A change is combined with others only if it shortens the iteration by at least this share.
LEAST_GAIN = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Improved:
    """A change of a plan, and the prediction of the changed job."""

    change: SingleChange
    prediction: Prediction


def improve(options: argparse.Namespace) -> int:
    """Report the single changes of a plan with the largest gains, and write the plan with several
    of them.
    """
    out = file_at(options.out, "plan file")
    job = on_cluster_with(load_job(options.start), numbers_of(options))
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    before = predictor.predict(job.plan)
    progress(f"{options.start}: {brief_words(before)}")
    alone = ranked(job, before, predictor)
    steps = walked(before, predictor, alone)
    if not before.fits and not any(step.prediction.fits for step in (*alone, *steps)):
        message = (
            f"--from {options.start}: the plan does not fit in GPU memory, and a few single "
            "changes do not make it fit: leave --from out, so that tune searches all plans"
        )
        raise NoAnswerError(message)
    last = steps[-1] if steps else None
    dump_job(last.change.job if last else job, out)
    if options.json:
        print_json(_mapping(options.start, before, alone, steps, out))
    else:
        print("\n".join([*_page(before, alone, steps), f"plan: {out}"]))
    return DONE


def ranked(job: Job, before: Prediction, predictor: SymbolicPredictor) -> list[Improved]:
    """The single changes that make a job faster, best first."""
    changes = single_changes(job)
    answers = predicted_each(predictor, [change.job.plan for change in changes])
    steps = [
        Improved(change=change, prediction=answer)
        for change, answer in zip(changes, answers, strict=True)
        if isinstance(answer, Prediction) and order_of(answer) < order_of(before)
    ]
    return sorted(steps, key=lambda step: (order_of(step.prediction), step.change.words))


def best_of_choices(steps: Sequence[Improved]) -> list[Improved]:
    """For each choice of a plan (such as the ZeRO level) its best change; the largest gains first,
    at most a few.
    """
    best: dict[str, Improved] = {}
    for step in steps:
        best.setdefault(step.change.choice, step)
    return list(best.values())[:ALONE]


def walked(
    before: Prediction, predictor: SymbolicPredictor, first: Sequence[Improved]
) -> list[Improved]:
    """The changes of a plan one on top of another: the best change, then the best change of the
    changed plan, and so on, until none gains enough.
    """
    steps: list[Improved] = []
    choices = list(first)
    now = before
    while choices and len(steps) < STEPS:
        best = choices[0]
        (is_over, then), (was_over, before_it) = order_of(best.prediction), order_of(now)
        if is_over == was_over and 1 - then / before_it < LEAST_GAIN:
            break
        steps.append(best)
        progress(f"{best.change.words}: {brief_words(best.prediction)}")
        now = best.prediction
        choices = ranked(best.change.job, now, predictor)
    return steps


def _page(
    before: Prediction, alone: Sequence[Improved], steps: Sequence[Improved]
) -> Iterator[str]:
    yield f"as it is: {brief_words(before)}"
    if not alone:
        yield "no single change makes it better"
        return
    yield "each change alone:"
    for step in best_of_choices(alone):
        yield f"  {step.change.words}: {_gain_words(before, step.prediction)}"
    yield "one after another:"
    now = before
    for number, step in enumerate(steps, 1):
        yield f"  {number}. {step.change.words}: {_gain_words(now, step.prediction)}"
        now = step.prediction
    yield f"together: {_gain_words(before, now)}, {_sure_words(before, now)}"


def _gain_words(before: Prediction, after: Prediction) -> str:
    if not before.fits:
        return brief_words(after)
    saved = 1 - after.iteration_s / before.iteration_s
    return f"{brief_words(after)}, {saved:.1%} less time"


def _sure_words(before: Prediction, after: Prediction) -> str:
    sure = compared(after, before).exceeds_bounds
    return "beyond what the bounds leave open" if sure else "within what the bounds leave open"


def _mapping(
    start: Path,
    before: Prediction,
    alone: Sequence[Improved],
    steps: Sequence[Improved],
    out: Path,
) -> dict[str, object]:
    def row(step: Improved) -> dict[str, object]:
        prediction = step.prediction
        return {
            "change": step.change.words,
            "iteration_s": prediction.iteration_s,
            "fits": prediction.fits,
        }

    return {
        "plan": str(start),
        "iteration_s": before.iteration_s,
        "fits": before.fits,
        "alone": [row(step) for step in best_of_choices(alone)],
        "steps": [row(step) for step in steps],
        "out": str(out),
    }
