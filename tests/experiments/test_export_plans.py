"""Plans on their way to other frameworks and back, and the few changes that gain most."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

import mistlab
from experiments import export, import_plan, tune
from experiments.agents.tools import Framework
from experiments.calibration.published import read_end_to_end
from experiments.calibration.whole_runs import predicted_s
from experiments.cli.command import EXAMPLE
from experiments.cli.commandline import PLANS, run
from experiments.interchange.launched_runs import launched_runs
from experiments.interchange.single_changes import single_changes
from experiments.live_page.questions import names as live_names
from mistlab.core.files import format_yaml, parse_yaml, read_yaml
from mistlab.core.values import InputError
from mistlab.export.targets import target_for
from mistlab.formats.recipes.exports import EXPORTS, RECIPES, target_of
from mistlab.job.job import job_to_mapping, load_job
from tests.experiments.test_predict import plan_file
from tests.mistlab.recipes.drawn_recipes import drawn_recipes

LINES = Path(__file__).parents[2] / "examples" / "launch"
SCRIPT = PLANS / "pretrain-gpt3-2.7b.sh"


def test_the_nearest_form_is_printed_and_its_cost_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path, "plan.yaml")
    assert run(export.main, [path, "--to", "deepspeed"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["pipeline"]["stages"] == 2
    assert "approximated: checkpointed_layers: 4 0 -> 16: DeepSpeed" in err
    given, near = [line for line in err.splitlines() if line.startswith("cost: ")]
    assert given.startswith("cost: the plan itself ")
    assert near.startswith("cost: its nearest form under engine deepspeed ")


@pytest.mark.parametrize(
    ("engine", "target"),
    [
        ("fsdp", "torchtitan"),
        ("deepspeed", "deepspeed"),
        ("megatron-core", "megatron"),
        ("mistlab", "megatron"),
        ("nanotron", "megatron"),
    ],
)
def test_a_plan_goes_to_the_framework_of_its_engine(engine: str, target: str) -> None:
    assert target_for(engine).name == target


def adapters_file(tmp_path: Path, **changes: Any) -> Path:
    """A plan of QLoRA that fits a card of 24 GB, on which full training would not."""
    plain = parse_yaml(ADAPTERS, "the plan")
    plain["plan"]["stages"][0] |= changes
    plain["cluster"]["gpus_per_node"] = changes.get("tensor_parallel", 1)
    file = tmp_path / "adapters.yaml"
    file.write_text(format_yaml(plain), encoding="utf-8")
    return file


ADAPTERS = """
workload: {model: llama3-8b, sequence_length: 2048, global_batch: 4, attention: flash,
           precision: bf16, train: adapters, base: 4bit}
cluster: {hardware: rtx-4090-24gb, nodes: 1, gpus_per_node: 1}
plan:
  engine: fsdp
  micro_batches: 4
  stages: [{layers: 32, data_parallel: 1, tensor_parallel: 1, micro_batch: 1,
            checkpointed_layers: 32}]
