"""Finds the best rented GPUs for a training: its hours and dollars on each kind of GPU in a table
of prices.
"""

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path

from experiments.bench.bench import Bench
from experiments.bench.problem import problem_of
from experiments.bench.search_options import space_called
from experiments.cli.commandline import DONE, NO_ANSWER, as_options, progress
from experiments.cli.live import Live
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, table_of
from mistlab.core.files import about, read_yaml
from mistlab.core.values import FieldError, InputError, refuse, reject
from mistlab.economy.bill import gpu_hours_of, steps_of
from mistlab.economy.price_table import (
    GpuPrice,
    PriceTable,
    Rented,
    cheapest_within,
    fastest_under,
)
from mistlab.job.job import hardware_from
from mistlab.job.search import Budget, Problem
from mistlab.plan.plan_words import plan_words
from mistlab.plan.space import SearchSpace
from mistlab.plan.workload import Workload

HOUR_S = 3600.0
BUDGET = Budget(evaluations=20_000)
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_HOURS = re.compile(r"([0-9]*\.?[0-9]+) ?(h|d)(?:ours|ays)?")


def hours_until(text: str, now: datetime) -> float:
    """The hours that are left until a deadline: the end of a day (``friday``, ``2026-12-04``), a
    minute (``2026-12-04T18:00``), or a duration from now (``36h``, ``3d``).
    """
    asked = text.strip().casefold()
    if match := _HOURS.fullmatch(asked):
        hours = float(match[1]) * (24 if match[2] == "d" else 1)
    elif asked in DAYS:
        # A weekday's name means the next day of this name, until its end; today's name means today.
        until = (DAYS.index(asked) - now.weekday()) % 7 + 1
        hours = (_midnight(now) + timedelta(days=until) - now) / timedelta(hours=1)
    else:
        try:
            then = datetime.fromisoformat(text.strip()).replace(tzinfo=now.tzinfo)
        except ValueError:
            reject(
                f"--by: {text!r} is not a time: give friday, 2026-12-04, 2026-12-04T18:00 or 36h"
            )
        if "T" not in text.upper() and " " not in text.strip():
            then += timedelta(days=1)
        hours = (then - now) / timedelta(hours=1)
    if not 0 < hours < math.inf:
        reject(f"--by: {text} is in the past: give a time after {now:%Y-%m-%dT%H:%M}")
    return hours


def _midnight(now: datetime) -> datetime:
    return now.replace(hour=0, minute=0, second=0, microsecond=0)


def space_name(options: argparse.Namespace) -> str:
    """The search space that the options name; by default that of programs for fine-tuning for
    adapters, for rented GPUs that of FSDP, and otherwise that of this package's own engine.
    """
    usual = "mist" if options.prices is None else "fsdp"
    return options.space or (usual if options.train == "all" else "trainer")


def space_searched(options: argparse.Namespace, work: Workload) -> SearchSpace:
    """The search space of the options, restricted to plans that can train the workload."""
    with as_options():
        return space_called(space_name(options), None).beside(work.reduction).holding(work.base)


@dataclass(frozen=True, slots=True, kw_only=True)
class RentedRun:
    """A training on a certain number of GPUs of one kind, with its plan, or with the reason why it
    is not possible.
    """

    price: GpuPrice
    gpus: int
    rented: Rented | None = None
    plan: tuple[str, ...] = ()
    why: str = ""

    def row(self) -> Row:
        """The row of the result table for this choice of GPUs."""
        return {
            "hardware": self.price.hardware,
            "gpus": self.gpus,
            "usd_per_gpu_hour": self.price.usd_per_gpu_hour,
            **({} if self.rented is None else asdict(self.rented)),
            "plan": list(self.plan),
            "why": self.why,
        }


def rented(options: argparse.Namespace, tokens: float, length: str) -> int:
    """The training on every kind and number of GPUs in the table of prices; ``length`` says how
    long it is.
    """
    content = read_yaml(options.prices)
    with about(options.prices):
        table = PriceTable.of_content(content)
        _check_names(table)
    now = datetime.now().astimezone() if options.starting is None else _start(options.starting)
    hours = None if options.by is None else hours_until(options.by, now)
    if options.under is not None and not 0 < options.under < math.inf:
        reject(
            f"--under: {options.under:g} is not a number of dollars: give one above 0, such as 500"
        )
    study = Study.begin("estimate", options)
    runs = []
    for run in _runs(options, table, tokens):
        runs.append(run)
        study.add(run.row())
    offered = [run for run in runs if run.rented is not None]
    sentences = [*_paragraphs(offered, options, hours, table), *_left_out(runs), length]
    is_answered = bool(offered) and not any(line.startswith("None ") for line in sentences)
    report = Report(title="What a training takes on rented GPUs", words=sentences)
    return study.end(report, DONE if is_answered else NO_ANSWER)


def _check_names(table: PriceTable) -> None:
    for index, price in enumerate(table.gpus):
        try:
            hardware_from(price.hardware, Path())
        except FieldError as error:
            refuse(f"gpus[{index}].hardware", error.problem)
        except InputError as error:
            refuse(f"gpus[{index}].hardware", str(error))


