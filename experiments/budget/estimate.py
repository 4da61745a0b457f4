"""Estimates of how long a training takes and what it costs, by a formula and by predictions."""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any

from experiments.bench.bench import Bench
from experiments.bench.problem import (
    check_beside_plan,
    load_equal,
    model_named,
    problem_of,
    untimed_words,
)
from experiments.bench.search_options import space_called
from experiments.budget.bill_units import UNITS, Unit, units_of
from experiments.budget.rented import rented, space_name, space_searched
from experiments.budget.trained_tokens import check_no_tokens, length_words, tokens_of
from experiments.cli.command import experiment
from experiments.cli.commandline import DONE, NO_ANSWER, PROBLEM, as_options, progress
from experiments.cli.live import Live
from experiments.pages.charts import Bars
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, number, table, table_of
from mistlab import catalog
from mistlab.core.files import parse_yaml
from mistlab.core.values import from_mapping, one_of, reject
from mistlab.economy.bill import (
    OPERATIONS_FROZEN,
    OPERATIONS_ONCE,
    OPERATIONS_RECOMPUTED,
    Prices,
    batch_of,
    bill_of,
    gpu_hours_of,
    model_parameters,
    operations_of,
    steps_of,
    training_s,
    utilisation_of,
)
from mistlab.engines.engine import ENGINES
from mistlab.job.prediction import Prediction
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan
from mistlab.plan.plan_words import plan_words
from mistlab.plan.space import SearchSpace
from mistlab.plan.workload import Workload
from searchers.methods.rule import ENGINE_OF_ADAPTERS, plan_by_rule

