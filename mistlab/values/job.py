"""A job: everything that one plan file says, and the checks across its parts.

A plan file names its model, its hardware and the order of its passes; names and paths are turned
into values and back by ``mistlab.values.references``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mistlab.engines.engine import Engine
from mistlab.engines.table import ENGINES
from mistlab.machine.cluster import Cluster
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.schedule.plan_orders import check_order
from mistlab.values.context_ways import GATHER, HEADS, RING
from mistlab.values.datafile import read_yaml, write_yaml
from mistlab.values.errors import FieldError, InputError, refuse
from mistlab.values.group_references import plain_groups, with_groups
from mistlab.values.mesh import num_gpus
from mistlab.values.model import ModelSpec
from mistlab.values.plan import NO_OFFLOAD, Plan
from mistlab.values.references import (
    hardware_from,
    model_from,
    order_from,
    plain_model,
    plain_order,
    plain_profile,
    profile_from,
)
from mistlab.values.value import check_fields, from_mapping, to_mapping
from mistlab.values.workload import Workload

HERE = Path()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A workload, a cluster and a plan, checked together; the plan may still not fit in memory."""

    workload: Workload
    cluster: Cluster
    plan: Plan

    def __post_init__(self) -> None:
        check_fields(self)
        problems = [problem for check in _CHECKS if (problem := check(self)) is not None]
        if problems:
            first, *others = problems
            refuse(first.path, "; ".join([first.problem, *map(str, others)]))


def load_job(path: Path | str) -> Job:
    """Read a plan file; paths in it are relative to its folder, and errors begin with its name."""
    path = Path(path)
    mapping = read_yaml(path)
    try:
        return job_from_mapping(mapping, path.parent)
    except InputError as error:
        message = f"{path}: {error}"
        raise InputError(message) from None


def dump_job(job: Job, path: Path | str) -> None:
    """Write a plan file from which ``load_job`` reads an equal job."""
    path = Path(path)
    write_yaml(job_to_mapping(job, path.parent), path)


def job_from_mapping(mapping: object, folder: Path = HERE) -> Job:
    """A job from the content of a plan file in ``folder``."""
    if not isinstance(mapping, Mapping):
        return from_mapping(Job, mapping)
    resolved = dict(mapping)
    if isinstance(mapping.get("cluster"), Mapping):
        resolved["cluster"] = with_groups(mapping["cluster"], folder)
    for section, key, value_from in (
        ("workload", "model", model_from),
        ("cluster", "hardware", hardware_from),
        ("cluster", "profile", profile_from),
        ("plan", "order", order_from),
    ):
        content = resolved.get(section)
        if isinstance(content, Mapping) and key in content:
            resolved[section] = {**resolved[section], key: value_from(content[key], folder)}
    return from_mapping(Job, resolved)


def job_to_mapping(job: Job, folder: Path = HERE) -> dict[str, Any]:
    """The content of a plan file in ``folder`` for a job; defaults are left out."""
    mapping = to_mapping(job, omit_defaults=True)
    mapping["workload"]["model"] = plain_model(job.workload.model, folder)
    mapping["cluster"] |= plain_groups(job.cluster)
    mapping["cluster"].pop("others", None)
    if job.cluster.profile is not None:
        mapping["cluster"]["profile"] = plain_profile(job.cluster.profile)
    if "order" in mapping["plan"]:
        mapping["plan"]["order"] = plain_order(job.plan.order, folder)
    return mapping


def _model_problem(job: Job) -> FieldError | None:
    model = job.workload.model
    if model.family != "custom" or model.graph_file is not None:
        return None
    problem = "missing: a custom model needs the path of its traced layers"
    return FieldError("workload.model.graph_file", problem)


def _precision_problem(job: Job) -> FieldError | None:
    try:
        for cluster in job.cluster.of_groups:
            cluster.peak_flop_per_s(job.workload.precision)
    except FieldError as error:
        return error.within("workload")
    return None


def _layers_problem(job: Job) -> FieldError | None:
    planned, layers = job.plan.layers, job.workload.model.layers
    if planned == layers:
        return None
    excess = planned - layers
    remedy = f"take {excess} away from" if excess > 0 else f"give the remaining {-excess} to"
    problem = f"layers sum to {planned}, the model has {layers}: {remedy} a stage"
    return FieldError("plan.stages", problem)


def _batch_problem(job: Job) -> FieldError | None:
    micro_batches, batch = job.plan.micro_batches, job.workload.global_batch
    for index, stage in enumerate(job.plan.stages):
        others = stage.data_parallel * micro_batches
        product = stage.micro_batch * others
        if product == batch:
            continue
        remedy = (
            f"give {batch // others}"
            if batch % others == 0
            else f"data_parallel x micro_batches = {others} must divide {batch}"
        )
        problem = (
            f"{stage.micro_batch} x data_parallel {stage.data_parallel} x micro_batches "
            f"{micro_batches} = {product}, global_batch is {batch}: {remedy}"
        )
        return FieldError(f"plan.stages[{index}].micro_batch", problem)
    return None


