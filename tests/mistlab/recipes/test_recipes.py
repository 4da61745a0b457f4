"""Plans as recipes for fine-tuning: each comes back from the framework's reader, is written in keys
that the framework has, or is refused by field, value and remedy.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import yaml

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.given import Given, Imported
from mistlab.export.nearest import nearest
from mistlab.export.rules import with_values, with_workload
from mistlab.export.target import Target, read_back
from mistlab.formats.file_formats import FORMATS, format_of
from mistlab.formats.recipes.component_exports import BUILDERS
from mistlab.formats.recipes.exports import EXPORTS, RECIPES
from mistlab.job.job import Job, job_from_mapping
from mistlab.shell.session import LaunchFile
from tests.mistlab.recipes.drawn_recipes import drawn_recipes
from tests.mistlab.recipes.recipe_keys import LIST, components_of, written_keys

ALL = tuple(RECIPES)
FEW, MANY = 12, 100
KEYS = yaml.safe_load(LIST.read_text(encoding="utf-8"))
# The formats that recognise recipes, where they are called otherwise.
FORMAT_OF = {"trl": "hf-trainer", "automodel": "nemo-automodel"}


def read_as_file(target: Target, text: str, job: Job) -> Imported:
    """What ``import_plan`` reads of a recipe, whose model and GPUs a user gives."""
    source = LaunchFile(text=text, name="recipe.yaml")
    format_found = format_of(source)
    assert format_found is FORMATS[FORMAT_OF.get(target.name, target.name)]
    cluster = job.cluster
    given = Given(
        hardware=cluster.hardware,
        model=job.workload.model,
        nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        attention=job.workload.attention if "attention" in target.beside else None,
    )
    return format_found.read(source, given)


def check_round_trips(name: str, count: int, seed: int) -> None:
    target = RECIPES[name]
    for job in drawn_recipes(target, count, seed):
        found = nearest(job, target)
        assert found.is_exact, found.remarks
        assert found.job == job
        text = target.write(job)
        assert read_back(target, text, job) == job
        imported = read_as_file(target, text, job)
        assert imported.job == job
        told = [one for one in imported.remarks if one.kind in ("ignored", "contradicting")]
        assert [one for one in told if not re.search("liger|^recipe$", one.choice)] == []


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_gives_the_plan_and_the_workload_again(name: str) -> None:
    check_round_trips(name, FEW, seed=36)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_hundred_recipes_give_their_plans_again(name: str) -> None:
    check_round_trips(name, MANY, seed=122)


def strange_keys(name: str, written: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """The keys of a recipe that the framework's classes lack, or hold in another type."""
    known = KEYS[name]["keys"]
    for path, values in written.items():
        if path not in known:
            yield f"{path} is no key"
        elif problems := [value for value in values if not is_of(known[path], value)]:
            yield f"{path} is {known[path]}, not {problems[0]!r}"


# What a declared type says that takes values of a type; texts may be members of enumerations.
TYPES: Mapping[type, str] = {
    type(None): "None|Optional",
    bool: r"bool|\w+Mode",
    int: "int|float",
    float: "float",
    list: "[Ll]ist",
    dict: r"dict|\w*(Config|Policy|Provider|PEFT)",
}


def is_of(declared: str, value: Any) -> bool:
    """Whether a value is of the type that a framework's class declares for its key."""
    if not declared or "Any" in declared:
        return True
    for kind, words in TYPES.items():
        if isinstance(value, kind):
            return re.search(rf"\b({words})\b", declared) is not None
    # A text is a string, one of several words, or the name of an enumeration's member.
    names = re.findall(r"\b[A-Z]\w+\b", re.sub(r"Literal\[.*?\]", "", declared))
    is_text = re.search(r"\bstr\b|\bCallable\b|dtype\b", declared) is not None
    return value in re.findall(r"'(\w+)'", declared) or is_text or bool({*names} - {"None"})


@pytest.mark.parametrize("name", ALL)
def test_recipes_have_keys_that_the_framework_has(name: str) -> None:
    assert list(strange_keys(name, written_keys(name))) == []
    assert written_keys(name).keys() == KEYS[name]["keys"].keys()
    assert components_of(name) == {*KEYS[name]["components"]}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", str(KEYS[name]["date"]))


def test_a_wrong_key_or_type_is_told() -> None:
    written = {"bf16": (True, "yes"), "lora_rank": (8,), "max_length": (512,), "optim": ("adamw",)}
    assert list(strange_keys("trl", written)) == ["bf16 is bool, not 'yes'", "lora_rank is no key"]


