"""Commands on unlike nodes: which take them, and what they say."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from experiments import analyse, predict, tune
from experiments.bench.problem import problem_of
from experiments.cli.commandline import PROBLEM, run
from experiments.sweeps.sweep import cells_of, sweep_from_mapping
from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.job.job import load_job
from mistlab.machine.cluster import NodeGroup

EXAMPLE = Path(__file__).parents[2] / "examples/plans/gpt3-7b-4xl4-4xa100.yaml"
BOTH = "l4-24gb:1,a100-40gb:2"


def options(**changes: object) -> Namespace:
    return Namespace(**{**PROBLEM, "hardware": BOTH, **changes})


def test_groups_on_a_command_line_are_a_cluster() -> None:
    _, cluster = problem_of(options(), takes_groups=True)
    assert cluster.groups == (
        NodeGroup(hardware=catalog.hardware("l4-24gb"), nodes=1),
        NodeGroup(hardware=catalog.hardware("a100-40gb"), nodes=2),
    )
    assert cluster.name == BOTH


def test_a_command_for_equal_nodes_refuses_groups() -> None:
    with pytest.raises(InputError, match=r"--hardware: .* supports only nodes that are all alike"):
        problem_of(options())


def test_nodes_beside_groups_must_add_up() -> None:
    with pytest.raises(
        InputError, match=r"--nodes: 2, but --hardware .* has 3 nodes: leave --nodes out"
    ):
        problem_of(options(nodes=2), takes_groups=True)


def test_the_example_is_predicted_with_the_memory_of_both(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(predict.main, [str(EXAMPLE)]) == 0
    told = capsys.readouterr().out
    assert "fits 21.7 and 39.1 GiB: a GPU's 22.0 less 0.3 and 39.4 less 0.3 outside" in told
    assert "no run on several kinds of nodes together was measured" in told


def test_a_plan_on_unlike_nodes_is_refused_where_only_equal_ones_are_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(analyse.main, [str(EXAMPLE)]) == 1
    assert (
        "l4-24gb:1,a100-40gb:1: this command supports only nodes that are all alike"
        in capsys.readouterr().err
    )


def test_a_plan_is_found_and_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.yaml"
    arguments = ["--model", "llama-1.3b", "--hardware", "l4-24gb:1,a100-40gb:1", "--space", "3d"]
    assert run(tune.main, [*arguments, "--gpus-per-node", "1", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "of 21.71 GiB" in told
    assert "of 39.11 GiB" in told
    assert load_job(out).cluster.name == "l4-24gb:1,a100-40gb:1"


def test_a_sweep_lists_groups_as_plan_files_do() -> None:
    groups = [{"hardware": "l4-24gb", "nodes": 1}, {"hardware": "a100-40gb", "nodes": 2}]
    sweep = {
        "models": ["llama-350m"],
        "clusters": [{"hardware": groups, "gpus_per_node": 2}],
        "global_batches": [8],
    }
    (cell,) = cells_of(sweep_from_mapping(sweep, Path()), 0)
    assert json.loads(json.dumps(cell.asked()))["hardware"] == BOTH
    groups[1]["hardware"] = "a100-41gb"
    with pytest.raises(InputError, match=r"clusters\[0\].hardware\[1\].hardware: 'a100-41gb' is"):
        sweep_from_mapping(sweep, Path())
