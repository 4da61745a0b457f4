"""The page of growth: every axis and idea has its rows, and no idea decides what is found."""

import json
from pathlib import Path

import pytest

from experiments import search_growth
from experiments.cli.commandline import run
from experiments.studies.search_growth import (
    AXES,
    BOXES,
    IDEAS,
    REMOVED,
    in_parts,
    searched,
    without,
)
from mistlab.plan.named_spaces import space_of
from tests.searchers.problems import SMALL

SPACE = in_parts(space_of("mist"), 2)


def test_every_axis_grows_and_every_idea_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--model", "llama-350m", "--sequence-length", "1024", "--gpus-per-node", "2")
    options = [*small, "--quick", "--seconds", "0.05", "--json", "--out", str(tmp_path)]
    assert run(search_growth.main, options) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["axis"] for row in rows} == {*AXES, "without"}
    assert [row["value"] for row in rows if row["axis"] == "without"] == [*IDEAS]
    assert (tmp_path / "search_growth.svg").exists()


@pytest.mark.parametrize("idea", IDEAS)
def test_no_idea_decides_what_is_found(idea: str) -> None:
    with without("nothing") as whole:
        best = searched(whole, SMALL, SPACE, 100)["timing"]
    with without(idea) as strategy:
        found = searched(strategy, SMALL, SPACE, 100)["timing"]
    assert best["is_proven"]
    assert found["is_proven"]
    assert found["iteration_s"] == pytest.approx(best["iteration_s"], rel=1e-9)


@pytest.mark.parametrize("idea", [idea for idea in IDEAS if idea not in ("nothing", BOXES)])
def test_what_was_removed_is_put_back(idea: str) -> None:
    before = [vars(where)[name] for where, name, _ in REMOVED[idea]]
    with without(idea):
        assert [vars(where)[name] for where, name, _ in REMOVED[idea]] != before
    assert [vars(where)[name] for where, name, _ in REMOVED[idea]] == before


def test_without_time_there_is_no_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(search_growth.main, ["--seconds", "-1"]) == 2
    assert "give more than 0" in capsys.readouterr().err
