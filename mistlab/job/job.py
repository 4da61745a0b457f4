"""A job: the workload, cluster and plan of a plan file, read, checked together, and written."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from mistlab import catalog
from mistlab.core.files import (
    about,
    in_file,
    is_path,
    joined,
    read_json,
    read_yaml,
    relative,
    write_yaml,
)
from mistlab.core.values import (
    FieldError,
    InputError,
    check_fields,
    from_mapping,
    refuse,
    reject,
    shown,
    to_mapping,
    within,
)
from mistlab.engines.engine import ENGINES
from mistlab.huggingface.configurations import KIND, model_of_config
from mistlab.machine.cluster import Cluster, NodeGroup, Profile
from mistlab.machine.hardware import Hardware
from mistlab.network.tiers import Network
from mistlab.plan.dimension import Setting, Step
from mistlab.plan.dimensions import DIMENSIONS, engine_problem, names_of
from mistlab.plan.plan import Plan
from mistlab.plan.workload import ModelSpec, Workload, unsupported
from mistlab.schedule.orders import DEFAULT_ORDER, is_order_path
from mistlab.stages.plan_orders import check_order

# Turns names and paths in a plan file into values: a model, hardware, a profile (a cluster's
# delays), a network, an order of passes.


MODEL = "workload.model"
HARDWARE = "cluster.hardware"
CONFIG = "config.json"
# Separates the path of a model's configuration from the part to read: ``config.json#text_config``.
_PART = "#"
# The keys of a mapping that names a model of the catalogue, and says which release of it is meant.
_OF_RELEASE = frozenset(("name", "checkpoint", "context"))


def model_from(plain: object, folder: Path) -> ModelSpec:
    """The model that ``workload.model`` names in a plan file in ``folder``.

    A text is a path if it contains a slash or has the extension of such a file; it is relative to
    ``folder``.
    """
    if isinstance(plain, ModelSpec):
        return plain
    if isinstance(plain, Mapping):
        spec = _mapped_model(plain)
        if spec.graph_file is None:
            return spec
        return replace(spec, graph_file=joined(folder, spec.graph_file))
    if not isinstance(plain, str):
        refuse(MODEL, f"{shown(plain)} is not a model: give a catalogue name, a path or a mapping")
    if plain.endswith((".yaml", ".yml")):
        return _model_file(joined(folder, plain))
    path, part = _path_and_part(plain)
    if is_path(path, (".json",)):
        if _OF_HUB.fullmatch(plain) and not (folder / plain).exists():
            refuse(
                MODEL,
                f"{plain!r} is not a file, and nothing is fetched: give a catalogue name, or the "
                f"path of the {CONFIG} that Hugging Face has of it",
            )
        return _json_model(joined(folder, path), part)
    with within("workload"):
        return catalog.model(plain)


def plain_model(model: ModelSpec, folder: Path) -> Any:
    """What a plan file in ``folder`` has under ``workload.model``: a name, a path or a mapping."""
    checkpoint = {"checkpoint": model.checkpoint} if model.checkpoint else {}
    if model.name in catalog.model_names():
        known = catalog.model(model.name)
        if model == known and model.context in (None, known.context):
            return {"name": known.name, **checkpoint} if checkpoint else known.name
        if checkpoint and model == known:
            return {"name": known.name, **checkpoint, "context": model.context}
    if model.graph_file is None:
        return to_mapping(model, omit_defaults=True)
    path = relative(model.graph_file, folder)
    if _is_traced(model):
        return path if is_path(path, (".json",)) else f"./{path}"
    return {**to_mapping(model, omit_defaults=True), "graph_file": path}


def hardware_from(plain: object, folder: Path) -> Hardware:
    """The hardware that a plan file in ``folder`` names in ``cluster.hardware``; a file with only
    datasheet figures is completed with those of the nearest calibrated GPU.
    """
    return catalog.with_all_groups(stated_hardware(plain, folder))


def stated_hardware(plain: object, folder: Path) -> Hardware:
    """The named hardware as its own file states it; figures that were not measured are missing."""
    if isinstance(plain, Hardware):
        return plain
    if isinstance(plain, Mapping):
        return from_mapping(Hardware, plain, HARDWARE)
    if not isinstance(plain, str):
        refuse(HARDWARE, f"{shown(plain)} is not hardware: give a catalogue name, path or mapping")
    if is_path(plain, (".yaml", ".yml")):
        return _hardware_file(joined(folder, plain))
    with within("cluster"):
        return catalog.stated_hardware(plain)


def plain_hardware(hardware: Hardware) -> Any:
    """What a plan file has under ``cluster.hardware``: a catalogue name, or all figures.

    A written plan file never names a hardware file, because such a file may change.
    """
    if hardware.name in catalog.hardware_names() and hardware == catalog.hardware(hardware.name):
        return hardware.name
    return to_mapping(hardware, omit_defaults=True)


def profile_from(plain: object, folder: Path) -> object:
    """The profile (a cluster's delays) that ``cluster.profile`` names; mappings stay mappings."""
    if not isinstance(plain, str):
        return plain
    with within("cluster"):
        return catalog.profile(plain)


def plain_profile(profile: Profile) -> Any:
    """What a plan file has under ``cluster.profile``: a catalogue name, or all figures."""
    if profile.name in catalog.profile_names() and profile == catalog.profile(profile.name):
        return profile.name
    return to_mapping(profile, omit_defaults=True)


def network_from(plain: object, folder: Path) -> object:
    """The network in the file that ``cluster.network`` names; mappings stay mappings."""
    if not isinstance(plain, str):
        return plain
    if not is_path(plain, (".yaml", ".yml")):
        problem = f"{plain!r} is not the path of a .yaml file: give one, or a mapping with tiers"
        refuse("cluster.network", problem)
    path = joined(folder, plain)
    with in_file("cluster.network", path):
        return from_mapping(Network, {"name": Path(path).stem, **read_yaml(Path(path))})


def order_from(plain: object, folder: Path) -> object:
    """The order of passes that ``plan.order`` gives: a name, or a path, joined to ``folder``."""
    if not isinstance(plain, str) or not is_order_path(plain):
        return plain
    return _as_path(joined(folder, plain))


def plain_order(order: str, folder: Path) -> str:
    """What a plan file has under ``plan.order``: an order's name, or its path from ``folder``."""
    return _as_path(relative(order, folder)) if is_order_path(order) else order


def _as_path(path: str) -> str:
    """A path written so that it cannot be mistaken for the name of an order of passes."""
    return path if is_order_path(path) else f"./{path}"


def _mapped_model(plain: Mapping[str, Any]) -> ModelSpec:
    """The model of a mapping; if this only names a release, with the catalogue's sizes."""
    if isinstance(plain.get("name"), str) and plain.keys() <= _OF_RELEASE:
        with within("workload"):
            known = catalog.model(plain["name"])
        with within(MODEL):
            return replace(known, **plain)
    return ModelSpec.from_mapping(plain, MODEL)


def _path_and_part(text: str) -> tuple[str, str]:
    """The path in ``config.json#text_config``, and the part after ``#``; empty if there is none."""
    path, divider, part = text.rpartition(_PART)
    return (path, part) if divider and "/" not in part else (text, "")


# Matches a model's name on Hugging Face: the owner, a slash and the model.
_OF_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.json)")


