"""Rules for the models, pipelines and sharding that torchtitan supports, up to version 0.2 and
since 0.3.

Up to 0.2 Qwen and gpt-oss models have no pipelines; since 0.3 models with tied embeddings have
none. Context parallelism does not support the attention of gpt-oss models and, up to 0.2, of
DeepSeek models (FlexAttention).

Expert parallelism gives each rank whole experts; up to 0.2, tensor-parallel ranks may also split
each of these. Without expert parallelism, tensor-parallel ranks split all experts, in all versions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import log

from mistlab import catalog
from mistlab.core.values import refuse, reject
from mistlab.export.found import Found, Section
from mistlab.export.nearest import STATES, fewest_replicas, sharded, states_offloaded
from mistlab.export.rules import (
    among_orders,
    dropped,
    none_or_all_blocks,
    one_stage,
    same_experts,
    with_stages,
    with_values,
    with_workload,
)
from mistlab.export.target import Row
from mistlab.job.job import Job
from mistlab.plan.dimensions import ranks_of
from mistlab.plan.model_parts import Experts
from mistlab.plan.plan import StagePlan
from mistlab.plan.workload import ModelSpec
from mistlab.schedule.orders import DEFAULT_ORDER, INTERLEAVED, TURNING, order_of_chunks
from mistlab.schedule.placement import Placement, even_shares, loop, turning
from mistlab.stages.stage_shape import parts_of_plan

# The catalogue's models that torchtitan includes, each with torchtitan's names of the model and of
# its flavour (size).
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
# Models that torchtitan 0.3 cannot run with context parallelism, because their variable-length
# attention does not support it.
_WITHOUT_CONTEXT_TODAY = ("gpt_oss",)

Brought = Mapping[str, tuple[str, str]]


def name_and_flavour(model: ModelSpec, brought: Brought = BROUGHT) -> tuple[str, str]:
    """Return torchtitan's names of a model and its flavour; a model that torchtitan does not
    include becomes a flavour of Llama.
    """
    return brought.get(model.name, ("llama3", model.name or "mine"))


def check_brought(model: ModelSpec, brought: Brought = BROUGHT) -> None:
    """Refuse a model with optional parts, such as experts, unless torchtitan includes exactly this
    model.
    """
    names = ("experts", "latent", "further_tokens", "window", "pattern", "post_norms")
    parts = [name for name in names if getattr(model, name)]
    if parts and (model.name not in brought or catalog.model(model.name) != model):
        refuse(
            "workload.model",
            f"{model.name or 'the mapping'} has {', '.join(parts)}, but torchtitan includes no "
            f"such model: give one of {', '.join(brought)}",
        )


def without_pipeline(job: Job) -> Job:
    """Give the job a single stage if torchtitan cannot divide its model into stages."""
    name, _ = name_and_flavour(job.workload.model)
    _check_context(job, is_lacking=name in _WITHOUT_CONTEXT)
    return one_stage(job) if name in _WITHOUT_PIPELINES else job


def without_pipeline_today(job: Job) -> Job:
    """Give the job a single stage if its model has tied embeddings, with which torchtitan 0.3 has
    no pipelines.
    """
    name, _ = name_and_flavour(job.workload.model, BROUGHT_TODAY)
    _check_context(job, is_lacking=name in _WITHOUT_CONTEXT_TODAY)
    return one_stage(job) if job.workload.model.tied_embeddings else job


def _check_context(job: Job, *, is_lacking: bool) -> None:
    if is_lacking and job.plan.stages[0].context_parallel > 1:
        refuse(
            "plan.stages[0].context_parallel",
            f"{job.plan.stages[0].context_parallel}, but torchtitan has no context parallelism for "
            f"{job.workload.model.name or 'this model'}: give 1",
        )


def whole_experts_divided(job: Job) -> Job:
    """The job with the nearest division of experts that torchtitan 0.3 supports: each expert lies
    whole on a rank, or all are cut by tensor parallelism.
    """
    return divided_experts(job, in_parts=False)


def divided_experts(job: Job, *, in_parts: bool = True) -> Job:
    """The job with the division of experts nearest to its own that torchtitan supports, the same on
    all stages; ``in_parts`` allows expert parallelism together with tensor parallelism of experts.
    """
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
        refuse(
            "plan.stages[0].tensor_parallel",
            f"{stage.tensor_parallel} does not divide experts' ffn {experts.ffn}: give 1",
        )
    ranks, parts = stage.expert_parallel, stage.expert_tensor_parallel

    def distance(way: tuple[int, int]) -> tuple[float, float]:
        """Measure how far one way to divide experts is from the plan's: by a rank's share of the
        experts, then by the number of ranks.
        """
        product = way[0] * way[1] / (ranks * parts)
        return abs(log(product)), abs(log(way[0] / ranks))

    best, inside = min(ways, key=distance)
    return with_values(job, {"expert_parallel": best, "expert_tensor_parallel": inside})


def _ways(stage: StagePlan, experts: Experts) -> Iterator[tuple[int, int]]:
    """Yield the ways in which torchtitan can divide experts on a stage: over how many ranks they
    are divided, and over how many each expert is split.
    """
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
    """Whether the ranks that share the experts span several replicas, so that FSDP2 has to shard
    over them.
    """
    in_replica = stage.num_gpus // stage.data_parallel
    return bool(in_replica % (stage.expert_parallel * stage.expert_tensor_parallel))


# Translates pipelines to torchtitan's schedules and lists of module names, and back.


# Torchtitan's names of the pipeline schedules that this package names on the left.
SCHEDULES: Mapping[str, str] = {
    DEFAULT_ORDER: "1F1B",
    "gpipe": "GPipe",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}


def pipeline_settings(job: Job, head: str = "output") -> dict[str, object]:
    """Return the pipeline settings of a job, empty without a pipeline; ``head`` is the name of the
    last module.
    """
    plan = job.plan
    if plan.num_stages == 1:
        return {}
    parts = [
        [f"layers.{block - 1}" for block in part.blocks]
        for part in parts_of_plan(plan, _placement(plan.order, plan.num_stages))
    ]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", head]
    return {
        "pipeline_parallel_schedule": SCHEDULES[plan.order],
        "pipeline_parallel_microbatch_size": plan.stages[0].micro_batch,
        "module_fqns_per_model_part": parts,
    }


def _placement(order: str, num_stages: int, chunks: int = 1) -> Placement:
    return turning(num_stages) if order in TURNING else loop(num_stages, chunks)


def read_stages(section: Section, draft: Found, layers: int) -> None:
    """Read the pipeline schedule and the blocks of each stage."""
    parts = section.get("module_fqns_per_model_part")
    schedule = section.get("pipeline_parallel_schedule", "1F1B")
    names = {name: order for order, name in SCHEDULES.items()}
    less = [
        section.whole(f"pipeline_parallel_{end}_stage_less_layers", minimum=0)
        for end in ("first", "last")
    ]
    if draft.num_stages == 1:
        return
    if schedule in names:
        draft.order = names[schedule]
    else:
        chunks = len(parts) // draft.num_stages if parts else 2
        order = order_of_chunks(chunks)
        if schedule == "Interleaved1F1B" and order in INTERLEAVED:
            draft.order = order
        else:
            text = f"schedule {schedule} is not supported: predicted as {DEFAULT_ORDER}"
            draft.remark("ignored", "order", text)
    if parts:
        blocks = [sum(name.startswith("layers.") for name in part) for part in parts]
        if len(blocks) % draft.num_stages:
            reject(
                f"parallelism.module_fqns_per_model_part: {len(blocks)} parts are not a "
                f"multiple of {draft.num_stages} stages: give each stage equally many parts"
            )
        chunks = len(blocks) // draft.num_stages
        placement = _placement(draft.order, draft.num_stages, chunks)
        if placement.chunks != chunks:
            reject(
                f"parallelism.module_fqns_per_model_part: {len(blocks)} parts, but schedule "
                f"{schedule} needs {placement.chunks} a stage: give "
                f"{placement.chunks * draft.num_stages} parts"
            )
        draft.layers = _of_stages(blocks, placement)
    else:
        first, last = (1 if one is None else one for one in less)
        placement = _placement(draft.order, draft.num_stages)
        draft.layers = _of_stages(_weighted(layers, len(placement.stages), first, last), placement)


def _of_stages(blocks: Sequence[int], placement: Placement) -> list[int]:
    """Return the number of blocks of each stage from the number of blocks in each model part."""
    parts = map(placement.of_stage, range(placement.num_stages))
    return [sum(blocks[part] for part in own) for own in parts]


def _weighted(layers: int, stages: int, first: int, last: int) -> list[int]:
    """Return the number of blocks of each stage if embedding and head count as ``first`` and
    ``last`` blocks.
    """
    counts = [*even_shares(layers + first + last, stages)]
    counts[0] -= first
    counts[-1] -= last
    return counts


# Rules for torchtitan: each changes a job into one that its configurations can express.


def sayable_workload(job: Job, brought: Brought = BROUGHT) -> Job:
    """Give the job bf16 or fp32 and fused attention; refuses a model that torchtitan cannot
    build.
    """
    model = job.workload.model
    if model.graph_file is not None:
        refuse(
            "workload.model",
            "is a traced model, which torchtitan cannot build: export a plan whose model is a name "
            "of the catalogue",
        )
    check_brought(model, brought)
    precision = "bf16" if job.workload.precision == "fp16" else job.workload.precision
    return with_workload(job, precision=precision, attention="flash")


def recomputed(job: Job) -> Job:
    """Make a job recompute all blocks, none, or every n-th: the largest n that recomputes at least
    as many blocks as each stage of the plan. If a stage recomputes GEMMs, recompute every second
    GEMM of all blocks.
    """
    stages = job.plan.stages
    if recomputes_products(job):
        return with_stages(
            job,
            [
                replace(stage, checkpointed_layers=0, products_recomputed_layers=stage.layers)
                for stage in stages
            ],
        )
    every = blocks_apart(job)
    if not every:
        return job
    return with_stages(
        job, [stage.with_values({"checkpointed_layers": stage.layers // every}) for stage in stages]
    )


def recomputed_today(job: Job) -> Job:
    """Make a job recompute all blocks, none, or every second GEMM of all blocks: what torchtitan
    0.3 supports.
    """
    if recomputes_products(job):
        return recomputed(job)
    return none_or_all_blocks("checkpointed_layers")(job)


def recomputes_products(job: Job) -> bool:
    """Whether the job recomputes every second GEMM of its blocks."""
    return any(stage.products_recomputed_layers for stage in job.plan.stages)


def blocks_apart(job: Job) -> int:
    """Return n if the job recomputes every n-th block, or 0 if it recomputes none."""
    pairs = [(stage.layers, stage.checkpointed_layers) for stage in job.plan.stages]
    if not any(count for _, count in pairs):
        return 0
    most = max(layers for layers, _ in pairs)
    return max(
        every
        for every in range(1, most + 1)
        if all(layers // every >= count for layers, count in pairs)
    )


def with_sequences_split(job: Job) -> Job:
    """Give the job sequence parallelism wherever it has tensor parallelism, as torchtitan does."""
    shares = job.plan.stages[0].tensor_parallel > 1
    return with_values(job, {"sequence_parallel": int(shares)})


def sharded_states(job: Job) -> Job:
    """Shard the states of a job as FSDP2 does: always over context-parallel ranks, and over
    replicas if the plan shards them.
    """
    job = sharded(job)
    first = job.plan.stages[0]
    has_to = first.context_parallel > 1 or has_to_shard(first)
    return with_values(job, {"zero": 2}) if has_to and not first.zero else job


def offloaded_states(job: Job) -> Job:
    """Offload states only where FSDP2 shards them over several ranks."""
    alone = ranks_of("gather", job.plan.stages[0].degree) == 1
    return dropped(*STATES)(job) if alone else states_offloaded(job)


# Rules that both tables of torchtitan share: that of its TOML files and that of its Python modules.
ORDERED = Row(
    choices=("order",),
    nearest=among_orders(SCHEDULES),
    because="runs 1F1B, GPipe, ZBVZeroBubble and DualPipeV",
)
SHARDED = (
    Row(
        choices=("zero",),
        nearest=sharded_states,
        because="shards by FSDP2, as ZeRO-2 or 3, alike on all stages, and always with context "
        "parallelism or divided experts",
    ),
    Row(
        choices=("state_replicas",),
        nearest=fewest_replicas,
        because="has one number of sharded replicas for all stages",
    ),
)
OFFLOADED = (
    Row(
        choices=STATES,
        nearest=offloaded_states,
        because="offloads all states that FSDP2 shards, or none",
    ),
    Row(
        choices=("offload_activations",),
        nearest=dropped("offload_activations"),
        because="keeps activations on the GPU",
    ),
)
