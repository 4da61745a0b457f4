"""The command ``compare_searchers``: runs several searchers on one problem, and stores, prints and
draws their results.
"""

import argparse
import io
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from matplotlib.figure import Figure

from experiments.bench.bench import Bench, Entry, decided, judged
from experiments.bench.problem import check_supported, free_words
from experiments.bench.search_options import (
    budget_of,
    can_ask,
    searched,
    searchers_called,
    space_for,
)
from experiments.cli.commandline import DONE, INTERRUPTED, NO_ANSWER, print_json, progress, writable
from experiments.cli.live import Live
from experiments.cli.rundir import RunDirectory, command_line, earlier_rows
from experiments.pages.drawing import save
from experiments.pages.tables import csv_of, played_words
from experiments.prediction.breakdown_plot import bar
from experiments.prediction.lanes import draw
from experiments.tuning import search_plots
from experiments.tuning.explain import Why, best_of, explain
from experiments.tuning.search_rows import bounded_by_all, entry_of, rows_of
from experiments.tuning.search_words import (
    HEAD,
    WORDS,
    busy_words,
    by_time,
    cells_of,
    prediction_words,
    rival_words,
    smallest_words,
    table,
    verdict,
    why_words,
)
from experiments.tuning.smallest import Smallest, smallest
from mistlab.core.files import naming, read_json
from mistlab.core.values import to_mapping
from mistlab.job.job import dump_job, job_to_mapping
from mistlab.job.prediction import Breakdown, Prediction
from mistlab.job.search import Budget
from mistlab.plan.plan import Plan
from mistlab.plan.plan_words import plan_words
from mistlab.plan.space import SearchSpace
from searchers.registry import SEARCHERS
from searchers.strategy import INTERRUPTED as SEARCH_INTERRUPTED

# Runs searchers on one problem, one after another, and stores their results in a folder.


@dataclass(slots=True, kw_only=True)
class Comparison:
    """A comparison of searchers on one problem, with the results so far."""

    bench: Bench
    space: SearchSpace
    budget: Budget
    seed: int
    directory: RunDirectory
    entries: list[Entry] = field(default_factory=list)
    is_interrupted: bool = False

    def run(self, names: Sequence[str], earlier: Sequence[Mapping[str, Any]] = ()) -> None:
        """Run each search in turn, unless a row of an earlier run has its result.

        An interrupt ends all searches; the plans found so far are kept.
        """
        ended = {row["searcher"]: row for row in earlier if row["reason"] != SEARCH_INTERRUPTED}
        try:
            for name in names:
                self._search(name, ended.get(name))
                self._keep()
                if self.entries[-1].is_interrupted:
                    self.is_interrupted = True
                    return
        except KeyboardInterrupt:
            self.is_interrupted = True
            self._keep()

    def _search(self, name: str, earlier: Mapping[str, Any] | None) -> None:
        live, space = Live(searcher=name), space_for(name, self.space)
        if earlier is None:
            self.bench.warm_up(space)
            entry = self.bench.search(name, space, self.budget, self.seed, live)
            came = f"in {entry.result.wall_s:.2f} s"
        else:
            entry = entry_of(earlier, space, self.bench, self.seed)
            came = "taken up from an earlier run"
        self.entries.append(entry)
        self.entries[-1] = self.bench.played(entry)
        best = "no plan" if entry.answer is None else f"{entry.answer[1].iteration_s:.3f} s"
        live.end(f"{entry.result.status}, {best}, {came}")

    def _keep(self) -> None:
        """Store the results so far, so that an interruption does not lose them."""
        self.directory.write_rows(self.rows())
        for entry in self.entries:
            if entry.answer is not None:
                name = entry.searcher.replace(":", "-")
                path = self.directory.path / "plans" / f"{name}.yaml"
                path.parent.mkdir(exist_ok=True)
                dump_job(self.bench.job(entry.answer[0]), path)

    def rows(self) -> list[dict[str, Any]]:
        """A result row for each searcher."""
        return rows_of(self.entries, self.bench)


# Reports a comparison of searchers: as text, as JSON, and as a page.


