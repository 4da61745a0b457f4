"""Writes and reads layer graphs as JSON.

A file holds the graph of one model, as a mapping of dataclass fields. Expressions are texts. An
operator is one line, so that files can be compared line by line.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import sympy

from mistlab.symbolic.graph import ModelGraph
from mistlab.symbolic.text import expression_from, text_of
from mistlab.values.errors import InputError


def to_mapping(graph: ModelGraph) -> dict[str, Any]:
    """A graph as plain mappings, lists and texts."""
    mapping: dict[str, Any] = _plain(graph)
    return mapping


def from_mapping(
    mapping: Mapping[str, Any],
    where: str = "graph",
    *,
    read: Callable[[str], Any] = expression_from,
) -> ModelGraph:
    """The graph from plain mappings, as ``to_mapping`` makes them; ``where`` is for errors.

    ``read`` makes an expression of its text: one of SymPy, or a sum of products.
    """
    graph: ModelGraph = _value(ModelGraph, mapping, where, read)
    return graph


def dumps(mapping: Mapping[str, Any]) -> str:
    """JSON with one line for each innermost list or mapping."""
    return _lines(mapping, "") + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, sympy.Expr):
        return text_of(value)
    if dataclasses.is_dataclass(value):
        pairs = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.name: _plain(content) for f, content in pairs if content != f.default}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _value(kind: Any, plain: Any, where: str, read: Callable[[str], Any]) -> Any:
    if kind is sympy.Expr:
        return read(_expect(str, plain, where))
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        items = enumerate(_expect(list, plain, where))
        return tuple(_value(item, entry, f"{where}[{i}]", read) for i, entry in items)
    if dataclasses.is_dataclass(kind):
        return _instance(kind, _expect(dict, plain, where), where, read)
    return _expect(bool if kind is bool else str, plain, where)


def _instance(kind: Any, plain: Mapping[str, Any], where: str, read: Callable[[str], Any]) -> Any:
    hints = _hints(kind)
    fields = dataclasses.fields(kind)
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    differing = (required - set(plain)) | (set(plain) - {field.name for field in fields})
    if differing:
        keys = ", ".join(sorted(differing))
        message = f"{where}: keys {keys} are missing or unknown: trace the model again"
        raise InputError(message)
    return kind(
        **{name: _value(hints[name], plain[name], f"{where}.{name}", read) for name in plain}
    )


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _expect(kind: type, plain: Any, where: str) -> Any:
    if not isinstance(plain, kind):
        message = f"{where}: {plain!r} is not a {kind.__name__}: trace the model again"
        raise InputError(message)
    return plain


def _lines(value: Any, indent: str) -> str:
    inner = indent + " "
    nested = isinstance(value, Mapping) and any(_deep(item) for item in value.values())
    if nested:
        entries = [f"{inner}{json.dumps(k)}: {_lines(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        entries = [inner + _lines(item, inner) for item in value]
        return "[\n" + ",\n".join(entries) + f"\n{indent}]"
    return json.dumps(value)


def _deep(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and any(isinstance(item, Mapping) for item in value)
    )