# Four GPUs that share the states of Llama 3 8B.
PLAIN = job_from_mapping(
    {
        "workload": {
            "model": "llama3-8b",
            "sequence_length": 2048,
            "global_batch": 16,
            "attention": "flash",
            "precision": "bf16",
        },
        "cluster": {"hardware": "h100-80gb", "nodes": 1, "gpus_per_node": 4},
        "plan": {
            "engine": "fsdp",
            "micro_batches": 4,
            "stages": [
                {
                    "layers": 32,
                    "data_parallel": 4,
                    "tensor_parallel": 1,
                    "micro_batch": 1,
                    "zero": 3,
                }
            ],
        },
    }
)


def with_degrees(**degrees: int) -> Job:
    """The plain job under the engine of all plans, on ranks of other degrees."""
    values = {"data_parallel": 1, "zero": 0, **degrees}
    stage = PLAIN.plan.stages[0].with_values(values)
    plan = replace(PLAIN.plan, engine="mistlab", micro_batches=16, stages=(stage,))
    return replace(PLAIN, plan=plan)


def in_stages() -> Job:
    stage = PLAIN.plan.stages[0].with_values({"layers": 16, "data_parallel": 2, "zero": 0})
    plan = replace(PLAIN.plan, engine="mistlab", micro_batches=8, stages=(stage, stage))
    return replace(PLAIN, plan=plan)


EIGHT_BITS = {"train": "adapters", "base": "8bit"}
PURE_FP16 = {"precision": "fp16", "states": "16bit"}
OF_REPLICAS = ("axolotl", "llama-factory", "trl", "torchtune")
OF_TRAINER = OF_REPLICAS[:3]


@pytest.mark.parametrize("name", OF_REPLICAS)
def test_meshes_that_a_recipe_cannot_say_are_refused(name: str) -> None:
    target = RECIPES[name]
    with pytest.raises(InputError, match=r"plan\.stages: 2 stages, .*: give one stage, or"):
        nearest(in_stages(), target)
    for axis in ("tensor_parallel", "context_parallel"):
        with pytest.raises(
            InputError, match=rf"plan\.stages\[0\]\.{axis}: 4, .*: give {axis}: 1, and"
        ):
            nearest(with_degrees(**{axis: 4}), target)


@pytest.mark.parametrize("name", OF_TRAINER)
def test_eight_bit_weights_that_are_sharded_are_refused(name: str) -> None:
    job = with_workload(PLAIN, train="adapters", base="8bit")
    with pytest.raises(
        InputError, match=r"workload\.base: 8bit, .* \(zero: 3\), .*: give base: 4bit, or zero: 0"
    ):
        nearest(job, RECIPES[name])


@pytest.mark.parametrize("name", OF_REPLICAS)
@pytest.mark.parametrize(
    ("values", "choice", "text"),
    [
        ({"zero": 1}, "zero", "ZeRO-1 -> ZeRO-2: .* give zero: 2 or 3"),
        ({"checkpointed_layers": 9}, "checkpointed_layers", "9 -> 32: .* give all blocks, or 0"),
        ({"offload_optimizer": 0.5}, "offload.weights", r"0\.0% -> 100\.0%: .* give 1 or 0"),
    ],
)
def test_savings_take_their_nearest_form_with_a_remedy(
    name: str, values: dict[str, float], choice: str, text: str
) -> None:
    plan = replace(PLAIN.plan, engine="mistlab")
    found = nearest(with_values(replace(PLAIN, plan=plan), values), RECIPES[name])
    (remark,) = (one for one in found.remarks if one.choice == choice)
    assert re.match(text, remark.text), remark.text
    assert not found.is_exact


@pytest.mark.parametrize("model", BUILDERS)
def test_torchtune_s_builders_are_read_as_their_models(model: str) -> None:
    workload = replace(PLAIN.workload, model=catalog.model(model), states="16bit")
    stage = PLAIN.plan.stages[0].with_values({"layers": workload.model.layers})
    plan = replace(PLAIN.plan, stages=(stage,), engine="trainer")
    job = replace(PLAIN, workload=workload, plan=plan)
    target = RECIPES["torchtune"]
    text = target.write(nearest(job, target).job)
    given = Given(hardware=PLAIN.cluster.hardware, nodes=1, gpus_per_node=4)
    assert target.read(text, given).job == job


@pytest.mark.parametrize(
    ("name", "changed", "refused"),
    [
        ("torchtune", EIGHT_BITS, r"workload\.base: 8bit, .*give base: 4bit"),
        ("torchtune", {"model": "falcon-7b"}, r"workload\.model: falcon-7b has no .*: give one"),
        ("automodel", EIGHT_BITS, r"workload\.base: 8bit, .*give base: 4bit"),
    ],
)
def test_workloads_that_a_recipe_cannot_say_are_refused(
    name: str, changed: dict[str, Any], refused: str
) -> None:
    if "model" in changed:
        changed = {"model": catalog.model(changed["model"])}
    with pytest.raises(InputError, match=refused):
        nearest(with_workload(PLAIN, **changed), RECIPES[name])


