"""The speedup breakdown: how much each part of the search space gains over Megatron-LM as
published, how much is lost without each part, and how gains depend on the hardware; for this
project's runtime and for Mist's published one.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

from experiments.bench.bench import Bench, Found
from experiments.bench.cases import Case, case_of, clusters
from experiments.bench.remembered import answers
from experiments.cli.commandline import DONE, NO_ANSWER, as_options
from experiments.pages.charts import Bars
from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, number, table, table_of
from mistlab.core.units import GIB_BYTES
from mistlab.engines.mistlab import MIST
from mistlab.job.search import Problem
from mistlab.machine.hardware import Line
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan_words import plan_line
from mistlab.plan.space import OffloadRatios, SearchSpace
from searchers.exact.published_programme import WEIGHTS
from searchers.methods.published import published
from simulators.views import FULL, view_of

# Computes average speedups, and the average difference between two iterations in each part of their
# time.


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The mean of some numbers, with the minimum and the maximum."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Self:
        """The mean, minimum and maximum of at least one number."""
        return cls(mean=sum(numbers) / len(numbers), least=min(numbers), most=max(numbers))

    def mapping(self) -> dict[str, float]:
        """The fields as a dictionary by name."""
        return asdict(self)


def difference_in_parts(
    pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
) -> dict[str, float]:
    """By how much two iterations differ in each part of their time, such as exposed communication,
    as a share of the first iteration; the mean over pairs of iterations.

    >>> difference_in_parts([({"a_s": 3.0, "b_s": 1.0}, {"a_s": 4.0, "b_s": 1.0})])
    {'a_s': 0.25, 'b_s': 0.0}
    """
    first, _ = pairs[0]
    return {
        name: sum((other[name] - own[name]) / sum(own.values()) for own, other in pairs)
        / len(pairs)
        for name in first
    }


# The names of the steps for which speedups were published.
FIRST, FLEXIBLE = "3D parallelism", "+ flexible checkpointing"
OFFLOADED, UNEVEN, AWARE = "+ offloading", "+ uneven blocks", "+ imbalance-aware"

# Two lists of searches: the steps of the breakdown, each of which adds a dimension to the search
# space, and searches of the full space without one of the dimensions.


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakdownStep:
    """A search of the breakdown: its space, the predictor's view that it uses and, for the
    published search, the number of weighted sums of steady time and extra time by which it samples
    Pareto frontiers.
    """

    name: str
    space: SearchSpace
    view: str
    weights: int = WEIGHTS


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakdownRuntime:
    """An engine for which the breakdown searches plans, and whether it uses the published
    search.
    """

    engine: str
    is_published_search: bool = False

    def found(self, bench: Bench, step: BreakdownStep, seed: int) -> Found | None:
        """The plan that the search of a step finds for this engine; None if no plan fits."""
        space = step.space.on(self.engine)
        if not self.is_published_search:
            return bench.found("mist", space, view=step.view, seed=seed)
        return bench.found(published(weights=step.weights), space, seed=seed)


def steps(unaware: str) -> list[BreakdownStep]:
    """The steps of the breakdown. Each but the last has one more part of the search space than the
    step before, and uses the view ``unaware``, which hides the extra time of the first and last
    micro-batches. The last step has the same space as the one before, and hides nothing.
    """
    all_recomputed = replace(space_of("3d"), name="3d, all recomputed", recomputation="all")
    sharded = replace(space_of("+zero"), name="+zero, all recomputed", recomputation="all")
    return [
        BreakdownStep(name=FIRST, space=all_recomputed, view=unaware, weights=1),
        BreakdownStep(name="+ ZeRO-2 and 3", space=sharded, view=unaware, weights=1),
        BreakdownStep(name=FLEXIBLE, space=space_of("+checkpointing"), view=unaware, weights=1),
        BreakdownStep(name=OFFLOADED, space=space_of("+offload"), view=unaware, weights=1),
        BreakdownStep(name=UNEVEN, space=space_of("mist"), view=unaware, weights=1),
        BreakdownStep(name=AWARE, space=space_of("mist"), view=FULL),
    ]


def left_out(unaware: str) -> list[BreakdownStep]:
    """The full search space without one of its parts, once for each part."""
    mist = space_of("mist")

    def without(name: str, **changes: object) -> BreakdownStep:
        space = replace(mist, name=f"mist without {name}", **changes)  # type: ignore[arg-type]
        return BreakdownStep(name=name, space=space, view=FULL)

    return [
        without("ZeRO-2 and 3", zero=(1,)),
        without("flexible checkpointing", recomputation="all"),
        without("offloading", offload=OffloadRatios()),
        without("uneven blocks", layers_off_balance=0),
        without("a choice for each stage", unequal_stages=False),
        BreakdownStep(name="imbalance awareness", space=mist, view=unaware),
    ]


# Breaks down the speedup: how much each part of the search space gains over Megatron-LM as
# published, and what is lost without it.


SIZES, QUICK_SIZES = ("7b", "13b", "22b"), ("7b",)
PUBLISHED, TUNED = "megatron:published", "megatron"
OURS, THEIRS, AS_PUBLISHED = "this runtime", "published runtime", "published runtime and search"
RUNTIMES: Mapping[str, BreakdownRuntime] = {
    OURS: BreakdownRuntime(engine="mistlab"),
    THEIRS: BreakdownRuntime(engine="mist"),
    # The published search takes minutes, so it is used only for hardware with a published
    # breakdown.
    AS_PUBLISHED: BreakdownRuntime(engine="mist", is_published_search=True),
}
# The hardware with a published breakdown, and the published speedup of one step over another.
PUBLISHED_FOR = "l4-24gb"
PUBLISHED_STEPS = {(FLEXIBLE, FIRST): 1.12, (OFFLOADED, FLEXIBLE): 1.07, (AWARE, OFFLOADED): 1.09}


def _as_it_is(problem: Problem) -> Problem:
    return problem


def _with_more_memory(problem: Problem, gib: float) -> Problem:
    cluster = problem.cluster
    memory_gib = cluster.memory_bytes / GIB_BYTES + gib
    return replace(problem, cluster=replace(cluster, memory_gib=memory_gib))


def _with_copies(problem: Problem, times: float) -> Problem:
    """The problem on hardware whose copies between GPU and host are this many times as fast."""
    cluster = problem.cluster
    transfers = cluster.hardware.transfers
    assert transfers is not None, "the evaluation's machines are calibrated"

    def faster(line: Line | None) -> Line | None:
        return line and replace(line, gbytes_per_s=line.gbytes_per_s * times)

    groups = tuple(
        replace(
            group,
            host_to_device=faster(group.host_to_device),
            device_to_host=faster(group.device_to_host),
        )
        for group in transfers.groups
    )
    hardware = replace(cluster.hardware, transfers=replace(transfers, groups=groups))
    return replace(problem, cluster=replace(cluster, hardware=hardware))


# Changes of the problem, such as faster copies, that show what a gain depends on.
CHANGES: Mapping[str, Callable[[Problem], Problem]] = {
    "nothing": _as_it_is,
    "copies to and from hosts take twice as long": partial(_with_copies, times=0.5),
    "copies take half as long": partial(_with_copies, times=2.0),
    "GPUs have 2 GiB less": partial(_with_more_memory, gib=-2.0),
    "GPUs have 4 GiB more": partial(_with_more_memory, gib=4.0),
}


def broken_down(options: argparse.Namespace) -> int:
    """Predict what each part of the search space gains over Megatron-LM as published, as parts are
    added one by one, and what is lost without each.

    The models are GPT on 8, 16 and 32 L4 and A100. The first step is 3D parallelism with every
    block recomputed; each further step adds a choice for each stage: ZeRO-2 and ZeRO-3, flexible
    checkpointing, offloading, uneven numbers of blocks. The last step changes the predictor
    instead: it counts the extra time of the first and last micro-batches. All steps are searched
    for this runtime and for Mist's published one. On L4 the published search is run too, and all is
    repeated with changed figures of the machine, such as faster copies.
    """
    with as_options():
        view_of(options.view)
    places = clusters(options.hardware)[: 1 if options.quick else None]
    chosen = QUICK_SIZES if options.quick else SIZES
    cases = [case_of(place, "gpt3", size, "flash") for size in chosen for place in places]
    search = partial(searched, view=options.view, seed=options.seed, is_quick=options.quick)
    study = Study.begin("speedup_breakdown", options)
    # Start with the largest cases, so that at the end no process is left alone with a long case.
    answered = [rows for _, rows in answers(study, search, cases[::-1], "cases")]
    study.add_all(row for rows in reversed(answered) for row in rows)
    status = DONE if all(row["kept_s"] for row in study.rows) else NO_ANSWER
    return study.end(report(study.rows, options.view), status)


def searched(case: Case, *, view: str, seed: int, is_quick: bool = False) -> list[dict[str, Any]]:
    """The result rows of a case: for each runtime, one row for every step, then one for the search
    without each part, and one for every step on each changed problem.
    """
    bench = Bench.of(case.problem())
    baselines = {
        name: None if (baseline := bench.found(name, space_of(name))) is None else baseline.seconds
        for name in (PUBLISHED, TUNED)
    }
    rows_of = partial(BreakdownRows, case=case, baselines=baselines)
    rows: list[dict[str, Any]] = []
    is_published = case.hardware == PUBLISHED_FOR
    for name, runtime in RUNTIMES.items():
        if runtime.is_published_search and (is_quick or not is_published):
            continue
        # The published breakdown does not have a step for unequal numbers of blocks.
        each = [one for one in steps(view) if one.name != UNEVEN or not runtime.is_published_search]
        rows += _steps(runtime, bench, each, seed, rows_of(chapter="with", runtime=name))
        for step in left_out(view) if name == OURS else ():
            best = runtime.found(bench, step, seed)
            row = rows_of(chapter="without", runtime=name).row(step, best, best, bench)
            rows.append(row)
    for change, changed in CHANGES.items() if is_published else ():
        other = Bench.of(changed(case.problem()))
        named = [step for step in steps(view) if step.name in (FIRST, FLEXIBLE, OFFLOADED, AWARE)]
        rows += _steps(
            RUNTIMES[THEIRS], other, named, seed, rows_of(chapter="changed", runtime=change)
        )
    return rows


def _steps(
    runtime: BreakdownRuntime,
    bench: Bench,
    each: Sequence[BreakdownStep],
    seed: int,
    rows_of: "BreakdownRows",
) -> Iterator[dict[str, Any]]:
    """A result row for each step; if the previous step's plan is faster, the step keeps it."""
    kept: Found | None = None
    for step in each:
        best = runtime.found(bench, step, seed)
        is_better = best is not None and (kept is None or best.seconds <= kept.seconds)
        kept = best if is_better else kept
        yield rows_of.row(step, best, kept, bench)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakdownRows:
    """Makes the result rows of a case for one runtime or one changed machine. Gains are differences
    between simulated times. So are the losses without a part of the search space, on this project's
    runtime.
    """

    case: Case
    baselines: Mapping[str, float | None]
    chapter: str
    runtime: str

    def row(
        self, step: BreakdownStep, best: Found | None, kept: Found | None, bench: Bench
    ) -> dict[str, Any]:
        """The result row of a step: the plan that its search found, and the fastest plan of this
        and all earlier steps, which a user would keep.
        """
        kept_s = kept.seconds if kept else None
        is_played = self.chapter == "with" or self.runtime == OURS
        played_s = bench.played_s(kept.plan) if kept and is_played else None
        return {
            "case": self.case.name,
            **asdict(self.case),
            "gpus": self.case.num_gpus,
            "chapter": self.chapter,
            "runtime": self.runtime,
            "step": step.name,
            "space": step.space.name,
            "view": step.view,
            "seen_s": best.seen_s if best else None,
            "chosen_s": best.seconds if best else None,
            "kept_s": kept_s,
            "played_s": played_s,
            "by_published_runtime_s": bench.run_by_s(MIST, kept.plan) if kept else None,
            "over": {
                name: None if baseline is None or kept_s is None else baseline / kept_s
                for name, baseline in self.baselines.items()
            },
            "baselines_s": dict(self.baselines),
            "terms_s": asdict(kept.terms) if kept else None,
            "plan": plan_line(kept.plan) if kept else None,
            "timing": {"search_s": best.result.wall_s if best else None},
        }


