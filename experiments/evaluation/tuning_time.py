"""Tuning time: the CPU time that every searcher takes on every search space."""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.bench.bench import Bench
from experiments.bench.cases import Case, case_of, clusters
from experiments.bench.remembered import answers
from experiments.cli.commandline import DONE, NO_ANSWER
from experiments.pages.charts import Lines
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, number, table_of
from mistlab.core.values import reject
from mistlab.job.search import Budget, Improvement, seconds_until, to_equal_quality
from mistlab.plan.named_spaces import space_of
from mistlab.plan.space import SearchSpace
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.views import FULL

SIZE, QUICK_SIZE = "22b", "2.7b"
QUICK_PLANS = 500
# How many times faster Mist's tuning was than that of each system, as published for GPT-22B on 32
# GPUs.
PUBLISHED = {"aceso": 1.97, "alpa": 9.33}
# A plan is nearly as good as the final one if its time is longer by at most this share.
NEARLY = 0.01
# The names of the searchers of plans for this project's runtime and for Mist's published runtime.
OURS, THEIRS = "mistlab", "mist"
SEARCHERS_ASKED = {OURS: ("mist", "aceso"), THEIRS: ("mist", "aceso", "mist:published")}
OFFLOADED = {"+OO": "optimizer", "+AO": "activations", "+GO": "gradients", "+WO": "weights"}


