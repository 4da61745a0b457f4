"""The command ``tune``: searches for the fastest plan of a problem, simulates it, explains it, and
writes its file.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from experiments.bench.bench import Bench, Entry, judged
from experiments.bench.problem import (
    asked_words,
    attention_words,
    check_beside_plan,
    check_supported,
    free_words,
    is_sure,
    margin_gib,
    peak_bounds_of,
    sure_words,
    untimed_words,
)
from experiments.bench.search_options import budget_of, searched, searchers_called, space_for
from experiments.cli.commandline import (
    DONE,
    INTERRUPTED,
    OF_CLUSTER,
    NoAnswerError,
    print_json,
    progress,
)
from experiments.cli.live import Live
from experiments.cli.rundir import file_at
from experiments.tuning.explain import Why, explain
from experiments.tuning.improve import improve
from experiments.tuning.search_rows import rows_of
from experiments.tuning.search_words import (
    busy_words,
    prediction_words,
    rival_words,
    smallest_words,
    verdict,
    why_words,
)
from experiments.tuning.smallest import smallest, trained_otherwise
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import to_mapping
from mistlab.engines.engine import ENGINES
from mistlab.job.job import dump_job
from mistlab.job.search import Budget
from mistlab.plan.plan_words import count_words, plan_line, plan_words
from mistlab.plan.space import SearchSpace

# The default searcher, and the searcher for problems that the default one refuses, which predicts
# whole plans only.
SEARCHER, OF_WHOLE_PLANS = "mist", "aceso"
# The budget of a search by default, for each engine of the search space.
BUDGET = Budget(evaluations=100_000, seconds=60)
QUICK = Budget(evaluations=1_000, seconds=2, clock="cpu")

# A proof that took at most so many seconds is repeated with memory kept free, if the plan does not
# surely fit.
SHORT_S = 2.0

# The options that may be given together with a plan to start from; all others are determined by the
# plan.
BESIDE_A_PLAN = ("from", "out", "json", "quick", "seed", *OF_CLUSTER)


def tune(options: argparse.Namespace, line: Sequence[str]) -> int:
    """Find the fastest plan that fits, explain it, and write its file.

    The file works with predict and every other command that takes plans. After the search, the
    event simulator plays the best plan and the plans whose predicted times cannot be told from its
    time. The file has the plan that is fastest in the simulator.

    With --from PLAN.yaml there is no search. The command shows which changes of that plan gain most
    by prediction, each by itself and one after another. The file has the plan with all of these
    changes.
    """
    if options.start is not None:
        check_beside_plan(line, BESIDE_A_PLAN, "--from")
        return improve(options)
    bench, entry, out = tuned(options, writes=True)
    if entry.answer is None:
        return _no_answer(entry, bench)
    dump_job(bench.job(entry.answer[0]), out)
    why = explain(entry, [entry], bench)
    if options.json:
        (row,) = rows_of([entry], bench)
        chosen_by = "played" if entry.is_played else "predicted"
        print_json({**row, "chosen_by": chosen_by, "why": to_mapping(why), "out": str(out)})
    else:
        again = _with_margin(entry, bench, options)
        gives = "" if again is None else _margin_words(entry, again)
        print("\n".join([*_page(entry, why, bench, gives), f"plan: {out}"]))
        if again is not None and again[1].is_interrupted:
            progress("interrupted: the plan stands, what memory kept free would give was not found")
            return INTERRUPTED
    if entry.is_interrupted:
        progress("interrupted: the plan is the best until then")
        return INTERRUPTED
    return DONE


def tuned(options: argparse.Namespace, *, writes: bool = False) -> tuple[Bench, Entry, Path]:
    """The search that the options ask for: its problem and predictor, its result, and the path of
    the plan file. If the command ``writes`` the file, its path is checked before the search.
    """
    (name,) = searchers_called([options.searcher or SEARCHER], options.predictor, "--searcher")
    problem, space = searched(options)
    check_supported(problem.workload, space_for(name, space).engines)
    if writes:
        progress(f"{asked_words(problem.workload, problem.cluster)}; space {space.name}")
    budget = budget_of(options, budget_for(QUICK if options.quick else BUDGET, space))
    out = file_at(options.out, "plan file") if writes else options.out
    bench, space = Bench.of(problem, options.predictor, options.view), space_for(name, space)
    bench.warm_up(space)
    entry = _searched(bench, name, space, budget, options.seed)
    if entry.result.status == "REFUSED" and options.searcher is None:
        progress(f"{name} {entry.result.reason}; {OF_WHOLE_PLANS} searches in its place")
        entry = _searched(bench, OF_WHOLE_PLANS, space, budget, options.seed)
    return bench, entry, out


def budget_for(budget: Budget, space: SearchSpace) -> Budget:
    """The budget to search all engines of a search space: the budget for one engine, times their
    number.
    """
    assert budget.evaluations is not None
    assert budget.seconds is not None
    engines = len(space.engines)
    return replace(
        budget, evaluations=engines * budget.evaluations, seconds=engines * budget.seconds
    )


def _searched(bench: Bench, name: str, space: SearchSpace, budget: Budget, seed: int) -> Entry:
    """The plan that a searcher finds, after simulating it together with plans that are predicted to
    be nearly as fast.
    """
    live = Live(searcher=name)
    entry = bench.played(bench.search(name, space, budget, seed, live))
    entry = judged([entry]) or entry
    live.end(f"{entry.result.status} in {entry.result.wall_s:.2f} s")
    return entry


def _with_margin(
    entry: Entry, bench: Bench, options: argparse.Namespace
) -> tuple[Bench, Entry] | None:
    """The search repeated with as much memory kept free as makes plans fit surely; None if the
    answer itself fits surely, no memory can be kept free for that, or the search was unfinished or
    too long to be repeated.
    """
    assert entry.answer is not None
    plan, prediction = entry.answer
    job = bench.job(plan)
    fits_surely = is_sure(peak_bounds_of(job, prediction).fit_probability)
    if fits_surely or entry.result.status != "OPTIMAL" or entry.result.wall_s > SHORT_S:
        return None
    if (margin := margin_gib(job)) is None:
        return None
    cluster = replace(job.cluster, keep_free_gib=margin)
    roomy = Bench.of(replace(bench.problem, cluster=cluster), options.predictor, options.view)
    budget = Budget(seconds=2 * SHORT_S)
    return roomy, roomy.search(entry.searcher, entry.space, budget, options.seed, lambda _: None)


def _margin_words(entry: Entry, again: tuple[Bench, Entry]) -> str:
    """The proven best plan of a search repeated with memory kept free, beside the first search's
    plan, as text, or the first way to train with less memory that gives a plan; empty if the
    repeated search proved nothing.
    """
    roomy, safer_entry = again
    if safer_entry.result.status == "INFEASIBLE":
        way = next(trained_otherwise(roomy.problem, entry.space), "")
        return f"no plan; {way} would give one" if way else "no plan"
    if safer_entry.result.status != "OPTIMAL":
        return ""
    assert entry.answer is not None
    assert safer_entry.answer is not None
    safer, prediction = safer_entry.answer
    longer = prediction.iteration_s / entry.answer[1].iteration_s - 1
    probability = peak_bounds_of(roomy.job(safer), prediction).fit_probability
    return (
        f"{prediction.iteration_s:.3f} s ({longer:+.1%}) at "
        f"{prediction.peak_reserved_bytes / GIB_BYTES:.1f} GiB, which fits with "
        f"{probability:.0%} ({plan_line(safer)})"
    )


def _no_answer(entry: Entry, bench: Bench) -> int:
    if entry.is_interrupted:
        progress("interrupted: nothing that fits was found")
        return INTERRUPTED
    raise NoAnswerError(lacking_words(entry, bench))


def lacking_words(entry: Entry, bench: Bench) -> str:
    """The reason why a search has found no plan, and changes with which there would be one."""
    if entry.result.status == "REFUSED":
        return entry.result.reason
    is_proven = entry.result.status == "INFEASIBLE"
    begin = "nothing fits" if is_proven else "no plan that fits was found"
    progress(f"{begin}: what would make one fit is tried")
    paragraphs = smallest_words(smallest(bench, entry.space), entry.space.name, is_proven=is_proven)
    paragraphs += free_words(bench.problem.cluster)
    reason = [entry.result.reason] if entry.result.reason else []
    return "\n".join([*reason, *paragraphs])


def _page(entry: Entry, why: Why, bench: Bench, margin_gives: str) -> Iterator[str]:
    assert entry.answer is not None
    plan, prediction = entry.answer
    yield verdict(entry)
    yield prediction_words(plan, prediction, entry.answer_simulated_s)
    if entry.result.reason:
        yield f"{entry.result.reason}."
    if plan.num_gpus < bench.problem.cluster.num_gpus:
        idle = bench.problem.cluster.num_gpus - plan.num_gpus
        yield f"{count_words(idle, 'GPU')} idle: the plan uses {plan.num_gpus:,}."
    yield from free_words(bench.problem.cluster)
    yield from plan_words(plan)
    yield from why_words(why)
    yield sure_words(bench.job(plan), prediction, margin_gives)
    if attention := attention_words(bench.job(plan)):
        yield attention
    if untimed := untimed_words(ENGINES[plan.engine], bench.problem.workload):
        yield untimed
    yield from rival_words(entry)
    yield from busy_words(entry)
    yield from (f"note: {note}" for note in prediction.notes)
