"""Rules of dialects turn the texts of a row of measured runs into typed columns."""

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest

from experiments.runs.configuration import variant_of
from experiments.runs.dialects.dialect import DialectRule, row_of, rules, typed
from experiments.runs.run_row import Recomputed, RunRow
from mistlab import catalog
from mistlab.engines.engine import ENGINES
from mistlab.schedule.orders import ORDERS

TYPED = {one.name for one in fields(RunRow)} - {"cells"}


def given(*columns: str) -> Iterator[Any]:
    return (rule.gives[name] for rule in rules() for name in columns if name in rule.gives)


def test_rules_give_all_typed_columns_and_no_other() -> None:
    assert {name for rule in rules() for name in rule.gives} == TYPED


def test_rules_name_what_exists() -> None:
    variants = [name for _, name in given("variant_before")]
    engines = {*given("engine", "sharded_engine", "variant"), *variants}
    assert engines <= {*ENGINES}
    assert {*given("order", "noted_order")} <= {*ORDERS}
    assert {*given("hybrid", "alike")} <= {*catalog.model_names()}
    hardware = {name for names in given("eager_on", "products_tflops_on") for name in names}
    assert hardware <= {*catalog.hardware_names()}
    assert {*given("recompute", "recipe_recompute")} == {*get_args(Recomputed)}


def test_values_are_of_their_columns_types() -> None:
    hints = get_type_hints(RunRow)
    for rule in rules():
        for name, value in rule.gives.items():
            if isinstance(value, bool | int | float) and name != "zero_level":
                kinds = {type(value), type(value) | None}
                assert hints[name] in kinds, (name, value)


def test_groups_are_numbers_where_their_columns_are() -> None:
    row = row_of(
        {"notes": "LBS 4; hidden-dropout=0.25; data parallel about 16", "engine": "NeMo AutoModel"}
    )
    assert (row.local_batch, row.dropout, row.data_ranks) == (4, 0.25, 16)
    assert row_of({"engine": "Megatron-Bridge 26.06"}).year == 26
    assert row_of({"engine": "Megatron-Bridge 26.06"}).month == 6


def test_a_row_without_texts_says_nothing() -> None:
    cells = {"layers": "8", "notes": "n/a", "engine": ""}
    assert row_of(cells) == RunRow(cells=cells)


def test_of_several_rules_the_first_counts() -> None:
    def rule(pattern: str, **gives: str) -> DialectRule:
        return DialectRule(gives=gives, when={"notes": re.compile(pattern)}, named={})

    several = rule("a", alike="first"), rule("b", alike="second", hybrid="other")
    assert typed(several, {"notes": "a and b"}) == {"alike": "first", "hybrid": "other"}
    assert typed(several, {"notes": "b"})["alike"] == "second"
    assert typed(several, {"notes": "none"}) == {}


@pytest.mark.parametrize(
    ("engine", "date", "variant"),
    [
        ("torchtitan", "2025-03", "fsdp-compiled-blocks"),
        ("torchtitan", "2025-04", "fsdp-compiled"),
        ("torchtitan", "", "fsdp-compiled"),
    ],
)
def test_a_date_decides_what_was_compiled(engine: str, date: str, variant: str) -> None:
    row = row_of({"engine": engine, "date": date, "notes": "torch.compile"})
    assert variant_of(row, "fsdp") == variant


def test_replicas_of_shards_are_at_least_one() -> None:
    assert row_of({"zero": "hsdp, 4 replicas"}).replicas == 4
    assert row_of({"zero": "hsdp, 0 replicas"}).replicas is None
