"""The example that motivates Mist: two plans compared side by side, and drawn on one time axis."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.bench.bench import TERM_WORDS, Bench
from experiments.cli.commandline import DONE, as_options
from experiments.pages.charts import Drawn
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, table
from experiments.prediction.lanes import lanes, legend, name_lanes
from mistlab import catalog
from mistlab.cost.pipeline import Terms
from mistlab.engines.mistlab import MIST
from mistlab.job.job import hardware_from
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.plan_words import plan_line
from mistlab.plan.workload import Workload
from mistlab.schedule.slots import Kind
from simulators.events import Simulation

# Draws several iterations on one time axis, each below the one before.


def timelines(played: Mapping[str, Simulation]) -> Figure:
    """Draw every stage of each iteration as four rows, one for each stream; every iteration is
    labelled with its name and its length.
    """
    rows = [
        (name, played_run, stage)
        for name, played_run in played.items()
        for stage in sorted({task.action.stage for task in played_run.tasks()})
    ]
    longest_s = max(one.iteration_s for one in played.values())
    figure = Figure(figsize=(12, 1.2 + 1.2 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, sharex="col", squeeze=False)
    seen: dict[Kind, str] = {}
    for axes, (name, played_run, stage) in zip(panels[:, 0], rows, strict=True):
        tasks = [task for task in played_run.tasks() if task.action.stage == stage]
        lanes(axes, tasks, (0.0, longest_s), seen)
        name_lanes(axes, stage)
        if stage == 0:
            axes.set_title(f"{name}: {played_run.iteration_s:.3f} s", loc="left", fontsize="small")
        axes.axvline(played_run.iteration_s, color="black", linewidth=0.8, linestyle=":")
    panels[-1, 0].set_xlabel("seconds")
    legend(figure, seen, columns=8)
    return figure


# Compares the two plans of Mist's motivating example, and finds the best plan of each search space.


SPACES = ("3d", "+zero", "+checkpointing", "+offload", "mist")
QUICK_SPACES = ("3d", "+zero", "+checkpointing")
# The search space whose best plan should be the second plan of the example.
FINDING = "+checkpointing"
_HALF = StagePlan(
    layers=16, data_parallel=2, tensor_parallel=1, micro_batch=1, zero=1, checkpointed_layers=16
)
_WHOLE = StagePlan(
    layers=32, data_parallel=4, tensor_parallel=1, micro_batch=2, zero=2, checkpointed_layers=28
)
PLANS: Mapping[str, Plan] = {
    "two stages, all recomputed": Plan(micro_batches=4, stages=(_HALF, _HALF)),
    "ZeRO-2, 28 of 32 recomputed": Plan(micro_batches=1, stages=(_WHOLE,)),
}


def motivated(options: argparse.Namespace) -> int:
    """Compare the two plans that motivate Mist: a pipeline with full recomputation, and ZeRO-2 with
    28 of 32 blocks recomputed.

    The model is GPT-3 2.7B on four L4, with sequence length 4096 and batch size 8. Both plans are
    predicted, played by the event simulator and drawn one below the other. Then each search space
    is searched in turn, to see whether a search finds the second plan.
    """
    with as_options():
        hardware = hardware_from(options.hardware, Path())
    study = Study.begin("motivation", options)
    problem = Problem(
        workload=Workload(
            model=catalog.model("gpt3-2.7b"),
            sequence_length=4096,
            global_batch=8,
            attention="flash",
            precision="fp16",
        ),
        cluster=Cluster(hardware=hardware, nodes=1, gpus_per_node=4),
    )
    bench = Bench.of(problem)
    for name, plan in PLANS.items():
        study.add({"what": name, **_figures(bench, plan)})
    for name in study.counted(QUICK_SPACES if options.quick else SPACES, "spaces"):
        best = bench.found("mist", space_of(name), seed=options.seed)
        study.add({"what": f"space {name}", **({} if best is None else _figures(bench, best.plan))})

    def draw() -> Any:
        return timelines({name: bench.simulator.simulate(plan) for name, plan in PLANS.items()})

    picture = Drawn(
        name="motivation",
        caption="One iteration of each plan, as played: four streams of each stage.",
        draw=draw,
    )
    report = _report(study.rows, picture)
    return study.end(report, DONE)


def _figures(bench: Bench, plan: Plan) -> dict[str, Any]:
    prediction = bench.predictor.predict(plan)
    return {
        "plan": plan_line(plan),
        "iteration_s": prediction.iteration_s,
        "fits": prediction.fits,
        "played_s": bench.played_s(plan),
        "by_published_runtime_s": bench.run_by_s(MIST, plan),
        "terms_s": asdict(Terms.of(plan, prediction)),
    }


def _report(rows: Sequence[Row], picture: Drawn) -> Report:
    first, second, *_ = rows
    kinds = ("iteration_s", "played_s", "by_published_runtime_s")
    ratios = {kind: first[kind] / second[kind] for kind in kinds}
    (finding,) = (row for row in rows if row["what"] == f"space {FINDING}")
    finds = finding.get("plan") == second["plan"]
    return Report(
        title="The motivating case",
        words=[
            _plans_table(rows, first),
            (
                f"The second plan is {ratios['iteration_s']:.3f}x as fast as the first, "
                f"{ratios['played_s']:.3f}x as played, and {ratios['by_published_runtime_s']:.3f}x "
                "if the published runtime ran both. The best plan of space "
                f"{FINDING} is {'the second plan' if finds else 'ANOTHER plan'}."
            ),
            "Where the first plan's time goes beyond the second's, in seconds:",
            table(
                TERM_WORDS.values(),  # type: ignore[arg-type]
                [
                    [
                        f"{first['terms_s'][name] - second['terms_s'][name]:+.3f}"
                        for name in TERM_WORDS
                    ]
                ],
            ),
        ],
        summary={"speedup": ratios, "finds_the_second": finds},
        pictures=[picture],
    )


def _plans_table(rows: Sequence[Row], first: Row) -> str:
    def lines() -> Iterator[Sequence[object]]:
        for row in rows:
            if "plan" not in row:
                yield (row["what"], "nothing fits", *[""] * 4)
                continue
            yield (
                row["what"],
                row["plan"],
                *(f"{row[k]:.3f}" for k in ("iteration_s", "played_s", "by_published_runtime_s")),
                f"{first['iteration_s'] / row['iteration_s']:.3f}",
            )

    head = ("what", "plan", "predicted s", "played s", "by published runtime s", "over the first")
    return table(head, lines())
