"""An estimate in words: tables of the question, and of what was published."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.pages.charts import Bars
from experiments.pages.study import Report, Study
from experiments.pages.tables import number, table, table_of
from mistlab.economy.bill import Prices

Row = Mapping[str, Any]
WAYS = {
    "formula": "8TP/(NFU)",
    "rule": "predicted, plan by the rule",
    "mist": "predicted, plan found by mist",
    "plan": "predicted, plan given",
    "GPU hours": "GPU hours given",
}


def report_of(study: Study, prices: Prices) -> Report:
    """The report of the study."""
    own = [row for row in study.rows if row["way"] in WAYS]
    runs = [row for row in study.rows if row["way"] == "published run"]
    bills = [row for row in study.rows if row["way"] == "published bill"]
    dated = [row for row in own if row["days"] is not None]
    words = [_own(own), _prices(prices), *_plans(own)]
    if runs:
        words += ["Published runs by the formula:", _runs(runs)]
        words += ["Published bills from their GPU hours:", _bills(bills)]
    pictures = []
    if dated:
        pictures = [
            Bars(
                name="estimate",
                caption="Days of training, by the formula and by predictions.",
                groups=[*dict.fromkeys(row["run"] for row in dated)],
                series=_by_way(dated),
                y="days",
                number=".1f",
            )
        ]
    return Report(
        title=f"What a training takes: {own[0]['run']}",
        words=words,
        pictures=pictures,
        beside=[*_beside(own, runs)] if runs else [],
    )


def _by_way(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Days of each run, by the way in which they were found."""
    days = {(row["run"], row["way"]): row["days"] for row in rows}
    runs = [*dict.fromkeys(row["run"] for row in rows)]
    ways = dict.fromkeys(row["way"] for row in rows)
    return {WAYS[way]: [days.get((run, way)) for run in runs] for way in ways}


def _own(rows: Sequence[Row]) -> str:
    head = [
        "run",
        "GPUs",
        "by",
        "days",
        "90 % within",
        "U",
        "MFU",
        "GPU hours",
        "M$",
        "MWh",
        "t CO2",
    ]
    return table(head, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    if row.get("gpu_hours") is None:
        return [row["run"], "", WAYS[row["way"]], "nothing fits", *[""] * 7]
    between = ""
    if "days_low" in row:
        between = f"{row['days_low']:.1f} to {row['days_high']:.1f}"
    return [
        row["run"],
        f"{row['gpus']:,} {row['hardware']}" if "gpus" in row else "",
        WAYS[row["way"]],
        number(row["days"], ",.1f", none=""),
        between,
        number(row.get("utilisation"), ".2f", none=""),
        number(row.get("mfu"), ".2f", none=""),
        f"{row['gpu_hours']:,.0f}",
        f"{row['usd'] / 1e6:,.2f}",
        f"{row['kwh'] / 1e3:,.0f}",
        f"{row['carbon_kg'] / 1e3:,.0f}",
    ]


def _prices(prices: Prices) -> str:
    return (
        f"At {prices.usd_per_gpu_hour:g} $ a GPU hour, {prices.watts:g} W a GPU, "
        f"{prices.overhead:g} W of the building for each, and {prices.kg_per_kwh:g} kg of carbon "
        "dioxide a kilowatt hour. U counts eight operations a parameter and token (everything "
        "recomputed), MFU those of the model alone."
    )


def _plans(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.get("plan"):
            plan = row["plan"]
            more = "; the other stages are unlike" if len(plan) > 2 else ""
            yield f"{row['run']}, {WAYS[row['way']]}: {plan[0]}; {plan[1]}{more}."


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


def _beside(own: Sequence[Row], runs: Sequence[Row]) -> Iterator[str]:
    found_by = {(row["run"], row["way"]): row for row in own if row["days"] is not None}
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
    found = days.get(("llama-65b", "mist"))
    if found:
        yield (
            f"Mist's plan, which recomputes part of the blocks, is predicted at {found:.1f} days, "
            f"{found / llama['published_days'] - 1:+.0%} against the published "
            f"{llama['published_days']}; the rule's, which recomputes all, at "
            f"{days['llama-65b', 'rule']:.1f}."
        )
