import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mistlab import catalog
from mistlab.core.files import read_yaml, write_yaml
from mistlab.core.values import InputError, to_mapping
from mistlab.job.job import (
    dump_job,
    job_from_mapping,
    job_to_mapping,
    load_job,
    model_from,
)
from mistlab.plan.named_spaces import space_of
from mistlab.plan.space_files import space_from
from mistlab.plan.workload import ModelSpec

SPEC = ModelSpec.of(name="mine", family="custom", hidden=256, layers=32, heads=8)
PlanFile = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of plans beside one of traced models and one of hardware files."""
    for name in ("plans", "models", "rigs"):
        (tmp_path / name).mkdir()
    spec = to_mapping(SPEC, omit_defaults=True)
    (tmp_path / "models" / "mine.json").write_text(json.dumps({"spec": spec, "graphs": []}))
    return tmp_path


def written(folder: Path, plan_file: PlanFile, **references: str) -> Path:
    plan_file["workload"]["model"] = references.get("model", "gpt3-2.7b")
    plan_file["cluster"]["hardware"] = references.get("hardware", "l4-24gb")
    path = folder / "plans" / "plan.yaml"
    write_yaml(plan_file, path)
    return path


def test_a_traced_model_is_found_from_the_folder_of_the_plan(
    folder: Path, plan_file: PlanFile
) -> None:
    job = load_job(written(folder, plan_file, model="../models/mine.json"))
    graph_file = str(folder / "models" / "mine.json")
    assert job.workload.model == replace(SPEC, graph_file=graph_file)


def test_a_model_s_mapping_may_be_a_file_of_its_own(folder: Path, plan_file: PlanFile) -> None:
    mapping = {"family": "gpt", "hidden": 256, "layers": 32, "heads": 8}
    write_yaml(mapping, folder / "models" / "mine.yaml")
    job = load_job(written(folder, plan_file, model="../models/mine.yaml"))
    assert job.workload.model == ModelSpec.of(family="gpt", hidden=256, layers=32, heads=8)
    dump_job(job, folder / "elsewhere.yaml")
    assert load_job(folder / "elsewhere.yaml") == job

    write_yaml({**mapping, "heads": 0}, folder / "models" / "mine.yaml")
    with pytest.raises(InputError, match=r"workload.model: .*mine.yaml: .*heads"):
        load_job(folder / "plans" / "plan.yaml")


def test_a_job_with_a_traced_model_comes_back_from_another_folder(
    folder: Path, plan_file: PlanFile
) -> None:
    job = load_job(written(folder, plan_file, model="../models/mine.json"))
    dump_job(job, folder / "elsewhere.yaml")
    assert load_job(folder / "elsewhere.yaml") == job


def test_relative_paths_stay_relative(
    folder: Path, plan_file: PlanFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(folder, plan_file, model="../models/mine.json")
    monkeypatch.chdir(folder)
    job = load_job("plans/plan.yaml")
    assert job.workload.model.graph_file == "models/mine.json"
    assert job_to_mapping(job, Path("plans"))["workload"]["model"] == "../models/mine.json"
    dump_job(job, "elsewhere.yaml")
    assert read_yaml(Path("elsewhere.yaml"))["workload"]["model"] == "models/mine.json"
    assert load_job("elsewhere.yaml") == job


def test_a_changed_copy_of_a_traced_model_is_written_as_a_mapping(
    folder: Path, plan_file: PlanFile
) -> None:
    job = load_job(written(folder, plan_file, model="../models/mine.json"))
    changed = replace(job.workload.model, vocab=512)
    other = replace(job, workload=replace(job.workload, model=changed))
    dump_job(other, folder / "plans" / "other.yaml")
    assert load_job(folder / "plans" / "other.yaml") == other


def test_a_changed_model_of_the_catalogue_is_written_as_a_mapping(plan_file: PlanFile) -> None:
    job = job_from_mapping(plan_file)
    changed = replace(job.workload.model, vocab=512)
    mapping = job_to_mapping(replace(job, workload=replace(job.workload, model=changed)))
    assert mapping["workload"]["model"]["vocab"] == 512
    assert job_from_mapping(mapping).workload.model == changed


def test_a_hardware_file_is_written_as_its_content(folder: Path, plan_file: PlanFile) -> None:
    mine = replace(catalog.hardware("l4-24gb"), name="mine")
    write_yaml(to_mapping(mine), folder / "rigs" / "mine.yaml")
    job = load_job(written(folder, plan_file, hardware="../rigs/mine.yaml"))
    assert job.cluster.hardware == mine
    (folder / "rigs" / "mine.yaml").unlink()
    assert job_from_mapping(job_to_mapping(job)) == job


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "meta-llama/Llama-3.1-8B",
            "nothing is fetched: give a catalogue name",
        ),
        ("models/none.json", "there is no such file"),
        ("./none/model", "there is no such file"),
    ],
)
def test_a_name_of_hugging_face_is_told_from_a_file(folder: Path, name: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        model_from(name, folder)


MODEL_FILES = {
    "missing": (None, "there is no such file: check the path"),
    "empty": ("", "is empty"),
    "no JSON": ("{", "line 1, column 2: "),
    "no spec": ("{}", "spec: missing, as is model_type: give the JSON file of a traced model"),
    "bad spec": ('{"spec": {"family": "gpt", "hiden": 1}}', "spec.hiden: unknown key: did you"),
    "null spec": ('{"spec": null}', "spec: null is not a mapping: give the keys"),
    "known family": (
        '{"spec": {"family": "gpt", "hidden": 64, "layers": 1, "heads": 1}}',
        "graph_file: ",
    ),
}


@pytest.mark.parametrize(("content", "problem"), MODEL_FILES.values(), ids=MODEL_FILES.keys())
def test_a_bad_traced_model_is_refused(
    folder: Path, plan_file: PlanFile, content: str | None, problem: str
) -> None:
    traced = folder / "models" / "bad.json"
    if content is not None:
        traced.write_text(content)
    path = written(folder, plan_file, model="../models/bad.json")
    with pytest.raises(InputError) as caught:
        load_job(path)
    assert str(caught.value).startswith(f"{path}: workload.model: {traced}: {problem}")


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "there is no such file"), ("name: mine\n", "gpu: missing: give the keys memory_gib")],
    ids=["missing", "incomplete"],
)
def test_a_bad_hardware_file_is_refused(
    folder: Path, plan_file: PlanFile, content: str | None, problem: str
) -> None:
    rig = folder / "rigs" / "bad.yaml"
    if content is not None:
        rig.write_text(content)
    path = written(folder, plan_file, hardware="../rigs/bad.yaml")
    with pytest.raises(InputError) as caught:
        load_job(path)
    assert str(caught.value).startswith(f"{path}: cluster.hardware: {rig}: {problem}")


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ("workload", "model", "workload.model: 7 is not a model: give a catalogue name, a path"),
        ("cluster", "hardware", "cluster.hardware: 7 is not hardware: give a catalogue name, p"),
    ],
)
def test_a_reference_is_a_text_or_a_mapping(
    plan_file: PlanFile, section: str, key: str, message: str
) -> None:
    plan_file[section][key] = 7
    with pytest.raises(InputError, match=message):
        job_from_mapping(plan_file)


def test_an_order_file_is_found_from_the_folder_of_the_plan(
    folder: Path, plan_file: PlanFile
) -> None:
    (folder / "orders").mkdir()
    (folder / "orders" / "mine").write_text("Fm0 Bm0 Fm1 Bm1 Fm2 Bm2 Fm3 Bm3\n" * 2)
    plan_file["plan"]["order"] = "../orders/mine"
    job = load_job(written(folder, plan_file))
    assert job.plan.order == str(folder / "orders" / "mine")
    dump_job(job, folder / "orders" / "plan.yaml")
    assert read_yaml(folder / "orders" / "plan.yaml")["plan"]["order"] == str(
        folder / "orders" / "mine"
    )
    assert load_job(folder / "orders" / "plan.yaml") == job


def test_a_relative_order_is_written_relative_to_the_new_file(
    folder: Path, plan_file: PlanFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "mine.txt").write_text("Fm0 Bm0 Fm1 Bm1 Fm2 Bm2 Fm3 Bm3\n" * 2)
    plan_file["plan"]["order"] = "./mine.txt"
    job = job_from_mapping(
        {**plan_file, "workload": {**plan_file["workload"], "model": "gpt3-2.7b"}}
    )
    dump_job(job, Path("plans") / "plan.yaml")
    assert read_yaml(Path("plans") / "plan.yaml")["plan"]["order"] == "../mine.txt"
    assert load_job(Path("plans") / "plan.yaml") == job
    assert job_to_mapping(job)["plan"]["order"] == "mine.txt"
    assert "order" not in job_to_mapping(replace(job, plan=replace(job.plan, order="1f1b")))["plan"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"order": "no/such"}, r"plan.order: .*no/such: cannot be read \(No such file"),
        (
            {"order": "1f1"},
            r"plan.order: '1f1' is not a known order, .*: did you mean '1f1b'\?",
        ),
        ({"order": 3}, "plan.order: 3 is not text"),
        (
            {"order": "./x.txt", "engine": "megatron"},
            "plan.order: .*x.txt, but engine megatron does not run it here: give 1f1b, inter",
        ),
    ],
)
def test_an_order_that_a_plan_cannot_have_is_refused(
    folder: Path, plan_file: PlanFile, changes: dict[str, object], problem: str
) -> None:
    plan_file["plan"] |= changes
    for stage in plan_file["plan"]["stages"]:
        del stage["offload"]
    with pytest.raises(InputError, match=problem):
        load_job(written(folder, plan_file))


def test_a_space_is_a_name_a_mapping_or_a_file_that_keeps_what_it_does_not_list(
    tmp_path: Path,
) -> None:
    own = {"like": "mist", "name": "own", "zero": [2], "offload": {"optimizer": [0, 0.5]}}
    base = space_of("mist")
    offload = replace(base.offload, optimizer=(0.0, 0.5))
    wanted = replace(base, name="own", zero=(2,), offload=offload)
    assert space_from("mist", tmp_path) == base
    assert space_from(own, tmp_path) == wanted
    write_yaml(own, tmp_path / "own.yaml")
    assert space_from("own.yaml", tmp_path) == wanted


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"like": "mist"}, "own.yaml: name: missing: give the search space a name"),
        ({"like": "mst", "name": "a"}, "own.yaml: like: space 'mst' is unknown: did you mean"),
        ({"like": "mist", "name": "a", "zeros": [1]}, "own.yaml: zeros: unknown key: did you"),
        ({"name": "a"}, "is not a search space: give a space's name"),
    ],
)
def test_a_bad_space_file_is_named_with_its_key(
    content: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_yaml(content, tmp_path / "own.yaml")
    with pytest.raises(InputError, match=re.escape(message)):
        space_from("own.yaml", tmp_path)