def report(rows: Sequence[Row], view: str) -> Report:
    """The report: what each part of the search space gains, and what is lost without it."""
    runtimes = list(dict.fromkeys(row["runtime"] for row in rows if row["chapter"] == "with"))
    bars = [bar for one in runtimes for bar in _bars(_chapter(rows, "with", one))]
    missing = [*_missing(rows)]
    gains = [*_gains(rows)]
    named = list(dict.fromkeys(bar["step"] for bar in bars))
    heights = {(bar["where"], bar["runtime"], bar["step"]): bar["mean"] for bar in bars}
    return Report(
        title="What each component brings",
        words=[
            (
                f"Speedups over Megatron-LM as published, on average over cases. Until the last "
                f"step searches see the view `{view}`; every winner is scored by the whole "
                "predictor, and a step whose search was misled keeps the plan of the step before. "
                "*Chosen* is what the search alone would have taken. *Published runtime* is "
                "engine `mist`; where the published search is asked, it samples frontiers by one "
                "weight until the last step, and by thirty there."
            ),
            *(text for one in runtimes for text in _bars_words(bars, one)),
            "Each case by itself, over Megatron-LM as published:",
            IN_A_FILE,
            _cases_table(rows, runtimes),
            *_gains_words(gains),
            "This runtime's whole without one component, as a share of its speed that is lost:",
            table(
                ("without", *_places(rows)),
                [
                    (lost_part["without"], *(f"{place['lost']:.1%}" for place in lost_part["lost"]))
                    for lost_part in missing
                ],
            ),
        ],
        summary={
            "bars": bars,
            "without": missing,
            "gains": gains,
        },
        pictures=[
            Bars(
                name="speedup_breakdown",
                caption="Speedup over Megatron-LM as published, on average over 8 to 32 GPUs.",
                groups=named,
                series={
                    f"{where}, {runtime_name}": [
                        heights.get((where, runtime_name, step)) for step in named
                    ]
                    for where in _places(rows)[:2]
                    for runtime_name in runtimes
                    if (where, runtime_name, FIRST) in heights
                },
                y="over Megatron-LM as published",
                marks={"Megatron-LM as published": 1.0},
            )
        ],
    )


