"""The survey of candidates: against single plans, and its command line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import survey as survey_command
from experiments.cli.commandline import run
from experiments.studies.survey import Mesh, candidates_of, meshes, survey
from mistlab import catalog
from mistlab.graph.stage_model import StageModel
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.stages.stage_batch import StageBatch
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

WORK = replace(workload_of("llama-350m", 2048, 8, "bf16", attention="math"), gradients="16bit")
CLUSTER = Cluster(
    hardware=catalog.hardware("l4-24gb"),
    nodes=1,
    gpus_per_node=4,
    memory_gib=6.0,
    host_memory_gib=24.0,
)
TWO_NODES = replace(CLUSTER, nodes=2, gpus_per_node=2, memory_gib=4.0, host_memory_gib=0.6)
RATIOS = (0.0, 0.5, 1.0)


@pytest.fixture(scope="module")
def model() -> StageModel:
    return StageModel.of(WORK)


def stage_of(mesh: Mesh, row: np.ndarray) -> StagePlan:
    """A candidate's first stage."""
    zero, checkpointed, weights, gradients, optimizer, activations = row.tolist()
    return StagePlan(
        layers=WORK.model.layers // mesh.stages,
        data_parallel=mesh.data_parallel,
        tensor_parallel=mesh.tensor_parallel,
        micro_batch=mesh.micro_batch,
        zero=int(zero),
        checkpointed_layers=int(checkpointed),
        offload=Offload(
            weights=weights, gradients=gradients, optimizer=optimizer, activations=activations
        ),
    )


@pytest.mark.parametrize("cluster", [CLUSTER, TWO_NODES], ids=["a node", "two nodes"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_what_fits_is_what_a_prediction_says(
    model: StageModel, cluster: Cluster, stages: int
) -> None:
    predictor = SymbolicPredictor(workload=WORK, cluster=cluster)
    gpus = cluster.num_gpus // stages
    mesh = Mesh(
        stages=stages, data_parallel=gpus, tensor_parallel=1, micro_batch=1, micro_batches=8 // gpus
    )
    grid = candidates_of(WORK.model, mesh, RATIOS)
    plans = [
        Plan(micro_batches=mesh.micro_batches, stages=(stage_of(mesh, row),) * stages)
        for row in grid
    ]
    fitting = [prediction.fits for prediction in predictor.predict_many(plans)]
    found = survey(model, cluster, mesh, RATIOS)
    assert (found.candidates, found.fitting) == (len(plans), sum(fitting))
    assert 0 < found.fitting < found.candidates


def test_a_frontier_is_what_plans_one_by_one_allow(model: StageModel) -> None:
    mesh = Mesh(stages=2, data_parallel=2, tensor_parallel=1, micro_batch=2, micro_batches=2)
    draw = np.random.default_rng(0)
    predictor = SymbolicPredictor(workload=WORK, cluster=CLUSTER)

    found = survey(model, CLUSTER, mesh, RATIOS)

    assert found.candidates == 3 * 13 * 3**4
    assert 0 < found.fitting < found.candidates
    hosts = [host for host, _, _ in found.frontier]
    shares = [share for _, share, _ in found.frontier]
    assert hosts == sorted(hosts)
    assert shares == sorted(shares, reverse=True)
    plans = []
    for _ in range(300):
        ratios = draw.choice(RATIOS, 4)
        stage = StagePlan(
            layers=12,
            data_parallel=2,
            tensor_parallel=1,
            micro_batch=2,
            zero=int(draw.integers(1, 4)),
            checkpointed_layers=int(draw.integers(0, 13)),
            offload=Offload(
                weights=ratios[0],
                gradients=ratios[1],
                optimizer=ratios[2],
                activations=ratios[3],
            ),
        )
        plans.append(Plan(micro_batches=2, stages=(stage, stage)))
    for plan, prediction in zip(plans, predictor.predict_many(plans), strict=True):
        if prediction.fits:
            host = model.figures(StageBatch.of_plan(plan)).host_bytes.max()
            better = [s for h, s in zip(hosts, shares, strict=True) if h <= host]
            assert min(better) <= plan.stages[0].checkpointed_layers / 12


def test_meshes_use_every_gpu_and_the_whole_batch() -> None:
    found = list(meshes(WORK, CLUSTER))
    assert len(found) == len(set(found)) > 10
    for mesh in found:
        assert mesh.stages * mesh.data_parallel * mesh.tensor_parallel == CLUSTER.num_gpus
        assert mesh.data_parallel * mesh.micro_batch * mesh.micro_batches == WORK.global_batch


def survey_to(out: Path, *options: str) -> int:
    small = ["--model", "llama-350m", "--gpus-per-node", "2", "--sequence-length", "1024"]
    return run(survey_command.main, [*small, "--quick", "--out", str(out), *options])


def test_a_run_directory_says_what_made_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "first"

    assert survey_to(out) == 0

    assert "candidates fit" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["options"]["model"] == "llama-350m"
    assert "python -m experiments.survey --model llama-350m" in (out / "README.md").read_text()
    rows = (out / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    assert all(json.loads(row)["candidates"] > 0 for row in rows)
    assert (out / "survey.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_equal_surveys_are_equal_but_for_their_timing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(name: str) -> dict[str, Any]:
        assert survey_to(tmp_path / name, "--json") == 0
        content: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert set(content.pop("timing")) == {"seconds", "stage_rows_per_s"}
        return content

    assert answer("one") == answer("two")
    for name in ("rows.jsonl", "survey.svg"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_nothing_fits_is_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "gpt3-175b", "--gpus-per-node", "1", "--out", str(tmp_path)]
    assert run(survey_command.main, [*options, "--quick", "--global-batch", "1"]) == 1
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "gpt3-2.7"], "--model: 'gpt3-2.7' is unknown: did you mean"),
        (["--hardware", "a100"], "--hardware: 'a100' is unknown: did you mean"),
        (["--gpus-per-node", "9"], "--gpus-per-node: 9 is more than a node of l4-24gb has"),
        (["--nodes", "0"], "--nodes: 0 is too small: give a whole number between 1 and 1,000,000"),
        (["--sequence-length", "-1"], "--sequence-length: -1 is too small"),
        (["--model", "missing.json"], "--model: missing.json: there is no such file"),
        (["--hardware", "v100-16gb", "--precision", "bf16"], "--precision: "),
    ],
)
def test_wrong_options_name_the_option_and_the_remedy(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(survey_command.main, [*options, "--out", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}"), captured.err


def test_a_file_in_the_place_of_the_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "taken"
    out.write_text("", encoding="utf-8")
    assert survey_to(out) == 2
    assert "--out" in capsys.readouterr().err