def _start(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        reject(f"--starting: {text!r} is not a time: give one such as 2026-11-28T12:00")


def _runs(options: argparse.Namespace, table: PriceTable, tokens: float) -> Iterator[RentedRun]:
    for price in table.gpus:
        node = hardware_from(price.hardware, Path()).node.gpus
        for gpus in price.counts():
            progress(f"{gpus} x {price.hardware}")
            nodes, rest = divmod(gpus, node) if gpus > node else (1, 0)
            if rest:
                why = f"{gpus} GPUs do not fill whole nodes of {node} GPUs"
                yield RentedRun(price=price, gpus=gpus, why=why)
                continue
            asked = {"hardware": price.hardware, "nodes": nodes, "gpus_per_node": gpus // nodes}
            arguments = argparse.Namespace(**{**vars(options), **asked})
            try:
                engines = space_called(space_name(options), None).engines
                workload, cluster = problem_of(arguments, engines=engines)
                yield _run(Problem(workload=workload, cluster=cluster), price, options, tokens)
            except InputError as error:
                yield RentedRun(price=price, gpus=gpus, why=str(error))


def _run(
    problem: Problem, price: GpuPrice, options: argparse.Namespace, tokens: float
) -> RentedRun:
    space = space_searched(options, problem.workload)
    with as_options():
        entry = Bench.of(problem).search("mist", space, BUDGET, 0, Live(searcher="mist"))
    gpus = problem.cluster.num_gpus
    if entry.answer is None or not entry.answer[1].fits:
        return RentedRun(price=price, gpus=gpus, why=f"no plan of space {space.name} fits")
    plan, prediction = entry.answer
    work = steps_of(tokens, problem.workload.tokens) / options.goodput
    low_s, seconds, high_s = (
        work * each
        for each in (
            prediction.iteration_s_low,
            prediction.iteration_s,
            prediction.iteration_s_high,
        )
    )
    offer = Rented(
        hardware=price.hardware,
        gpus=gpus,
        hours=seconds / HOUR_S,
        hours_low=low_s / HOUR_S,
        hours_high=high_s / HOUR_S,
        usd=gpu_hours_of(gpus, seconds) * price.usd_per_gpu_hour,
    )
    return RentedRun(price=price, gpus=gpus, rented=offer, plan=tuple(plan_words(plan)))


def _paragraphs(
    runs: list[RentedRun], options: argparse.Namespace, hours: float | None, table: PriceTable
) -> Iterator[str]:
    yield f"Prices of {table.date}, from {table.source}."
    if not runs:
        yield f"None of these GPUs has a plan of space {space_name(options)} that fits."
        return
    yield _table(runs)
    offers = [run.rented for run in runs if run.rented is not None]
    plans = {id(run.rented): run.plan for run in runs}

    def offer_line(what: str, best: Rented, doubt: str = "") -> str:
        return (
            f"{what}: {best.gpus} x {best.hardware}, {_in_hours(best.hours)} hours "
            f"({_in_hours(best.hours_low)} to {_in_hours(best.hours_high)}{doubt}), "
            f"{best.usd:,.2f} $. "
            f"{'; '.join(plans[id(best)])}."
        )

    cheapest = cheapest_within(offers, math.inf)
    assert cheapest is not None
    yield offer_line("Cheapest of all", cheapest)
    if hours is not None:
        best = cheapest_within(offers, hours)
        what = f"Cheapest that ends by {options.by}, in {hours:,.1f} hours"
        late = ", which ends later" if best is not None and best.hours_high > hours else ""
        yield f"None ends by {options.by}." if best is None else offer_line(what, best, late)
    if options.under is not None:
        best = fastest_under(offers, options.under)
        what = f"Fastest under {options.under:g} dollars"
        yield (
            f"None is under {options.under:g} dollars." if best is None else offer_line(what, best)
        )


def _left_out(runs: list[RentedRun]) -> Iterator[str]:
    """The reasons why some kinds of GPUs cannot run the training, one line each."""
    answered = {run.price.hardware for run in runs if run.rented is not None}
    last = {run.price.hardware: run for run in runs if run.price.hardware not in answered}
    yield from (f"No {name}: {run.why}, with {run.gpus} of them too." for name, run in last.items())


def _in_hours(hours: float) -> str:
    """Hours as text; below one with two significant digits, since a small training takes minutes.

    >>> _in_hours(1234.56), _in_hours(0.0421)
    ('1,234.6', '0.042')
    """
    return f"{hours:,.1f}" if hours >= 1 else f"{hours:.2g}"


def _table(runs: list[RentedRun]) -> str:
    names = ("hours", "hours_low", "hours_high")
    rows = [
        {**row, **{f"{name} told": _in_hours(row[name]) for name in names}}
        for row in (run.row() for run in runs)
    ]
    return table_of(
        sorted(rows, key=lambda row: row["usd"]),
        ("GPUs", "{gpus:,} {hardware}"),
        ("$ a GPU hour", "{usd_per_gpu_hour:g}"),
        ("hours", "{hours told}"),
        ("90 % within", "{hours_low told} to {hours_high told}"),
        ("$", "{usd:,.2f}"),
    )
