"""A user's own model trains by plans as it does by plain PyTorch, or is refused in one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import cross_entropy  # noqa: E402

from experiments import run_plan, trace  # noqa: E402
from experiments.cli.commandline import run  # noqa: E402
from mistlab import catalog  # noqa: E402
from mistlab.core.values import InputError  # noqa: E402
from mistlab.graph.stage_model import StageModel  # noqa: E402
from mistlab.job.job import Job, model_from  # noqa: E402
from mistlab.machine.cluster import Cluster  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from mistlab.stages.stage_batch import StageBatch  # noqa: E402
from runtime.checkpoints.tensor_files import tensors_of  # noqa: E402
from runtime.comm.topology import isolated  # noqa: E402
from runtime.data import Synthetic, batch_of  # noqa: E402
from runtime.engine.work import own_layers  # noqa: E402
from runtime.engine.work.own_layers import PartedModel, built  # noqa: E402
from runtime.runnable import check_runnable  # noqa: E402
from tests.runtime.own_runs import (  # noqa: E402
    PLANS,
    joined,
    own_workload,
    plan_of,
    trained_by,
    trained_plainly,
)
from tests.runtime.planted import plant  # noqa: E402
from tests.runtime.taken_memory import memory_taken  # noqa: E402
from tests.runtime.test_real_ranks import run_world  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    CPU,
    SEED,
    Report,
    Trained,
    assert_alike,
    stage,
)
from tests.sweep import sweep  # noqa: E402

MODELS = ("decoder", "with_loss")


@pytest.mark.parametrize(
    ("model", "plan"), sweep([(model, plan) for plan in PLANS for model in MODELS], first=6)
)
def test_a_plan_trains_a_user_s_model_as_plain_pytorch(model: str, plan: str) -> None:
    work = own_workload(model)
    assert_alike(trained_by(work, plan_of(plan)), trained_plainly(work))


def test_one_process_trains_it_too() -> None:
    work = own_workload("decoder")
    plan = Plan(micro_batches=2, stages=(stage(4, micro_batch=4, checkpointed_layers=2),))
    assert_alike(trained_by(work, plan), trained_plainly(work))


@pytest.mark.slow
def test_two_processes_train_it_as_plain_pytorch(tmp_path: Path, warm_python: str) -> None:
    assert run_world(warm_python, "own_runs", 2, tmp_path) == {}
    expected = trained_plainly(own_workload("decoder"))
    for name in PLANS:
        said = [json.loads((tmp_path / f"{name} {rank}.json").read_text()) for rank in range(2)]
        assert said[0] == said[1]
        parts = [torch.load(tmp_path / f"{name} {rank}.pt") for rank in range(2)]
        reports = [
            Report(loss=loss, gradient_norm=None, loss_scale=1.0, skipped=False) for loss in said[0]
        ]
        assert_alike(Trained(reports=reports, weights=joined(parts)), expected)


def test_layers_have_the_parameters_that_they_use() -> None:
    work = own_workload("decoder")
    layers = own_layers.own_layers(work, SEED, 2, range(6), CPU)
    assert [*layers[0].whole_shapes] == ["places", "tokens.weight"]
    assert [*layers[5].whole_shapes] == ["norm.weight", "norm.bias", "head.weight"]
    assert layers[3].prefix == "layers.2."
    assert "qkv.weight" in layers[3].whole_shapes


REFUSED = {
    "code_between": "block 1 of layers does not take the output of block 0",
    "mask_of_tokens": "block 0 of layers takes a further tensor that depends on the tokens",
    "twice": "block 0 of layers is not called exactly once",
    "unused": "is a parameter without gradient: remove it from the model",
    "drops": "dropout is dropout whose random draws",
    "tied": "tokens.weight is a parameter shared",
    "frozen": "norm.weight is a frozen parameter",
    "nowhere": "factory: tests.runtime.own_modules:nowhere",
}


@pytest.mark.parametrize("factory", REFUSED)
def test_what_cannot_be_trained_apart_is_refused(factory: str) -> None:
    with pytest.raises(InputError, match=REFUSED[factory]):
        own_layers.own_layers(own_workload(factory), SEED, 2, range(6), CPU)


def test_a_file_of_another_model_is_refused() -> None:
    with pytest.raises(InputError, match="makes 4 blocks, but the traced file says 5"):
        own_layers.own_layers(own_workload("decoder", layers=5), SEED, 2, range(6), CPU)


@pytest.mark.parametrize(
    ("change", "order", "problem"),
    [
        ({"tensor_parallel": 2}, "1f1b", "tensor_parallel: 2 of a traced model"),
        ({"lean_layers": 1, "lean_operators": 1}, "1f1b", "lean_layers: .* of a traced model"),
        ({}, "zb-h1", "plan.order: zb-h1 with a traced model"),
    ],
)
def test_ways_that_need_the_runtime_s_layers_are_refused(
    change: dict[str, Any], order: str, problem: str, traced: Workload
) -> None:
    plan = Plan(micro_batches=4, stages=(stage(4, **change),), order=order)
    cluster = Cluster(hardware=catalog.hardware("a100-80gb"), nodes=1, gpus_per_node=8)
    work = replace(traced, model=replace(traced.model, tensor_parallel_degrees=(1, 2)))
    with pytest.raises(InputError, match=problem):
        check_runnable(Job(workload=work, cluster=cluster, plan=plan))
    without = replace(work, model=replace(work.model, factory=""))
    with pytest.raises(InputError, match="its code is not known: trace package"):
        check_runnable(
            Job(
                workload=without,
                cluster=cluster,
                plan=replace(plan, stages=(stage(4),), order="1f1b"),
            )
        )


def traced_from(factory: str, folder: Path, sequence_length: int) -> Workload:
    """A user's model from the command that traces it."""
    path = folder / f"{factory}.json"
    options = ["--precision", "fp32", "--sequence-length", str(sequence_length)]
    source = f"tests.runtime.own_modules:{factory}"
    assert run(trace.main, [source, "--out", str(path), *options]) == 0
    model = model_from(str(path), folder)
    return replace(own_workload(factory), model=model, sequence_length=sequence_length)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return traced_from("decoder", tmp_path_factory.mktemp("own"), 16)