DAY_S = 86_400.0
# The budget of a search counts predicted plans rather than seconds, so that the same question
# always gives the same plan.
BUDGET = Budget(evaluations=100_000)
# The model of the default question, for which the page also lists published training runs.
GPT = "gpt3-175b"
LLAMA_SEQUENCE = 2048
# The tokens in a batch, for models whose publication does not state the batch size.
BATCH_TOKENS = 2.0**22
# The options that may be given together with a plan file; all others are determined by the plan, or
# belong to a table of prices.
BESIDE_A_PLAN = (
    *("plan", "tokens", "samples", "epochs", "utilisation", "goodput"),
    *("usd_per_gpu_hour", "watts", "overhead", "kg_per_kwh", "by", "under", "starting"),
    *experiment("estimate"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A training to estimate: the problem (workload and cluster), the space that is searched, the
    number of tokens, and the prices per hour.
    """

    problem: Problem
    space: SearchSpace
    tokens: float
    parameters: int
    prices: Prices
    utilisation: float
    goodput: float

    def formula(self) -> Row:
        """The days and the cost of a training by the formula 8TP/(NFU), for T tokens, P parameters,
        N GPUs of peak rate F and a utilisation U; if weights are frozen, 6TP/(NFU).
        """
        return self._row("formula", training_s(**self._sizes, utilisation=self.utilisation))

    def predicted(self, way: str, answer: tuple[Plan, Prediction] | None) -> Row:
        """The days and the cost of a training, from the predicted iteration time of its plan; if
        there is no plan, the days are missing.
        """
        if answer is None or not answer[1].fits:
            none = {"way": way, "days": None, "plan": answer and plan_words(answer[0])}
            return {"run": self.problem.workload.model.name, **none}
        plan, prediction = answer
        steps = steps_of(self.tokens, self.problem.workload.tokens)
        work = steps / self.goodput
        row = self._row(way, work * prediction.iteration_s)
        return {
            **row,
            "utilisation": row["utilisation"] * self._done(plan) / row["operations"],
            "days_low": work * prediction.iteration_s_low / DAY_S,
            "days_high": work * prediction.iteration_s_high / DAY_S,
            "iteration_s": prediction.iteration_s,
            "steps": steps,
            "mfu": prediction.mfu,
            "plan": plan_words(plan),
        }

    @property
    def _sizes(self) -> dict[str, Any]:
        """The numbers that the formula needs: operations, parameters P, tokens T, GPUs N, and the
        rate F of a GPU.
        """
        cluster, work = self.problem.cluster, self.problem.workload
        peak = cluster.peak_flop_per_s(work.precision)
        sizes = {"tokens": self.tokens, "parameters": self.parameters, "gpus": cluster.num_gpus}
        return {**sizes, "peak_flop_per_s": peak, "operations": operations_of(work)}

    def _done(self, plan: Plan) -> float:
        """The operations per parameter and token that a plan does: those of the formula, less the
        second forward pass of GEMMs that the plan does not recompute.
        """
        again = OPERATIONS_RECOMPUTED - OPERATIONS_ONCE
        return operations_of(self.problem.workload) - again * (1 - plan.recomputed_share)

    def _row(self, way: str, seconds: float) -> Row:
        cluster = self.problem.cluster
        gpus = cluster.num_gpus
        return {
            "run": self.problem.workload.model.name,
            "way": way,
            "tokens": self.tokens,
            "parameters": self.parameters,
            "operations": self._sizes["operations"],
            "gpus": gpus,
            "hardware": cluster.hardware.name,
            "days": seconds / DAY_S,
            **asdict(bill_of(gpu_hours_of(gpus, seconds), self.prices)),
            "utilisation": utilisation_of(**self._sizes, seconds=seconds),
        }


def estimate(options: argparse.Namespace, line: Sequence[str]) -> int:
    """Estimate what a training costs: days, GPU hours, money, energy and carbon, by formula and by
    prediction.

    The formula is 8TP/(NFU): T tokens, P parameters, N GPUs with a peak rate of F, of which they
    sustain the share U. Beside it stand predictions for three plans: the plan by the rule of
    Megatron-LM's authors (every block recomputed; where weights are frozen, that of Hugging Face's
    programs, which shard all weights), the plan that mist finds in --space, or the plan of --plan.
    --tokens is the number of tokens, "published" for as many as the model was trained with, or
    "chinchilla" for 20 a parameter; --samples and --epochs give those of a data set. Without
    --nodes and --attention, the training runs on one node with flash attention; gpt3-175b runs on
    128 nodes with math attention, as published. Prices of power and carbon intensities are options.
    A second table has published training runs. With --prices, a table of kinds of GPUs with its
    date and source, the command instead shows the hours and dollars on each kind of GPU, and which
    of them to rent.
    """
    if options.gpu_hours is not None:
        return _billed(options)
    if options.prices is not None:
        return _rented(options)
    if options.plan is not None:
        check_beside_plan(line, BESIDE_A_PLAN, f"--plan {options.plan}")
    for name in ("by", "under", "starting"):
        if (value := getattr(options, name)) is not None:
            reject(
                f"--{name} {value}: has an effect only with a table of prices: give --prices "
                f"PRICES.yaml too, or leave --{name} out"
            )
    question, plan = _question(options)
    study = Study.begin("estimate", options)
    study.add_all(_rows(question, plan, quick=options.quick))
    is_answered = any("iteration_s" in row for row in study.rows)
    if (options.model, plan) == (GPT, None):
        if not options.quick:
            study.add_all(_rows(_llama(question), None, quick=False))
        study.add_all(known_rows())
    length = length_words(options, question.problem.workload, question.tokens)
    is_searched = any(row["way"] == "mist" and row["days"] is not None for row in study.rows)
    engine, work = ENGINES[question.space.engine], question.problem.workload
    untimed = untimed_words(engine, work) if is_searched else ""
    report = report_of(study, question.prices, length, untimed)
    return study.end(report, DONE if is_answered else NO_ANSWER)


def _rented(options: argparse.Namespace) -> int:
    """Estimate the training on each kind of GPU in a table of prices; returns the exit status."""
    if options.plan is not None:
        reject(
            f"--plan {options.plan}: a plan file fixes the GPUs, but --prices {options.prices} "
            "compares kinds of GPUs: leave out --plan or --prices"
        )
    if options.nodes is not None:
        reject(
            f"--nodes {options.nodes}: the table of --prices {options.prices} has the kinds and "
            "numbers of GPUs: leave out --nodes or --prices"
        )
    progress(f"kinds and numbers of GPUs are those of {options.prices}")
    _check_shares(options)
    problem = _problem(options)
    tokens = tokens_of(options, problem.workload, model_parameters(problem.workload))
    return rented(options, tokens, length_words(options, problem.workload, tokens))


def _llama(question: Question) -> Question:
    """The estimate for LLaMA 65B as its authors trained it, at the prices that the user gave."""
    model = catalog.model("llama-65b")
    assert model.trained is not None
    tokens, batch_tokens = model.trained.tokens, model.trained.batch_tokens
    assert tokens is not None
    assert batch_tokens is not None
    batch = batch_of(batch_tokens, LLAMA_SEQUENCE)
    work = Workload(
        model=model,
        sequence_length=LLAMA_SEQUENCE,
        global_batch=batch,
        # LLaMA's authors trained with an attention kernel that does not store attention
        # probabilities.
        attention="flash",
        precision="fp16",
    )
    cluster = Cluster(hardware=catalog.hardware("a100-80gb"), nodes=256, gpus_per_node=8)
    return replace(
        question,
        problem=Problem(workload=work, cluster=cluster),
        tokens=tokens,
        parameters=model_parameters(work),
    )


def _rows(question: Question, plan: Plan | None, *, quick: bool) -> Iterator[Row]:
    yield question.formula()
    name, gpus = question.problem.workload.model.name, question.problem.cluster.num_gpus
    progress(f"predicting {name} on {gpus:,} {'GPU' if gpus == 1 else 'GPUs'}")
    bench = Bench.of(question.problem)
    if plan is not None:
        yield question.predicted("plan", (plan, bench.predictor.predict(plan)))
        return
    with as_options():
        ruled = plan_by_rule(question.problem, bench.predictor)
    yield question.predicted("rule", ruled)
    if not quick:
        with as_options():
            entry = bench.search("mist", question.space, BUDGET, 0, Live(searcher="mist"))
        yield question.predicted("mist", entry.answer)


def _question(options: argparse.Namespace) -> tuple[Question, Plan | None]:
    """The training that the options describe, and the plan that they give, if any."""
    plan = None
    if options.plan is not None:
        job = load_equal(options.plan)
        problem, plan = Problem(workload=job.workload, cluster=job.cluster), job.plan
    else:
        problem = _problem(options)
    space = space_searched(options, problem.workload)
    if plan is None:
        _check_precision(problem.workload, space)
    _check_shares(options)
    parameters = model_parameters(problem.workload)
    question = Question(
        problem=problem,
        space=space,
        tokens=tokens_of(options, problem.workload, parameters),
        parameters=parameters,
        prices=_prices(options, problem.cluster),
        utilisation=options.utilisation,
        goodput=options.goodput,
    )
    return question, plan


def _check_precision(work: Workload, space: SearchSpace) -> None:
    """Refuse a precision that the engines of the predicted plans do not train in."""
    ruled = "megatron" if work.train == "all" else ENGINE_OF_ADAPTERS
    engines = [*dict.fromkeys((ruled, *space.engines))]
    rows = [ENGINES[name].memory for name in engines]
    known = [name for name in rows[0] if all(name in row for row in rows)]
    if work.precision not in known:
        noun = "engine" if len(engines) == 1 else "engines"
        reject(
            f"--precision {work.precision}: {noun} {' and '.join(engines)}, whose plans are "
            f"predicted, do not train in it: give {one_of(known)}, or a plan of another engine "
            "(--plan PLAN.yaml)"
        )


def _check_shares(options: argparse.Namespace) -> None:
    for name in ("utilisation", "goodput"):
        value = getattr(options, name)
        if not 0 < value <= 1:
            reject(f"--{name}: {value} is not a share: give a number above 0 and up to 1, as 0.4")


def _problem(options: argparse.Namespace) -> Problem:
    """The workload and cluster of the training; by default, the batch size is the one with which
    the model was published, or that of other commands for adapters or samples, at least one
    sequence for each GPU.
    """
    with as_options():
        trained = model_named(options.model, options.base).trained
    tokens = BATCH_TOKENS if trained is None else trained.batch_tokens or BATCH_TOKENS
    is_tuned = options.train != "all" or options.samples is not None
    if options.global_batch is None and options.sequence_length > 0:
        options.global_batch = batch_of(tokens, options.sequence_length)
        if is_tuned:
            options.global_batch = max(
                PROBLEM["global_batch"], (options.nodes or 1) * options.gpus_per_node
            )
    _set_defaults(options)
    named = options.space is not None or options.train != "all"
    engines = space_called(space_name(options), None).engines if named else ()
    workload, cluster = problem_of(options, engines=engines)
    for remark in workload.remarks:
        progress(f"note: {remark}")
    return Problem(workload=workload, cluster=cluster)


def _set_defaults(options: argparse.Namespace) -> None:
    """Set the nodes and the attention kernel if they were not given: 128 nodes and math attention
    for GPT-3 175B, as published; otherwise one node and fused attention.
    """
    nodes, attention = (128, "math") if options.model == GPT else (1, "flash")
    options.nodes = nodes if options.nodes is None else options.nodes
    options.attention = options.attention or attention


def _prices(options: argparse.Namespace, cluster: Cluster) -> Prices:
    watts = cluster.hardware.gpu.board_watts if options.watts is None else options.watts
    if watts is None:
        reject(
            f"--watts: the power that a GPU of {cluster.hardware.name} draws is unknown: give "
            "--watts WATTS, or gpu.board_watts in the hardware file"
        )
    with as_options():
        return Prices(
            usd_per_gpu_hour=options.usd_per_gpu_hour,
            watts=watts,
            overhead=options.overhead,
            kg_per_kwh=options.kg_per_kwh,
        )


def _billed(options: argparse.Namespace) -> int:
    """The bill for a number of GPU hours that the options give."""
    if not 0 < options.gpu_hours < math.inf:
        reject(f"--gpu-hours: {options.gpu_hours:g} is not above 0: give hours above 0")
    check_no_tokens(options)
    options.global_batch = options.global_batch or 1
    _set_defaults(options)
    _, cluster = problem_of(options)
    prices = _prices(options, cluster)
    study = Study.begin("estimate", options)
    bill = bill_of(options.gpu_hours, prices)
    study.add({"run": "given", "way": "GPU hours", "days": None, **asdict(bill)})
    return study.end(report_of(study, prices))


# Writes an estimate as text: a table for the question, and one for published trainings.


WAYS = {
    "formula": "{operations:g}TP/(NFU)",
    "rule": "predicted, plan by the rule",
    "mist": "predicted, plan found by mist",
    "plan": "predicted, plan given",
    "GPU hours": "GPU hours given",
}


def report_of(study: Study, prices: Prices, length: str = "", untimed: str = "") -> Report:
    """The text and tables of an estimate; ``length`` says how long the training is, ``untimed``
    that no GPU has run the engine of the plan that was found.
    """
    estimates = [row for row in study.rows if row["way"] in WAYS]
    runs = [row for row in study.rows if row["way"] == "published run"]
    bills = [row for row in study.rows if row["way"] == "published bill"]
    dated = [row for row in estimates if row["days"] is not None]
    paragraphs = [_own(estimates), *filter(None, [length]), _price_words(estimates, prices)]
    paragraphs += [*_plans(estimates), *filter(None, [untimed])]
    if runs:
        paragraphs += ["Published runs by the formula:", _runs(runs)]
        paragraphs += ["Published bills from their GPU hours:", _bills(bills)]
    pictures = []
    time = units_of(estimates)["days"]
    if dated:
        pictures = [
            Bars(
                name="estimate",
                caption=f"{time.head.capitalize()} of training, by the formula and by predictions.",
                groups=[*dict.fromkeys(row["run"] for row in dated)],
                series=_by_way(dated, time),
                y=time.head,
                number=".1f",
            )
        ]
    return Report(
        title=f"What a training takes: {estimates[0]['run']}",
        words=paragraphs,
        pictures=pictures,
        beside=[*_beside(estimates, runs)] if runs else [],
    )


def _by_way(rows: Sequence[Row], time: Unit) -> dict[str, list[float | None]]:
    """For each training, its training time by each way of estimating it (formula or prediction)."""
    times = {(row["run"], _way(row)): row["days"] * time.factor for row in rows}
    runs = [*dict.fromkeys(row["run"] for row in rows)]
    ways = dict.fromkeys(_way(row) for row in rows)
    return {way: [times.get((run, way)) for run in runs] for way in ways}


def _own(rows: Sequence[Row]) -> str:
    units = units_of(rows)
    heads = [unit.head for unit in units.values()]
    head = ["run", "GPUs", "by", heads[0], "90 % within", "U", "MFU", *heads[1:]]
    return table(head, [_cells(row, units) for row in rows])


def _cells(row: Row, units: Mapping[str, Unit]) -> list[str]:
    if row.get("gpu_hours") is None:
        return [row["run"], "", _way(row), "nothing fits", *[""] * 7]
    between = ""
    if "days_low" in row:
        between = " to ".join(units["days"].text(row[name]) for name in ("days_low", "days_high"))
    return [
        row["run"],
        f"{row['gpus']:,} {row['hardware']}" if "gpus" in row else "",
        _way(row),
        units["days"].text(row["days"]),
        between,
        number(row.get("utilisation"), ".2f", none=""),
        number(row.get("mfu"), ".2f", none=""),
        *(units[name].text(row[name]) for name, *_ in UNITS[1:]),
    ]


def _way(row: Row) -> str:
    """The way in which a row was estimated, as text; for the formula, with its number of operations
    per parameter and token.
    """
    return WAYS[row["way"]].format(operations=row.get("operations", 0.0))


def _price_words(rows: Sequence[Row], prices: Prices) -> str:
    counted = "eight operations a parameter and token (everything recomputed)"
    if any(row.get("operations") == OPERATIONS_FROZEN for row in rows):
        counted = (
            "six operations a parameter and token (everything recomputed, no gradients of frozen "
            "weights)"
        )
    return (
        f"At {prices.usd_per_gpu_hour:g} $ a GPU hour, {prices.watts:g} W a GPU, "
        f"{prices.overhead:g} W of the building for each, and {prices.kg_per_kwh:g} kg of carbon "
        f"dioxide a kilowatt hour. U counts {counted}, MFU those of the model alone."
    )


def _plans(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.get("plan"):
            plan = row["plan"]
            more = "; the other stages are unlike" if len(plan) > 2 else ""
            yield f"{row['run']}, {_way(row)}: {plan[0]}; {plan[1]}{more}."


def _runs(rows: Sequence[Row]) -> str:
    return table_of(
        rows,
        ("run", "{run}"),
        ("GPUs", "{gpus:,}"),
        ("days by the formula", "{days:.1f}"),
        ("at U", "{published_utilisation:g}"),
        ("days, published", "{published_days:g}"),
        ("U that gives these", "{utilisation:.2f}"),
    )


def _bills(rows: Sequence[Row]) -> str:
    return table_of(
        rows,
        ("model", "{run}"),
        ("GPU hours", "{gpu_hours:,.0f}"),
        ("M$", lambda row: f"{row['usd'] / 1e6:.2f}"),
        ("published", lambda row: f"{row['published_usd'] / 1e6:.2f}"),
        ("t CO2", lambda row: f"{row['carbon_kg'] / 1e3:,.0f}"),
        ("published", lambda row: f"{row['published_carbon_kg'] / 1e3:,.0f}"),
        ("off by", lambda row: f"{row['carbon_kg'] / row['published_carbon_kg'] - 1:+.1%}"),
    )


def _beside(estimates: Sequence[Row], runs: Sequence[Row]) -> Iterator[str]:
    found_by = {(row["run"], row["way"]): row for row in estimates if row["days"] is not None}
    days = {key: row["days"] for key, row in found_by.items()}
    gpt, llama = runs
    yield "## Published, and why this differs"
    ruled = found_by.get(("gpt3-175b", "rule"))
    if ruled:
        off = ruled["days"] / gpt["published_days"] - 1
        yield (
            f"GPT-3 175B: the rule's plan is predicted at {ruled['days']:.1f} days, {off:+.0%} "
            f"against the published {gpt['published_days']}, which follow from 140 TFLOP/s a GPU; "
            f"the bounds are {ruled['days_low']:.0f} and {ruled['days_high']:.0f} days. The plan "
            "of that run is not known here. A search finds a faster one because it need not "
            "recompute on GPUs of 80 GB: operations are then six a parameter and token, not eight."
        )
    yield (
        "LLaMA 65B: its printed share of the peak, 0.3, does not follow from its own tokens, GPUs "
        "and days: with eight operations a parameter and token the formula needs "
        f"{llama['utilisation']:.2f}. That run kept most activations; with six operations it is "
        "three quarters of that."
    )
    mist = days.get(("llama-65b", "mist"))
    if mist:
        yield (
            f"Mist's plan, which recomputes part of the blocks, is predicted at {mist:.1f} days, "
            f"{mist / llama['published_days'] - 1:+.0%} against the published "
            f"{llama['published_days']}; the rule's, which recomputes all, at "
            f"{days['llama-65b', 'rule']:.1f}."
        )


# Recomputes published runs and bills from their inputs.


FILE = "published_bills.yaml"


def known_rows() -> Iterator[dict[str, Any]]:
    """The rows of the table of known trainings: each published run by the formula 8TP/(NFU), and
    each published bill.
    """
    text = files("experiments.budget").joinpath(FILE).read_text(encoding="utf-8")
    content = parse_yaml(text, FILE)
    for run in content["runs"]:
        yield _run(run)
    prices = from_mapping(Prices, content["prices"], FILE)
    for bill in content["bills"]:
        yield _bill(bill, prices)


def _run(run: Mapping[str, Any]) -> dict[str, Any]:
    inputs = {
        "tokens": run["billion_tokens"] * 1e9,
        "parameters": run["billion_parameters"] * 1e9,
        "gpus": run["gpus"],
        "peak_flop_per_s": catalog.hardware(run["hardware"]).gpu.peak_flop_per_s("fp16"),
    }
    return {
        "run": run["name"],
        "way": "published run",
        **inputs,
        "days": training_s(**inputs, utilisation=run["utilisation"]) / DAY_S,
        "published_days": run["days"],
        "published_utilisation": run["utilisation"],
        "utilisation": utilisation_of(**inputs, seconds=run["days"] * DAY_S),
    }


def _bill(bill: Mapping[str, Any], prices: Prices) -> dict[str, Any]:
    return {
        "run": bill["name"],
        "way": "published bill",
        "days": None,
        **asdict(bill_of(bill["million_gpu_hours"] * 1e6, prices)),
        "published_usd": bill["million_usd"] * 1e6,
        "published_carbon_kg": bill["carbon_t"] * 1e3,
    }