def _chapter(rows: Sequence[Row], chapter: str, runtime: str) -> list[Row]:
    return [row for row in rows if (row["chapter"], row["runtime"]) == (chapter, runtime)]


def _places(rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(row["hardware"] for row in rows))
    return [*names, "both"] if len(names) > 1 else names


def _bars(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """A bar chart of one runtime's gains, step by step."""
    for where in _places(rows):
        for step in dict.fromkeys(row["step"] for row in rows):
            at_step = [
                row
                for row in rows
                if row["step"] == step and where in (row["hardware"], "both") and row["kept_s"]
            ]
            if not at_step:
                continue
            of_case = [(row["baselines_s"][PUBLISHED], row) for row in at_step]
            yield {
                "runtime": at_step[0]["runtime"],
                "where": where,
                "step": step,
                "cases": len(at_step),
                **Summary.of([row["over"][PUBLISHED] for row in at_step]).mapping(),
                "over_tuned": Summary.of([row["over"][TUNED] for row in at_step]).mean,
                "chosen": _mean(of_case, "chosen_s"),
                "played": _mean(of_case, "played_s"),
                "by_published_runtime": _mean(of_case, "by_published_runtime_s"),
            }


def _mean(of_case: Sequence[tuple[float, Row]], name: str) -> float:
    return Summary.of([base / row[name] for base, row in of_case if row[name]]).mean


def _bars_words(bars: Sequence[Mapping[str, Any]], runtime: str) -> Sequence[str]:
    """Bar charts of the gains of the steps, as text: the chart for this project's runtime goes to
    the page, charts for other runtimes to files.
    """
    apart = () if runtime == OURS else (IN_A_FILE,)
    return [f"On {runtime}:", *apart, _bars_table(bars, runtime)]


def _bars_table(bars: Sequence[Mapping[str, Any]], runtime: str) -> str:
    columns = [
        ("where", "{where}"),
        ("step", "{step}"),
        ("over as published", "{mean:.3f}"),
        ("least", "{least:.3f}"),
        ("most", "{most:.3f}"),
        ("over tuned", "{over_tuned:.3f}"),
        ("chosen", "{chosen:.3f}"),
        ("played", "{played:.3f}"),
    ]
    if runtime == OURS:
        columns.append(("by published runtime", "{by_published_runtime:.3f}"))
    return table_of([bar for bar in bars if bar["runtime"] == runtime], *columns)


def _cases_table(rows: Sequence[Row], runtimes: Sequence[str]) -> str:
    with_rows = [row for row in rows if row["chapter"] == "with"]
    cases, named = ([*dict.fromkeys(row[key] for row in with_rows)] for key in ("case", "step"))
    over = {(row["case"], row["runtime"], row["step"]): row["over"][PUBLISHED] for row in with_rows}
    return table(
        ("case", "runtime", *named),
        [
            (
                case,
                runtime_name,
                *(number(over.get((case, runtime_name, step)), ".3f") for step in named),
            )
            for case in cases
            for runtime_name in runtimes
            if (case, runtime_name, FIRST) in over
        ],
    )


def _gains(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The speedup of every published step over the step against which it was published, for each
    runtime and each changed problem; averaged over the cases on the published hardware.
    """
    of_machine = [row for row in rows if row["hardware"] == PUBLISHED_FOR]
    kinds = dict.fromkeys((row["chapter"], row["runtime"]) for row in of_machine)
    for chapter, name in kinds:
        if chapter == "without":
            continue
        kept_s = {
            (row["case"], row["step"]): row["kept_s"]
            for row in _chapter(of_machine, chapter, name)
            if row["kept_s"]
        }
        gains_of_runtime = {"chapter": chapter, "runtime": name}
        for after, before in PUBLISHED_STEPS:
            ratios = [
                kept_s[case, before] / seconds
                for (case, step), seconds in kept_s.items()
                if step == after and (case, before) in kept_s
            ]
            gains_of_runtime[after] = Summary.of(ratios).mean if ratios else None
        yield gains_of_runtime


def _gains_words(gains: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The tables of gains as text; empty if there are none."""
    if not gains:
        return
    heads = [f"{after} over {before}" for after, before in PUBLISHED_STEPS]

    def lines(chapter: str) -> Iterator[tuple[str, ...]]:
        for gain in gains:
            if gain["chapter"] == chapter:
                cells = (number(gain[after], ".3f") for after, _ in PUBLISHED_STEPS)
                yield gain["runtime"], *cells

    published_figures = ("published", *(f"{one:.2f}" for one in PUBLISHED_STEPS.values()))
    yield f"Each step over an earlier one on {PUBLISHED_FOR}, beside what was published:"
    yield table(("searched on", *heads), [*lines("with"), published_figures])
    yield (
        f"The same on the published runtime by `mist` on {PUBLISHED_FOR}, where one mechanism of "
        "the machine is changed:"
    )
    yield table(("changed", *heads), [*lines("changed")])


def _missing(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The share of the full search's speed that is lost without each part of the search space, on
    this project's runtime.
    """
    whole = {row["case"]: row for row in _chapter(rows, "with", OURS)}
    without = [row for row in _chapter(rows, "without", OURS) if row["kept_s"]]
    for step in dict.fromkeys(row["step"] for row in without):
        yield {
            "without": step,
            "lost": [
                {
                    "where": where,
                    "lost": Summary.of(
                        [
                            1 - whole[row["case"]]["kept_s"] / row["kept_s"]
                            for row in without
                            if row["step"] == step and where in (row["hardware"], "both")
                        ]
                    ).mean,
                }
                for where in _places(rows)
            ],
        }
