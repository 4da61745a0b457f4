import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mistlab import catalog
from mistlab.core.files import format_yaml, parse_yaml
from mistlab.core.values import FieldError, InputError, from_mapping
from mistlab.engines.engine import ENGINES
from mistlab.job.job import Job, dump_job, job_from_mapping, job_to_mapping, load_job
from mistlab.plan.named_spaces import SPACE_OF_FRAMEWORK, SPACES, space_of
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.workload import ModelSpec

PlanFile = dict[str, Any]


def stage(**changes: Any) -> Callable[[PlanFile], None]:
    return lambda plan_file: plan_file["plan"]["stages"][1].update(changes)


def section(name: str, **changes: Any) -> Callable[[PlanFile], None]:
    return lambda plan_file: plan_file[name].update(changes)


def model(**changes: Any) -> Callable[[PlanFile], None]:
    shape = {"family": "llama", "hidden": 768, "layers": 32, "heads": 12, **changes}
    return section("workload", model=shape)


def both(
    first: Callable[[PlanFile], None], second: Callable[[PlanFile], None]
) -> Callable[[PlanFile], None]:
    def change(plan_file: PlanFile) -> None:
        first(plan_file)
        second(plan_file)

    return change


BAD = {
    "layers missing": (
        stage(layers=14),
        "plan.stages: layers sum to 30, but the model has 32: give the remaining 2 to a stage",
    ),
    "layers too many": (
        stage(layers=20),
        "plan.stages: layers sum to 36, but the model has 32: take 4 away from a stage",
    ),
    "batch too large": (
        stage(micro_batch=2),
        (
            "plan.stages[1].micro_batch: 2 x data_parallel 2 x micro_batches 4 = 16, "
            "but global_batch is 8: give 1"
        ),
    ),
    "batch that does not divide": (
        section("workload", global_batch=12),
        (
            "plan.stages[0].micro_batch: 1 x data_parallel 2 x micro_batches 4 = 8, "
            "but global_batch is 12: give data_parallel and micro_batches whose product divides 12"
        ),
    ),
    "tensor parallel and heads": (
        both(model(heads=6), stage(data_parallel=1, tensor_parallel=4, micro_batch=2)),
        "plan.stages[1].tensor_parallel: 4 does not divide heads 6: give a divisor of 6",
    ),
    "tensor parallel and kv_heads": (
        both(model(kv_heads=3), stage(data_parallel=1, tensor_parallel=2, micro_batch=2)),
        "plan.stages[1].tensor_parallel: 2 does not divide kv_heads 3: give a divisor of 3",
    ),
    "tensor parallel and ffn": (
        both(model(ffn=2047), stage(data_parallel=1, tensor_parallel=2, micro_batch=2)),
        "plan.stages[1].tensor_parallel: 2 does not divide ffn 2047: give a divisor of 2047",
    ),
    "more GPUs than there are": (
        section("cluster", gpus_per_node=2),
        "plan.stages: take 4 GPUs, but the cluster has 2: lower data_parallel or tensor_parallel",
    ),
    "checkpoints": (
        stage(checkpointed_layers=17),
        "plan.stages[1].checkpointed_layers: 17 is more than the stage's 16 layers: give at most",
    ),
    "ratio above 1": (
        stage(offload={"optimizer": 1.5}),
        "plan.stages[1].offload.optimizer: 1.5 is not a ratio: give a number between 0 and 1",
    ),
    "negative ratio": (
        stage(offload={"activations": -0.25}),
        "plan.stages[1].offload.activations: -0.25 is not a ratio: give a number between 0 and 1",
    ),
    "NaN": (
        stage(offload={"weights": float("nan")}),
        "plan.stages[1].offload.weights: nan is not a finite number: give a number between 0 and 1",
    ),
    "bool for int": (
        stage(layers=True),
        "plan.stages[1].layers: true is not a whole number: give a whole number of at least 0",
    ),
    "unknown key of a stage": (
        stage(chekpointed_layers=1),
        (
            "plan.stages[1].chekpointed_layers: unknown key: did you mean 'checkpointed_layers' or "
            "'lean_layers'?"
        ),
    ),
    "unknown section": (
        lambda plan_file: plan_file.update(wrokload={}),
        "wrokload: unknown key: did you mean 'workload'?",
    ),
    "missing section": (lambda plan_file: plan_file.pop("plan"), "plan: missing: give the keys"),
    "missing key": (
        lambda plan_file: plan_file["workload"].pop("attention"),
        "workload.attention: missing: give one of flash, math",
    ),
    "section that is not a mapping": (
        lambda plan_file: plan_file.update(workload=3),
        "workload: 3 is not a mapping: give the keys model,",
    ),
    "unknown model": (
        section("workload", model="llama-7"),
        "workload.model: 'llama-7' is unknown: did you mean 'llama-7b'",
    ),
    "unknown hardware": (
        section("cluster", hardware="h100-80"),
        "cluster.hardware: 'h100-80' is unknown: did you mean 'h100-80gb'",
    ),
    "bad model": (model(layers=0), "workload.model.layers: 0 is too small: give"),
    "precision that the GPU lacks": (
        both(section("workload", precision="bf16"), section("cluster", hardware="v100-16gb")),
        "workload.precision: bf16 is not supported by GPU v100-16gb: give fp16 or fp32",
    ),
    "offloading by a baseline": (
        both(section("plan", engine="deepspeed"), stage(offload={"weights": 0.5})),
        "plan.stages[0].offload: optimizer 0.5, but engine deepspeed is modelled with everything",
    ),
    "sharded gradients by Megatron": (
        both(
            section("plan", engine="megatron"),
            lambda plan_file: [s.update(zero=2, offload={}) for s in plan_file["plan"]["stages"]],
        ),
        "plan.stages[0].zero: 2, but engine megatron shards optimizer state only: give 0 or 1",
    ),
    "sharded gradients by DeepSpeed in a pipeline": (
        both(
            section("plan", engine="deepspeed"),
            lambda plan_file: [s.update(zero=2, offload={}) for s in plan_file["plan"]["stages"]],
        ),
        "plan.stages[0].zero: 2, but engine deepspeed shards optimizer state only in a pipeline",
    ),
    "custom model without layers": (
        model(family="custom"),
        "workload.model.graph_file: missing: give the path of the traced model's JSON",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_plan_file_is_refused_with_path_value_and_remedy(
    plan_file: PlanFile, change: Callable[[PlanFile], None], message: str
) -> None:
    change(plan_file)
    with pytest.raises(FieldError) as caught:
        job_from_mapping(plan_file)
    assert str(caught.value).startswith(message)


def test_all_that_is_wrong_between_the_parts_is_said_at_once(plan_file: PlanFile) -> None:
    stage(layers=17, tensor_parallel=3)(plan_file)
    with pytest.raises(FieldError) as caught:
        job_from_mapping(plan_file)
    assert str(caught.value).split("; ") == [
        "plan.stages: layers sum to 33, but the model has 32: take 1 away from a stage",
        "plan.stages[1].tensor_parallel: 3 does not divide heads 32: give a divisor of 32",
        (
            "plan.stages: take 8 GPUs, but the cluster has 4: lower data_parallel or "
            "tensor_parallel, or raise cluster.nodes or cluster.gpus_per_node"
        ),
    ]


@pytest.mark.parametrize("content", [None, 3, []], ids=repr)
def test_what_is_no_mapping_is_refused(content: object) -> None:
    with pytest.raises(FieldError, match="is not a mapping: give the keys workload, cluster, plan"):
        job_from_mapping(content)


def test_a_launch_script_in_a_plan_files_place_is_told_its_command(tmp_path: Path) -> None:
    script = tmp_path / "launch.sh"
    script.write_text("torchrun pretrain_gpt.py --num-layers 2\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"launch\.sh: is no plan, .* make a plan .* import_plan"):
        load_job(script)


def test_a_frameworks_name_is_told_the_space_of_its_plans() -> None:
    with pytest.raises(
        InputError, match="'torchtitan' is unknown: give fsdp, the space of plans for torchtitan"
    ):
        space_of("torchtitan")
    assert {*SPACE_OF_FRAMEWORK.values()} <= SPACES.keys()
    assert not SPACE_OF_FRAMEWORK.keys() & SPACES.keys()


def test_a_plan_file_becomes_values(plan_file: PlanFile) -> None:
    job = job_from_mapping(plan_file)
    assert job.workload.model == catalog.model("gpt3-2.7b")
    assert job.workload.tokens == 8 * 4096
    assert job.cluster.hardware == catalog.hardware("l4-24gb")
    assert job.plan.stages[0].offload == Offload(optimizer=0.5)
    assert job.plan.engine == "mistlab"


def test_an_engine_for_adapters_is_read_as_a_workload_that_trains_them(plan_file: PlanFile) -> None:
    plan_file["workload"]["adapter_rank"] = 8
    for name, row in plan_file["plan"].items():
        if name == "stages":
            plan_file["plan"]["stages"] = [{**one, "offload": {}} for one in row]
    plan_file["plan"]["engine"] = "megatron-core-adapters"
    job = job_from_mapping(plan_file)
    assert job.plan.engine == "megatron-core"
    assert (job.workload.train, job.workload.rank) == ("adapters", 8)


def test_a_plan_may_use_fewer_gpus_than_there_are(plan_file: PlanFile) -> None:
    plan_file["cluster"].update(nodes=2, gpus_per_node=8)
    assert job_from_mapping(plan_file).plan.num_gpus == 4


def test_a_written_plan_file_is_the_one_that_was_read(plan_file: PlanFile) -> None:
    assert job_to_mapping(job_from_mapping(plan_file)) == plan_file


def test_errors_begin_with_the_name_of_the_file(tmp_path: Path, plan_file: PlanFile) -> None:
    path = tmp_path / "plan.yaml"
    plan_file["plan"]["engine"] = "mistlb"
    path.write_text(format_yaml(plan_file))
    with pytest.raises(InputError) as caught:
        load_job(path)
    expected = f"{path}: plan.engine: 'mistlb' is unknown: did you mean 'mistlab' or 'mist'?"
    assert str(caught.value) == expected


def test_a_number_may_have_an_exponent_but_no_quotes(tmp_path: Path, plan_file: PlanFile) -> None:
    path, text = tmp_path / "plan.yaml", format_yaml(plan_file)
    path.write_text(text.replace("optimizer: 0.5", "optimizer: 1e-3"))
    offloads = [stage.offload.optimizer for stage in load_job(path).plan.stages]
    assert 1e-3 in offloads
    path.write_text(text.replace("optimizer: 0.5", "optimizer: '1e-3'"))
    with pytest.raises(InputError, match=r"'1e-3' is text in YAML, .*: write 0\.001"):
        load_job(path)


RATIOS = st.floats(0, 1)
OFFLOADS = st.builds(
    Offload, weights=RATIOS, gradients=RATIOS, optimizer=RATIOS, activations=RATIOS
)
OVERRIDES = st.none() | st.floats(0.001, 1e6)
SMALL_MODELS = st.builds(
    ModelSpec.of,
    name=st.sampled_from(["", "my model", "gpt3-2.7b", "ja: nein"]),
    family=st.sampled_from(["gpt", "llama", "falcon"]),
    hidden=st.integers(1, 64).map(lambda units: 64 * units),
    layers=st.integers(4, 128),
    heads=st.sampled_from([4, 8, 16]),
    vocab=st.integers(1, 10**6),
    dropout=RATIOS,
    biases=st.booleans(),
)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Any well-formed job on one or two nodes, with a model of the catalogue or a new one."""
    model = draw(SMALL_MODELS | st.sampled_from(["gpt3-1.3b", "llama-7b"]).map(catalog.model))
    num_stages = draw(st.sampled_from([1, 2, 4]))
    cuts = draw(st.sets(st.integers(1, model.layers - 1), max_size=3, min_size=3))
    ends = [*sorted(cuts)[: num_stages - 1], model.layers]
    starts = [0, *ends[:-1]]
    micro_batches = draw(st.integers(1, 9))
    engine = draw(st.sampled_from(["mistlab", "megatron", "deepspeed"]))
    highest = ENGINES[engine].highest_zero_of(in_pipeline=num_stages > 1)
    plan = Plan(
        engine=engine,
        micro_batches=micro_batches,
        stages=tuple(
            draw(stages(end - start, engine, highest))
            for start, end in zip(starts, ends, strict=True)
        ),
    )
    hardware = catalog.hardware(draw(st.sampled_from(catalog.hardware_names())))
    workload = {
        "model": model,
        "sequence_length": draw(st.integers(1, 10**5)),
        "global_batch": 4 * micro_batches,
        "attention": draw(st.sampled_from(["flash", "math"])),
        "precision": draw(st.sampled_from(["fp16", "fp32"])),
    }
    gpus_per_node = min(8, hardware.node.gpus)
    cluster = {
        "hardware": hardware,
        "nodes": 16 // gpus_per_node,
        "gpus_per_node": gpus_per_node,
        "memory_gib": draw(st.none() | st.floats(0.001, 1500)),
        "inter_node_gbytes_per_s": draw(OVERRIDES),
    }
    return from_mapping(Job, {"workload": workload, "cluster": cluster, "plan": plan})


def stages(layers: int, engine: str, highest: int) -> st.SearchStrategy[StagePlan]:
    return st.sampled_from([1, 2, 4]).flatmap(
        lambda data_parallel: st.builds(
            StagePlan,
            layers=st.just(layers),
            data_parallel=st.just(data_parallel),
            tensor_parallel=st.sampled_from([1, 2, 4][: 3 - data_parallel // 2]),
            micro_batch=st.just(4 // data_parallel),
            zero=st.integers(0, highest),
            checkpointed_layers=st.integers(0, layers),
            offload=OFFLOADS if engine == "mistlab" else st.just(Offload()),
        )
    )


@given(job=jobs())
@settings(deadline=None)
def test_a_job_comes_back_from_yaml_and_json(job: Job) -> None:
    mapping = job_to_mapping(job)
    assert job_from_mapping(parse_yaml(format_yaml(mapping), "text")) == job
    assert job_from_mapping(json.loads(json.dumps(mapping))) == job


def test_a_job_comes_back_from_its_file(tmp_path: Path, plan_file: PlanFile) -> None:
    job = job_from_mapping(plan_file)
    dump_job(job, tmp_path / "plan.yaml")
    assert load_job(tmp_path / "plan.yaml") == job
