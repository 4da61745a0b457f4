"""Models with experts and latent attention in torchtitan's words."""

from typing import Any

import pytest

from mistlab.core.values import InputError
from mistlab.export.given import Given
from mistlab.export.nearest import nearest
from mistlab.export.targets import TARGETS
from mistlab.export.torchtitan_rules import BROUGHT
from mistlab.job.job import Job
from tests.mistlab.plans_of_today import job_of, jobs_of_today
from tests.mistlab.test_export import what_is_trained

TORCHTITAN = TARGETS["torchtitan-toml"]


def back_from_torchtitan(job: Job) -> Job:
    cluster = job.cluster
    given = Given(
        hardware=cluster.hardware, nodes=cluster.nodes, gpus_per_node=cluster.gpus_per_node
    )
    return TORCHTITAN.read(TORCHTITAN.write(job), given).job


def test_models_that_torchtitan_brings_come_back_or_what_was_lost_is_said() -> None:
    found, refused = [], 0
    for job in jobs_of_today(150, seed=5):
        try:
            found.append((job, nearest(job, TORCHTITAN)))
        except InputError:
            refused += 1
    assert refused < len(found)
    for job, one in found:
        if job.workload.model.name in BROUGHT:
            assert back_from_torchtitan(one.job) == one.job
        assert one.is_exact == (what_is_trained(job) == what_is_trained(one.job))
        assert nearest(one.job, TORCHTITAN).is_exact


@pytest.mark.parametrize(
    ("wanted", "tensor", "got"),
    [
        # Undivided experts are divided inside by tensor parallelism.
        ((1, 1), 2, (1, 2)),
        ((1, 2), 2, (1, 2)),
        ((4, 1), 2, (4, 1)),
        ((2, 4), 2, (4, 2)),
        ((1, 1), 1, (1, 1)),
    ],
)
def test_torchtitan_divides_experts_whole_or_as_layers(
    wanted: tuple[int, int], tensor: int, got: tuple[int, int]
) -> None:
    stage = {"expert_parallel": wanted[0], "expert_tensor_parallel": wanted[1], "zero": 2}
    job = job_of("qwen3-30b-a3b", {**stage, "tensor_parallel": tensor}, engine="fsdp")
    found = nearest(job, TORCHTITAN)
    (one,) = found.job.plan.stages
    assert (one.expert_parallel, one.expert_tensor_parallel) == got
    text = TORCHTITAN.write(found.job)
    assert 'name = "qwen3"\nflavor = "30B-A3B"\n' in text
    assert (f"expert_parallel_degree = {got[0]}\n" in text) == (got[0] > 1)


def test_torchtitan_shards_where_experts_lie_on_several_replicas() -> None:
    for ranks, level in ((1, 0), (8, 2)):
        job = job_of("qwen3-30b-a3b", {"expert_parallel": ranks})
        assert nearest(job, TORCHTITAN).job.plan.stages[0].zero == level


def test_torchtitan_has_no_pipeline_for_some_models() -> None:
    stages: tuple[dict[str, Any], ...] = ({"zero": 2, "tensor_parallel": 2},) * 2
    job = nearest(job_of("qwen3-30b-a3b", *stages, engine="fsdp"), TORCHTITAN).job
    (one,) = job.plan.stages
    assert (one.layers, one.data_parallel, one.tensor_parallel) == (48, 16, 2)
    blocks = ({"zero": 2, "layers": 30}, {"zero": 2, "layers": 31})
    assert (
        nearest(job_of("deepseek-v3", *blocks, engine="fsdp"), TORCHTITAN).job.plan.num_stages == 2
    )


def test_a_single_stage_keeps_its_ranks_of_sequences() -> None:
    stages: tuple[dict[str, Any], ...] = (
        {"zero": 2, "context_parallel": 2, "data_parallel": 4, "state_replicas": 4},
    ) * 2
    (one,) = nearest(job_of("qwen3-30b-a3b", *stages, engine="fsdp"), TORCHTITAN).job.plan.stages
    assert (one.data_parallel, one.context_parallel, one.state_replicas) == (8, 2, 4)


@pytest.mark.parametrize(
    ("model", "stage", "words"),
    [
        ("mixtral-8x7b", {}, "torchtitan includes no such model: give one of llama3-8b"),
        ("deepseek-v3-mtp", {"layers": 61}, "torchtitan includes no such model"),
        (
            "deepseek-v3",
            {"layers": 61, "context_parallel": 2},
            "torchtitan has no context parallelism for deepseek-v3: give 1",
        ),
    ],
)
def test_what_torchtitan_does_not_bring_is_refused(
    model: str, stage: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        nearest(job_of(model, stage), TORCHTITAN)
