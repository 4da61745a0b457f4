"""The speed of predictions: of many candidates at once, of whole plans, and of one configuration
after another with plain numbers.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from importlib import import_module
from itertools import islice
from statistics import median
from time import process_time
from typing import Any

import numpy as np

from experiments.bench.problem import problem_of
from experiments.cli.commandline import DONE, progress
from experiments.pages.charts import Bars
from experiments.pages.study import Report, Study
from experiments.pages.tables import TIMING, Row, table_of
from experiments.studies.survey import candidates_of, meshes, rows_of_mesh
from mistlab.engines.engine import SINGLE
from mistlab.graph.library import Variant
from mistlab.graph.stage_model import StageModel
from mistlab.graph.symbols import constants_of
from mistlab.job.search import Problem
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch
from searchers.savings import Chooser, chosen_plan
from simulators.symbolic import SymbolicPredictor

RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
ROUNDS, MESHES, PLANS = 5, 6, 2000
QUICK_ROUNDS, QUICK_MESHES, QUICK_PLANS = 3, 2, 200
# How many configurations per second Mist analyses, as published.
PUBLISHED_RATE = 1e5
MEMORY, COSTS, WHOLE, CONCRETE, EVERY_BLOCK = (
    "stage candidates, memory",
    "stage candidates, memory and times",
    "whole plans",
    "concrete traces of one block",
    "concrete runs of every block",
)
# A round that runs every block takes a second or two, so only two rounds are timed.
FEW_ROUNDS = 2


def speeds(options: argparse.Namespace) -> int:
    """Measure how many configurations per second are predicted, beside a trace and evaluation of a
    single one with plain numbers.

    Layer graphs are traced once with symbols, and their sums compiled; then whole columns of stage
    candidates are evaluated at a time. The alternative is to run the model's code, without its
    tensors, for every configuration: this is timed with torch, and left out if torch is not
    installed.
    """
    workload, cluster = problem_of(options)
    study = Study.begin("analysis_speed", options)
    problem = Problem(workload=workload, cluster=cluster)
    predictor = SymbolicPredictor(workload=workload, cluster=cluster)
    quick, rounds = options.quick, QUICK_ROUNDS if options.quick else ROUNDS
    progress("timing columns of candidates")
    batches = _batches(problem, QUICK_MESHES if quick else MESHES)
    model = StageModel.of(workload)
    analyses: dict[str, Callable[[StageBatch], Any]] = {
        MEMORY: model.peaks,
        COSTS: predictor.stage_costs,
    }
    for what, analyse in analyses.items():
        of_batches = [_seconds(partial(analyse, batch), rounds) for batch in batches]
        study.add(_row(what, sum(map(len, batches)), sum(of_batches)))
    progress("timing whole plans")
    number = QUICK_PLANS if quick else PLANS
    predictor.predict_many(_plans(problem, number, options.seed))
    plans = _plans(problem, number, options.seed + 1)
    study.add(_row(WHOLE, number, _seconds(lambda: predictor.predict_many(plans), 1)))
    for what, seconds in _concrete_s(workload, rounds).items():
        study.add(_row(what, 1, seconds))
    return study.end(_report(study.rows, f"{options.model} on {cluster.num_gpus} GPUs"), DONE)


def _batches(problem: Problem, number: int) -> list[StageBatch]:
    """Batches of candidates for the first stage of a pipeline: all combinations of memory savings,
    on several meshes.
    """
    layers = problem.workload.model.layers
    return [
        rows_of_mesh(
            mesh,
            layers // mesh.stages,
            candidates_of(problem.workload.model, mesh, RATIOS),
            first=True,
        )
        for mesh in islice(meshes(problem.workload, problem.cluster), number)
    ]


def _plans(problem: Problem, number: int, seed: int) -> list[Plan]:
    """Random plans of the search space ``mist``."""
    draw = np.random.default_rng(seed)
    chooser = Chooser(lambda _, count: int(draw.integers(count)))
    drawn = (chosen_plan(problem, space_of("mist"), chooser) for _ in range(2 * number))
    return [plan for plan in drawn if plan is not None][:number]


def _seconds(work: Callable[[], Any], rounds: int) -> float:
    """The CPU seconds of some work: the median of several rounds, after a first round that does not
    count.
    """
    times = []
    for _ in range(rounds + (rounds > 1)):
        began_s = process_time()
        work()
        times.append(process_time() - began_s)
    return median(times[rounds > 1 :])


def _concrete_s(workload: Workload, rounds: int) -> dict[str, float]:
    """The CPU seconds that the analysis of one configuration takes with plain numbers; empty if
    that is not possible.

    It is measured in two ways: one of the blocks is traced and its layers are summed up; or all
    blocks run.
    """
    model = workload.model
    if model.family == "custom":
        progress("left out: concrete traces: this model's code is not here: give a catalogue name")
        return {}
    try:
        families, sizes = (
            import_module("runtime.tracing.traced_families"),
            import_module("runtime.tracing.symbolic_sizes"),
        )
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed: pip install '.[runtime]'"
        progress(f"left out: concrete traces: {missing}")
        return {}
    layer = import_module("mistlab.graph.layer_types")
    variant = Variant(
        family=model.family,
        attention=workload.attention,
        precision="single" if workload.precision in SINGLE else "half",
        biases=model.biases,
        dropout=model.dropout > 0,
    )
    values = {**constants_of(workload), "b": 1, "tp": 1, "V": model.padded_vocab(1)}
    # A traced block has no adapters, so the sizes of a trace lack the rank of LoRA.
    names = [field.name for field in fields(families.Sizes)]
    numbers = families.Sizes(**{name: values[name] for name in names if name in values})

    def analyse_a_block() -> list[Any]:
        graph = families.trace_sizes(variant, numbers, sizes.SizeSpace())
        return [layer.expressions_of(one) for one in graph.layers]

    def run_every_block() -> None:
        families.run_sizes(variant, numbers, sizes.SizeSpace(), model.layers)

    progress("timing concrete traces")
    of_a_block = _seconds(analyse_a_block, rounds)
    progress("timing concrete runs")
    return {CONCRETE: of_a_block, EVERY_BLOCK: _seconds(run_every_block, FEW_ROUNDS)}


def _row(what: str, number: int, seconds: float) -> Row:
    return {
        "what": what,
        "number": number,
        TIMING: {"cpu_s": seconds, "a_second": number / seconds},
    }


def _report(rows: Sequence[Row], where: str) -> Report:
    rates = {row["what"]: row[TIMING]["a_second"] for row in rows}
    paragraphs = [
        f"{where}. CPU seconds of one process on one core.",
        table_of(
            rows,
            ("what", "{what}"),
            ("number", "{number:,}"),
            ("CPU s", "{timing[cpu_s]:.3f}"),
            (
                "a second",
                lambda row: f"{row[TIMING]['a_second']:{',.0f' if row['number'] > 1 else '.1f'}}",
            ),
        ),
    ]
    summary: dict[str, Any] = {"candidates_per_s": rates[COSTS]}
    if CONCRETE in rates:
        summary |= {
            "over_concrete": rates[COSTS] / rates[CONCRETE],
            "over_every_block": rates[COSTS] / rates[EVERY_BLOCK],
        }
        paragraphs.append(
            "Memory and times of a stage candidate take "
            f"1/{summary['over_every_block']:,.0f} of a concrete run of every block, and "
            f"1/{summary['over_concrete']:,.0f} of a concrete trace and evaluation of one block."
        )
    else:
        paragraphs.append("Concrete traces are left out, because torch is not installed.")
    return Report(
        title="How fast configurations are analysed",
        words=paragraphs,
        summary={TIMING: summary},
        pictures=[
            Bars(
                name="analysis_speed",
                caption="Analysed a second on one core, by what is analysed.",
                groups=[row["what"] for row in rows],
                series={"here": [row[TIMING]["a_second"] for row in rows]},
                y="a second",
                log_y=True,
                number=",.0f",
                marks={"published: more than": PUBLISHED_RATE},
            )
        ],
    )
