"""The command ``sensitivity``: how the best plan and its speed change if one figure of the problem
changes.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from time import perf_counter

from experiments.bench.bench import Bench
from experiments.bench.problem import problem_of
from experiments.bench.remembered import answers
from experiments.cli.commandline import DONE, as_options
from experiments.pages.charts import Bars, Picture
from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.study import Report, Study
from experiments.pages.tables import TIMING, Row, number, table, table_of
from mistlab.core.units import GIB_BYTES
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.machine.slowdowns import NO_INTERFERENCE
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan
from mistlab.plan.space import OffloadRatios, SearchSpace
from mistlab.plan.workload import Workload

BATCHES = (64, 128, 256, 512, 1024, 2048)
DEPTHS = (48, 64, 80, 96)
SEQUENCES = (1024, 2048, 4096, 8192)
# By which factors figures of the machine are increased: its rates, and its memory.
FASTER, LARGER = (4.0,), (1.5, 2.0)
SPACE = space_of("mist")
# The search space of a quick run: stages are uniform, and offload all or none of the optimizer
# states, and none, half or all of activations. These are the states that the best plans of the
# defaults offload.
QUICK_SPACE = replace(
    space_of("+offload"),
    name="+offload, equal stages, halves",
    unequal_stages=False,
    offload=OffloadRatios(optimizer=(0.0, 1.0), activations=(0.0, 0.5, 1.0)),
)
# The searchers of the baselines: the grid of a user who tunes Megatron-LM, and the grid of one who
# recomputes every block, as published.
BASELINES = {"tuned": "megatron", "published": "megatron:published"}
OVER = {f"over_{key}": f"over {key}" for key in BASELINES}
BASELINE_WORDS = (
    "Speedups are over Megatron-LM's grid as a user tunes it, and as published, with every block "
    "recomputed."
)
# Changes that make the machine better; none of them may make the best plan slower.
MACHINE = ("links between nodes", "links in a node", "memory", "interference")
UNCHANGED = "as it is"
# A search without a proof may find a plan that is slower than the best one by about this share.
MISSED = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedProblem:
    """A problem in which one figure has been changed."""

    aspect: str
    value: str
    problem: Problem


def sensitivity(options: argparse.Namespace) -> int:
    """Show how the best plan changes with one figure of the problem: batch, depth, sequence length,
    links, memory or interference.

    One figure of a problem is changed at a time, and the best plan is searched again: for this
    package's engine, and in Megatron-LM's grid. The changes of the best plan, and of its speedup
    over the grid, show what a result depends on.
    """
    workload, cluster = problem_of(options)
    study = Study.begin("sensitivity", options)
    base = Problem(workload=workload, cluster=cluster)
    space = QUICK_SPACE if options.quick else SPACE
    every = list(cases(base))
    if options.quick:
        every = [*_ends(every)]
    problems = [*dict.fromkeys(case.problem for case in every)]
    search = partial(_searched, space=space, seed=options.seed)
    # Parallel processes are used only if the searches are long: a process needs as long to start as
    # a few quick searches take.
    answered = answers(study, search, problems, "problems", side_by_side=not options.quick)
    known: dict[Problem, Row] = {}
    for case in every:
        if case.problem not in known:
            known.update([next(answered)])
        study.add({"aspect": case.aspect, "value": case.value, **known[case.problem]})
    where = f"{options.model} on {cluster.nodes} x {cluster.gpus_per_node} {options.hardware}"
    return study.end(_report(study.rows, f"{where}, space {space.name}"), DONE)


def cases(base: Problem) -> Iterator[ChangedProblem]:
    """All problems: the original one with one figure changed, figure after figure."""
    work, cluster = base.workload, base.cluster
    node = cluster.hardware.node
    for batch in BATCHES:
        yield from _case(base, "batch", batch, lambda n: replace(work, global_batch=n))
    for depth in DEPTHS:
        yield from _case(
            base,
            "blocks",
            depth,
            lambda n: replace(work, model=replace(work.model, name="", layers=n)),
        )
    for sequence in SEQUENCES:
        yield from _case(base, "sequence", sequence, lambda n: replace(work, sequence_length=n))
    better: Mapping[str, Mapping[float, Cluster]] = {
        "links between nodes": {
            factor: replace(cluster, inter_node_gbytes_per_s=factor * node.inter_node_gbytes_per_s)
            for factor in FASTER
        },
        "links in a node": {
            factor: replace(cluster, intra_node_gbytes_per_s=factor * node.intra_node_gbytes_per_s)
            for factor in FASTER
        },
        "memory": {
            factor: replace(cluster, memory_gib=factor * cluster.whole_memory_bytes / GIB_BYTES)
            for factor in LARGER
        },
    }
    for aspect, clusters in better.items():
        yield ChangedProblem(aspect=aspect, value=UNCHANGED, problem=base)
        for factor, changed in clusters.items():
            problem = replace(base, cluster=changed)
            yield ChangedProblem(aspect=aspect, value=f"{factor:g} times", problem=problem)
    yield ChangedProblem(aspect="interference", value=UNCHANGED, problem=base)
    calm = replace(cluster.hardware, interference=NO_INTERFERENCE)
    problem = replace(base, cluster=replace(cluster, hardware=calm))
    yield ChangedProblem(aspect="interference", value="off", problem=problem)


def _case(
    base: Problem, aspect: str, number: int, changed: Callable[[int], Workload]
) -> Iterator[ChangedProblem]:
    with as_options():
        problem = replace(base, workload=changed(number))
    yield ChangedProblem(aspect=aspect, value=str(number), problem=problem)


def _ends(every: Sequence[ChangedProblem]) -> Iterator[ChangedProblem]:
    """For each figure, the problems with its first and its last value."""
    for aspect in dict.fromkeys(case.aspect for case in every):
        first, *_, last = (case for case in every if case.aspect == aspect)
        yield from (first, last)


def _searched(problem: Problem, space: SearchSpace, seed: int) -> Row:
    """The best plans of a problem: that for this package's engine, and those of Megatron-LM's
    grids.
    """
    began_s = perf_counter()
    bench = Bench.of(problem)
    ours = bench.found("mist", space, view=None, seed=seed)
    ours_s = ours.seen_s if ours else None
    grids_s = {
        key: grid.seen_s if grid else None
        for key, name in BASELINES.items()
        for grid in [bench.found(name, space_of(name), view=None, seed=seed)]
    }
    best = ours.prediction if ours else None
    return {
        "iteration_s": ours_s,
        "tokens_per_s_per_gpu": best and best.tokens_per_s / problem.cluster.num_gpus,
        "share_of_peak": best and best.mfu,
        **{f"{key}_s": seconds for key, seconds in grids_s.items()},
        **{
            f"over_{key}": None if ours_s is None or seconds is None else seconds / ours_s
            for key, seconds in grids_s.items()
        },
        "plan": "nothing fits" if ours is None else _plan_text(ours.plan),
        TIMING: {"s": perf_counter() - began_s},
    }


def _plan_text(plan: Plan) -> str:
    """A plan in a few words: its parallel degrees, and the range of its memory savings."""
    stage = plan.stages[0]
    text = (
        f"pp {plan.num_stages} dp {stage.data_parallel} tp {stage.tensor_parallel} micro-batch "
        f"{stage.micro_batch} x {plan.micro_batches}"
    )
    levels = sorted({one.zero for one in plan.stages})
    again = [one.checkpointed_layers for one in plan.stages]
    kinds = ("weights", "gradients", "optimizer", "activations")
    offloaded = [kind for kind in kinds if any(getattr(one.offload, kind) for one in plan.stages)]
    return (
        f"{text}, ZeRO-{'/'.join(map(str, levels))}, {_blocks(sum(again))} recomputed, offloads "
        f"{', '.join(offloaded) or 'nothing'}"
    )


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count or 'no'} blocks"


def _report(rows: Sequence[Row], where: str) -> Report:
    paragraphs = [f"{where}. {BASELINE_WORDS}", _overview(rows)]
    paragraphs += ["Every value, with its plan:", IN_A_FILE, _table(rows)]
    slower = worse(rows)
    sentence = "No plan gets slower when the machine gets better."
    if slower:
        sentence = f"Slower on a better machine: {', '.join(slower)}."
    return Report(
        title="Sensitivity: what a result depends on",
        words=[*paragraphs, sentence],
        summary={"slower_on_a_better_machine": slower},
        pictures=[*_pictures(rows)],
    )


def _overview(rows: Sequence[Row]) -> str:
    """For each figure, from its first to its last value: the training rate of the best plan, and
    its speedup over Megatron-LM's grid.
    """
    lines = []
    for aspect in dict.fromkeys(row["aspect"] for row in rows):
        first, *_, last = (row for row in rows if row["aspect"] == aspect)
        lines.append(
            (
                aspect,
                f"{first['value']} to {last['value']}",
                " to ".join(number(row["tokens_per_s_per_gpu"], ",.0f") for row in (first, last)),
                *(
                    " to ".join(number(row[f"over_{key}"], ".2f", "x") for row in (first, last))
                    for key in BASELINES
                ),
            )
        )
    return table(("changed", "from, to", "tokens/s a GPU", *OVER.values()), lines)


def worse(rows: Sequence[Row]) -> list[str]:
    """The changes that make the machine better but the best plan slower, by more than a search may
    miss.
    """
    return [
        f"{aspect} {more['value']}"
        for aspect in MACHINE
        for less, more in pairwise([row for row in rows if row["aspect"] == aspect])
        if less["iteration_s"] is not None
        and (more["iteration_s"] or float("inf")) > less["iteration_s"] * (1 + MISSED)
    ]


def _table(rows: Sequence[Row]) -> str:
    return table_of(
        rows,
        ("changed", "{aspect}"),
        ("value", "{value}"),
        ("iteration s", "{iteration_s:.2f}"),
        ("tokens/s a GPU", "{tokens_per_s_per_gpu:,.0f}"),
        ("of peak", "{share_of_peak:.1%}"),
        *((OVER[key], lambda row, key=key: number(row[key], ".2f", "x")) for key in OVER),
        ("plan", lambda row: row["plan"]),
    )


def _pictures(rows: Sequence[Row]) -> Iterator[Picture]:
    groups = [f"{row['aspect']} {row['value']}" for row in rows]
    yield Bars(
        name="sensitivity-rate",
        caption="Tokens a second and GPU of the best plan, one number changed at a time.",
        groups=groups,
        series={"best plan": [row["tokens_per_s_per_gpu"] for row in rows]},
        y="tokens a second and GPU",
    )
    yield Bars(
        name="sensitivity-speedup",
        caption="The best plan over the best of Megatron-LM's grids, one number changed at a time.",
        groups=groups,
        series={name: [row[key] for row in rows] for key, name in OVER.items()},
        y="speedup",
        marks={"equal": 1.0},
    )
