"""A plan names the checkpoint that its user or its file named, and exports train that one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mistlab import catalog
from mistlab.core.values import InputError, to_mapping
from mistlab.export.given import Given
from mistlab.export.target import Target
from mistlab.formats.checkpoints import released, repository_of
from mistlab.formats.file_formats import FORMATS
from mistlab.formats.recipes.component_exports import AUTOMODEL, TORCHTUNE
from mistlab.formats.recipes.trainer_recipes import AXOLOTL, LLAMA_FACTORY, TRL
from mistlab.job.job import (
    Job,
    dump_job,
    job_from_mapping,
    job_to_mapping,
    load_job,
    model_from,
    plain_model,
)
from mistlab.plan.workload import ModelSpec
from mistlab.shell.session import LaunchFile

INSTRUCT = "meta-llama/Llama-3.1-8B-Instruct"
HERE = Path()
RECIPE = """
base_model: {name}
datasets: [{{path: mine, type: alpaca}}]
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""


GIVEN = Given(hardware=catalog.hardware("h100-80gb"), gpus_per_node=1)
OF_AUTOMODEL = """
model: {pretrained_model_name_or_path: NAME}
dataset: {seq_length: 2048}
step_scheduler: {global_batch_size: 8, local_batch_size: 1}
"""


def imported(name: str, model: ModelSpec | None = None) -> Job:
    given = replace(GIVEN, model=model)
    return FORMATS["axolotl"].read(LaunchFile(text=RECIPE.format(name=name)), given).job


@pytest.mark.parametrize("name", [INSTRUCT, "me/unknown-13b"])
def test_a_given_model_has_not_the_checkpoint_of_the_file(name: str) -> None:
    model = catalog.model("qwen3-8b")
    recipe = LaunchFile(text=OF_AUTOMODEL.replace("NAME", name))
    of_automodel = FORMATS["nemo-automodel"].read(recipe, replace(GIVEN, model=model)).job
    for job in (imported(name, model), of_automodel):
        assert job.workload.model.checkpoint == ""
        assert "Qwen/Qwen3-8B" in TRL.write(job)
    named = replace(model, checkpoint="me/tuned")
    assert imported(name, named).workload.model.checkpoint == "me/tuned"


def test_a_plan_file_keeps_the_checkpoint_of_a_traced_model(tmp_path: Path) -> None:
    spec = to_mapping(replace(catalog.model("qwen3-8b"), name="mine", family="custom"))
    (tmp_path / "mine.json").write_text(json.dumps({"spec": spec}))
    traced = model_from("mine.json", tmp_path)
    assert plain_model(traced, tmp_path) == str(tmp_path / "mine.json")
    trained = replace(traced, checkpoint="me/mine")
    again = model_from(plain_model(trained, tmp_path), tmp_path)
    assert (again, again.checkpoint) == (trained, "me/mine")


@pytest.mark.parametrize("target", [AXOLOTL, LLAMA_FACTORY, TRL, AUTOMODEL, TORCHTUNE])
@pytest.mark.parametrize("name", [INSTRUCT, "NousResearch/Meta-Llama-3.1-8B"])
def test_exports_train_the_checkpoint_of_the_imported_file(target: Target, name: str) -> None:
    text = target.write(imported(name))
    assert name in text
    assert "Meta-Llama-3-8B" not in text


def test_torchtunes_function_is_that_of_the_release() -> None:
    assert "llama3_1.llama3_1_8b" in TORCHTUNE.write(imported(INSTRUCT))
    assert "llama3.llama3_8b" in TORCHTUNE.write(imported("meta-llama/Meta-Llama-3-8B"))


@pytest.mark.parametrize("name", [INSTRUCT, "mistralai/Mistral-7B-v0.3", "Qwen/Qwen3-8B"])
def test_a_plan_file_keeps_the_name_of_the_weights(name: str, tmp_path: Path) -> None:
    job = imported(name)
    assert job.workload.model.checkpoint == name
    dump_job(job, tmp_path / "plan.yaml")
    again = load_job(tmp_path / "plan.yaml")
    assert again == job
    assert again.workload.model.checkpoint == name
    assert again.workload.model.context == job.workload.model.context


def test_names_given_for_model_are_kept_with_their_context() -> None:
    known = released(INSTRUCT)
    assert known is not None
    plain = plain_model(known[0], HERE)
    assert plain == {"name": "llama3-8b", "checkpoint": INSTRUCT, "context": 131_072}
    assert model_from(plain, HERE) == known[0]
    assert model_from(plain, HERE).context == 131_072


def test_a_plan_without_a_checkpoint_is_written_and_read_as_before() -> None:
    job = imported("meta-llama/Meta-Llama-3-8B")
    mapping = job_to_mapping(job)
    mapping["workload"]["model"] = "llama3-8b"
    old = job_from_mapping(mapping)
    assert old.workload.model.checkpoint == ""
    assert job_to_mapping(old)["workload"]["model"] == "llama3-8b"
    assert "meta-llama/Meta-Llama-3-8B" in TRL.write(old)


def test_a_tuned_release_without_its_owner_is_left_to_the_user() -> None:
    for name, repository in [
        ("Llama-3.1-8B-Instruct", None),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
    ]:
        known = released(name)
        assert known is not None
        assert repository_of(known[0]) == repository


def test_a_mapping_of_an_unknown_name_alone_is_refused() -> None:
    with pytest.raises(InputError, match="llama9"):
        model_from({"name": "llama9", "checkpoint": "me/mine"}, HERE)
    with pytest.raises(InputError, match=r"workload\.model\.checkpoint"):
        model_from({"name": "llama3-8b", "checkpoint": 5}, HERE)
