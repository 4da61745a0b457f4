"""Reads a registry of torchtitan 0.3, a Python module, without running it: settings that stand in
it as literals become those of the TOML that earlier versions read.

A text that is no Python is read as that TOML.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export import torchtitan, torchtitan_read
from mistlab.export.fsdp import ENGINES
from mistlab.export.given import Given, Imported
from mistlab.export.nearest import canonical, under_any_engine, with_engine
from mistlab.export.torchtitan_models import BROUGHT_TODAY
from mistlab.export.with_parts import with_values
from mistlab.job.job import Job
from mistlab.plan.workload import ModelSpec
from mistlab.schedule.context_ways import GATHER, RING

_MODES: Mapping[str, Mapping[str, object]] = {
    "FullAC": {"mode": "full"},
    "SelectiveAC": {"mode": "selective", "selective_ac_option": "op"},
}
_PACKAGE = "torchtitan.models."
# Settings of 0.3 that change nothing that a plan says.
_CALM = ("disable_cuda_graphs", "spmd_backend")


def read(text: str, given: Given) -> Imported:
    """The job of a module, or of a TOML."""
    if "Trainer.Config" not in text:
        return torchtitan_read.read(text, given)
    module = _module(text)
    settings = {name: _settings(module, f"{name}Config") for name in ("Training", "Parallelism")}
    splits = settings["Parallelism"].pop("enable_sequence_parallel", True)
    for name in _CALM:
        for section in settings.values():
            section.pop(name, None)
    sections = {
        "model": _model(module),
        "training": settings["Training"],
        "parallelism": settings["Parallelism"],
        "activation_checkpoint": _recomputation(module),
    }
    model = given.model or _brought(sections["model"])
    found = torchtitan_read.read(torchtitan.toml_of(sections), replace(given, model=model))
    return replace(found, job=_as_today(found.job, given, splits=bool(splits)))


def _brought(section: Mapping[str, object]) -> ModelSpec | None:
    """The model of a flavour; None if torchtitan does not bring it."""
    words = section["name"], section["flavor"]
    name = next((name for name, known in BROUGHT_TODAY.items() if known == words), None)
    return None if name is None else catalog.model(name)


def _as_today(job: Job, given: Given, *, splits: bool) -> Job:
    """The job with the choices that only later versions have."""
    stage, overlaps = job.plan.stages[0], job.plan.overlap_communication
    values = {
        "sequence_parallel": int(splits and stage.tensor_parallel > 1),
        "context_exchange": GATHER if stage.context_parallel > 1 else RING,
    }
    engines = ENGINES if given.engine is None else (given.engine, *ENGINES)
    made = canonical(with_values(under_any_engine(job), values), shares_experts=False)
    return with_engine(made, engines, overlaps=overlaps, precision=job.workload.precision)


def _module(text: str) -> ast.Module:
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        message = f"{error}: correct the Python"
        raise InputError(message) from None
    functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
    if len(functions) != 1:
        named = ", ".join(functions[:3])
        message = f"holds {len(functions)} functions ({named}): give a module with one of them"
        raise InputError(message)
    return module


def _calls(module: ast.Module, name: str) -> Iterator[ast.Call]:
    """Calls of a function or class of this name."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
            yield node


def _settings(module: ast.Module, name: str) -> dict[str, object]:
    """The literal arguments of the call that makes a section."""
    call = next(_calls(module, name), None)
    return {} if call is None else {word.arg: _literal(word) for word in call.keywords if word.arg}


def _literal(word: ast.keyword) -> object:
    try:
        return ast.literal_eval(word.value)
    except (ValueError, RecursionError):
        message = f"{word.arg}: {ast.unparse(word.value)} is no literal: write its value"
        raise InputError(message) from None


def _model(module: ast.Module) -> dict[str, object]:
    """The name of the model's package, and the flavour."""
    places = [
        node.module.removeprefix(_PACKAGE).partition(".")[0]
        for node in module.body
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith(_PACKAGE)
        and any(alias.name == "model_registry" for alias in node.names)
        and node.module
    ]
    call = next(_calls(module, "model_registry"), None)
    if not places or call is None or not call.args:
        message = "model_registry: no flavour is named: give model_registry('8B'), or --model"
        raise InputError(message)
    return {"name": places[0], "flavor": str(ast.literal_eval(call.args[0]))}


def _recomputation(module: ast.Module) -> Mapping[str, object]:
    for name, mode in _MODES.items():
        if next(_calls(module, f"{name}.Config"), None) is not None:
            return mode
    # Without a word torchtitan's default counts.
    says_none = any(
        word.arg == "activation_checkpoint"
        for call in _calls(module, "Trainer.Config")
        for word in call.keywords
    )
    return {"mode": "none"} if says_none else _MODES["SelectiveAC"]