COMMAND = "compare_searchers"
EVALUATIONS = 10_000
# The seconds of all searchers together, so that an answer takes less than a minute.
SECONDS_TOGETHER = 55.0
QUICK = 20
# The CPU seconds of each searcher in a quick run; most searches end earlier, by their number of
# evaluations.
QUICK_SECONDS = 1.5
# Variants of searchers (with a colon in their names) that are compared by default.
BESIDE = ("mist:published",)
# How the best plan was chosen from plans whose predicted times cannot be told apart.
ANSWERED = {False: "predicted best and played fastest", True: "of the plans near it played fastest"}
# Options that do not change the result of a single searcher.
ASIDE = ("searchers", "out", "json", "page")


def compare(options: argparse.Namespace) -> int:
    """Compare all searchers on one problem: which finds the best plan, how fast, and how far from
    optimal it may be.

    All searchers ask the same predictor, with the same budget and seed. The Megatron and DeepSpeed
    grids search their own spaces, the others the given one. The event simulator plays every plan
    that a searcher finds. The folder of --out gets rows, plan files, the best plan's timeline and
    one HTML page. A run with the same options continues one that was interrupted.
    """
    started = time.perf_counter()
    if options.page is not None:
        writable(options.page, "page", "--page")
    names = searchers_called(_wanted(options), options.predictor)
    options.searchers = ",".join(names)
    problem, space = searched(options)
    check_supported(problem.workload, space.engines)
    budget = budget_of(options, _default_budget(len(names), quick=options.quick))
    options.budget_evaluations, options.budget_seconds = budget.evaluations, budget.seconds
    if budget.clock == "cpu":
        options.budget_seconds, options.budget_cpu_seconds = None, budget.seconds
    bench = Bench.of(problem, options.predictor, options.view)
    earlier = earlier_rows(options.out, COMMAND, vars(options), aside=ASIDE)
    comparison = Comparison(
        bench=bench,
        space=space,
        budget=budget,
        seed=options.seed,
        directory=RunDirectory.make(options.out, COMMAND, vars(options)),
    )
    comparison.run(names, earlier)
    status = _conclude(comparison, options, started)
    if comparison.is_interrupted:
        folder = comparison.directory.path
        progress(f"interrupted: what was found is in {folder}; the same command goes on")
        return INTERRUPTED
    return status


def _wanted(options: argparse.Namespace) -> list[str]:
    """The searchers that the options name; by default all for which the predictor has the
    methods.
    """
    if options.searchers is not None:
        wanted: list[str] = options.searchers.split(",")
        return wanted
    plain = (name for name in SEARCHERS if ":" not in name or name in BESIDE)
    return [name for name in plain if can_ask(name, options.predictor)]


