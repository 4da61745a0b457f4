"""Runs and bills that were published, worked out again from the inputs that go with them."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from mistlab import catalog
from mistlab.core.files import parse_yaml
from mistlab.core.values import from_mapping
from mistlab.economy.bill import Prices, bill_of, training_s, utilisation_of

DAY_S = 86_400.0
FILE = "published_bills.yaml"


def known_rows() -> Iterator[dict[str, Any]]:
    """A row for each published run, by the formula, and for each published bill."""
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
