"""Imports configurations of torchtitan 0.3, which are Python functions, without running them.

Such a function makes a ``Trainer.Config`` of dataclasses; it may start from the configuration of
another function and change fields. The import understands plain values, arithmetic on numbers, and
the names of dataclasses. Anything else is refused if the cost may depend on it.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mistlab import catalog
from mistlab.core.values import InputError, reject
from mistlab.export import torchtitan_read
from mistlab.export.given import Given, Imported, ask_for
from mistlab.export.nearest import ENGINES, canonical, under_any_engine, with_engine
from mistlab.export.rules import with_values
from mistlab.export.torchtitan_rules import BROUGHT_TODAY
from mistlab.job.job import Job
from mistlab.plan.workload import ModelSpec
from mistlab.schedule.context_ways import GATHER, RING

# Matches the return type of functions that build a configuration.
NAMES = re.compile(r"->\s*(\w+\.)*(Trainer|\w*Trainer)\.Config\b")
_KINDS = re.compile(r"(llama3|llama4|qwen3|deepseek_v3|gpt_oss|kimi_k2|flux|muse_glimmer)")
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
# The classes by which torchtitan 0.3 recomputes, each with the settings of earlier versions that
# mean the same.
_RECOMPUTED: Mapping[str, Mapping[str, str]] = {
    "FullAC": {"mode": "full"},
    "SelectiveAC": {"mode": "selective", "selective_ac_option": "op"},
    "MemoryBudgetAC": {"mode": "memory_budget"},
}
_CONVERTERS = {"Float8": "float8", "MXFP8": "mxfp8", "NVFP4": "nvfp4", "LoRA": "lora"}
_DEEPEST = 10


class _NotRead:
    """A placeholder for an expression that is not evaluated; the import fails only if its value is
    needed.
    """


_UNREAD = _NotRead()


def sections_of(text: str, name: str, wanted: str | None) -> dict[str, Any]:
    """Return the sections of the configuration that a Python function builds, as in torchtitan's
    TOML files.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reject(f"{name}: {_python_problem(error)}")
    functions = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.returns and _builds(node.returns)
    }
    if wanted is None:
        names = [key for key in functions if "debug" not in key]
        if len(names) != 1:
            reject(
                f"holds {len(functions)} configurations: choose one by --set CONFIG=NAME, where "
                f"NAME is one of {', '.join(functions)}"
            )
        wanted = names[0]
    if wanted not in functions:
        known = ", ".join(functions)
        reject(f"CONFIG: {name} has no configuration {wanted!r}: give one of {known}")
    built = _Registry(functions).build(wanted, 0)
    kind = _KINDS.search(name) or _KINDS.search(wanted)
    return _as_sections(built, kind[1] if kind else "", wanted)


def _python_problem(error: Exception) -> str:
    """What is wrong with a text that Python cannot parse, with its line if Python names it."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"line {error.lineno}: is not Python ({error.msg}): correct this line"
    return "cannot be read as Python: give a file that Python can import"


def _builds(node: ast.expr) -> bool:
    return NAMES.search(f"-> {ast.unparse(node)}") is not None


class _Registry:
    """The functions of a Python module that build configurations."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef]) -> None:
        self.functions = functions

    def build(self, name: str, depth: int) -> dict[str, Any]:
        """Return the fields of the configuration that a function of the module builds."""
        if depth > _DEEPEST:
            reject(f"{name}: calls itself without end: choose another by --set CONFIG=NAME")
        values: dict[str, Any] = {}
        for statement in self.functions[name].body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                value = self.value(statement.value, values, depth)
                if isinstance(value, dict):
                    return value
                break
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self._assign(statement.targets[0], statement.value, values, depth)
            elif not _changes_nothing(statement):
                reject(
                    f"line {statement.lineno}: {name} does more than build a configuration, and "
                    "this file is never run: give a function that builds one from plain values"
                )
        message = (
            f"{name}: returns no configuration that can be read without running it: give a "
            "function that builds one from plain values"
        )
        raise InputError(message)

    def _assign(
        self, target: ast.expr, source: ast.expr, values: dict[str, Any], depth: int
    ) -> None:
        value = self.value(source, values, depth)
        path = ast.unparse(target).split(".")
        holder: Any = values
        for part in path[:-1]:
            holder = holder.setdefault(part, {}) if isinstance(holder, dict) else {}
        if isinstance(holder, dict):
            holder[path[-1]] = value

    def value(self, node: ast.expr, values: Mapping[str, Any], depth: int) -> Any:
        """Evaluate an expression to plain data or the fields of a dataclass; ``_UNREAD`` if that is
        not possible.
        """
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return values.get(node.id, _UNREAD)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item, values, depth) for item in node.elts]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.value(node.operand, values, depth)
            return -inner if isinstance(inner, int | float) else _UNREAD
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            pair = [self.value(part, values, depth) for part in (node.left, node.right)]
            known = all(isinstance(part, int) for part in pair)
            return _OPERATORS[type(node.op)](*pair) if known and pair[1] else _UNREAD
        return self._call(node, values, depth) if isinstance(node, ast.Call) else _UNREAD

    def _call(self, node: ast.Call, values: Mapping[str, Any], depth: int) -> Any:
        name = ast.unparse(node.func)
        if name in self.functions:
            return self.build(name, depth + 1)
        fields = {
            word.arg: self.value(word.value, values, depth) for word in node.keywords if word.arg
        }
        first = [self.value(part, values, depth) for part in node.args]
        return {"": name, "()": first, **fields}


