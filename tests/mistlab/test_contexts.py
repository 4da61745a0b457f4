"""The context of a model: as configurations say it, in plan files, and under longer sequences."""

from dataclasses import replace
from typing import Any

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.huggingface.configurations import model_of_config
from mistlab.job.job import Job, job_from_mapping, job_to_mapping
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import ModelSpec, Workload
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

CLUSTER = Cluster(hardware=catalog.hardware("a100-80gb"), nodes=1, gpus_per_node=8)


def job_of(work: Workload) -> Job:
    stage = StagePlan(
        layers=work.model.layers, data_parallel=8, tensor_parallel=1, micro_batch=1, zero=3
    )
    plan = Plan(micro_batches=work.global_batch // 8, stages=(stage,))
    return Job(workload=work, cluster=CLUSTER, plan=plan)


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"model_type": "llama"}, None),
        ({"model_type": "llama", "max_position_embeddings": 8192}, 8192),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
        ({"model_type": "roberta", "max_position_embeddings": 514}, 512),
        (
            {
                "model_type": "qwen2",
                "max_position_embeddings": 32768,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        (
            {
                "model_type": "llama",
                "max_position_embeddings": 4096,
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            16384,
        ),
        (
            {
                "model_type": "llama",
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
    ],
    ids=["unsaid", "said", "gpt2", "roberta", "yarn", "linear", "llama3"],
)
def test_a_configuration_says_its_context(config: dict[str, Any], context: int | None) -> None:
    assert model_of_config(config, "").context == context


@pytest.mark.parametrize("wrong", ["8k", 0, 8192.5])
def test_a_context_that_is_no_number_of_tokens_is_refused(wrong: object) -> None:
    with pytest.raises(InputError, match=r"max_position_embeddings: .*: give (the|a) number"):
        model_of_config({"model_type": "llama", "max_position_embeddings": wrong}, "")


@pytest.mark.parametrize("name", catalog.model_names())
def test_released_models_have_the_context_of_their_release(name: str) -> None:
    # The shapes of an evaluation and of GPT-3 were never released with a configuration.
    shapes = ("gpt3-", "falcon-", "llama-")
    released = name in ("falcon-180b", "llama-32.5b", "llama-65b") or not name.startswith(shapes)
    is_known = catalog.model(name).context is not None
    assert is_known == (released and name != "nemotron-3-ultra")


def test_a_context_does_not_make_another_model() -> None:
    model = catalog.model("llama3-8b")
    other = replace(model, context=None)
    assert (other, hash(other)) == (model, hash(model))


@pytest.mark.parametrize("context", [None, 8192, 131072])
def test_a_plan_file_keeps_a_context_that_is_not_the_catalogue_s(context: int | None) -> None:
    work = workload_of("llama3-8b", 4096, 8, "bf16", context=context)
    written = job_to_mapping(job_of(work))["workload"]["model"]
    assert isinstance(written, str) == (context != 131072)
    read = job_from_mapping(job_to_mapping(job_of(work))).workload.model
    assert read.context == (context or 8192)


def test_a_plan_file_without_a_context_says_none() -> None:
    model = ModelSpec.of(family="llama", hidden=768, layers=8, heads=12)
    work = replace(workload_of("llama3-8b", 4096, 8, "bf16"), model=model)
    assert "context" not in job_to_mapping(job_of(work))["workload"]["model"]


def test_learned_positions_are_not_exceeded() -> None:
    assert workload_of("gpt2", 1024, 8).sequence_length == 1024
    with pytest.raises(
        InputError, match=r"sequence_length: 2048 is more than the 1024 .*gpt2: giv"
    ):
        workload_of("gpt2", 2048, 8)
    assert workload_of("gpt2", 2048, 8, context=2048).sequence_length == 2048
    # GPT-3's positions are as many as it is trained with here.
    assert workload_of("gpt3-125m", 4096, 8).sequence_length == 4096


@pytest.mark.parametrize(("length", "notes"), [(8192, 0), (16384, 1)])
def test_rotary_models_train_longer_sequences_with_a_note(length: int, notes: int) -> None:
    work = workload_of("llama3-8b", length, 8, "bf16")
    prediction = SymbolicPredictor(workload=work, cluster=CLUSTER).predict(job_of(work).plan)
    told = [note for note in prediction.notes if "exceed the context of 8,192" in note]
    assert len(told) == notes
    unsaid = workload_of("llama3-8b", length, 8, "bf16", context=None)
    same = SymbolicPredictor(workload=unsaid, cluster=CLUSTER).predict(job_of(unsaid).plan)
    assert same.iteration_s == prediction.iteration_s
