"""Weak and strong scaling with the number of GPUs: predictions of published runs, and plans found
by search.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from statistics import mean
from time import perf_counter, process_time

from experiments.bench.bench import BUDGET, answer_of
from experiments.calibration.published import PublishedRun, carried
from experiments.calibration.whole_runs import is_said_to_fit, predicted_s
from experiments.cli.commandline import DONE, as_options
from experiments.pages.charts import Lines, Picture
from experiments.pages.groups import grouped
from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.study import Report, Study
from experiments.pages.tables import TIMING, Row, gib, number, table, table_of, yes_no
from mistlab import catalog
from mistlab.core.units import TFLOP
from mistlab.cost.kernels import megatron_flop
from mistlab.cost.links import LinkTimes, all_reduce_latency
from mistlab.cost.pipeline import Terms
from mistlab.job.job import hardware_from, model_from
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import Hardware
from mistlab.plan.dimensions import num_gpus
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.space import SearchSpace
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.schedule.orders import DEFAULT_ORDER
from searchers.meshes import even_layers
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor

MOST_NODES = 1536
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, MOST_NODES)
QUICK_NODES = (1, 16, 512)
# The number of sequences in a step: for strong scaling in total, for weak scaling per GPU.
STRONG_BATCH, BATCH_A_GPU = 1536, 4
# The factors by which the network is slower than its datasheet says; the second list is for quick
# runs.
SLOWER, QUICK_SLOWER = (1, 2, 4), (1, 4)
# The search space of plans with equal stages: it is searched quickly, with a proof of the best
# plan.
SPACE = replace(space_of("+checkpointing"), name="equal stages", unequal_stages=False)
# The model and number of nodes of the largest search, whose plans may have unequal stages; a quick
# run has fewer nodes, and equal stages.
LARGE_MODEL, LARGE_NODES, QUICK_LARGE_NODES = "gpt3-175b", 1280, 32
LARGE_SPACE, QUICK_LARGE_SPACE = space_of("mist"), SPACE
# The numbers of GPUs for which the latency of an all-reduce is computed.
LATENCY_GPUS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SMALL_BYTES = 1024.0
TERA = 1e12


def scaling(options: argparse.Namespace) -> int:
    """Study how training scales from 8 to 12,288 GPUs: predictions of published weak scaling, and
    plans found by search.

    First, predictions are compared with Megatron-LM's published table of weak scaling, from 1.7
    billion to a trillion parameters. Then plans are searched for growing numbers of GPUs: the batch
    grows with them (weak scaling) or stays the same (strong scaling), also on networks that are
    slower by a factor. The page ends with a published 405-billion-parameter run, and the latency of
    all-reduces.
    """
    with as_options():
        model = model_from(options.model, Path())
        hardware = hardware_from(options.hardware, Path())
    study = Study.begin("scaling", options)
    study.add_all(weak_scaling_rows())
    nodes = QUICK_NODES if options.quick else NODES
    asked = [("weak", count, 1) for count in nodes]
    slower = QUICK_SLOWER if options.quick else SLOWER
    asked += [("strong", count, factor) for factor in slower for count in nodes]
    for chapter, count, factor in study.counted(asked, "searches"):
        workload = _workload(model, options.sequence_length, _batch(chapter, count, hardware))
        study.add(_searched(chapter, workload, _slower(hardware, count, factor), factor, options))
    study.add(_largest(hardware, options))
    study.add_all((*llama3_405b(), *latencies(hardware)))
    return study.end(_report(study.rows, options), DONE)


def _batch(chapter: str, nodes: int, hardware: Hardware) -> int:
    return BATCH_A_GPU * nodes * hardware.node.gpus if chapter == "weak" else STRONG_BATCH


def _workload(model: ModelSpec, sequence_length: int, global_batch: int) -> Workload:
    with as_options():
        return Workload(
            model=model,
            sequence_length=sequence_length,
            global_batch=global_batch,
            attention="flash",
            precision="fp16",
        )


def _slower(hardware: Hardware, nodes: int, factor: int) -> Cluster:
    """A cluster whose network is slower by a factor."""
    rate = hardware.node.inter_node_gbytes_per_s
    return Cluster(
        hardware=hardware,
        nodes=nodes,
        gpus_per_node=hardware.node.gpus,
        inter_node_gbytes_per_s=None if factor == 1 else rate / factor,
    )


def _searched(
    chapter: str,
    workload: Workload,
    cluster: Cluster,
    factor: int,
    options: argparse.Namespace,
    space: SearchSpace = SPACE,
) -> Row:
    """The best plan that a search finds on a cluster: its training rate, and the seconds that the
    search took.
    """
    predictor = SymbolicPredictor(workload=workload, cluster=cluster)
    searcher = StrategySearcher(strategy=SEARCHERS["mist"], predictor=predictor)
    began_s, began_cpu_s = perf_counter(), process_time()
    problem = Problem(workload=workload, cluster=cluster)
    result = searcher.search(problem, space, BUDGET, options.seed)
    row: Row = {
        "chapter": chapter,
        "space": space.name,
        "gpus": cluster.num_gpus,
        "slower_network": factor,
        "global_batch": workload.global_batch,
        "status": result.status,
        TIMING: {
            "search_s": perf_counter() - began_s,
            "search_cpu_s": process_time() - began_cpu_s,
        },
    }
    answer = answer_of(result)
    if answer is None:
        return {**row, "iteration_s": None}
    plan, prediction = answer
    stage = plan.stages[0]
    rate = prediction.mfu * cluster.peak_flop_per_s(workload.precision) / TERA
    return {
        **row,
        "iteration_s": prediction.iteration_s,
        "tokens_per_s_per_gpu": prediction.tokens_per_s / cluster.num_gpus,
        "share_of_peak": prediction.mfu,
        "tflop_per_s_per_gpu": rate,
        "tflop_per_s_low": rate * prediction.iteration_s / prediction.iteration_s_high,
        "tflop_per_s_high": rate * prediction.iteration_s / prediction.iteration_s_low,
        "notes": list(prediction.notes),
        "plan": f"pp {plan.num_stages} dp {stage.data_parallel} tp "
        f"{stage.tensor_parallel} micro-batch {stage.micro_batch}",
    }


def _largest(hardware: Hardware, options: argparse.Namespace) -> Row:
    """A search for more than ten thousand GPUs in a whole search space; in a quick run a smaller
    one.
    """
    nodes = QUICK_LARGE_NODES if options.quick else LARGE_NODES
    space = QUICK_LARGE_SPACE if options.quick else LARGE_SPACE
    workload = _workload(model_from(LARGE_MODEL, Path()), options.sequence_length, STRONG_BATCH)
    cluster = _slower(hardware, nodes, 1)
    return _searched("largest search", workload, cluster, 1, options, space)


def latencies(hardware: Hardware) -> Iterator[Row]:
    """The time of an all-reduce of one kilobyte on more and more GPUs: over a ring, over a tree,
    and the shorter of both.
    """
    per_node = hardware.node.gpus
    for gpus in LATENCY_GPUS:
        cluster = Cluster(
            hardware=hardware,
            nodes=max(1, gpus // per_node),
            gpus_per_node=min(gpus, per_node),
        )
        latency = all_reduce_latency(LinkTimes.of(cluster), SMALL_BYTES)
        yield {
            "chapter": "latency",
            "gpus": gpus,
            "ring_s": latency.ring_s,
            "tree_s": latency.tree_s,
            "fastest_s": latency.fastest_s,
        }


def _report(rows: Sequence[Row], options: argparse.Namespace) -> Report:
    chapters = {
        name: [row for row in rows if row["chapter"] == name]
        for name in dict.fromkeys(row["chapter"] for row in rows)
    }
    published, strong = chapters["published"], efficiencies(chapters["strong"])
    weak, largest = efficiencies(chapters["weak"]), chapters["largest search"][0]
    return Report(
        title="Scaling from 8 to 12,288 GPUs",
        words=scaling_words(chapters, weak, strong, options),
        summary={
            "weak_scaling_mean_error": mean(abs(row["error"]) for row in published),
            "falls_faster": falls_faster(strong),
            "llama3_405b_tflop_per_s_per_gpu": max(
                row["tflop_per_s_per_gpu"] for row in chapters["trained"] if row["fits"]
            ),
            TIMING: {f"largest_{key}": value for key, value in largest[TIMING].items()},
        },
        pictures=[*_pictures(published, weak, strong, chapters["latency"])],
    )


# Curves of strong scaling, one for each slowdown of the network: points of a number of GPUs and the
# training rate per GPU, relative to that on one node.
Curves = Mapping[int, Sequence[tuple[int, float]]]


def efficiencies(rows: Sequence[Row]) -> Curves:
    """For each number of GPUs, the training rate per GPU relative to that on one node."""
    curves: dict[int, list[tuple[int, float]]] = {}
    for factor in dict.fromkeys(row["slower_network"] for row in rows):
        mine = [row for row in rows if row["slower_network"] == factor and row["iteration_s"]]
        if mine:
            alone = mine[0]["tokens_per_s_per_gpu"]
            curves[factor] = [(row["gpus"], row["tokens_per_s_per_gpu"] / alone) for row in mine]
    return curves


def falls_faster(curves: Curves) -> bool:
    """Whether a slower network gives a lower training rate per GPU for every number of nodes above
    one.
    """
    at = [dict(points) for _, points in sorted(curves.items())]
    return all(
        slow[gpus] < fast[gpus]
        for fast, slow in pairwise(at)
        for gpus in sorted(fast)[1:]
        if gpus in slow
    )


def _pictures(
    published: Sequence[Row], weak: Curves, strong: Curves, latency: Sequence[Row]
) -> Iterator[Picture]:
    yield Lines(
        name="scaling-published",
        caption="Weak scaling of Megatron-LM, as published and as predicted.",
        curves={
            name: [(row["gpus"], row[key]) for row in published]
            for name, key in (
                ("published", "published_tflop_per_s_per_gpu"),
                ("predicted", "tflop_per_s_per_gpu"),
            )
        },
        x="GPUs",
        y="TFLOP/s a GPU",
        log_x=True,
    )
    yield Lines(
        name="scaling-searched",
        caption="What a GPU of searched plans does, over what it does in one node.",
        curves={
            "weak": weak.get(1, []),
            **{curve_name(factor): points for factor, points in strong.items()},
        },
        x="GPUs",
        y="share of one node's rate",
        log_x=True,
    )
    yield Lines(
        name="scaling-latency",
        caption="An all-reduce of a kilobyte over a ring and over a tree of nodes.",
        curves={
            name: [(row["gpus"], 1e6 * row[key]) for row in latency if row[key] is not None]
            for name, key in (("ring", "ring_s"), ("tree", "tree_s"))
        },
        x="GPUs",
        y="microseconds",
        log_x=True,
        log_y=True,
    )


# Predicts published runs whose plans are known: Megatron-LM's weak scaling, and Llama 3 405B.


PETA_IN_TERA = 1000
# The numbers of model chunks per stage that are tried in an interleaved pipeline.
CHUNKS = (1, 2, 4)


def weak_scaling_rows() -> Iterator[Row]:
    """The runs of Megatron-LM's weak scaling, with all columns of the published table and the
    predictions.
    """
    file = files("experiments.calibration").joinpath("published.yaml")
    text = file.read_text(encoding="utf-8")
    _, runs = carried(text, catalog.hardware("a100-80gb"))
    for name, alike in grouped(runs, lambda run: run.name).items():
        # The published table does not state micro-batch sizes, so the fastest one that fits is
        # used.
        timed = [
            (predicted_s(run, run.cluster.hardware), index)
            for index, run in enumerate(alike)
            if is_said_to_fit(run)
        ]
        seconds, chosen = min(timed)
        yield _weak_scaling_row(name, alike[chosen], seconds)


def _weak_scaling_row(name: str, run: PublishedRun, seconds: float) -> Row:
    workload, gpus = run.workload, int(num_gpus(run.stages.value).sum())
    model = workload.model
    flop = megatron_flop(
        batch=workload.global_batch,
        sequence_length=workload.sequence_length,
        layers=model.layers,
        hidden=model.hidden,
        vocab=model.vocab,
    )
    peak = run.cluster.peak_flop_per_s(workload.precision) / TFLOP
    rates = {"published_": run.iteration_s, "": seconds}
    tflop = {key: flop / (gpus * taken * TFLOP) for key, taken in rates.items()}
    return {
        "chapter": "published",
        "billion_parameters": float(name.split(maxsplit=1)[0]),
        "heads": model.heads,
        "hidden": model.hidden,
        "layers": model.layers,
        "tensor_parallel": int(run.stages.tensor_parallel[0]),
        "pipeline_parallel": len(run.stages),
        "gpus": gpus,
        "global_batch": workload.global_batch,
        "micro_batch": int(run.stages.micro_batch[0]),
        **{f"{key}tflop_per_s_per_gpu": rate for key, rate in tflop.items()},
        **{f"{key}share_of_peak": rate / peak for key, rate in tflop.items()},
        **{f"{key}pflop_per_s": rate * gpus / PETA_IN_TERA for key, rate in tflop.items()},
        # The relative error of the predicted time.
        "error": seconds / run.iteration_s - 1,
    }


def llama3_405b() -> Iterator[Row]:
    """Predictions of Llama 3 405B on 16,384 H100 with its published parallel degrees and several
    numbers of chunks per stage.
    """
    cluster = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=2048, gpus_per_node=8)
    workload = Workload(
        model=catalog.model("llama3-405b"),
        sequence_length=8192,
        global_batch=2048,
        attention="flash",
        precision="bf16",
        # The published run shards gradients that are accumulated in 32 bits; unsharded ones, as
        # here, would not fit.
        gradients="16bit",
    )
    predictor = SymbolicPredictor(workload=workload, cluster=cluster)
    stages, data, tensor = 16, 128, 8
    micro_batches = workload.global_batch // data
    for chunks in CHUNKS:
        plan = Plan(
            order=f"interleaved-{chunks}" if chunks > 1 else DEFAULT_ORDER,
            micro_batches=micro_batches,
            stages=tuple(
                StagePlan(
                    layers=layers,
                    data_parallel=data,
                    tensor_parallel=tensor,
                    sequence_parallel=1,
                    micro_batch=1,
                    zero=1,
                )
                for layers in even_layers(workload.model.layers, stages)
            ),
        )
        prediction = predictor.predict(plan)
        yield {
            "chapter": "trained",
            "gpus": cluster.num_gpus,
            "global_batch": workload.global_batch,
            "chunks": chunks,
            "iteration_s": prediction.iteration_s,
            "low_s": prediction.iteration_s_low,
            "high_s": prediction.iteration_s_high,
            "share_of_peak": prediction.mfu,
            "tflop_per_s_per_gpu": prediction.mfu * cluster.peak_flop_per_s("bf16") / TFLOP,
            "terms_s": asdict(Terms.of(plan, prediction)),
            "fits": prediction.fits,
            "peak_reserved_bytes": prediction.peak_reserved_bytes,
        }


# Tables and sentences about how training scales.


# The published training rate per GPU of Llama 3 405B on 16K GPUs.
LLAMA3_405B_TFLOP_PER_S = 400
MICROSECONDS_A_SECOND = 1e6


def scaling_words(
    chapters: Mapping[str, Sequence[Row]], weak: Curves, strong: Curves, options: argparse.Namespace
) -> list[str]:
    """The sections of the scaling study's page, one after another."""
    return [
        *_published(chapters["published"]),
        *_searched_words(chapters, weak, strong, options),
        *_largest_words(chapters["largest search"][0]),
        *_trained(chapters["trained"]),
        *_latency(chapters["latency"], options.hardware),
    ]


