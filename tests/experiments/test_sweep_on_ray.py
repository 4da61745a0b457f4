"""Sweeps on a Ray cluster on this machine: killed workers, equal rows, other versions."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.cli.command import parser_for
from experiments.commands import COMMANDS
from experiments.pages.study import Study
from experiments.pages.tables import csv_of, untimed
from experiments.sweeps.cell import Cell, solved
from experiments.sweeps.sweep import Answers, load_cells
from experiments.sweeps.workers import OtherVersionError, here, workers
from tests.experiments import killed_once

# 5 x 4 x 5 x 2 = 200 problems, most of them quick.
MANY = """
models: [llama-350m, gpt3-1.3b, llama-1.3b, gpt3-2.7b, falcon-1.3b]
clusters:
  - {hardware: l4-24gb, nodes: 1, gpus_per_node: 1}
  - {hardware: l4-24gb, nodes: 1, gpus_per_node: 2}
  - {hardware: l4-24gb, nodes: 1, gpus_per_node: 4}
  - {hardware: l4-24gb, nodes: 2, gpus_per_node: 4}
global_batches: [2, 4, 8, 16, 32]
sequence_lengths: [1024, 2048]
spaces: [3d]
play: false
budget: {evaluations: 300}
"""
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def ray() -> Any:
    return pytest.importorskip("ray", reason="Ray is not installed: make extras")


@pytest.fixture
def by_value(ray: Any) -> Iterator[None]:
    """Workers get the killing call with its code, as they may not find the tests."""
    ray.cloudpickle.register_pickle_by_value(killed_once)
    yield
    ray.cloudpickle.unregister_pickle_by_value(killed_once)


@pytest.mark.slow
@pytest.mark.usefixtures("by_value")
def test_two_hundred_problems_on_four_workers_one_of_them_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "many.yaml"
    path.write_text(MANY, encoding="utf-8")
    cells: list[Cell] = load_cells(path, 0)
    assert len(cells) == 200
    killing = killed_once.KilledOnce(tmp_path / "killed", cells[100], solved)
    tables = []
    for name, jobs, cluster, call in (("four", 4, "ray", killing), ("one", None, None, solved)):
        options = parser_for(COMMANDS["sweep"], "sweep").parse_args(
            [str(path), "--out", str(tmp_path / name)]
        )
        answers = Answers(Study.begin("sweep", options), [cell.key("") for cell in cells])
        with workers(jobs, cluster) as those:
            assert not answers.fill(cells, those, call)
        tables.append([answer.row for answer in answers.in_order()])
    assert (tmp_path / "killed").exists()
    assert "a worker process was lost (" in capsys.readouterr().err
    four, one = tables
    assert len(four) == 200
    assert csv_of(four) == csv_of(one)
    assert [*map(untimed, four)] == [*map(untimed, one)]


@pytest.mark.usefixtures("ray")
def test_a_cluster_of_another_version_is_refused_before_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As seen from here: the cluster's processes have what there is, this one something else.
    other = {**here(), "sources": "of yesterday"}
    monkeypatch.setattr("experiments.sweeps.workers.here", lambda: other)
    with (
        pytest.raises(OtherVersionError, match="instead of of yesterday: install the same"),
        workers(1, "ray"),
    ):
        pytest.fail("work has begun")
