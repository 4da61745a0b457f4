"""Every experiment of the frame: its options, what it leaves, and that it can be had again."""

import json
import shlex
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from experiments.cli.command import experiment
from experiments.cli.commandline import run
from experiments.commands import COMMANDS

FOLDER = Path(__file__).parents[2] / "experiments"
EXPERIMENTS = sorted(
    name for name, command in COMMANDS.items() if command.common.keys() >= experiment(name).keys()
)
COMMON = ("--seed", "--out", "--page", "--json", "--quick")
# What an experiment needs beyond the tests' environment, of the extra ``baselines``.
NEEDED = {"measure_speedup": "megatron.core", "whole_loop": "megatron.core"}
# What an experiment asks for that only a user has: here files of this repository.
FILES = {
    "check_imports": (str(FOLDER.parent),),
    # Runs that were made by predictions and chance, none of them measured.
    "serving_errors": (str(FOLDER.parent / "tests" / "serving" / "made_runs.csv"),),
}
# Always run; the others are left to make test-all.
FEW = ("reliability",)
BY_COST = [
    pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in EXPERIMENTS
]


def main_of(name: str) -> Callable[[Sequence[str]], int]:
    main: Any = import_module(f"experiments.{name}").main
    return main  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_has_the_common_options(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main_of(name)(["--help"])
    text = capsys.readouterr().out
    assert [option for option in COMMON if option not in text] == []


@pytest.mark.parametrize("name", BY_COST)
def test_an_experiment_leaves_what_makes_it_again(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    one, two = tmp_path / "one", tmp_path / "two"
    assert run(main_of(name), [*FILES.get(name, ()), "--quick", "--json", "--out", str(one)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["rows"]
    assert answer["timing"]["seconds"] > 0
    line = (one / "README.md").read_text(encoding="utf-8").split("`")[1]
    _, _, module, *arguments = shlex.split(line)
    assert module == f"experiments.{name}"
    arguments[arguments.index(str(one))] = str(two)
    assert run(main_of(name), arguments) == 0
    assert (two / "rows.csv").read_bytes() == (one / "rows.csv").read_bytes()
    assert (two / "report.md").read_text(encoding="utf-8").startswith("# ")
    pictures = sorted(path.name for path in two.glob("*.svg"))
    assert pictures
    assert pictures == sorted(path.name for path in one.glob("*.svg"))