def _tensor_parallel_problem(job: Job) -> FieldError | None:
    model = job.workload.model
    for index, stage in enumerate(job.plan.stages):
        problem = degree_problem(model, stage.tensor_parallel)
        if problem:
            return FieldError(f"plan.stages[{index}].tensor_parallel", problem)
    return None


def _experts_problem(job: Job) -> FieldError | None:
    """Why a stage's GPUs cannot divide a model's experts among them."""
    experts = job.workload.model.experts
    for index, stage in enumerate(job.plan.stages):
        ranks, parts = stage.expert_parallel, stage.expert_tensor_parallel
        where = f"plan.stages[{index}].expert"
        if experts is None and ranks * parts > 1:
            name, value = ("parallel", ranks) if ranks > 1 else ("tensor_parallel", parts)
            problem = f"{value}, but the model has no experts: give 1, or a model with experts"
            return FieldError(f"{where}_{name}", problem)
        if experts is None:
            continue
        if experts.count % ranks:
            problem = f"{ranks} does not divide experts {experts.count}: give a divisor"
            return FieldError(f"{where}_parallel", problem)
        if experts.ffn % parts:
            problem = f"{parts} does not divide experts' ffn {experts.ffn}: give a divisor"
            return FieldError(f"{where}_tensor_parallel", problem)
        if stage.num_gpus % (ranks * parts):
            problem = (
                f"{ranks} x expert_tensor_parallel {parts} does not divide the stage's "
                f"{stage.num_gpus} GPUs: give degrees whose product does"
            )
            return FieldError(f"{where}_parallel", problem)
        tokens = job.workload.sequence_length
        if tokens % stage.tensor_parallel:
            problem = (
                f"{stage.tensor_parallel} does not divide sequence_length {tokens}, as blocks with "
                "experts need: give a divisor"
            )
            return FieldError(f"plan.stages[{index}].tensor_parallel", problem)
    return None


def _replicas_problem(job: Job) -> FieldError | None:
    for index, stage in enumerate(job.plan.stages):
        if problem := replicas_problem(stage.degree):
            return FieldError(f"plan.stages[{index}].state_replicas", problem)
    return None


def replicas_problem(degree: Callable[[str], int]) -> str:
    """Why a stage's ranks cannot keep so many replicas of states; empty if they can."""
    replicas, data = degree("state_replicas"), degree("data_parallel")
    if data % replicas:
        return f"{replicas} does not divide data_parallel {data}: give a divisor"
    gpus = num_gpus(degree) // replicas
    ranks = degree("expert_parallel") * degree("expert_tensor_parallel")
    if replicas > 1 and gpus % ranks:
        return (
            f"{replicas} leaves {gpus} GPUs to a replica, which expert_parallel x "
            f"expert_tensor_parallel {ranks} does not divide: give fewer replicas"
        )
    return ""


def _parts_problem(job: Job) -> FieldError | None:
    for index, stage in enumerate(job.plan.stages):
        if problem := parts_problem(job.workload, stage.degree):
            return problem.within(f"plan.stages[{index}]")
    return None


def parts_problem(workload: Workload, degree: Callable[[str], int]) -> FieldError | None:
    """Why a stage's ranks cannot split its tokens; context-parallel ranks take two parts each."""
    tokens, context = workload.sequence_length, degree("context_parallel")
    tensor = degree("tensor_parallel") if degree("sequence_parallel") else 1
    if workload.model.family == "custom" and max(context, tensor) > 1:
        name, default = ("sequence_parallel", 0) if tensor > 1 else ("context_parallel", 1)
        problem = (
            f"{degree(name)}, but a custom model is traced without: give {default}, or a model of "
            "a family"
        )
        return FieldError(name, problem)
    if context > 1 and tokens % (2 * context):
        problem = (
            f"{context} ranks take two parts each of a sequence, but {2 * context} does not "
            f"divide sequence_length {tokens}: give half of a divisor of {tokens}"
        )
        return FieldError("context_parallel", problem)
    if degree("context_exchange") == HEADS and (parts := _parts_of_heads(workload, degree)):
        return FieldError("context_exchange", parts)
    if tokens // context % tensor:
        problem = (
            f"1, but tensor_parallel {tensor} does not divide sequence_length "
            f"{tokens // context}: give 0, or a degree that divides it"
        )
        return FieldError("sequence_parallel", problem)
    return None


