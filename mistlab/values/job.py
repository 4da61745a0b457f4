"""A job: everything that one plan file says, and the checks across its parts.

A plan file names its model, its hardware and the order of its passes; names and paths are turned
into values and back by ``mistlab.values.references``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from mistlab.engines.engine import Engine
from mistlab.engines.table import ENGINES
from mistlab.machine.cluster import Cluster
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.schedule.plan_orders import check_order
from mistlab.values.datafile import read_yaml, write_yaml
from mistlab.values.dimension import Setting, Step
from mistlab.values.dimensions import DIMENSIONS, engine_problem, names_of
from mistlab.values.errors import FieldError, InputError, refuse
from mistlab.values.group_references import plain_groups, with_groups
from mistlab.values.plan import Plan
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


def _stage_problem(job: Job, step: Step) -> FieldError | None:
    """The first problem that a step of checks finds with the stages' dimensions."""
    rows = [(name, row) for name, row in DIMENSIONS.items() if step in row.checks]
    for index, stage in enumerate(job.plan.stages):
        setting = Setting(
            degree=stage.degree,
            gpus=stage.num_gpus,
            gpus_per_node=job.cluster.gpus_per_node,
            workload=job.workload,
            micro_batches=job.plan.micro_batches,
        )
        for name, row in rows:
            if problem := row.checks[step](setting):
                return FieldError(f"plan.stages[{index}].{row.path or name}", problem)
    return None


def _engine_problem(job: Job) -> FieldError | None:
    """The first thing in the job that the plan's engine cannot do."""
    engine, in_pipeline = ENGINES[job.plan.engine], job.plan.num_stages > 1
    if found := _engine_problem_of_workload(job.workload, engine):
        return found
    for index, stage in enumerate(job.plan.stages):
        for name in (*names_of("savings"), *names_of("mesh")):
            value = stage.value(name)
            if problem := engine_problem(name, value, engine, in_pipeline=in_pipeline):
                key = DIMENSIONS[name].holder or name
                return FieldError(f"plan.stages[{index}].{key}", problem)
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
    *(partial(_stage_problem, step=step) for step in get_args(Step)),
    _engine_problem,
    _num_gpus_problem,
    _groups_problem,
    _order_problem,
)