def _model_file(path: str) -> ModelSpec:
    with in_file(MODEL, path):
        return model_from(read_yaml(Path(path)), Path(path).parent)


def _json_model(path: str, part: str) -> ModelSpec:
    """The model in a JSON file: a traced one, or (a ``part`` of) a Hugging Face configuration."""
    file = Path(path, CONFIG) if Path(path).is_dir() else Path(path)
    with in_file(MODEL, str(file)):
        content = read_json(file)
        if KIND in content:
            return model_of_config(content, file.absolute().parent.name, part)
    return _traced_model(str(file))


def _traced_model(path: str) -> ModelSpec:
    with in_file(MODEL, path):
        content = read_json(Path(path))
        if "spec" not in content:
            refuse(
                "spec",
                f"missing, as is {KIND}: give the JSON file of a traced model, or a Hugging Face "
                f"{CONFIG}",
            )
        return replace(ModelSpec.from_mapping(content["spec"], "spec"), graph_file=path)


def _is_traced(model: ModelSpec) -> bool:
    """Whether a model equals the traced one in its ``graph_file``; a changed copy does not."""
    assert model.graph_file is not None
    try:
        traced = _traced_model(model.graph_file)
    except InputError:
        return False
    return traced == model and traced.checkpoint == model.checkpoint


