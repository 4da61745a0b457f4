"""Reads what a user picks or pastes on the page: names of the catalogue, and the contents of files.
No file on this machine is read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

from experiments.bench.search_options import space_called, usual_space
from mistlab import catalog
from mistlab.core.files import parse_settings
from mistlab.core.values import FieldError, InputError, from_mapping, near_matches, refuse, shown
from mistlab.export.given import Given
from mistlab.formats.file_formats import FORMATS, format_of
from mistlab.huggingface.configurations import KIND, model_of_config
from mistlab.job.job import (
    HERE,
    Job,
    hardware_from,
    job_from_mapping,
    job_to_mapping,
    model_from,
)
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import Hardware
from mistlab.plan.space import SearchSpace
from mistlab.plan.workload import ModelSpec, Workload
from mistlab.serving.step_cost import parameters_of
from mistlab.shell.session import LaunchFile

Named = TypeVar("Named")
# The most characters of a pasted text; the largest launch scripts have some tens of kilobytes.
MOST_TEXT = 1 << 18

_OF_WORKLOAD = (
    *("sequence_length", "global_batch", "attention", "precision", "optimizer"),
    *("train", "adapter_rank", "adapter_targets", "base", "loss", "states", "gradients"),
    "reduction",
)
_OF_CLUSTER = (
    *("nodes", "gpus_per_node", "keep_free_gib"),
    *("intra_node_gbytes_per_s", "inter_node_gbytes_per_s"),
)
# Keys whose values may be paths when a command reads a plan file; on the live page they may only
# name something in the catalogue.
_MAY_NAME_FILES = ("model", "hardware", "profile", "order", "space")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedProblem:
    """The problem (workload and cluster) that the live page asks about, and the search space."""

    problem: Problem
    space: SearchSpace

    @property
    def workload(self) -> Workload:
        """The problem's workload."""
        return self.problem.workload

    @property
    def cluster(self) -> Cluster:
        """The problem's cluster."""
        return self.problem.cluster


def problem_asked(body: object) -> AskedProblem:
    """The problem that the live page asks about, from a mapping; the message for an invalid field
    has the field's name.
    """
    plain = mapping_of(body, "problem")
    known = ("model", "hardware", *_OF_WORKLOAD, *_OF_CLUSTER, "space", "engine")
    for key in plain:
        if key not in known:
            refuse(f"problem.{key}", f"is unknown{near_matches(str(key), known)}")
    workload = from_mapping(
        Workload,
        {"model": model_in(plain.get("model")), **_given(plain, _OF_WORKLOAD)},
        "workload",
    )
    cluster = from_mapping(
        Cluster,
        {"hardware": hardware_in(plain.get("hardware")), **_given(plain, _OF_CLUSTER)},
        "cluster",
    )
    cluster.peak_flop_per_s(workload.precision)
    names = {key: plain.get(key) for key in ("space", "engine")}
    for key, name in names.items():
        if name is not None and not isinstance(name, str):
            refuse(key, f"{name!r} is not in the list: choose a name from it")
    _refuse_files(names)
    engine = names["engine"] or None
    space = space_called(names["space"] or usual_space(workload.model, engine), engine)
    return AskedProblem(problem=Problem(workload=workload, cluster=cluster), space=space)


def model_in(text: object) -> ModelSpec:
    """The model with this name in the catalogue, or the model that a Hugging Face configuration or
    a mapping describes.
    """
    if not _is_content(text):
        return _named(text, "model", catalog.model)
    with_model = parse_settings(_short(text, "model"), "model")
    if KIND in with_model:
        return model_of_config(with_model, str(with_model.get("_name_or_path") or "model"))
    _refuse_files(with_model)
    return model_from(with_model, HERE)


def hardware_in(text: object) -> Hardware:
    """The hardware with this name in the catalogue, or the hardware in the contents of a file."""
    if not _is_content(text):
        return _named(text, "hardware", catalog.hardware)
    return hardware_from(parse_settings(_short(text, "hardware"), "hardware"), HERE)