def _changes_nothing(statement: ast.stmt) -> bool:
    """Whether a statement cannot change a configuration, as a docstring, an assertion or an
    import.
    """
    plain = (ast.Assert, ast.Import, ast.ImportFrom, ast.Pass, ast.AnnAssign)
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or isinstance(statement, plain)


def _as_sections(built: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    sections: dict[str, Any] = {}
    spec = built.get("model_spec")
    flavour = spec["()"][0] if isinstance(spec, dict) and spec.get("()") else _UNREAD
    if not isinstance(flavour, str):
        ask_for("model", f"{name}: its model_spec cannot be read without running it: give --model")
    converters = [_converter(entry) for entry in _listed(spec, "converters")]
    sections["model"] = {"name": kind, "flavor": flavour, "converters": converters}
    for key in ("training", "parallelism", "compile"):
        sections[key] = _fields(built.get(key), f"{name}.{key}")
    sections["training"].setdefault("num_tokens_per_microbatch_per_dp_rank", 16384)
    loss = built.get("loss")
    if isinstance(loss, dict) and str(loss.get("", "")).startswith("ChunkedLoss"):
        sections["training"][torchtitan_read.CHUNKED_LOSS] = True
    sections["compile"].setdefault("enable", False)
    recomputed = built.get("activation_checkpoint")
    word = str(recomputed.get("", "")).partition(".")[0] if isinstance(recomputed, dict) else ""
    default = "SelectiveAC" if "activation_checkpoint" not in built else ""
    sections["activation_checkpoint"] = dict(_RECOMPUTED.get(word or default, {"mode": "none"}))
    return sections


def _listed(spec: Any, key: str) -> list[Any]:
    value = spec.get(key) if isinstance(spec, Mapping) else None
    return value if isinstance(value, list) else []


def _converter(entry: Any) -> str:
    name = str(entry.get("", "")) if isinstance(entry, dict) else "unknown"
    return next((word for start, word in _CONVERTERS.items() if name.startswith(start)), name)


def _fields(value: Any, where: str) -> dict[str, Any]:
    """Return the fields that a dataclass call sets; refuses a field that may affect cost if its
    value is unknown.
    """
    fields = dict(value) if isinstance(value, dict) else {}
    fields.pop("", None)
    fields.pop("()", None)
    for key, inner in fields.items():
        if inner is _UNREAD:
            reject(f"{where}.{key}: cannot be read without running it: give a plain value")
    return fields


# Imports a torchtitan 0.3 configuration from a Python module without running it: its literal
# settings are translated to the TOML of earlier versions.
#
# A text that is not Python is read as TOML.


_PACKAGE = "torchtitan.models."
# Settings of torchtitan 0.3 that do not affect a plan.
_CALM = ("disable_cuda_graphs", "spmd_backend")


def read_registry(text: str, given: Given) -> Imported:
    """Import a torchtitan configuration, a Python module or a TOML text, as a job."""
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
    if next(_calls(module, "ChunkedLossWrapper.Config"), None) is not None:
        settings["Training"][torchtitan_read.CHUNKED_LOSS] = True
    model = given.model or _brought(sections["model"])
    imported = torchtitan_read.read(torchtitan_read.toml_of(sections), replace(given, model=model))
    return replace(imported, job=_as_today(imported.job, given, splits=bool(splits)))


def _brought(section: Mapping[str, object]) -> ModelSpec | None:
    """Return the catalogue's model for a torchtitan model and flavour, or None if torchtitan does
    not include it.
    """
    flavour = section["name"], section["flavor"]
    name = next((name for name, known in BROUGHT_TODAY.items() if known == flavour), None)
    return None if name is None else catalog.model(name)


def _as_today(job: Job, given: Given, *, splits: bool) -> Job:
    """Set the choices of a job that torchtitan expresses only since version 0.3."""
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
        reject(_python_problem(error))
    functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
    if len(functions) != 1:
        named = ", ".join(functions[:3])
        reject(f"holds {len(functions)} functions ({named}): give a file with only one of them")
    return module


def _calls(module: ast.Module, name: str) -> Iterator[ast.Call]:
    """Yield all calls of a function or class in a Python module."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
            yield node


def _settings(module: ast.Module, name: str) -> dict[str, object]:
    """Return the literal arguments of the call that builds one section of settings."""
    call = next(_calls(module, name), None)
    return {} if call is None else {word.arg: _literal(word) for word in call.keywords if word.arg}


def _literal(word: ast.keyword) -> object:
    try:
        return ast.literal_eval(word.value)
    except (ValueError, RecursionError):
        source = ast.unparse(word.value)
        reject(f"{word.arg}: {source} is not a plain value: write the value itself")


def _model(module: ast.Module) -> dict[str, object]:
    """Return torchtitan's names of the model and of its flavour."""
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
        reject(
            "model_registry: the file names no flavour: write one, as in model_registry('8B'), or "
            "give --model"
        )
    return {"name": places[0], "flavor": str(ast.literal_eval(call.args[0]))}


def _recomputation(module: ast.Module) -> Mapping[str, object]:
    for name in ("FullAC", "SelectiveAC"):
        if next(_calls(module, f"{name}.Config"), None) is not None:
            return _RECOMPUTED[name]
    # ``Trainer.Config`` without this argument uses torchtitan's default recomputation; None turns
    # it off.
    says_none = any(
        word.arg == "activation_checkpoint"
        for call in _calls(module, "Trainer.Config")
        for word in call.keywords
    )
    return {"mode": "none"} if says_none else _RECOMPUTED["SelectiveAC"]
