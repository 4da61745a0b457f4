"""Estimates the time that a training loses to failing GPUs, by a closed form and by simulation, and
plots it over checkpoint intervals and numbers of GPUs.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from experiments.cli.commandline import DONE, NO_ANSWER, as_options
from experiments.pages.charts import Bars, Lines
from experiments.pages.study import Report, Study
from experiments.pages.tables import table, table_of
from mistlab.core.values import reject
from mistlab.economy.failures import (
    Reliability,
    TimeShares,
    best_interval_s,
    failures_in,
    intervals_in,
    lost_gpu_hours,
    shares_of,
)
from simulators.failures import played

HOUR_S, DAY_S = 3600.0, 86_400.0
QUICK_RUNS = 20
# The largest number of failures to simulate for one row; if more are expected, fewer runs are
# simulated.
MOST_FAILURES = 1_000_000
# Besides the training that was asked about, the table has rows in which the best checkpoint
# interval or the number of GPUs is multiplied by these factors.
INTERVALS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
SIZES = (0.25, 1.0, 4.0, 16.0)
# By what factors checkpoints may become faster, for instance if they are written asynchronously.
FASTER_CHECKPOINTS = (4, 16, 64)
# The largest accepted ``--days``: longer than any training, and short enough to simulate.
MOST_DAYS = 10_000
# Figures of the Llama 3 training from "The Llama 3 Herd of Models" (2024), section 3.3.4: GPUs,
# days, unexpected interruptions, and the share of effective training time.
LLAMA_GPUS, LLAMA_DAYS, LLAMA_FAILURES, LLAMA_GOODPUT = 16_384, 54, 419, 0.9
LLAMA_HOURS_PER_FAILURE = LLAMA_GPUS * LLAMA_DAYS * 24 / LLAMA_FAILURES
WORDS = {
    "work": "work that stays",
    "checkpoints": "writing checkpoints",
    "work_done_again": "work done again",
    "detection": "until failures are noticed",
    "starting": "starting again",
}
Row = dict[str, Any]


def reliability(options: argparse.Namespace) -> int:
    """Estimate the time that a training loses to failing GPUs: the best interval between
    checkpoints, and the goodput that remains.

    Every GPU fails at random, all of them at the same rate. A failure undoes the work since the
    last checkpoint; then it must be noticed, the run started again and the checkpoint read. The
    goodput is the share of time whose work is not lost. It is computed in closed form, and by
    simulating every failure over many days. The defaults are an example: 992 GPUs, one of which
    fails every 8.2 hours.
    """
    given = _given(options)
    _check(options)
    best_s = best_interval_s(given)
    interval_s = best_s if options.interval_s is None else options.interval_s
    study = Study.begin("reliability", options)
    for row in study.counted(_asked(given, interval_s, best_s), "intervals and sizes"):
        study.add(_row(row, study.options))
    (asked,) = _rows(study, "asked")
    report = _report(study, given, asked, best_s)
    return study.end(report, DONE if asked["makes_progress"] else NO_ANSWER)


def _given(options: argparse.Namespace) -> Reliability:
    with as_options():
        return Reliability(
            **{entry.name: getattr(options, entry.name) for entry in fields(Reliability)}
        )


def _check(options: argparse.Namespace) -> None:
    for name, least in (("days", 0.0), ("runs", 0), ("interval_s", 0.0)):
        value = getattr(options, name)
        if value is not None and not least < value < float("inf"):
            reject(f"--{name.replace('_', '-')}: {value} is not above 0: give a number above 0")
    if options.days > MOST_DAYS:
        reject(f"--days: {options.days:g} is too large: give at most {MOST_DAYS:,}")


def _asked(given: Reliability, interval_s: float, best_s: float) -> list[Row]:
    """The rows of the table: the training that was asked about, and the same training with other
    checkpoint intervals, numbers of GPUs and checkpoint times.
    """
    rows: list[Row] = [{"kind": "asked", "given": given, "interval_s": interval_s}]
    rows += [{"kind": "interval", "given": given, "interval_s": by * best_s} for by in INTERVALS]
    for by in SIZES:
        other = replace(given, gpus=max(1, round(by * given.gpus)))
        rows.append({"kind": "size", "given": other, "interval_s": best_interval_s(other)})
    for by in FASTER_CHECKPOINTS if given.checkpoint_s else ():
        other = replace(given, checkpoint_s=given.checkpoint_s / by)
        rows.append({"kind": "checkpoint", "given": other, "interval_s": best_interval_s(other)})
    return rows


def _row(asked: Row, options: argparse.Namespace) -> Row:
    given, interval_s, seconds = asked["given"], asked["interval_s"], options.days * DAY_S
    closed = shares_of(given, interval_s)
    makes_progress = intervals_in(given, interval_s, seconds) >= 1
    row: Row = {
        "kind": asked["kind"],
        "gpus": given.gpus,
        "checkpoint_s": given.checkpoint_s,
        "hours_between_failures": 1 / (given.failures_per_s * HOUR_S),
        "interval_s": interval_s,
        "failures": failures_in(given, seconds),
        "makes_progress": makes_progress,
        "goodput": closed.work if closed is not None and makes_progress else 0.0,
        "lost_gpu_hours": None,
        "closed": None,
        "played": None,
    }
    if closed is not None and makes_progress:
        row["lost_gpu_hours"] = lost_gpu_hours(given, closed, seconds)
        row["closed"] = _mapping(closed)
        row["played"] = _played(given, interval_s, seconds, options)
    return row


def _played(
    given: Reliability, interval_s: float, seconds: float, options: argparse.Namespace
) -> Row:
    """The means over the simulated runs of a row, and the lowest and the highest goodput among
    them.
    """
    wanted = min(options.runs, QUICK_RUNS) if options.quick else options.runs
    runs = max(1, min(wanted, int(MOST_FAILURES / max(1.0, failures_in(given, seconds)))))
    draw = np.random.default_rng(options.seed)
    runs_played = [played(given, interval_s, seconds, draw) for _ in range(runs)]
    work = [one.shares.work for one in runs_played]
    means = {
        name: float(np.mean([getattr(one.shares, name) for one in runs_played])) for name in WORDS
    }
    return {
        "runs": runs,
        "failures": float(np.mean([one.failures for one in runs_played])),
        **means,
        "lowest_work": min(work),
        "highest_work": max(work),
    }


def _mapping(shares: TimeShares) -> Row:
    return {name: getattr(shares, name) for name in WORDS}


def _rows(study: Study, kind: str) -> list[Mapping[str, Any]]:
    return [row for row in study.rows if row["kind"] == kind]


def _report(study: Study, given: Reliability, asked: Mapping[str, Any], best_s: float) -> Report:
    options = study.options
    title = f"{asked['gpus']:,} GPUs, one failure every {_span(asked['hours_between_failures'])}"
    if not asked["makes_progress"]:
        return Report(title=title, words=[*_no_progress(asked, best_s, options)])
    return Report(
        title=f"Time lost to failures: {title}",
        words=[*_paragraphs(study, asked, best_s, options.days)],
        summary={
            "best_interval_s": best_s,
            "goodput_closed_over_played": asked["goodput"] / asked["played"]["work"],
        },
        pictures=_pictures(study),
        beside=[*_beside(given)],
    )


def _no_progress(
    asked: Mapping[str, Any], best_s: float, options: argparse.Namespace
) -> Iterator[str]:
    yield (
        f"No progress: one of {asked['gpus']:,} GPUs fails every "
        f"{_span(asked['hours_between_failures'])}. In {options.days:g} days hardly one interval "
        f"of {asked['interval_s']:,.0f} s of work with its checkpoint of {options.checkpoint_s:g} "
        "s comes to its end before the next failure."
    )
    yield (
        f"The best interval would be {best_s:,.0f} s. Give fewer GPUs, GPUs that fail less often, "
        "or less time for writing a checkpoint and starting again."
    )


def _paragraphs(
    study: Study, asked: Mapping[str, Any], best_s: float, days: float
) -> Iterator[str]:
    closed, mean = asked["closed"], asked["played"]
    gpu_hours = asked["gpus"] * days * 24
    yield table(
        ["share of the time", "closed form", f"mean of {mean['runs']} played", "GPU hours"],
        [
            (label, f"{closed[name]:.2%}", f"{mean[name]:.2%}", f"{closed[name] * gpu_hours:,.0f}")
            for name, label in WORDS.items()
        ],
    )
    yield (
        f"A checkpoint after every {asked['interval_s'] / 60:,.1f} min of work (the best interval: "
        f"{best_s / 60:,.1f} min). Over {days:g} days {asked['failures']:,.0f} failures and "
        f"{asked['lost_gpu_hours']:,.0f} lost GPU hours. Closed form over played goodput: "
        f"{asked['goodput'] / mean['work'] - 1:+.2%}; the played runs have "
        f"{mean['lowest_work']:.2%} to {mean['highest_work']:.2%}."
    )
    yield table_of(_rows(study, "interval"), ("interval (min)", _minutes), *GOODPUT)
    yield table_of(
        _rows(study, "size"),
        ("GPUs", "{gpus:,}"),
        ("a failure every", lambda row: _span(row["hours_between_failures"])),
        ("best interval (min)", _minutes),
        *GOODPUT,
    )
    faster = _rows(study, "checkpoint")
    if faster:
        yield "If training stood still for less time at each checkpoint:"
        checkpoint = ("checkpoint (s)", "{checkpoint_s:,.3g}")
        yield table_of(faster, checkpoint, ("best interval (min)", _minutes), *GOODPUT)


def _minutes(row: Row) -> str:
    return f"{row['interval_s'] / 60:,.1f}"


def _progress(form: Callable[[Row], str], otherwise: str = "") -> Callable[[Row], str]:
    """A function that makes the text of a table cell from a row; the text is ``otherwise`` if
    failures are so frequent that the training makes no progress.
    """
    return lambda row: form(row) if row["makes_progress"] else otherwise


GOODPUT = (
    ("goodput", _progress(lambda row: f"{row['goodput']:.2%}", "no progress")),
    ("played", _progress(lambda row: f"{row['played']['work']:.2%}")),
    ("lost GPU hours", _progress(lambda row: f"{row['lost_gpu_hours']:,.0f}")),
)


def _span(hours: float) -> str:
    if hours >= 1:
        return f"{hours:,.1f} h"
    return f"{60 * hours:,.1f} min" if hours >= 1 / 60 else f"{HOUR_S * hours:,.2g} s"


def _pictures(study: Study) -> Sequence[Lines | Bars]:
    around = [row for row in _rows(study, "interval") if row["makes_progress"]]
    sizes = [row for row in _rows(study, "size") if row["makes_progress"]]
    return [
        Lines(
            name="reliability",
            caption="Work that stays, over the interval between checkpoints.",
            curves={
                "closed form": [(row["interval_s"] / 60, row["goodput"]) for row in around],
                "played, mean": [(row["interval_s"] / 60, row["played"]["work"]) for row in around],
            },
            x="minutes of work between checkpoints",
            y="goodput (share of the time)",
            log_x=True,
            dots=["played, mean"],
        ),
        Bars(
            name="reliability-sizes",
            caption="Where time goes on other numbers of GPUs, each with its best interval.",
            groups=[f"{row['gpus']:,} GPUs" for row in sizes],
            series={
                label: [row["closed"][name] for row in sizes]
                for name, label in WORDS.items()
                if name != "work"
            },
            y="share of the time",
            stacked=True,
        ),
    ]


def _beside(given: Reliability) -> Iterator[str]:
    """A text that compares the published goodput of a run with the goodput that is predicted from
    the run's number of failures.
    """
    published = replace(given, gpus=LLAMA_GPUS, gpu_hours_between_failures=LLAMA_HOURS_PER_FAILURE)
    interval_s = best_interval_s(published)
    shares = shares_of(published, interval_s)
    between = _span(1 / (published.failures_per_s * HOUR_S))
    starting_s = given.detection_s + given.restart_s + given.reload_s
    yield "## Published"
    yield (
        f"Llama 3 405B on {LLAMA_GPUS:,} H100 was interrupted unexpectedly {LLAMA_FAILURES} times "
        f"in {LLAMA_DAYS} days, once in {between}, and still trained for more than "
        f"{LLAMA_GOODPUT:.0%} of the time (The Llama 3 Herd of Models, 2024)."
    )
    if shares is None:
        yield "By the options of this page such a training would make no progress."
        return
    yield (
        f"By the options of this page, fitted to no run, {shares.work:.1%} of its time would be "
        f"work that stays: {shares.checkpoints:.1%} go to checkpoints that stop the training for "
        f"{given.checkpoint_s:g} s, {shares.work_done_again:.1%} to work done again, "
        f"{shares.detection + shares.starting:.1%} to the {starting_s / 60:.1f} min until training "
        "goes on. What these took in that run was not published."
    )