def job_in(content: object) -> Job:
    """The job in the contents of a plan file, as text or plain data; references to other files are
    refused.
    """
    plain = (
        parse_settings(_short(content, "plan"), "plan")
        if isinstance(content, str)
        else mapping_of(content, "plan")
    )
    _refuse_files(plain)
    return job_from_mapping(plain)


def pasted(body: Mapping[str, Any]) -> dict[str, Any]:
    """Finds out what a pasted text is: a plan, a hardware file, a model's configuration, or a
    launch file, which is imported as a plan.
    """
    text = _short(body.get("text"), "text")
    content = _plain(text)
    if {"workload", "cluster", "plan"} <= content.keys():
        return {"kind": "plan", "plan": job_to_mapping(job_in(content)), "remarks": []}
    if {"gpu", "node"} <= content.keys():
        return {"kind": "hardware", "name": hardware_in(text).name, "remarks": []}
    is_config = KIND in content and "hidden_size" in content
    if is_config or {"family", "layers"} <= content.keys():
        model = model_in(text)
        size = f"{parameters_of(model) / 1e9:.2f} billion parameters in {model.layers} blocks"
        return {"kind": "model", "name": f"{model.name}: {size}", "remarks": [*model.remarks]}
    ending = ".json" if text.lstrip().startswith("{") else ""
    source = LaunchFile(text=text, name=f"pasted text{ending}")
    try:
        row = format_of(source)
    except InputError:
        # A configuration of an unknown type is reported as such, and not tried as a launch file.
        if KIND in content:
            model_in(text)
        raise
    given = Given(
        hardware=hardware_in(body.get("hardware")),
        model=model_in(body["model"]) if body.get("model") else None,
    )
    imported = FORMATS[row.name].imported(source, given)
    return {
        "kind": "launch",
        "name": row.title,
        "plan": job_to_mapping(imported.job),
        "remarks": [*map(str, imported.remarks)],
    }


def mapping_of(plain: object, name: str) -> Mapping[str, Any]:
    """The value of a field, which must be a mapping."""
    if not isinstance(plain, Mapping):
        refuse(name, f"{shown(plain)} is not an object: give an object with fields")
    return plain


def _plain(text: str) -> Mapping[str, Any]:
    """The mapping that a text contains; empty if it contains none, as a script does."""
    try:
        return parse_settings(text, "text")
    except InputError:
        return {}


def _given(plain: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: plain[name] for name in names if plain.get(name) is not None}


def _is_content(text: object) -> TypeGuard[str]:
    """Whether a text is the contents of a file rather than a name."""
    return isinstance(text, str) and ("\n" in text.strip() or text.lstrip().startswith("{"))


def _named(text: object, key: str, find: Callable[[str], Named]) -> Named:
    """The entry of the catalogue with this name."""
    if not isinstance(text, str) or not text:
        refuse(key, "missing: pick a name, or paste a file's content")
    try:
        return find(text)
    except FieldError as error:
        raise FieldError(key, error.problem) from None


def _short(text: object, key: str) -> str:
    if not isinstance(text, str):
        refuse(key, f"{type(text).__name__} is not a text: paste a file's content")
    if len(text) > MOST_TEXT:
        refuse(key, f"has {len(text):,} characters: paste at most {MOST_TEXT:,}")
    return text


def _refuse_files(plain: object) -> None:
    """Refuse contents that name a file, however deeply nested the name is."""
    if isinstance(plain, Mapping):
        for key, value in plain.items():
            _refuse_file(str(key), value)
            _refuse_files(value)
    elif isinstance(plain, list | tuple):
        for value in plain:
            _refuse_files(value)


def _refuse_file(key: str, value: object) -> None:
    names_file = isinstance(value, str) and ("/" in value or value.endswith(_ENDINGS))
    if key == "graph_file" or (key in _MAY_NAME_FILES and names_file):
        refuse(key, f"{value!r} names a file, which the page does not read: paste its content")


_ENDINGS = (".yaml", ".yml", ".json", ".txt")
