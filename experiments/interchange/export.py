"""The command ``export``: writes a plan as a framework's file, and tells which choices are lost and
their predicted cost.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from experiments.cli.commandline import DONE, NO_ANSWER, print_json, progress
from experiments.interchange.fidelity import Export, exported, fits
from experiments.pages.tables import brief_words
from mistlab.core.files import about
from mistlab.core.values import InputError, reject, to_mapping
from mistlab.formats.recipes.exports import EXPORTS, RECIPES, target_of
from mistlab.job.job import load_job
from mistlab.job.prediction import compared

# The exit status if the plan fits in memory, but the plan that the exported text describes does
# not.
NO_LONGER_FITS = 3


def export(options: argparse.Namespace) -> int:
    """Export a plan to Megatron-LM, DeepSpeed, torchtitan or Accelerate, or as a recipe.

    The nearest plan that the framework can express goes to standard output, as its file. Standard
    error says which choices are lost or approximated, and their predicted cost. Exit status 3 means
    that the plan fits but the exported plan does not. With --strict, exit status 1 means that the
    exported plan differs from the plan in any figure of its prediction. With --check, the
    framework's own classes must accept the file.
    """
    job = load_job(options.plan)
    target = EXPORTS[options.to] if options.to else target_of(job)
    with about(options.plan):
        made = exported(job, target)
    if options.check and target.name in RECIPES:
        reject(
            f"--check: files for {target.title} cannot be checked by {target.title} itself: leave "
            "--check out"
        )
    if options.check:
        from runtime.baselines.accepted import check_accepted  # noqa: PLC0415 (needs frameworks)

        check_accepted(target.name, made.text, made.found.job)
    if options.json:
        _print_json(options.plan, made)
    else:
        print(made.text, end="")
        for line in (*map(str, made.found.remarks), *_cost_words(made), *_memory_words(made)):
            progress(line)
    if made.no_longer_fits:
        return NO_LONGER_FITS
    return NO_ANSWER if options.strict and not made.is_exact else DONE


def _cost_words(made: Export) -> Iterator[str]:
    given, near = made.given, made.near
    if isinstance(given, InputError) or isinstance(near, InputError):
        problem = given if isinstance(given, InputError) else near
        yield f"cost: not predicted: {problem}"
        return
    yield f"cost: the plan itself {brief_words(given)}"
    comparison = compared(given, near)
    longer = comparison.ratio - 1
    by = f"{abs(longer):.1%} {'longer' if longer >= 0 else 'shorter'}"
    sure = "beyond" if comparison.exceeds_bounds else "within"
    yield (
        f"cost: {_form_words(made)} under engine {made.found.job.plan.engine} {brief_words(near)}; "
        f"{by}, {sure} what the bounds leave open"
    )


def _form_words(made: Export) -> str:
    if made.is_exact:
        return "said exactly"
    return "every choice said, but" if made.found.is_exact else "its nearest form"


def _memory_words(made: Export) -> Iterator[str]:
    """A warning, if a plan fits but the exported plan does not; otherwise an empty text."""
    if not made.no_longer_fits:
        return
    yield (
        f"does not fit any more: {'; '.join(made.lacking)}; no few changes that "
        f"{made.target.title} can say make it fit: exit status {NO_LONGER_FITS}"
    )


def _print_json(path: Path, made: Export) -> None:
    costs = {
        name: {"error": str(each)} if isinstance(each, InputError) else to_mapping(each)
        for name, each in (("given", made.given), ("nearest", made.near))
    }
    print_json(
        {
            "plan": str(path),
            "to": made.target.name,
            "exact": made.is_exact,
            "fits": {"given": fits(made.given), "nearest": fits(made.near)},
            "no_longer_fits": made.no_longer_fits,
            "lacks": list(made.lacking),
            "text": made.text,
            "remarks": [to_mapping(remark) for remark in made.found.remarks],
            **costs,
        }
    )