def _default_budget(searchers: int, *, quick: bool) -> Budget:
    if quick:
        return Budget(evaluations=EVALUATIONS // QUICK, seconds=QUICK_SECONDS, clock="cpu")
    return Budget(evaluations=EVALUATIONS, seconds=SECONDS_TOGETHER / searchers)


def _conclude(comparison: Comparison, options: argparse.Namespace, started: float) -> int:
    """Explain the best plan, write the page, and print; returns the exit status."""
    best, why = judged(comparison.entries), None
    if best is not None:
        others = [entry for entry in comparison.entries if entry.searcher != best.searcher]
        why = explain(best, [best, *others], comparison.bench)
    nothing = None
    if best is None and not comparison.is_interrupted:
        nothing = smallest(comparison.bench, comparison.space)
    free = free_words(comparison.bench.problem.cluster)
    # A searcher with a search space of its own proves nothing about the space of the other
    # searchers.
    is_proven = any(
        entry.result.status == "INFEASIBLE" and entry.space == comparison.space
        for entry in comparison.entries
    )
    lines = []
    if nothing is not None:
        name = comparison.space.name
        lines = [*smallest_words(nothing, name, is_proven=is_proven), *free]
    _write_page(comparison, options, best, why, lines)
    answer = _mapping(comparison, best, why, nothing, time.perf_counter() - started)
    _write_rows(comparison, answer)
    if options.json:
        print_json(answer)
        for line in lines:
            progress(line)
    else:
        print("\n".join(_text(comparison, best, why, lines)))
        print(f"\nrows, plans and page: {comparison.directory.path / 'report.html'}")
    return NO_ANSWER if best is None else DONE


def _mapping(
    comparison: Comparison,
    best: Entry | None,
    why: Why | None,
    nothing: Smallest | None,
    seconds: float,
) -> dict[str, Any]:
    return {
        "best": None if best is None else best.searcher,
        "played": _played_mapping(comparison, best),
        "rows": comparison.rows(),
        "why": None if why is None else to_mapping(why),
        "smallest": None if nothing is None else to_mapping(nothing),
        "budget": to_mapping(comparison.budget),
        "seed": comparison.seed,
        "is_interrupted": comparison.is_interrupted,
        "timing": {"seconds": seconds},
    }


def _played_mapping(comparison: Comparison, best: Entry | None) -> dict[str, Any] | None:
    """The plan that is fastest in the event simulator, and whether it is also the one predicted to
    be best, as plain values; None if no plan was simulated.
    """
    fastest = fastest_played(comparison.entries)
    if fastest is None or best is None:
        return None
    searcher, plan, seconds = fastest
    return {
        "searcher": searcher,
        "simulated_s": seconds,
        "agrees": plan == best.result.plan or seconds == best.simulated_s,
        "plan": job_to_mapping(comparison.bench.job(plan)),
    }


def _text(
    comparison: Comparison, best: Entry | None, why: Why | None, nothing: Sequence[str]
) -> Iterator[str]:
    yield from (f"{line}\n" for line in _proven(comparison))
    yield table(comparison.rows())
    yield from nothing
    if best is not None and best.answer is not None and why is not None:
        plan, prediction = best.answer
        yield f"\nThe answer, {ANSWERED[best.is_played]}, by {best.searcher}:"
        yield f"  {prediction_words(plan, prediction, best.answer_simulated_s)}"
        yield from (f"  {line}" for line in free_words(comparison.bench.problem.cluster))
        yield from (f"  {line}" for line in plan_words(plan))
        yield "\nWhy:"
        yield from (f"  {line}" for line in why_words(why))
        yield "\nPlayed:"
        yield from (f"  {line}" for line in _played(comparison.entries, best))


def _proven(comparison: Comparison) -> Iterator[str]:
    """What the search that found the predicted best plan has proven, with the name of its
    searcher.
    """
    if (prover := best_of(comparison.entries)) is not None:
        judge = decided(bounded_by_all(prover, comparison.entries))
        yield f"{verdict(judge)} ({prover.searcher})"


def fastest_played(entries: Sequence[Entry]) -> tuple[str, Plan, float] | None:
    """The plan that is fastest in the event simulator, with its searcher and seconds, among the
    simulated plans: the best plans of all searchers, and plans predicted to be nearly as fast. None
    if none was simulated.
    """
    played = [
        (seconds, number, plan)
        for number, entry in enumerate(entries)
        for plan, seconds in _played_plans(entry)
    ]
    if not played:
        return None
    seconds, number, plan = min(played, key=lambda one: one[:2])
    return entries[number].searcher, plan, seconds


def _played_plans(entry: Entry) -> Iterator[tuple[Plan, float]]:
    if entry.result.plan is not None and entry.simulated_s is not None:
        yield entry.result.plan, entry.simulated_s
    for rival in entry.rivals:
        if rival.simulated_s is not None:
            yield rival.plan, rival.simulated_s


def _played(entries: Sequence[Entry], best: Entry) -> Iterator[str]:
    """A sentence on whether plans are ranked differently when they are simulated."""
    fastest = fastest_played(entries)
    if fastest is not None and best.simulated_s is not None:
        searcher, plan, seconds = fastest
        if plan == best.result.plan or seconds >= best.simulated_s:
            yield "The plan predicted best is the fastest of all when played, too."
        else:
            yield (
                f"The predictors disagree: of the best plans and their rivals one of {searcher} is "
                f"played fastest, in {seconds:.3f} s, {1 - seconds / best.simulated_s:.2%} less "
                f"than the plan predicted best ({best.simulated_s:.3f} s)."
            )
    for entry in entries:
        yield from rival_words(entry)
        yield from (f"{entry.searcher}: {line}" for line in busy_words(entry))


def _write_page(
    comparison: Comparison,
    options: argparse.Namespace,
    best: Entry | None,
    why: Why | None,
    nothing: Sequence[str],
) -> None:
    bench, folder = comparison.bench, comparison.directory.path
    rows = comparison.rows()
    answer = None
    if best is not None and best.answer is not None and why is not None:
        plan, prediction = best.answer
        draw(bench.job(plan), bench.simulator.simulate(plan), "best", folder)
        answer = BestPlan(
            row=rows_of([best, *comparison.entries], bench)[0],
            prediction=prediction,
            plan=[*free_words(bench.problem.cluster), *plan_words(plan)],
            why=[*_proven(comparison), *why_words(why)],
            breakdown=why.breakdown,
            timeline=(folder / "best.svg").read_text(encoding="utf-8"),
        )
    report = ComparisonPage(
        title=f"{options.model} on {bench.problem.cluster.num_gpus} {options.hardware}",
        subtitle=(
            f"Sequences of {options.sequence_length} tokens, {options.global_batch} a step, "
            f"{options.attention} attention, {bench.problem.workload.precision}; space "
            f"{comparison.space.name}, seed {options.seed}."
        ),
        rows=rows,
        answer=answer,
        no_answer=nothing,
        limit_bytes=max(one.memory_bytes for one in bench.problem.cluster.of_groups),
        outside_bytes=bench.outside_bytes,
        config=read_json(folder / "config.json"),
    )
    with naming(folder / "report.html"):
        (folder / "report.html").write_text(report.html(), encoding="utf-8")
    if options.page is not None:
        with naming(options.page):
            options.page.write_text(report.html(), encoding="utf-8")


def _write_rows(comparison: Comparison, answer: Mapping[str, Any]) -> None:
    """Write the result rows as a table without measured times, and write the whole answer."""
    rows = [{name: row[name] for name in row if name != "wall_s"} for row in answer["rows"]]
    comparison.directory.write_text("rows.csv", csv_of(rows))
    text = json.dumps(answer, indent=1, allow_nan=False)
    comparison.directory.write_text("summary.json", f"{text}\n")


# A comparison of searchers as one HTML page, which needs no network and no script, and contains all
# pictures.


@dataclass(frozen=True, slots=True, kw_only=True)
class BestPlan:
    """The best plan: its searcher, its text, the reasons why it is best, its time breakdown (if the
    closed form predicts it), and an iteration as SVG.
    """

    row: Mapping[str, Any]
    prediction: Prediction
    plan: Sequence[str]
    why: Sequence[str]
    breakdown: Breakdown | None
    timeline: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPage:
    """The contents of the page; if there is no plan, ``no_answer`` says why."""

    title: str
    subtitle: str
    rows: Sequence[Mapping[str, Any]]
    answer: BestPlan | None
    no_answer: Sequence[str]
    limit_bytes: int
    outside_bytes: float
    config: Mapping[str, Any]

    def html(self) -> str:
        """The page as the text of an HTML file."""
        template = Template(
            files("experiments.tuning").joinpath("page.html").read_text(encoding="utf-8")
        )
        return template.substitute(
            title=escape(self.title),
            subtitle=escape(self.subtitle),
            facts=_facts(self.answer) if self.answer else _paragraphs(self.no_answer),
            table=_table(self.rows),
            reasons=_paragraphs(
                [f"{r['searcher']}: {r['reason']}" for r in self.rows if r["reason"]]
            ),
            answer=self._answer(self.answer) if self.answer else "",
            searches=self._searches() if self.answer else "",
            command=escape(command_line(self.config)),
            config=escape(json.dumps(self.config, indent=2)),
        )

    def _answer(self, answer: BestPlan) -> str:
        bars = search_plots.memory(answer.prediction, self.outside_bytes, self.limit_bytes)
        parts = [
            "<h2>The best plan</h2>",
            _list(answer.plan),
            "<h2>Why this one</h2>",
            _list([*answer.why, *answer.prediction.notes]),
            *_time(answer.breakdown),
            "<h2>What fills its memory</h2>",
            _figure(bars, "A GPU of each stage at its fullest moment, by what it holds."),
            "<h2>One iteration of it</h2>",
            _caption(
                inline_svg(answer.timeline, "timeline"),
                "As the event simulator plays it: four streams a stage.",
                "long",
            ),
        ]
        return "\n".join(parts)

    def _searches(self) -> str:
        evaluations = search_plots.convergence(self.rows, over_seconds=False)
        seconds = search_plots.convergence(self.rows, over_seconds=True)
        parts = [
            "<h2>How the searches went</h2>",
            '<div class="pair">',
            _figure(evaluations, "Best plan so far against evaluations."),
            _figure(seconds, "Best plan so far against seconds of the search."),
            "</div>",
            _figure(
                search_plots.fronts(self.rows, self.limit_bytes),
                "Time against memory: the plans each searcher asked about that no other of its "
                "beats in both, its answer a star. Beyond the limit they do not fit.",
            ),
        ]
        return "\n".join(parts)


def _time(breakdown: Breakdown | None) -> list[str]:
    """The section of the page on what GPUs spend their time on; empty without a time breakdown."""
    if breakdown is None:
        return []
    caption = "What a GPU does in an iteration; of communication, what no arithmetic hides."
    return ["<h2>Where the time goes</h2>", _figure(bar(breakdown), caption)]


def _facts(answer: BestPlan) -> str:
    row, prediction = answer.row, answer.prediction
    facts = {
        "found by": row["searcher"],
        "iteration, predicted": f"{row['predicted_s']:.3f} s",
        "bounds (90 %)": f"{row['predicted_s_low']:.2f} to {row['predicted_s_high']:.2f} s",
        "iteration, event simulator": played_words(row["simulated_s"]),
        "tokens a second": f"{prediction.tokens_per_s:,.0f}",
        "of the peak": f"{prediction.mfu:.1%}",
    }
    if row["speedup"] is not None:
        facts["over the Megatron grid"] = f"{row['speedup']:.2f}x"
    items = [f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items()]
    return f'<dl class="facts">{"".join(items)}</dl>'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [_line("th", HEAD, "")]
    for number, row in enumerate(by_time(rows)):
        is_best = number == 0 and row["predicted_s"] is not None
        lines.append(_line("td", cells_of(row), ' class="best"' if is_best else ""))
    return (
        f"<table>\n<thead>{lines[0]}</thead>\n<tbody>\n{chr(10).join(lines[1:])}\n</tbody></table>"
    )


def _line(tag: str, cells: Sequence[str], style: str) -> str:
    marks = ["" if place in WORDS else ' class="number"' for place in range(len(cells))]
    content = "".join(
        f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, cells, strict=True)
    )
    return f"<tr{style}>{content}</tr>"


def _paragraphs(lines: Sequence[str]) -> str:
    return "\n".join(f"<p>{escape(line)}</p>" for line in lines)


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _figure(figure: Figure, caption: str) -> str:
    text = svg_of(figure)
    prefix = re.sub(r"\W+", "-", caption.lower()).strip("-")
    return _caption(inline_svg(text, prefix), caption, "")


def _caption(svg: str, caption: str, kind: str) -> str:
    text = escape(caption)
    return (
        f'<figure class="{kind}"><figcaption>{text}</figcaption>'
        f'<div class="wide">{svg}</div></figure>'
    )


def svg_of(figure: Figure) -> str:
    """A picture as the text of an SVG file."""
    text = io.StringIO()
    save(figure, text)
    return text.getvalue()


def inline_svg(text: str, prefix: str) -> str:
    """The text of an SVG file in the form in which a page can contain it.

    Its ids get a prefix, because all pictures of a page share one name space. Black becomes the
    page's ink and white its paper, so a reader's dark mode holds for pictures too.
    """
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = text.replace("url(#", f"url(#{prefix}-")
    return text.replace("#000000", "var(--ink)").replace("#ffffff", "var(--paper)")
