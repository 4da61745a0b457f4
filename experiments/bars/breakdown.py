"""The speedup breakdown: bars over Megatron-LM as published, and what is lost without each part."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experiments.bars.steps import Step, left_out, steps
from experiments.cli.commandline import DONE, NO_ANSWER, as_options
from experiments.comparing.bench import Bench, Found
from experiments.comparing.cases import Case, case_of, clusters
from experiments.frame.charts import Bars
from experiments.frame.in_order import answers
from experiments.frame.numbers_in_words import number
from experiments.frame.pages import beside
from experiments.frame.study import Report, Study
from experiments.frame.tables import Row, table, table_of
from mistlab.cost.averages import Summary
from mistlab.cost.named_views import view_of
from mistlab.engines.mist import MIST
from mistlab.values.plan_words import plan_line
from mistlab.values.space import space_of

SIZES, QUICK_SIZES = ("7b", "13b", "22b"), ("7b",)
PUBLISHED, TUNED = "megatron:published", "megatron"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A case, and the view of searches that do not know about first and last micro-batches."""

    case: Case
    view: str
    seed: int


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
    # The largest first, so that no process is left alone with one of them at the end.
    asked = [Asked(case=case, view=options.view, seed=options.seed) for case in reversed(cases)]
    study = Study.begin("speedup_breakdown", options)
    found = [rows for _, rows in answers(study, searched, asked, "cases")]
    for rows in reversed(found):
        for row in rows:
            study.add(row)
    status = DONE if all(row["kept_s"] for row in study.rows) else NO_ANSWER
    return study.end(report(study.rows, options.view), status)


def searched(asked: Asked) -> list[dict[str, Any]]:
    """The rows of a case: a row a step, and a row for each step that is left out."""
    bench = Bench.of(asked.case.problem())
    baselines = {
        name: None if (one := bench.found(name, space_of(name))) is None else one.seconds
        for name in (PUBLISHED, TUNED)
    }
    rows: list[dict[str, Any]] = []
    kept: Found | None = None
    for step in steps(asked.view):
        found = _found(bench, step, asked)
        is_better = found is not None and (kept is None or found.seconds <= kept.seconds)
        kept = found if is_better else kept
        rows.append(_row(asked, step, "with", found, kept, bench, baselines))
    for step in left_out(asked.view):
        found = _found(bench, step, asked)
        rows.append(_row(asked, step, "without", found, found, bench, baselines))
    return rows


def _found(bench: Bench, step: Step, asked: Asked) -> Found | None:
    return bench.found("mist", step.space, view=step.view, seed=asked.seed)


def _row(
    asked: Asked,
    step: Step,
    chapter: str,
    found: Found | None,
    kept: Found | None,
    bench: Bench,
    baselines: Mapping[str, float | None],
) -> dict[str, Any]:
    kept_s = kept.seconds if kept else None
    played_s = bench.played_s(kept.plan) if kept else None
    return {
        "case": asked.case.name,
        **asdict(asked.case),
        "gpus": asked.case.num_gpus,
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
        beside=beside("experiments.bars", "speedup_breakdown"),
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
