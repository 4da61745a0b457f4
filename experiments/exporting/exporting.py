"""A plan file in a framework's words, with what was lost and what that costs by prediction."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from experiments.cli.commandline import DONE, NO_ANSWER, about, print_json, progress
from experiments.frame.rates import brief_words
from mistlab.export.nearest import Nearest, nearest
from mistlab.export.table import TARGETS, target_for
from mistlab.export.target import Target
from mistlab.values.errors import InputError
from mistlab.values.job import Job, load_job
from mistlab.values.prediction import Prediction, compared
from mistlab.values.value import to_mapping
from simulators.symbolic import SymbolicPredictor


def export(options: argparse.Namespace) -> int:
    """Export a plan file."""
    job = load_job(options.plan)
    target = TARGETS[options.to] if options.to else target_for(job.plan.engine)
    with about(options.plan):
        found = nearest(job, target)
        text = target.write(found.job)
    if options.check:
        from runtime.baselines.accepted import check_accepted  # noqa: PLC0415 (needs frameworks)

        check_accepted(target.name, text, found.job)
    predictions = [_predicted(one) for one in (job, found.job)]
    if options.json:
        _print_json(options.plan, target, found, text, predictions)
    else:
        print(text, end="")
        for line in (*map(str, found.remarks), *_cost_words(found, predictions)):
            progress(line)
    return NO_ANSWER if options.strict and not found.is_exact else DONE


def _predicted(job: Job) -> Prediction | InputError:
    """The prediction of a job, or why there is none."""
    predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
    try:
        return predictor.predict(job.plan)
    except InputError as error:
        return error


def _cost_words(found: Nearest, predictions: list[Prediction | InputError]) -> Iterator[str]:
    given, near = predictions
    if isinstance(given, InputError) or isinstance(near, InputError):
        problem = given if isinstance(given, InputError) else near
        yield f"cost: not predicted: {problem}"
        return
    yield f"cost: the plan itself {brief_words(given)}"
    comparison = compared(given, near)
    longer = comparison.ratio - 1
    by = f"{abs(longer):.1%} {'longer' if longer >= 0 else 'shorter'}"
    sure = "beyond" if comparison.exceeds_bounds else "within"
    form = "said exactly" if found.is_exact else "its nearest form"
    yield (
        f"cost: {form} under engine {found.job.plan.engine} {brief_words(near)}; {by}, "
        f"{sure} what the bounds leave open"
    )


def _print_json(
    path: Path,
    target: Target,
    found: Nearest,
    text: str,
    predictions: list[Prediction | InputError],
) -> None:
    costs = {
        name: {"error": str(one)} if isinstance(one, InputError) else to_mapping(one)
        for name, one in zip(("given", "nearest"), predictions, strict=True)
    }
    print_json(
        {
            "plan": str(path),
            "to": target.name,
            "exact": found.is_exact,
            "text": text,
            "remarks": [to_mapping(remark) for remark in found.remarks],
            **costs,
        }
    )
