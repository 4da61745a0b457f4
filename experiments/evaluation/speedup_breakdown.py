"""The speedup breakdown: what each step brings over Megatron-LM as published, and each left out."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

from experiments.bench.bench import Bench, Found
from experiments.bench.cases import Case, case_of, clusters
from experiments.bench.remembered import answers
from experiments.cli.commandline import DONE, NO_ANSWER, as_options
from experiments.pages.charts import Bars
from experiments.pages.study import Report, Study, beside
from experiments.pages.tables import Row, number, table, table_of
from mistlab.cost.views import FULL, view_of
from mistlab.engines.mistlab import MIST
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan_words import plan_line
from mistlab.plan.space import OffloadRatios, SearchSpace

# Averages of ratios, and of differences between iterations in their terms.


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The mean of some numbers, the least and the most of them."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Self:
        """The summary of at least one number."""
        return cls(mean=sum(numbers) / len(numbers), least=min(numbers), most=max(numbers))

    def mapping(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


def difference_in_parts(
    pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
) -> dict[str, float]:
    """How much longer the second of two iterations is in each of its terms, as a share of the
    first iteration, on average over pairs.

    >>> difference_in_parts([({"a_s": 3.0, "b_s": 1.0}, {"a_s": 4.0, "b_s": 1.0})])
    {'a_s': 0.25, 'b_s': 0.0}
    """
    first, _ = pairs[0]
    return {
        name: sum((other[name] - own[name]) / sum(own.values()) for own, other in pairs)
        / len(pairs)
        for name in first
    }


# The steps of the breakdown, and the searches in which one of them is left out.


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakdownStep:
    """A space to search, and the view in which it is searched."""

    name: str
    space: SearchSpace
    view: str


def steps(unaware: str) -> list[BreakdownStep]:
    """The steps, each with a component more than the one before; all but the last are searched in
    the view ``unaware``."""
    all_recomputed = replace(space_of("3d"), name="3d, all recomputed", recomputation="all")
    sharded = replace(space_of("+zero"), name="+zero, all recomputed", recomputation="all")
    return [
        BreakdownStep(name="3D parallelism", space=all_recomputed, view=unaware),
        BreakdownStep(name="+ ZeRO-2 and 3", space=sharded, view=unaware),
        BreakdownStep(
            name="+ flexible checkpointing", space=space_of("+checkpointing"), view=unaware
        ),
        BreakdownStep(name="+ offloading", space=space_of("+offload"), view=unaware),
        BreakdownStep(name="+ uneven blocks", space=space_of("mist"), view=unaware),
        BreakdownStep(name="+ imbalance-aware", space=space_of("mist"), view=FULL),
    ]


def left_out(unaware: str) -> list[BreakdownStep]:
    """The whole with one component missing."""
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


# The speedup breakdown: bars over Megatron-LM as published, and what is lost without each part.


SIZES, QUICK_SIZES = ("7b", "13b", "22b"), ("7b",)
PUBLISHED, TUNED = "megatron:published", "megatron"


def broken_down(options: argparse.Namespace) -> int:
    """What each component brings over Megatron-LM as published, one after another and each left
    out.

    GPT on 8, 16 and 32 L4 and A100. From 3D parallelism with every block recomputed, spaces get
    ZeRO-2 and 3, flexible checkpointing, offloading and uneven blocks, chosen for each stage.
    The last step is no space: the search comes to know what the first and the last micro-batch
    take beyond the others.
    """
    with as_options():
        view_of(options.view)
    places = clusters(options.hardware)[: 1 if options.quick else None]
    chosen = QUICK_SIZES if options.quick else SIZES
    cases = [case_of(place, "gpt3", size, "flash") for size in chosen for place in places]
    search = partial(searched, view=options.view, seed=options.seed)
    study = Study.begin("speedup_breakdown", options)
    # The largest first, so that no process is left alone with one of them at the end.
    found = [rows for _, rows in answers(study, search, cases[::-1], "cases")]
    study.add_all(row for rows in reversed(found) for row in rows)
    status = DONE if all(row["kept_s"] for row in study.rows) else NO_ANSWER
    return study.end(report(study.rows, options.view), status)


def searched(case: Case, *, view: str, seed: int) -> list[dict[str, Any]]:
    """The rows of a case: a row a step, and a row for each step that is left out."""
    bench = Bench.of(case.problem())
    baselines = {
        name: None if (one := bench.found(name, space_of(name))) is None else one.seconds
        for name in (PUBLISHED, TUNED)
    }
    rows: list[dict[str, Any]] = []
    kept: Found | None = None
    for step in steps(view):
        found = bench.found("mist", step.space, view=step.view, seed=seed)
        is_better = found is not None and (kept is None or found.seconds <= kept.seconds)
        kept = found if is_better else kept
        rows.append(_row(case, step, "with", found, kept, bench, baselines))
    for step in left_out(view):
        found = bench.found("mist", step.space, view=step.view, seed=seed)
        rows.append(_row(case, step, "without", found, found, bench, baselines))
    return rows


def _row(
    case: Case,
    step: BreakdownStep,
    chapter: str,
    found: Found | None,
    kept: Found | None,
    bench: Bench,
    baselines: Mapping[str, float | None],
) -> dict[str, Any]:
    kept_s = kept.seconds if kept else None
    played_s = bench.played_s(kept.plan) if kept else None
    return {
        "case": case.name,
        **asdict(case),
        "gpus": case.num_gpus,
        "chapter": chapter,
        "step": step.name,
        "space": step.space.name,
        "view": step.view,
        "seen_s": found.seen_s if found else None,
        "chosen_s": found.seconds if found else None,
        "kept_s": kept_s,
        "played_s": played_s,
        "by_published_runtime_s": bench.run_by_s(MIST, kept.plan) if kept else None,
        "over": {
            name: None if baseline is None or kept_s is None else baseline / kept_s
            for name, baseline in baselines.items()
        },
        "baselines_s": dict(baselines),
        "terms_s": asdict(kept.terms) if kept else None,
        "plan": plan_line(kept.plan) if kept else None,
        "timing": {"search_s": found.result.wall_s if found else None},
    }


def report(rows: Sequence[Row], view: str) -> Report:
    """The bars, and what is lost without each part."""
    bars = [*_bars([row for row in rows if row["chapter"] == "with"])]
    missing = [*_missing(rows)]
    return Report(
        title="What each component brings",
        words=[
            (
                f"Speedups over Megatron-LM as published, on average over cases. Until the last "
                f"step searches see the view `{view}`; every winner is scored by the whole "
                "predictor, and a step whose search was misled keeps the plan of the step before. "
                "*Chosen* is what the search alone would have taken."
            ),
            _bars_table(bars),
            "Each case by itself, over Megatron-LM as published:",
            _cases_table(rows),
            "The whole without one component, as a share of the whole's speed that is lost:",
            table(
                ("without", *_places(rows)),
                [
                    (one["without"], *(f"{place['lost']:.1%}" for place in one["lost"]))
                    for one in missing
                ],
            ),
        ],
        summary={"bars": bars, "without": missing},
        pictures=[
            Bars(
                name="speedup_breakdown",
                caption="Speedup over Megatron-LM as published, on average over 8 to 32 GPUs.",
                groups=list(dict.fromkeys(bar["step"] for bar in bars)),
                series={
                    where: [bar["mean"] for bar in bars if bar["where"] == where]
                    for where in dict.fromkeys(bar["where"] for bar in bars)
                },
                y="over Megatron-LM as published",
                number=".2f",
                marks={"Megatron-LM as published": 1.0},
            )
        ],
        beside=beside("experiments.evaluation", "speedup_breakdown"),
    )


def _places(rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(row["hardware"] for row in rows))
    return [*names, "both"] if len(names) > 1 else names


def _bars(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for where in _places(rows):
        for step in dict.fromkeys(row["step"] for row in rows):
            some = [
                row
                for row in rows
                if row["step"] == step and where in (row["hardware"], "both") and row["kept_s"]
            ]
            of_case = [(row["baselines_s"][PUBLISHED], row) for row in some]
            yield {
                "where": where,
                "step": step,
                "cases": len(some),
                **Summary.of([row["over"][PUBLISHED] for row in some]).mapping(),
                "over_tuned": Summary.of([row["over"][TUNED] for row in some]).mean,
                "chosen": _mean(of_case, "chosen_s"),
                "played": _mean(of_case, "played_s"),
                "by_published_runtime": _mean(of_case, "by_published_runtime_s"),
            }


def _mean(of_case: Sequence[tuple[float, Row]], name: str) -> float:
    return Summary.of([base / row[name] for base, row in of_case if row[name]]).mean


def _bars_table(bars: Sequence[Mapping[str, Any]]) -> str:
    return table_of(
        bars,
        ("where", "{where}"),
        ("step", "{step}"),
        ("over as published", "{mean:.3f}"),
        ("least", "{least:.3f}"),
        ("most", "{most:.3f}"),
        ("over tuned", "{over_tuned:.3f}"),
        ("chosen", "{chosen:.3f}"),
        ("played", "{played:.3f}"),
        ("by published runtime", "{by_published_runtime:.3f}"),
    )


def _cases_table(rows: Sequence[Row]) -> str:
    some = [row for row in rows if row["chapter"] == "with"]
    cases, named = ([*dict.fromkeys(row[key] for row in some)] for key in ("case", "step"))
    over = {(row["case"], row["step"]): row["over"][PUBLISHED] for row in some}
    return table(
        ("case", *named),
        [(case, *(number(over[case, step], ".3f") for step in named)) for case in cases],
    )


def _missing(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The share of the whole's speed that is lost without each component."""
    whole = {row["case"]: row for row in rows if row["chapter"] == "with"}
    without = [row for row in rows if row["chapter"] == "without" and row["kept_s"]]
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