"""


def test_a_plan_of_adapters_goes_to_a_recipe_that_trains_them(tmp_path: Path) -> None:
    assert target_of(load_job(adapters_file(tmp_path))).name == "axolotl"
    # axolotl has no tensor parallelism.
    split = load_job(adapters_file(tmp_path, tensor_parallel=2))
    assert target_of(split).name == "automodel"
    assert target_of(load_job(EXAMPLE)).name == "megatron"


@pytest.mark.parametrize("name", ["megatron", "torchtitan", "torchtitan-toml"])
def test_a_file_that_trains_all_weights_is_no_plan_of_adapters(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [str(adapters_file(tmp_path)), "--to", name]
    assert run(export.main, line) == 3
    told = capsys.readouterr().err
    assert "approximated: train: adapters -> all: " in told
    assert "for adapters export to a recipe, such as trl" in told
    assert "does not fit any more" in told


@pytest.mark.parametrize("name", ["deepspeed", "accelerate"])
def test_what_a_training_script_has_to_train_is_told(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(export.main, [str(adapters_file(tmp_path)), "--to", name]) == 0
    assert (
        f"noted: {name}: the training script has to train adapters of rank 16 on linear layers of "
        "attention and feed-forward networks, with frozen weights of 4 bits"
    ) in capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_printed_or_the_plan_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (job,) = drawn_recipes(RECIPES[name], 1, seed=3)
    plan = str(tmp_path / "drawn.yaml")
    Path(plan).write_text(format_yaml(job_to_mapping(job)), encoding="utf-8")
    assert run(export.main, [plan, "--to", name, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"].startswith("# Add ")
    status = run(export.main, [plan_file(tmp_path, "piped.yaml"), "--to", name])
    refused = "plan.stages: 2 stages, but recipes of .* have no pipelines: give one stage"
    told = re.search(refused, capsys.readouterr().err)
    assert (status, told is None) == ((0, True) if name == "megatron-bridge" else (2, False))
    assert run(export.main, [plan, "--to", name, "--check"]) == 2
    assert "itself: leave --check out" in capsys.readouterr().err


def test_every_surface_offers_every_framework() -> None:
    assert set(get_args(Framework)) == {*EXPORTS}
    assert mistlab.names()["frameworks"] == tuple(EXPORTS)
    assert live_names({}, lambda _: None)["frameworks"] == [*EXPORTS]


def test_strictly_what_is_lost_is_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lossy = plan_file(tmp_path, "lossy.yaml")
    exact = plan_file(
        tmp_path,
        "exact.yaml",
        ("checkpointed_layers: 4, ", ""),
        ("plan:\n", "plan:\n  engine: megatron\n"),
    )
    assert run(export.main, [lossy, "--strict"]) == 1
    assert run(export.main, [exact, "--strict"]) == 0
    assert "cost: said exactly under engine megatron" in capsys.readouterr().err


def test_an_export_as_json_has_remarks_and_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path, "plan.yaml")
    assert run(export.main, [path, "--to", "torchtitan-toml", "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert err == ""
    assert not answer["exact"]
    assert "[parallelism]" in answer["text"]
    assert answer["nearest"]["iteration_s"] > 0
    assert {"approximated", "noted"} <= {remark["kind"] for remark in answer["remarks"]}


def test_a_plan_that_cannot_be_predicted_is_exported_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # No layer graphs are shipped for Falcon's blocks one after another.
    path = plan_file(tmp_path, "falcon.yaml", ("gpt3-2.7b", "falcon-2.7b"))
    assert run(export.main, [path]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("torchrun ")
    assert "model.parallel_block: true -> false" in err
    assert "cost: " in err


def test_an_export_comes_back_by_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = plan_file(tmp_path, "plan.yaml", ("checkpointed_layers: 4, ", ""))
    assert run(export.main, [path]) == 0
    script = tmp_path / "launch.sh"
    script.write_text(capsys.readouterr().out, encoding="utf-8")
    assert run(import_plan.main, [str(script)]) == 0
    out, err = capsys.readouterr()
    assert "assumed: hardware: l4-24gb, since no file of Megatron-LM names it" in err
    back = tmp_path / "back.yaml"
    back.write_text(out, encoding="utf-8")
    given, found = load_job(path), load_job(back)
    assert (found.workload, found.cluster) == (given.workload, given.cluster)
    assert found.plan.stages == given.plan.stages
    assert found.plan.engine == "megatron"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("none.sh", None, "there is no such file: check the path"),
        ("empty.json", "", "is empty"),
        ("list.json", "[]", "holds no JSON object"),
        ("bad.yaml", "distributed_type: TPU", "distributed_type: 'TPU' is not supported"),
        ("deep.json", "[" * 100_000, "correct the JSON|nested too deeply"),
        ("bytes.sh", b"\xff\xfe\x00", "is not text in UTF-8"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(
    name: str,
    text: str | bytes | None,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    assert run(import_plan.main, [str(path), "--model", "gpt3-2.7b"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {path}: ")
    assert any(word in err for word in words.split("|"))


def test_changes_of_an_imported_plan_are_told_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(import_plan.main, [str(SCRIPT), "--json"]) == 0
    said, told = capsys.readouterr()
    assert told == ""
    found = json.loads(said)
    assert run(import_plan.main, [str(SCRIPT)]) == 0
    written, told = capsys.readouterr()
    assert told.splitlines() == [*(f"read: {text}" for text in found["read"]), *found["remarks"]]
    mine, better = tmp_path / "mine.yaml", tmp_path / "better.yaml"
    mine.write_text(written, encoding="utf-8")
    assert read_yaml(mine) == found["plan"]
    assert run(tune.main, ["--from", str(mine), "--out", str(better), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    times = [told["iteration_s"], *(step["iteration_s"] for step in told["steps"])]
    assert len(times) > 2
    assert times == sorted(times, reverse=True)
    assert all(step["fits"] for step in told["steps"])
    assert told["alone"][0]["iteration_s"] == times[1]
    before, after = load_job(mine), load_job(better)
    assert (after.workload, after.cluster) == (before.workload, before.cluster)
    assert after.plan != before.plan
    assert after.plan.engine == before.plan.engine == "megatron"
    # Nothing is left to change that gains as much as a step has to.
    assert run(tune.main, ["--from", str(better), "--out", str(tmp_path / "x.yaml")]) == 0
    out = capsys.readouterr().out
    assert "  1. " not in out


def test_a_plan_that_does_not_fit_gets_the_change_that_makes_it_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(
        tmp_path,
        "large.yaml",
        ("model: gpt3-2.7b", "model: gpt3-7b"),
        ("checkpointed_layers: 4, ", ""),
        ("global_batch: 8", "global_batch: 16"),
        ("micro_batch: 1", "micro_batch: 2"),
    )
    out = tmp_path / "small.yaml"
    assert run(tune.main, ["--from", path, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "does not fit" in text.splitlines()[0]
    assert ", fits" in text
    assert load_job(out).plan.num_gpus == 4


def test_options_beside_a_plan_to_start_from_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path, "plan.yaml")
    assert run(tune.main, ["--from", path, "--model", "gpt3-7b", "--nodes", "2"]) == 2
    assert capsys.readouterr().err == (
        "error: --from: the plan file already determines --model, --nodes: "
        "leave these options out\n"
    )


def test_single_changes_keep_the_problem_and_are_valid(tmp_path: Path) -> None:
    job = load_job(plan_file(tmp_path, "plan.yaml"))
    changes = single_changes(job)
    assert len({change.job.plan for change in changes}) == len(changes) > 30
    assert {change.choice for change in changes} >= {
        "degrees",
        "micro_batches",
        "layers",
        "order",
        "zero",
        "checkpointed_layers",
        "offload_optimizer",
    }
    for change in changes:
        assert (change.job.workload, change.job.cluster) == (job.workload, job.cluster)
        assert change.job.plan.num_gpus == job.plan.num_gpus


TABLE = """\
id,hardware,nodes,gpus,system,model,flash,seq,vocab,dropout,global_batch,grad_accum,num_stages,\
layers,ckpt_layers,mbs,dp,tp,zero_wgo,offload_wgoa,iter_s,pred_iter_s,peak_alloc_mb,\
peak_reserved_mb,kind,source
megatron-l4-gpt2-1.3b-True,l4-24gb,1,2,megatron-lm,gpt2-1.3b,True,2048,50304,0,32,2,1,24 each,\
all,8,2,1,001,0,10.0,,,,made up,nobody
another,l4-24gb,1,2,megatron-lm,gpt2-1.3b,True,2048,50304,0,32,2,1,24 each,\
all,8,2,1,001,0,10.0,,,,made up,nobody
"""


def test_measured_runs_take_their_plans_from_launch_lines(tmp_path: Path) -> None:
    table = tmp_path / "end_to_end.csv"
    table.write_text(TABLE, encoding="utf-8")
    runs = read_end_to_end(table).runs
    (launched,) = launched_runs(runs, LINES)
    (described, _) = runs
    assert launched.name == "megatron-l4-gpt2-1.3b-True"
    assert launched.set == "l4-24gb, megatron-lm, launch lines"
    assert launched.plan == described.plan
    assert predicted_s(launched, launched.cluster.hardware) == pytest.approx(
        predicted_s(described, described.cluster.hardware)
    )
    with pytest.raises(InputError, match="has no file named after a run, such as"):
        launched_runs(runs, tmp_path)
    with pytest.raises(InputError, match="nosuch: is not a folder"):
        launched_runs(runs, tmp_path / "nosuch")
