"""Fits to measured serving runs: what a fit learns from, what it is judged by, and waves."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.serve.served_rows import ServedRow
from experiments.serve.serving_errors import ranking
from experiments.serve.serving_fit import (
    LeftOut,
    constants_of_rows,
    contradicted,
    left_out,
    measured_of,
    rows_to_fit,
)
from mistlab import catalog
from mistlab.serving.engine_constants import DEFAULTS
from mistlab.serving.load import ServingLoad
from mistlab.serving.steady import SteadyLoad, capacity_tokens, steady_state
from mistlab.serving.step_cost import LayoutColumns, RankLayout
from simulators.serving.continuous import Batching, play_continuous
from simulators.serving.step_clock import StepClock

TABLE = Path(__file__).parent / "made_runs.csv"


def with_a_contradiction() -> tuple[list[ServedRow], set[int]]:
    """Measured runs, and the places of a layout's whose time per token falls with more requests."""
    rows = rows_to_fit([TABLE])
    places = {
        place
        for place, row in enumerate(rows)
        if (row.layout, row.prompt) == (rows[0].layout, rows[0].prompt)
    }
    assert len(places) == 3
    rows[0] = replace(rows[0], token_s=3 * (rows[0].token_s or 0.0))
    return rows, places


def test_runs_that_contradict_one_another_are_found() -> None:
    rows, places = with_a_contradiction()
    assert contradicted(rows) == places
    assert contradicted(rows_to_fit([TABLE])) == set()


def test_contradicted_runs_are_left_out_of_fits_and_judged_all_the_same() -> None:
    rows, places = with_a_contradiction()
    others = [row for place, row in enumerate(rows) if place not in places]
    assert constants_of_rows(rows).factors == constants_of_rows(others).factors
    apart = left_out(rows, "model")
    assert len(apart.rows) == len(rows)
    assert np.isfinite(apart.logs("token_s")).sum() == len(rows)


HEAD = "engine,hardware,gpus,model,weights,tp,pp,ep,dp,isl,osl,concurrency,ttft_s,tpot_s,spec\n"
RUN = "vllm,B200,4,MiniMax-M2.5,fp8_block,4,1,{},{},1024,1024,{},0.1,{},none\n"


def ranked(
    folder: Path, lines: list[str], predicted: list[float], head: str = HEAD
) -> dict[str, float | None]:
    table = folder / "runs.csv"
    table.write_text(head + "".join(lines), encoding="utf-8")
    rows = rows_to_fit([table])
    groups = ["0"] * len(rows)
    rates = {"requests_per_s": np.array(predicted)}
    apart = LeftOut(rows=rows, groups=groups, predicted=rates, measured=measured_of(rows))
    return ranking(apart)


def test_layouts_are_ranked_where_measured_rates_clearly_differ(tmp_path: Path) -> None:
    # Half as fast, a little faster, and another load in which the order is predicted wrong.
    lines = [RUN.format(1, 1, 8, 0.02), RUN.format(4, 1, 8, 0.01), RUN.format(4, 1, 16, 0.01)]
    lines += [RUN.format(1, 1, 16, 0.011), RUN.format(1, 1, 32, 0.01), RUN.format(4, 1, 32, 0.0101)]
    found = ranked(tmp_path, lines, [1.0, 2.0, 1.0, 2.0, 1.0, 2.0])
    assert (found["groups"], found["pairs"], found["right_order"]) == (3, 2, 0.5)
    assert found["pick_over_best"] == pytest.approx((1 + 1.1 + 1.01) / 3, abs=2e-3)


def test_layouts_of_different_versions_are_no_pair_of_one_version(tmp_path: Path) -> None:
    # Over all versions the order is right, by one that a single layout ran; in 0.19 it is not.
    lines = [RUN.format(1, 1, 8, 0.03), RUN.format(4, 1, 8, 0.02), RUN.format(4, 1, 8, 0.01)]
    head = HEAD.replace("engine,", "engine,engine_version,")
    versions = ("0.19.0", "0.19.1", "0.5")
    table = "".join(
        line.replace("vllm", f"vllm,{one}") for line, one in zip(lines, versions, strict=True)
    )
    found = ranked(tmp_path, [table], [2.0, 1.0, 9.0], head)
    assert (found["pairs"], found["right_order"]) == (1, 1.0)
    assert (found["pairs_of_one_version"], found["right_order_of_one_version"]) == (1, 0.0)


def test_a_layout_whose_ranks_are_unsaid_is_no_other_layout(tmp_path: Path) -> None:
    lines = [RUN.format(4, "", 8, 0.02), RUN.format(4, 1, 8, 0.01)]
    assert {"in_tables": 1, "groups": 0, "pairs": 0}.items() <= ranked(
        tmp_path, lines, [1.0, 1.0]
    ).items()


@pytest.mark.parametrize(("prompt", "output", "in_flight"), [(1000, 200, 16), (3000, 400, 64)])
def test_waves_of_engines_that_read_first_are_as_played(
    prompt: int, output: int, in_flight: int
) -> None:
    constants = {**DEFAULTS, "first": 0.0, "burst": 0.0, "steps": 0.0}
    layout = RankLayout(
        model=catalog.model("qwen3-32b"),
        gpu="H100",
        engine="vllm",
        weights="bf16",
        cache="bf16",
        tp=4,
    )
    of = LayoutColumns.of([layout])
    by = {name: np.array([value]) for name, value in constants.items()}
    count = 4 * in_flight
    load = ServingLoad(
        prompts=(prompt,) * count,
        outputs=(output,) * count,
        arrivals_s=(0.0,) * count,
        in_flight=in_flight,
    )
    clock = StepClock.of(layout, constants, most=in_flight)
    batching = Batching(capacity=int(capacity_tokens(of, by)[0]), mixes=False)
    played = play_continuous(load, clock, batching).requests
    token_s = np.mean(
        [((one.end_s or 0.0) - (one.first_s or 0.0)) / (output - 1) for one in played]
    )
    first_s = np.mean([(one.first_s or 0.0) - one.arrival_s for one in played])
    waves, mixed = (
        steady_state(
            of,
            by,
            SteadyLoad(
                in_flight=np.array([float(in_flight)]),
                prompt=np.array([float(prompt)]),
                output=np.array([float(output)]),
                sequences=np.array([1024.0]),
                budget=np.array([8192.0]),
                waves=np.array([True]),
                reads_first=np.array([first]),
            ),
        )
        for first in (True, False)
    )
    assert waves.token_s[0] == pytest.approx(token_s, rel=0.05)
    assert waves.first_s[0] == pytest.approx(first_s, rel=0.1)
    # The same requests without waves: each token waits for all prompts, and no prompt for another.
    assert mixed.token_s[0] > 1.05 * token_s
    assert mixed.first_s[0] < 0.5 * first_s