def _parts_of_heads(workload: Workload, degree: Callable[[str], int]) -> str:
    """Why a stage's ranks cannot exchange tokens for heads; empty if they can."""
    ranks = degree("tensor_parallel") * degree("context_parallel")
    for name, count in (("heads", workload.model.heads), ("kv_heads", workload.model.kv_heads)):
        if count % ranks:
            return (
                f"{HEADS}, but tensor_parallel x context_parallel {ranks} does not divide {name} "
                f"{count}: give {RING} or {GATHER}"
            )
    return ""


def degree_problem(model: ModelSpec, degree: int) -> str:
    """Why a model cannot be split over ``degree`` ranks; empty if it can."""
    if model.tensor_parallel_degrees is not None:
        if degree in model.tensor_parallel_degrees:
            return ""
        can = ", ".join(map(str, model.tensor_parallel_degrees))
        return f"{degree}, but the traced model's own code can be split to {can}: give one of these"
    sizes = {"heads": model.heads, "kv_heads": model.kv_heads, "ffn": model.ffn}
    for name, size in sizes.items():
        if size % degree:
            return f"{degree} does not divide {name} {size}: give a divisor of {size}"
    return ""


def _engine_problem(job: Job) -> FieldError | None:
    """The first thing in the job that the plan's engine cannot do."""
    engine, in_pipeline = ENGINES[job.plan.engine], job.plan.num_stages > 1
    if found := _engine_problem_of_workload(job.workload, engine):
        return found
    for index, stage in enumerate(job.plan.stages):
        where = f"plan.stages[{index}]"
        if problem := engine.zero_problem(stage.zero, in_pipeline=in_pipeline):
            return FieldError(f"{where}.zero", problem)
        if problem := engine.offload_problem(offloads=stage.offload != NO_OFFLOAD):
            return FieldError(f"{where}.offload", problem)
        if problem := engine.exchange_problem(stage.context_exchange):
            return FieldError(f"{where}.context_exchange", problem)
    return None


def _engine_problem_of_workload(workload: Workload, engine: Engine) -> FieldError | None:
    if problem := engine.precision_problem(workload.precision):
        able = [row.name for row in ENGINES.values() if workload.precision in row.memory]
        return FieldError("workload.precision", f"{problem}, or engine: {able[0]}")
    if problem := engine.optimizer_problem(workload.optimizer):
        able = [row.name for row in ENGINES.values() if workload.optimizer in row.optimizers]
        return FieldError("workload.optimizer", f"{problem}, or engine: {able[0]}")
    if workload.expert_capacity is not None and not engine.drops_tokens:
        able = [row.name for row in ENGINES.values() if row.drops_tokens]
        problem = f"given, but engine {engine.name} drops no tokens: leave it out, or give engine: "
        return FieldError("workload.expert_capacity", f"{problem}{able[0]}")
    return None


def _num_gpus_problem(job: Job) -> FieldError | None:
    used, present = job.plan.num_gpus, job.cluster.num_gpus
    if used <= present:
        return None
    problem = (
        f"take {used} GPUs, the cluster has {present}: lower data_parallel or "
        "tensor_parallel, or raise cluster.nodes or cluster.gpus_per_node"
    )
    return FieldError("plan.stages", problem)


def _groups_problem(job: Job) -> FieldError | None:
    """A stage whose GPUs are of two groups of nodes."""
    cluster, first_rank = job.cluster, 0
    for index, stage in enumerate(job.plan.stages):
        after = first_rank + stage.num_gpus
        if not cluster.in_one_group(first_rank, stage.num_gpus):
            border = next(one.start for one in cluster.ranks_of_groups if one.start > first_rank)
            first, last = (
                cluster.groups[number].hardware.name
                for number in map(cluster.group_of, (first_rank, border))
            )
            problem = (
                f"takes GPUs {first_rank} to {after - 1}, of which those before {border} are "
                f"{first} and the others {last}: give the stages before it, or it, degrees with "
                f"which a stage ends at GPU {border}"
            )
            return FieldError(f"plan.stages[{index}]", problem)
        first_rank = after
    return None


def _order_problem(job: Job) -> FieldError | None:
    """What is wrong with the order of the plan's passes."""
    plan = job.plan
    if plan.order == DEFAULT_ORDER:
        return None
    problem = ENGINES[plan.engine].order_problem(plan.order, default=DEFAULT_ORDER)
    if problem:
        return FieldError("plan.order", problem)
    try:
        check_order(plan)
    except FieldError as error:
        return error
    return None


# Each check finds at most one problem, and a job is refused with all problems.
_CHECKS: tuple[Callable[[Job], FieldError | None], ...] = (
    _model_problem,
    _precision_problem,
    _layers_problem,
    _batch_problem,
    _tensor_parallel_problem,
    _experts_problem,
    _replicas_problem,
    _parts_problem,
    _engine_problem,
    _num_gpus_problem,
    _groups_problem,
    _order_problem,
)
