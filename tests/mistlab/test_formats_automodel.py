"""NeMo AutoModel's recipes: pipelines, narrow GEMMs, strategies, and nodes of its own runs."""

import pytest

from mistlab.core.values import InputError
from tests.mistlab.launch_files import imported, texts

RECIPE = """
step_scheduler: {global_batch_size: 128, local_batch_size: 16}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: Qwen/Qwen3-8B
distributed: {strategy: fsdp2, pp_size: 1}
packed_sequence: {packed_sequence_size: 4096}
optimizer: {_target_: torch.optim.AdamW}
"""


def test_a_pipeline_divides_the_local_batch() -> None:
    piped = RECIPE.replace(
        "pp_size: 1", "pp_size: 2, pipeline: {pp_schedule: interleaved1f1b, pp_microbatch_size: 4}"
    )
    found = imported(piped, gpus_per_node=8)
    first, plan = found.job.plan.stages[0], found.job.plan
    assert (plan.num_stages, first.micro_batch, plan.micro_batches) == (2, 4, 8)
    ignored = texts(found, "ignored")
    assert "after every 16 sequences" in ignored["distributed.pipeline.pp_microbatch_size"]
    assert "predicted as 1f1b" in ignored["distributed.pipeline.pp_schedule"]
    older = RECIPE.replace("pp_size: 1}", "pp_size: 2}\nautopipeline: {pp_microbatch_size: 2}")
    assert imported(older, gpus_per_node=8).job.plan.stages[0].micro_batch == 2
    usual = imported(RECIPE.replace("pp_size: 1", "pp_size: 2"), gpus_per_node=8)
    assert usual.job.plan.stages[0].micro_batch == 1
    alone = imported(piped.replace("pp_size: 2", "pp_size: 1"), gpus_per_node=8)
    assert alone.job.plan.stages[0].micro_batch == 16
    with pytest.raises(InputError, match="pp_microbatch_size: 3 does not divide local_batch_size"):
        imported(
            piped.replace("size: 4,", "size: 4").replace("size: 4}", "size: 3}"), gpus_per_node=8
        )


@pytest.mark.parametrize(
    ("more", "precision", "engine"),
    [
        ("fp8: {enabled: true, recipe_name: tensorwise, filter_fqns: [lm_head]}", "fp8", "fsdp"),
        ("fp8: {enabled: true, recipe_name: rowwise}", "fp8", "fsdp-rowwise"),
        (
            "fp8: {enabled: true, recipe_name: rowwise_with_gw_hp}\ncompile: {enabled: true}",
            "fp8",
            "fsdp-compiled-rowwise",
        ),
        ("fp8: {enabled: false}\ncompile: {enabled: true}", "bf16", "fsdp-compiled"),
    ],
)
def test_narrow_gemms_are_read(more: str, precision: str, engine: str) -> None:
    found = imported(f"{RECIPE}{more}\n", gpus_per_node=8)
    assert (found.job.workload.precision, found.job.plan.engine) == (precision, engine)
    assert not texts(found, "ignored")


def test_a_backend_has_kernels_and_narrow_gemms() -> None:
    backend = "\n  backend: {attn: te, linear: te, te_fp8: {recipe: block}}\ndistributed:"
    found = imported(RECIPE.replace("\ndistributed:", backend), gpus_per_node=8)
    assert (found.job.workload.precision, found.job.plan.engine) == ("fp8", "fsdp-te")
    plain = RECIPE.replace("\ndistributed:", "\n  backend: {linear: torch}\ndistributed:")
    assert imported(plain, gpus_per_node=8).job.plan.engine == "fsdp"


def test_megatron_s_fsdp_is_an_engine_of_its_own() -> None:
    found = imported(RECIPE.replace("fsdp2", "megatron_fsdp"), gpus_per_node=8)
    assert (found.job.plan.engine, found.job.plan.stages[0].zero) == ("megatron-fsdp", 3)
    less = RECIPE.replace("fsdp2", "megatron_fsdp, zero_dp_strategy: 1")
    assert imported(less, gpus_per_node=8).job.plan.stages[0].zero == 1


@pytest.mark.parametrize("text", ["ci: {nodes: 4, time: '10'}", "benchmark: {num_nodes: 4}"])
def test_nodes_of_automodel_s_own_runs_are_assumed(text: str) -> None:
    recipe = f"{RECIPE.replace('128', '512')}{text}\n"
    found = imported(recipe, gpus_per_node=8)
    assert found.job.cluster.nodes == 4
    assert texts(found, "assumed")["nodes"].startswith("4, by ")
    assert imported(recipe, gpus_per_node=8, nodes=2).job.cluster.nodes == 2


@pytest.mark.parametrize("text", ["cluster_tag: gb200", "nproc_per_node: 4"])
def test_gpus_of_automodel_s_own_nodes_are_assumed(text: str) -> None:
    found = imported(f"{RECIPE}ci: {{nodes: 2, {text}}}\n")
    assert (found.job.cluster.nodes, found.job.cluster.gpus_per_node) == (2, 4)
    assert texts(found, "assumed")["gpus_per_node"] == "4, by ci"


def test_distillation_is_refused() -> None:
    text = f"{RECIPE}teacher_model: {{pretrained_model_name_or_path: Qwen/Qwen3-14B}}\n"
    with pytest.raises(InputError, match="teacher_model: trains by distillation"):
        imported(text, gpus_per_node=8)