def spaces() -> dict[str, SearchSpace]:
    """The search spaces, each with one more way to save memory than the one before."""
    full = space_of("mist").offload
    space = replace(space_of("3d"), unequal_stages=True, layers_off_balance=2)
    spaces_by_name = {"3D": space}
    space = replace(space, recomputation="any")
    spaces_by_name["+CKPT"] = space
    space = replace(space, zero=(1, 2, 3))
    spaces_by_name["+ZeRO"] = space
    for name, kind in OFFLOADED.items():
        ratios = getattr(full, kind)
        space = replace(space, offload=replace(space.offload, **{kind: ratios}))
        spaces_by_name[name] = space
    return {name: replace(one, name=name) for name, one in spaces_by_name.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTimeQuestion:
    """A search to be timed: the searcher, the search space, and how many plans it may predict."""

    case: Case
    searcher: str
    step: str
    space: SearchSpace
    plans: int
    seed: int


def timed(options: argparse.Namespace) -> int:
    """Measure how long the search takes for GPT-3 22B on 32 GPUs, with one more way to save memory
    in each step.

    The steps are 3D parallelism, flexible checkpointing (+CKPT), ZeRO (+ZeRO), then offloading of
    optimizer states, activations, gradients and weights. Aceso searches the same spaces, Alpa a
    space of its own. Times are measured until the search ends, until its plan is within 1 % of the
    final one, and until it is as good as that of the search compared with it. Plans are for this
    runtime and for Mist's published one, which also gets the published search. All searchers are
    this project's implementations.
    """
    if options.plans < 1:
        reject(f"--plans {options.plans}: a search must predict plans: give at least 1")
    (cluster,) = clusters(options.hardware)
    case = case_of(cluster, "gpt3", QUICK_SIZE if options.quick else SIZE, "flash")
    plans = min(options.plans, QUICK_PLANS) if options.quick else options.plans
    steps = spaces()
    chosen = {name: steps[name] for name in ("+CKPT", "+WO")} if options.quick else steps
    asked = [
        TuningTimeQuestion(
            case=case,
            searcher=searcher,
            step=step,
            space=space.on(engine),
            plans=plans,
            seed=options.seed,
        )
        for engine, searchers in SEARCHERS_ASKED.items()
        for step, space in chosen.items()
        for searcher in searchers
    ]
    alone = (("aceso", "its own"), ("alpa", "its own"))
    asked += [
        replace(asked[0], searcher=searcher, step=step, space=space_of(searcher))
        for searcher, step in alone
    ]
    study = Study.begin("tuning_time", options)
    study.add_all(row for _, row in answers(study, searched, asked, "searches"))
    status = DONE if any(row["iteration_s"] for row in study.rows) else NO_ANSWER
    return study.end(report(study.rows, case), status)


def searched(asked: TuningTimeQuestion) -> dict[str, Any]:
    """The result row of a search. The time in it is CPU time, without the time to compile
    expressions.
    """
    bench = Bench.of(asked.case.problem())
    bench.found(asked.searcher, asked.space, budget=Budget(evaluations=1))
    searcher = StrategySearcher(
        strategy=SEARCHERS[asked.searcher], predictor=bench.seen(FULL), clock=time.process_time
    )
    budget = Budget(evaluations=asked.plans)
    result = searcher.search(asked.case.problem(), asked.space, budget, asked.seed)
    return {
        "case": asked.case.name,
        "searcher": asked.searcher,
        "space": asked.step,
        "engine": asked.space.engine,
        "status": result.status,
        "iteration_s": result.prediction.iteration_s if result.prediction else None,
        "plans": result.plan_evaluations,
        "stage_candidates": result.stage_evaluations,
        "timing": {
            "search_s": result.wall_s,
            "nearly_s": seconds_until(result.history, _nearly(result.history)),
            "history": [[one.iteration_s, one.wall_s] for one in result.history],
        },
    }


def _nearly(history: Sequence[Improvement]) -> float:
    return history[-1].iteration_s * (1 + NEARLY) if history else 0.0


def report(rows: Sequence[Row], case: Case) -> Report:
    """The report: the CPU time of all searches, and how much faster this project's search is."""
    on_ours, on_theirs = (_by_step(rows, engine) for engine in (OURS, THEIRS))
    faster = {f"aceso, {step}": _faster(on_ours, step, "aceso") for step in on_ours}
    there = {
        f"{other}, {step}": _faster(on_theirs, step, other)
        for step in on_theirs
        for other in SEARCHERS_ASKED[THEIRS][1:]
    }
    last = [*on_ours][-1]
    ours = on_ours[last]["mist"]["timing"]["search_s"]
    (alpa,) = (row["timing"]["search_s"] for row in rows if row["searcher"] == "alpa")
    over_alpa = alpa / ours
    missing_s = max(0.0, PUBLISHED["alpa"] * ours - alpa)
    known = [one for one in faster.values() if one is not None]
    return Report(
        title=f"Tuning time: {case.name} on {case.num_gpus} GPUs",
        words=[
            (
                "Seconds of one processor core until a search ends by itself or has asked about so "
                "many plans, and until its plan is within 1 % of its last one."
            ),
            _table(rows),
            (
                "How many times as fast `mist` is as `aceso` on an equal space, until both have a "
                "plan as good as the worse of their two last ones; on the published runtime, and "
                "there as the published search too:"
            ),
            table_of(
                list(on_ours),
                ("space", lambda step: step),
                ("times as fast", lambda step: number(faster[f"aceso, {step}"], ".2f")),
                *(
                    (
                        f"as {other}, published runtime",
                        lambda step, other=other: number(there[f"{other}, {step}"], ".2f"),
                    )
                    for other in SEARCHERS_ASKED[THEIRS][1:]
                ),
            ),
            (
                f"At least {min(known):.2f}x, published {PUBLISHED['aceso']}x. "
                if known
                else "No plan fits in any space. "
            )
            + f"`alpa` on its own space takes {over_alpa:.2f} times as long as `mist` with all "
            f"ratios on ({last}), published {PUBLISHED['alpa']}: it would take as long if "
            "compiling and profiling stages, for which predictions stand here, took "
            f"{missing_s:.0f} s. All of these searchers are this project's: `aceso` and `alpa` are "
            "written after their papers.",
        ],
        summary={
            "timing": {
                "faster_than_aceso": faster,
                "faster_on_published_runtime": there,
                "alpa_over_mist": over_alpa,
            }
        },
        pictures=[
            _picture(rows, "tuning_time", "search_s", "to their end"),
            _picture(rows, "tuning_time-nearly", "nearly_s", "to within 1 % of their last plan"),
        ],
    )


def _by_step(rows: Sequence[Row], engine: str) -> dict[str, dict[str, Row]]:
    """The result rows of one engine by search space and searcher, smallest space first."""
    by_step: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["engine"] == engine and row["space"] != "its own":
            by_step.setdefault(row["space"], {})[row["searcher"]] = row
    return by_step


def _faster(on_engine: Mapping[str, Mapping[str, Row]], step: str, other: str) -> float | None:
    """How many times as fast this project's search is as another one, each timed until it has found
    a plan of equal quality; None if they never do.
    """
    seconds = to_equal_quality(*(_history(on_engine[step][name]) for name in ("mist", other)))
    return None if seconds is None else seconds[1] / max(seconds[0], 1e-9)


def _history(row: Row) -> list[Improvement]:
    return [
        Improvement(iteration_s=s, wall_s=wall_s, plan_evaluations=0, stage_evaluations=0)
        for s, wall_s in row["timing"]["history"]
    ]


def _table(rows: Sequence[Row]) -> str:
    return table_of(
        rows,
        ("searcher", "{searcher}"),
        ("space", "{space}"),
        ("engine", "{engine}"),
        ("iteration s", "{iteration_s:.2f}"),
        ("to the end s", "{timing[search_s]:.2f}"),
        ("within 1 % s", "{timing[nearly_s]:.2f}"),
        ("plans", "{plans:,}"),
        ("stages", "{stage_candidates:,}"),
    )


def _picture(rows: Sequence[Row], name: str, timing: str, what: str) -> Lines:
    steps = [*_by_step(rows, OURS)]
    runtimes = {OURS: "this runtime", THEIRS: "published runtime"}
    curves = {
        f"{searcher}, {runtimes[engine]}": [
            (float(steps.index(step)), of_step[searcher]["timing"][timing])
            for step, of_step in _by_step(rows, engine).items()
            if of_step[searcher]["timing"][timing] is not None
        ]
        for engine, searchers in SEARCHERS_ASKED.items()
        for searcher in searchers
    }
    return Lines(
        name=name,
        caption=f"Seconds of searches {what}, on spaces that grow from left to right.",
        curves=curves,
        x="space",
        names=steps,
        y="seconds of one core",
        log_y=True,
    )