def _hardware_file(path: str) -> Hardware:
    with in_file(HARDWARE, path):
        return from_mapping(Hardware, read_yaml(Path(path)))


# Reads a cluster of several groups of nodes from a plan file, or from ``--hardware`` on a command
# line (``l4-24gb:1,a100-40gb:2``).


def with_groups(plain: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The section ``cluster`` of a plan file; listed groups of nodes become ``Cluster`` fields."""
    if "others" in plain:
        refuse("cluster.others", "unknown key: list all groups of nodes in cluster.hardware")
    listed = plain.get("hardware")
    if not isinstance(listed, list | tuple):
        return plain
    fields = fields_of([_group_from(one, place, folder) for place, one in enumerate(listed)])
    given = plain.get("nodes", fields["nodes"])
    if given != fields["nodes"]:
        refuse(
            "cluster.nodes",
            f"{shown(given)}, but the groups in cluster.hardware have {fields['nodes']} nodes: "
            f"give {fields['nodes']}, or leave it out",
        )
    return {**plain, **fields}


def fields_of(groups: Sequence[NodeGroup]) -> dict[str, Any]:
    """The fields of a ``Cluster`` that describe its groups of equal nodes."""
    if not groups:
        refuse(HARDWARE, "is an empty list: give at least one group, with hardware and nodes")
    return {
        "hardware": groups[0].hardware,
        "nodes": sum(group.nodes for group in groups),
        "others": tuple(groups[1:]),
    }


def plain_groups(cluster: Cluster) -> dict[str, Any]:
    """What a plan file has under ``cluster.hardware``: one hardware, or a list of node groups."""
    if not cluster.others:
        return {"hardware": plain_hardware(cluster.hardware)}
    return {
        "hardware": [
            {"hardware": plain_hardware(group.hardware), "nodes": group.nodes}
            for group in cluster.groups
        ]
    }


def groups_named(text: str, folder: Path) -> list[NodeGroup]:
    """The groups of nodes that a text such as ``l4-24gb:1,a100-40gb:2`` names; none if it names a
    single hardware without a number of nodes.
    """
    parts = [part.rpartition(":") for part in text.split(",")]
    if len(parts) == 1 and not (parts[0][1] and parts[0][2].isdecimal()):
        return []
    groups = []
    for name, colon, nodes in parts:
        if not (name and nodes.isdecimal()):
            refuse(
                HARDWARE,
                f"{text!r}: {name + colon + nodes!r} lacks a number of nodes: give each group as "
                "hardware:nodes, such as l4-24gb:1,a100-40gb:2",
            )
        groups.append(NodeGroup(hardware=hardware_from(name, folder), nodes=int(nodes)))
    return groups


def _group_from(plain: object, index: int, folder: Path) -> NodeGroup:
    """A group of nodes from the list in ``cluster.hardware``; errors name its index in the list."""
    where = f"{HARDWARE}[{index}]"
    if not isinstance(plain, Mapping):
        refuse(
            where, f"{shown(plain)} is not a group of nodes: give a mapping with hardware and nodes"
        )
    resolved = dict(plain)
    if "hardware" in plain:
        try:
            resolved["hardware"] = hardware_from(plain["hardware"], folder)
        except FieldError as error:
            path = f"{where}.hardware{error.path.removeprefix(HARDWARE)}"
            raise FieldError(path, error.problem) from None
    return from_mapping(NodeGroup, resolved, where)


# A job: what one plan file says, and the checks of its workload, cluster and plan together.

HERE = Path()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A workload, a cluster and a plan that match; the plan may still not fit in memory."""

    workload: Workload
    cluster: Cluster
    plan: Plan

    def __post_init__(self) -> None:
        check_fields(self)
        problems = [problem for check in _CHECKS if (problem := check(self)) is not None]
        if problems:
            first, *others = problems
            refuse(first.path, "; ".join([first.problem, *map(str, others)]))


# Extensions of files that launch a run: scripts, programs and TOML configurations.
LAUNCH_FILES = (".sh", ".bash", ".sbatch", ".slurm", ".toml", ".py")


def load_job(path: Path | str) -> Job:
    """Read a plan file; paths in it are relative to its folder, and errors begin with its name."""
    path = Path(path)
    launches = path.suffix in LAUNCH_FILES and path.is_file()
    mapping = {} if launches else read_yaml(path)
    if launches or (mapping and not mapping.keys() & {"workload", "cluster", "plan"}):
        reject(
            f"{path}: is no plan, which has workload, cluster and plan: if it starts or configures "
            "a run of another framework, make a plan of it by mistlab import_plan"
        )
    with about(path):
        return job_from_mapping(mapping, path.parent)


def dump_job(job: Job, path: Path | str) -> None:
    """Write a plan file from which ``load_job`` reads an equal job."""
    path = Path(path)
    write_yaml(job_to_mapping(job, path.parent), path)


def job_from_mapping(mapping: object, folder: Path = HERE) -> Job:
    """The job that the content of a plan file in ``folder`` describes."""
    if not isinstance(mapping, Mapping):
        return from_mapping(Job, mapping)
    resolved = _with_names_of_today(mapping)
    if isinstance(mapping.get("cluster"), Mapping):
        resolved["cluster"] = with_groups(mapping["cluster"], folder)
    for section, key, value_from in (
        ("workload", "model", model_from),
        ("cluster", "hardware", hardware_from),
        ("cluster", "network", network_from),
        ("cluster", "profile", profile_from),
        ("plan", "order", order_from),
    ):
        content = resolved.get(section)
        if isinstance(content, Mapping) and key in content:
            resolved[section] = {**resolved[section], key: value_from(content[key], folder)}
    return from_mapping(Job, resolved)


# Engines of older plan files that trained adapters, each with the engine that replaces it; now a
# field of the workload says that adapters are trained.
_OF_ADAPTERS = {
    f"{name}-adapters": name for name in ("megatron-core", "megatron-bridge", "fsdp", "fsdp-eager")
}


def _with_names_of_today(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a plan file, with engine names of older versions replaced by current ones."""
    plan, workload = mapping.get("plan"), mapping.get("workload")
    if not isinstance(plan, Mapping) or not isinstance(workload, Mapping):
        return dict(mapping)
    engine = _OF_ADAPTERS.get(str(plan.get("engine")))
    if engine is None:
        return dict(mapping)
    trained = {"train": "adapters", **workload}
    return {**mapping, "plan": {**plan, "engine": engine}, "workload": trained}


def job_to_mapping(job: Job, folder: Path = HERE) -> dict[str, Any]:
    """The content of a plan file in ``folder`` for this job; default values are omitted."""
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
    return FieldError(
        "workload.model.graph_file",
        "missing: give the path of the traced model's JSON file, which family custom needs",
    )


def _precision_problem(job: Job) -> FieldError | None:
    precision = job.workload.precision
    for hardware in (cluster.hardware for cluster in job.cluster.of_groups):
        if not hardware.gpu.has(precision):
            problem = f"{precision} is not supported by GPU {hardware.name}"
            return FieldError("workload.precision", f"{problem}: give {hardware.gpu.precisions}")
    return None


def _layers_problem(job: Job) -> FieldError | None:
    planned, layers = job.plan.layers, job.workload.model.layers
    if planned == layers:
        return None
    if planned > layers:
        return FieldError(
            "plan.stages",
            f"layers sum to {planned}, but the model has {layers}: take {planned - layers} away "
            "from a stage",
        )
    return FieldError(
        "plan.stages",
        f"layers sum to {planned}, but the model has {layers}: give the remaining "
        f"{layers - planned} to a stage",
    )


def _stage_problem(job: Job, step: Step) -> FieldError | None:
    """The first problem with the choices of the stages that the checks of one step find, or
    None.
    """
    rows = [(name, row) for name, row in DIMENSIONS.items() if step in row.checks]
    for index, stage in enumerate(job.plan.stages):
        setting = Setting(
            degree=stage.degree,
            value=stage.value,
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
    """The error about the first setting of the job that the plan's engine lacks, if any."""
    engine, in_pipeline = ENGINES[job.plan.engine], job.plan.num_stages > 1
    if field_error := unsupported(job.workload, engine):
        return field_error
    for index, stage in enumerate(job.plan.stages):
        for name in (*names_of("savings"), *names_of("mesh"), *names_of("layers")):
            value = stage.value(name)
            if problem := engine_problem(name, value, engine, in_pipeline=in_pipeline):
                path = f"plan.stages[{index}].{DIMENSIONS[name].holder or name}"
                return FieldError(path, problem)
    return None


def _replicas_problem(job: Job) -> FieldError | None:
    """Report stages with different numbers of data-parallel ranks where replicas of the model must
    have one rank in every stage; None if they match.
    """
    how, ranks = job.workload.reduction, job.plan.data_ranks
    if not job.workload.averages_weights or how.replicas is not None:
        return None
    for index, count in enumerate(ranks):
        if count != ranks[0]:
            return FieldError(
                f"plan.stages[{index}].data_parallel",
                f"{count}, but the first stage has {ranks[0]}, and replicas of workload.reduction "
                f"{how.kind} span all stages: give every stage the same data_parallel",
            )
    return None


def _num_gpus_problem(job: Job) -> FieldError | None:
    used, present = job.plan.num_gpus, job.cluster.num_gpus
    if used <= present:
        return None
    return FieldError(
        "plan.stages",
        f"take {used} GPUs, but the cluster has {present}: lower data_parallel or "
        "tensor_parallel, or raise cluster.nodes or cluster.gpus_per_node",
    )


def _groups_problem(job: Job) -> FieldError | None:
    """Report a stage whose GPUs are on nodes of two kinds; None if there is none."""
    cluster, first_rank = job.cluster, 0
    for index, stage in enumerate(job.plan.stages):
        after = first_rank + stage.num_gpus
        if not cluster.in_one_group(first_rank, stage.num_gpus):
            border = next(one.start for one in cluster.ranks_of_groups if one.start > first_rank)
            first, last = (
                cluster.groups[number].hardware.name
                for number in map(cluster.group_of, (first_rank, border))
            )
            return FieldError(
                f"plan.stages[{index}]",
                f"takes GPUs {first_rank} to {after - 1}, which are {first} before GPU {border} "
                f"and {last} from there on: give degrees with which a stage begins at GPU {border}",
            )
        first_rank = after
    return None


def _order_problem(job: Job) -> FieldError | None:
    """Report an order of the plan's passes that cannot run; None if it can."""
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


# The checks of a job, each of which finds at most one problem; an error reports the problems of all
# checks.
_CHECKS: tuple[Callable[[Job], FieldError | None], ...] = (
    _model_problem,
    _precision_problem,
    _layers_problem,
    *(partial(_stage_problem, step=step) for step in get_args(Step)),
    _engine_problem,
    _replicas_problem,
    _num_gpus_problem,
    _groups_problem,
    _order_problem,
)