def _published(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Weak scaling as published"
    yield table_of(
        rows,
        ("billion", "{billion_parameters:g}"),
        ("heads", "{heads}"),
        ("hidden", "{hidden}"),
        ("layers", "{layers}"),
        ("tp", "{tensor_parallel}"),
        ("pp", "{pipeline_parallel}"),
        ("GPUs", "{gpus}"),
        ("batch", "{global_batch}"),
        ("TFLOP/s", "{published_tflop_per_s_per_gpu:.0f}"),
        ("predicted", "{tflop_per_s_per_gpu:.0f}"),
        ("of peak", "{published_share_of_peak:.0%}"),
        ("predicted", "{share_of_peak:.0%}"),
        ("PFLOP/s, by its TFLOP/s", "{published_pflop_per_s:.1f}"),
        ("predicted", "{pflop_per_s:.1f}"),
        ("micro-batch", "{micro_batch}"),
        ("error", "{error:+.1%}"),
    )
    errors = [abs(row["error"]) for row in rows]
    yield (
        f"Predicted times are off by {mean(errors):.2%} on average and {max(errors):.1%} at most. "
        "TFLOP/s are a GPU's, with recomputed arithmetic counted, as published; PFLOP/s of all "
        "GPUs are these times the GPUs. The micro-batch was not published: it is the fastest of "
        "1, 2, 4 and 8 that fits."
    )


def _searched_words(
    chapters: Mapping[str, Sequence[Row]], weak: Curves, strong: Curves, options: argparse.Namespace
) -> Iterator[str]:
    rows = [*chapters["weak"], *(r for r in chapters["strong"] if r["slower_network"] == 1)]
    yield f"## Searched plans of {options.model} on {options.hardware}"
    yield IN_A_FILE
    yield table_of(
        rows,
        ("scaling", "{chapter}"),
        ("GPUs", "{gpus:,}"),
        ("batch", "{global_batch}"),
        ("iteration s", "{iteration_s:.2f}"),
        ("TFLOP/s", lambda row: number(row.get("tflop_per_s_per_gpu"), ".0f")),
        ("90 % within", _within),
        ("of peak", lambda row: number(row.get("share_of_peak"), ".0%")),
        ("search CPU s", "{timing[search_cpu_s]:.1f}"),
        ("plan", lambda row: row.get("plan", "nothing fits")),
    )
    notes = dict.fromkeys(note for row in rows for note in row.get("notes", ()))
    yield (
        "Rates are predicted, and nobody has run these plans: the share of the peak is as sure as "
        f"the bounds say. {' '.join(f'{note[0].upper()}{note[1:]}.' for note in notes)}".rstrip()
    )
    yield "What a GPU does, over what it does in one node (drawn below):"
    yield IN_A_FILE
    gpus = list(dict.fromkeys(row["gpus"] for row in rows))
    curves = {"weak": weak.get(1, ())} | {
        curve_name(factor): points for factor, points in strong.items()
    }
    yield table(
        ("scaling", *(f"{count:,}" for count in gpus)),
        [
            (name, *(number(dict(points).get(count), ".2f") for count in gpus))
            for name, points in curves.items()
        ],
    )


def _within(row: Row) -> str:
    """The bounds of the training rate of a plan that was found by search, as text."""
    if row["iteration_s"] is None:
        return ""
    return f"{row['tflop_per_s_low']:.0f} to {row['tflop_per_s_high']:.0f}"


def curve_name(factor: int) -> str:
    """The name of a strong scaling curve, by how much slower the network is."""
    return "strong" if factor == 1 else f"strong, network {factor} times slower"


def _largest_words(row: Row) -> Iterator[str]:
    yield "## The largest search"
    yield (
        f"GPT-3 175B on {row['gpus']:,} GPUs, batch {row['global_batch']}, in space "
        f"{row['space']}: {row[TIMING]['search_s']:.0f} s of the clock and "
        f"{row[TIMING]['search_cpu_s']:.0f} s of one core, compilation included, to a plan of "
        f"{row['iteration_s']:.2f} s ({row.get('plan')})."
    )


def _trained(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Llama 3 405B"
    yield (
        f"On {rows[0]['gpus']:,} H100: tensor parallel 8 with sequence parallelism, 16 stages, "
        f"data parallel 128, ZeRO-1, sequence 8192, batch {rows[0]['global_batch']}, nothing "
        "recomputed. "
        "With several chunks a stage, 1F1B is interleaved."
    )
    yield table_of(
        [{**row, **_spent(row)} for row in rows],
        ("chunks", "{chunks}"),
        ("iteration s", "{iteration_s:.2f}"),
        ("bounds", "{low_s:.2f} to {high_s:.2f}"),
        ("TFLOP/s a GPU", "{tflop_per_s_per_gpu:.0f}"),
        ("of peak", "{share_of_peak:.0%}"),
        *((name, f"{{{name}:.0%}}") for name in ("computing", "communicating", "waiting")),
        ("fullest GiB", lambda row: gib(row["peak_reserved_bytes"], ".1f")),
        ("fits", lambda row: yes_no(row["fits"])),
    )
    yield (
        "*Computing* and *communicating* are the slowest stage's shares of the iteration; "
        "*waiting* is the rest: passages through other stages, first and last micro-batches, and "
        "the step."
    )
    best = max((row for row in rows if row["fits"]), key=lambda row: row["share_of_peak"])
    low, high = (
        best["tflop_per_s_per_gpu"] * best["iteration_s"] / best[key] for key in ("high_s", "low_s")
    )
    yield (
        f"Published: over {LLAMA3_405B_TFLOP_PER_S} TFLOP/s a GPU. Predicted at best: "
        f"{best['tflop_per_s_per_gpu']:.0f}, with bounds from {low:.0f} to {high:.0f}."
    )


def _spent(row: Row) -> dict[str, float]:
    """Which shares of an iteration the slowest stage spends on computing, on communicating, and
    idle.
    """
    computing, communicating = (
        row["terms_s"][name] / row["iteration_s"]
        for name in ("computation_s", "exposed_communication_s")
    )
    waiting = 1 - sum([computing, communicating])
    return {"computing": computing, "communicating": communicating, "waiting": waiting}


def _latency(rows: Sequence[Row], hardware: str) -> Iterator[str]:
    yield "## Latency of a ring"
    yield (
        f"An all-reduce of a kilobyte on {hardware}, in microseconds. A ring of n ranks has "
        "2 (n - 1) hops; a tree has two for each level of nodes. The library takes the faster."
    )
    yield IN_A_FILE
    yield table_of(
        rows,
        ("GPUs", "{gpus:,}"),
        ("hops of a ring", lambda row: f"{2 * (row['gpus'] - 1):,}"),
        ("ring us", lambda row: _microseconds(row["ring_s"])),
        ("tree us", lambda row: _microseconds(row["tree_s"])),
        ("fastest us", lambda row: _microseconds(row["fastest_s"])),
    )


def _microseconds(seconds: float | None) -> str:
    return number(None if seconds is None else seconds * MICROSECONDS_A_SECOND, ",.0f")