def test_a_trace_says_whose_code_it_is_of(traced: Workload) -> None:
    assert traced.model.factory == "tests.runtime.own_modules:decoder"
    plan = plan_of("ZeRO-3, run again, offloaded")
    assert_alike(trained_by(traced, plan), trained_plainly(traced))


PLAN = """
workload:
  {{model: {model}, sequence_length: 16, global_batch: 8, attention: flash, precision: fp32}}
cluster: {{hardware: a100-40gb, nodes: 1, gpus_per_node: 1}}
plan:
  micro_batches: 2
  stages:
    - {{layers: 4, data_parallel: 1, tensor_parallel: 1, micro_batch: 4, checkpointed_layers: 2}}
"""


def test_the_command_trains_a_traced_file(
    traced: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, weights = tmp_path / "plan.yaml", tmp_path / "weights.safetensors"
    path.write_text(PLAN.format(model=traced.model.graph_file))
    options = ["--steps", "3", "--seed", "3", "--export", str(weights), "--json"]
    assert run(run_plan.main, [str(path), *options]) == 0
    said = json.loads(capsys.readouterr().out)
    model, batches = built(traced, 3).model, Synthetic(length=16, vocab=96, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, (0.9, 0.95), weight_decay=0.1)
    for step, found in enumerate(said["losses"]):
        optimizer.zero_grad()
        tokens, targets = batch_of(batches, 8 * step, 8)
        loss = cross_entropy(model(tokens)["logits"].flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        assert found == pytest.approx(loss.item(), rel=1e-6)
    shapes = {name: tuple(place.shape) for name, place in tensors_of(weights)}
    assert shapes == {name: tuple(one.shape) for name, one in model.named_parameters()}


@pytest.mark.parametrize("checkpointed", sweep([4, 0], first=1))
def test_an_iteration_takes_what_is_predicted(checkpointed: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    work = traced_from("wide", tmp_path, 128)
    plan = Plan(micro_batches=2, stages=(stage(checkpointed_layers=checkpointed, micro_batch=4),))
    (predicted,) = StageModel.of(work).figures(StageBatch.of_plan(plan)).peak_bytes
    taken, _ = memory_taken(work, plan, isolated(plan, 0, CPU, 0))
    assert taken == pytest.approx(predicted, rel=0.02)


def test_hidden_states_of_another_block_show(monkeypatch: pytest.MonkeyPatch) -> None:
    work, plan = own_workload("decoder"), plan_of("ZeRO-2, run again")
    expected = trained_plainly(work)
    plant(monkeypatch, own_layers._OwnBlock.__init__, "parted.calls[number]", "parted.calls[0]")
    with pytest.raises(AssertionError):
        assert_alike(trained_by(work, plan), expected)


def test_a_head_that_learns_what_comes_before_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    work, plan = own_workload("decoder"), plan_of("ZeRO-0")
    expected = trained_plainly(work)
    plant(monkeypatch, PartedModel._run, "targets.flatten()", "tokens.flatten() * 0")
    with pytest.raises(AssertionError):
        assert_alike(trained_by(work, plan), expected)