@pytest.mark.parametrize(
    ("name", "changed", "choice", "text"),
    [
        (
            "torchtune",
            {"states": "mixed"},
            "states",
            "mixed -> 16bit: .* data type of the weights",
        ),
        ("torchtune", {"attention": "math"}, "attention", "math -> flash: .* SDPA: give"),
        ("torchtune", {"precision": "fp16"}, "precision", "fp16 -> bf16: .* give precision: bf16"),
        ("automodel", {"train": "adapters"}, "states", "mixed -> 16bit: .* adapters' states"),
        ("trl", PURE_FP16, "states", "16bit -> mixed: .* bf16 only"),
        ("axolotl", {"optimizer": "adamw-bf16"}, "optimizer", "adamw-bf16 -> adamw: "),
    ],
)
def test_workloads_take_their_nearest_form_with_a_remark(
    name: str, changed: dict[str, Any], choice: str, text: str
) -> None:
    any_plan = replace(PLAIN, plan=replace(PLAIN.plan, engine="mistlab"))
    found = nearest(with_workload(any_plan, **changed), RECIPES[name])
    (remark,) = (one for one in found.remarks if one.choice == choice)
    assert re.match(text, remark.text), remark.text


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({"model": catalog.model("nemotron-h-8b")}, r"workload\.model: nemotron-h-8b is a hybrid"),
        ({"precision": "fp32"}, r"workload\.precision: fp32, .*: give precision: bf16, or export"),
        ({"precision": "tf32"}, r"workload\.precision: .*: give precision: bf16, or export"),
        ({"train": "adapters", "base": "4bit"}, r"workload\.base: 4bit, .*: give base: 16bit, or"),
    ],
)
def test_megatron_bridge_refuses_what_its_recipes_do_otherwise(
    changed: dict[str, Any], refused: str
) -> None:
    plan = replace(PLAIN.plan, engine="mistlab")
    layers = changed.get("model", PLAIN.workload.model).layers
    stages = tuple(stage.with_values({"layers": layers}) for stage in plan.stages)
    workload = replace(PLAIN.workload, **changed)
    job = replace(PLAIN, workload=workload, plan=replace(plan, stages=stages))
    with pytest.raises(InputError, match=refused):
        nearest(job, RECIPES["megatron-bridge"])


def test_megatron_bridge_has_pipelines_and_its_own_engine() -> None:
    target, job = RECIPES["megatron-bridge"], in_stages()
    job = replace(job, plan=replace(job.plan, engine="megatron-bridge"))
    found = nearest(job, target)
    assert found.is_exact
    assert found.job.plan.engine == "megatron-bridge"
    text = target.write(found.job)
    assert "pipeline_model_parallel_size: 2" in text
    assert read_back(target, text, found.job) == found.job


def test_whole_states_are_whole_in_both_sections_of_megatron_bridge() -> None:
    target, job = RECIPES["megatron-bridge"], in_stages()
    plan = replace(
        job.plan,
        engine="megatron-bridge",
        stages=tuple(stage.with_values({"zero": 0}) for stage in job.plan.stages),
    )
    written = nearest(replace(job, plan=plan), target).job
    text = target.write(written)
    assert text.count("use_distributed_optimizer: false") == len(("ddp", "optimizer"))
    assert read_back(target, text, written) == written


def test_automodel_has_tensor_and_context_ranks_and_no_pipelines() -> None:
    target = RECIPES["automodel"]
    found = nearest(with_degrees(tensor_parallel=2, context_parallel=2), target)
    text = target.write(found.job)
    assert "tp_size: 2" in text
    assert "cp_size: 2" in text
    with pytest.raises(InputError, match=r"plan\.stages: 2 stages, .*: give one stage, or"):
        nearest(in_stages(), target)


def test_a_left_out_rank_is_the_usual_one_and_no_loss() -> None:
    job = with_workload(PLAIN, train="adapters")
    found = nearest(job, RECIPES["trl"])
    assert found.is_exact
    assert found.job.workload.adapter_rank == 16


@pytest.mark.parametrize("name", ALL)
def test_the_weights_of_a_catalogue_model_are_named(name: str) -> None:
    text = RECIPES[name].write(nearest(PLAIN, RECIPES[name]).job)
    assert "llama3" in text.lower().replace("-", "").replace("_", "")
    given = Given(hardware=PLAIN.cluster.hardware, nodes=1, gpus_per_node=4)
    if name == "megatron-bridge":
        with pytest.raises(InputError, match=r"only changes a recipe in Python: .* by --model"):
            RECIPES[name].read(text, given)
        return
    assert RECIPES[name].read(text, given).job.workload.model == PLAIN.workload.model


def test_recipes_are_beside_the_frameworks() -> None:
    assert set(EXPORTS) > set(RECIPES)
    assert all(name == EXPORTS[name].name for name in EXPORTS)
