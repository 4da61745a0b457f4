"""The models that torchtitan brings, up to 0.2 and from 0.3 on, and what it can do with each.

Up to 0.2 Qwen and gpt-oss models have no pipelines, and the attention of DeepSeek and gpt-oss
models (FlexAttention) has no context parallelism. Experts are divided among data-parallel ranks,
each whole or, up to 0.2, in as many parts as there are tensor-parallel ranks; undivided, they have
those parts in all versions.
"""

from collections.abc import Iterator, Mapping
from math import log

from mistlab import catalog
from mistlab.core.values import refuse
from mistlab.export.expert_rules import same_experts
from mistlab.export.rules import one_stage
from mistlab.export.with_parts import with_values
from mistlab.job.job import Job
from mistlab.plan.plan import StagePlan
from mistlab.plan.workload import Experts, ModelSpec

# By name in the catalogue: the model's name and its flavour.
BROUGHT: Mapping[str, tuple[str, str]] = {
    "llama3-8b": ("llama3", "8B"),
    "llama3-70b": ("llama3", "70B"),
    "llama3-405b": ("llama3", "405B"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B"),
    "deepseek-v2": ("deepseek_v3", "236B"),
    "deepseek-v3": ("deepseek_v3", "671B"),
    "gpt-oss-20b": ("gpt_oss", "20b"),
    "gpt-oss-120b": ("gpt_oss", "120b"),
}
BROUGHT_TODAY: Mapping[str, tuple[str, str]] = {
    **BROUGHT,
    "llama3.2-1b": ("llama3", "1B"),
    "llama3.2-3b": ("llama3", "3B"),
    "qwen3-0.6b": ("qwen3", "0.6B"),
    "qwen3-1.7b": ("qwen3", "1.7B"),
    "qwen3-4b": ("qwen3", "4B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"),
    "qwen3-32b": ("qwen3", "32B"),
    "deepseek-v2-lite": ("deepseek_v3", "16B"),
}
_WITHOUT_PIPELINES = ("qwen3", "gpt_oss")
_WITHOUT_CONTEXT = ("deepseek_v3", "gpt_oss")
# Their attention is of variable length, which has no context parallelism.
_WITHOUT_CONTEXT_TODAY = ("gpt_oss",)

Brought = Mapping[str, tuple[str, str]]


def words_of(model: ModelSpec, brought: Brought = BROUGHT) -> tuple[str, str]:
    """The name and the flavour of a model; one that is not brought is a Llama's flavour."""
    return brought.get(model.name, ("llama3", model.name or "mine"))


def check_brought(model: ModelSpec, brought: Brought = BROUGHT) -> None:
    """Refuse a model with parts that are only those of brought models."""
    parts = (model.experts, model.latent, model.further_tokens, model.window, model.pattern)
    has_parts = any(parts) or model.post_norms
    if has_parts and (model.name not in brought or catalog.model(model.name) != model):
        problem = (
            "has experts, latent attention, windows, post_norms, further tokens or a pattern of "
            "blocks, and torchtitan brings"
        )
        refuse("workload.model", f"{problem} no such model: give one of {', '.join(brought)}")


def without_pipeline(job: Job) -> Job:
    """A single stage for models that torchtitan does not cut."""
    name, _ = words_of(job.workload.model)
    _check_context(job, is_lacking=name in _WITHOUT_CONTEXT)
    return one_stage(job) if name in _WITHOUT_PIPELINES else job


def without_pipeline_today(job: Job) -> Job:
    """A single stage for models that torchtitan does not cut from 0.3 on: those whose head is their
    embedding."""
    name, _ = words_of(job.workload.model, BROUGHT_TODAY)
    _check_context(job, is_lacking=name in _WITHOUT_CONTEXT_TODAY)
    return one_stage(job) if job.workload.model.tied_embeddings else job


def _check_context(job: Job, *, is_lacking: bool) -> None:
    if is_lacking and job.plan.stages[0].context_parallel > 1:
        problem = f"{job.plan.stages[0].context_parallel}, which torchtitan has not for this model"
        refuse("plan.stages[0].context_parallel", f"{problem}: give 1")


def whole_experts_divided(job: Job) -> Job:
    """Experts divided in the nearest way that torchtitan knows from 0.3 on: whole, or undivided
    among ranks and in as many parts as layers."""
    return divided_experts(job, in_parts=False)


def divided_experts(job: Job, *, in_parts: bool = True) -> Job:
    """Experts divided in the nearest way that torchtitan knows, alike on all stages: whole, or
    ``in_parts`` too."""
    experts = job.workload.model.experts
    if experts is None:
        return job
    job = same_experts(job)
    stage = job.plan.stages[0]
    ways = [
        (ranks, parts)
        for ranks, parts in _ways(stage, experts)
        if in_parts or ranks == 1 or parts == 1
    ]
    if not ways:
        problem = f"{stage.tensor_parallel} does not divide experts' ffn {experts.ffn}: give 1"
        refuse("plan.stages[0].tensor_parallel", problem)
    ranks, parts = stage.expert_parallel, stage.expert_tensor_parallel

    def distance(way: tuple[int, int]) -> tuple[float, float]:
        """How far a rank's share of the experts is from the wanted one, then the number of
        ranks."""
        product = way[0] * way[1] / (ranks * parts)
        return abs(log(product)), abs(log(way[0] / ranks))

    best, inside = min(ways, key=distance)
    return with_values(job, {"expert_parallel": best, "expert_tensor_parallel": inside})


def _ways(stage: StagePlan, experts: Experts) -> Iterator[tuple[int, int]]:
    """The degrees of experts, and of their parts, that torchtitan can have on a stage."""
    tensor = stage.tensor_parallel
    gpus = stage.num_gpus // stage.state_replicas
    for parts in sorted({1, tensor}):
        if experts.ffn % parts:
            continue
        for ranks in range(1, experts.count + 1):
            is_known = ranks > 1 or parts == tensor
            if is_known and not experts.count % ranks and not gpus % (ranks * parts):
                yield ranks, parts


def has_to_shard(stage: StagePlan) -> bool:
    """Whether experts lie on more ranks than those of one replica, which FSDP2 then shards over."""
    in_replica = stage.num_gpus // stage.data_parallel
    return bool(in_replica % (stage.expert_parallel * stage.expert_tensor_parallel))
