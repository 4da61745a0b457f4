"""Which GPUs to rent for a training: hours and dollars by a table of prices."""

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from experiments import estimate
from experiments.budget.rented import hours_until
from experiments.cli.commandline import run
from mistlab.core.values import InputError
from mistlab.economy.price_table import (
    PriceTable,
    Rented,
    cheapest_within,
    fastest_under,
)

KINDS = [
    {"hardware": "a100-80gb", "usd_per_gpu_hour": 2.0, "most_gpus": 2},
    {"hardware": "l4-24gb", "usd_per_gpu_hour": 0.5, "most_gpus": 1},
    {"hardware": "t4-16gb", "usd_per_gpu_hour": 0.1, "most_gpus": 1},
]
TABLE = {"date": "2026-11-28", "source": "a test", "gpus": KINDS}
LINE = (
    *("--model", "llama3.2-1b", "--train", "lora", "--rank", "16", "--base", "4bit"),
    *("--precision", "bf16", "--sequence-length", "1024", "--global-batch", "16"),
    *("--attention", "flash", "--tokens", "16384000"),
)
FRIDAY = datetime.fromisoformat("2026-11-27T18:00:00+00:00")


def written(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "prices.yaml"
    table = {name: value for name, value in {**TABLE, **changes}.items() if value is not None}
    path.write_text(json.dumps(table), encoding="utf-8")
    return str(path)


def test_every_kind_and_number_of_gpus_has_its_hours_and_dollars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--prices", written(tmp_path), "--by", "36h", "--under", "1000"]
    assert run(estimate.main, [*LINE, *asked, "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    text = (tmp_path / "out" / "rows.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    assert [(row["hardware"], row["gpus"]) for row in rows] == [
        *(("a100-80gb", 1), ("a100-80gb", 2), ("l4-24gb", 1), ("t4-16gb", 1)),
    ]
    answered = [row for row in rows if "hours" in row]
    for row in answered:
        assert row["usd"] == pytest.approx(row["hours"] * row["gpus"] * row["usd_per_gpu_hour"])
        assert row["hours_low"] <= row["hours"] <= row["hours_high"]
    one, two, slow = answered
    assert two["hours"] < one["hours"] < slow["hours"]
    cheapest = min(answered, key=lambda row: row["usd"])
    assert f"Cheapest that ends by 36h, in 36.0 hours: {cheapest['gpus']} x" in told
    assert f"Fastest under 1000 dollars: 2 x a100-80gb, {two['hours']:.2g} hours" in told
    assert "No t4-16gb: " in told
    assert "Prices of 2026-11-28, from a test." in told


def test_a_question_that_nothing_answers_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = [{"hardware": "l4-24gb", "usd_per_gpu_hour": 1.0, "most_gpus": 1}]
    asked = ["--prices", written(tmp_path, gpus=kinds), "--under", "0.0001"]
    assert run(estimate.main, [*LINE, *asked, "--out", str(tmp_path / "out")]) == 1
    assert "None is under 0.0001 dollars." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"date": None}, r"prices.yaml: date: missing: give the day of the prices"),
        (
            {"date": "last week"},
            r"date: 'last week' is not a day: give the day of the prices, such as",
        ),
        ({"source": None}, r"source: missing: give where the prices are from"),
        ({"gpus": []}, r"gpus: is empty: give a list of GPUs"),
        ({"gpus": {"a100-80gb": 1.9}}, r"gpus: .*a100-80gb.* cannot be read: give a list of GPUs"),
        ({"gpus": ["a100-80gb"]}, r"gpus: .*a100-80gb.* cannot be read: give a list of GPUs"),
        ({"gpus": [KINDS[0]] * 2}, r"gpus: a100-80gb is listed twice: list each hardware"),
        ({"gpus": [{**KINDS[0], "hardware": "a101"}]}, r"gpus\[0\].hardware: .*a101"),
        ({"gpus": [{**KINDS[0], "usd_per_gpu_hour": -1}]}, r"gpus\[0\].usd_per_gpu_hour: -1"),
    ],
)
def test_a_table_that_is_nobody_s_prices_is_refused(
    changes: dict[str, Any], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(estimate.main, [*LINE, "--prices", written(tmp_path, **changes)]) == 2

    assert re.search(problem, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (("--by", "friday"), "--by friday: has an effect only with a table of prices"),
        (("--under", "500"), "--under 500.0: has an effect only with a table of prices"),
    ],
)
def test_options_of_renting_need_prices(
    line: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(estimate.main, [*LINE, *line]) == 2
    assert problem in capsys.readouterr().err


def test_an_optimizer_that_the_space_lacks_is_told_by_its_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*LINE, "--optimizer", "adamw-bf16", "--prices", written(tmp_path), "--space", "fsdp"]
    assert run(estimate.main, [*line, "--out", str(tmp_path / "out")]) == 1
    message = "--optimizer: adamw-bf16, but engine fsdp keeps moments otherwise: give adamw"
    assert message in capsys.readouterr().out


def test_numbers_of_gpus_are_the_table_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*LINE, "--prices", written(tmp_path), "--nodes", "2"]
    assert run(estimate.main, line) == 2
    assert "numbers of GPUs: leave out --nodes or --prices" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        *(("36h", 36.0), ("1.5 days", 36.0), ("friday", 6.0), ("Saturday", 30.0)),
        *(("thursday", 150.0), ("2026-11-28", 30.0), ("2026-11-28T06:00", 12.0)),
    ],
)
def test_times_are_hours_from_now(text: str, hours: float) -> None:
    assert hours_until(text, FRIDAY) == pytest.approx(hours)


@pytest.mark.parametrize("text", ["soon", "2026-11-26", "0h"])
def test_times_that_are_over_or_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--by: .*(is not a time|is in the past): give"):
        hours_until(text, FRIDAY)


def test_the_choice_is_by_price_and_then_by_time() -> None:
    offers = [
        Rented(hardware=name, gpus=1, hours=hours, hours_low=hours, hours_high=hours, usd=usd)
        for name, hours, usd in (("a", 10, 5), ("b", 2, 20), ("c", 8, 5), ("d", 1, 50))
    ]
    cheap, quick = cheapest_within(offers, 9), fastest_under(offers, 20)
    assert cheap is not None
    assert quick is not None
    assert (cheap.hardware, quick.hardware) == ("c", "b")
    assert cheapest_within(offers, 0.5) is None
    assert fastest_under(offers, 4) is None


def test_a_table_says_how_many_gpus_there_are() -> None:
    table = PriceTable.of_content(TABLE)
    assert [one.counts() for one in table.gpus] == [(1, 2), (1,), (1,)]
