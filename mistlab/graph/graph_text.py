"""Writes expressions as text, and reads such text without running it as code.

A graph file holds arithmetic on size symbols, ``Max``, ``Mod`` and comparisons. Anything else is
refused, so a file from a stranger can be read.
"""

import ast
import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

import sympy

from mistlab.core.values import InputError, reject, shown
from mistlab.graph.graph import ModelGraph
from mistlab.graph.symbols import size_symbol

_BINARY: Mapping[type[ast.operator], Callable[[sympy.Expr, sympy.Expr], sympy.Expr]] = {
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.Pow: lambda left, right: left**right,
}

_COMPARISONS: Mapping[type[ast.cmpop], Callable[[sympy.Expr, sympy.Expr], sympy.Basic]] = {
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
}


def text_of(expression: sympy.Expr) -> str:
    """The text of an expression; equal expressions have equal texts."""
    return str(expression)


@cache
def expression_from(text: str) -> sympy.Expr:
    """The expression that a text written by ``text_of`` stands for.

    >>> expression_from("2*b*s*h**2/tp")
    2*b*h**2*s/tp
    """
    try:
        return _build(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError) as error:
        message = f"{text[:80]!r} is not an expression in sizes, of + - * / ** and symbols"
        raise InputError(message) from error


@cache
def relation_from(text: str) -> sympy.Basic:
    """The comparison of two expressions that a text printed by SymPy stands for.

    >>> relation_from("s < 4096")
    s < 4096
    >>> relation_from("Ne(b, s)")
    Ne(b, s)
    """
    try:
        return _relation(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError) as error:
        message = f"{text[:80]!r} is not a comparison of sizes, by < <= > >= Eq Ne"
        raise InputError(message) from error


def _relation(node: ast.expr) -> sympy.Basic:
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if (
            type(operator) in _COMPARISONS
        ):
            return _COMPARISONS[type(operator)](_build(left), _build(right))
        case ast.Call(func=ast.Name(id="Eq" | "Ne" as name), args=[left, right], keywords=[]):
            return (sympy.Eq if name == "Eq" else sympy.Ne)(_build(left), _build(right))
        case _:
            raise ValueError(ast.dump(node))


def _build(node: ast.expr) -> sympy.Expr:
    match node:
        case ast.Constant(value=int(number)):
            return sympy.Integer(number)
        case ast.Name(id=name):
            return size_symbol(name)
        case ast.UnaryOp(op=ast.USub()) | ast.BinOp(op=ast.Add() | ast.Sub()):
            return sympy.Add(*_terms(node))
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))):
            return _build(left) ** min(power, 64)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _BINARY:
            return _BINARY[type(operator)](_build(left), _build(right))
        case ast.Call(func=ast.Name(id="Max" | "Mod" as name), args=terms, keywords=[]):
            return (sympy.Max if name == "Max" else sympy.Mod)(*map(_build, terms))
        case _:
            raise ValueError(ast.dump(node))


def _terms(node: ast.expr) -> list[sympy.Expr]:
    """The terms of a parsed sum, one by one.

    SymPy builds a sum faster from a list than by repeated addition.
    """
    last: list[sympy.Expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        term = _build(node.right)
        last.append(-term if isinstance(node.op, ast.Sub) else term)
        node = node.left
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return [-_build(node.operand), *reversed(last)]
    return [_build(node), *reversed(last)]


# Writes layer graphs to JSON and reads them.


def to_mapping(graph: ModelGraph) -> dict[str, Any]:
    """Convert a model's layer graphs to mappings, lists and texts."""
    mapping: dict[str, Any] = _plain(graph)
    return mapping


def from_mapping(
    mapping: Mapping[str, Any],
    where: str = "graph",
    *,
    read: Callable[[str], Any] = expression_from,
) -> ModelGraph:
    """Convert mappings, lists and texts back to layer graphs; error messages name their file
    ``where``.

    ``read`` makes an expression of its text: one of SymPy, or a sum of products.
    """
    graph: ModelGraph = _value(ModelGraph, mapping, where, read)
    return graph


def dumps(mapping: Mapping[str, Any]) -> str:
    """Write a layer graph as JSON, with one line for each operator."""
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
        try:
            return read(_expect(str, plain, where))
        except InputError as error:
            reject(f"{where}: {error}: trace the model again")
    item = _item_of(kind)
    if item is not None:
        items = enumerate(_expect(list, plain, where))
        return tuple([_value(item, entry, f"{where}[{i}]", read) for i, entry in items])
    if dataclasses.is_dataclass(kind):
        return _instance(kind, _expect(dict, plain, where), where, read)
    return _expect(bool if kind is bool else str, plain, where)


def _instance(kind: Any, plain: Mapping[str, Any], where: str, read: Callable[[str], Any]) -> Any:
    hints, required = _hints(kind), _required(kind)
    if not required <= plain.keys() <= hints.keys():
        is_missing = not required <= plain.keys()
        keys = sorted(required - plain.keys() if is_missing else plain.keys() - hints.keys())
        problem = "missing" if is_missing else "unknown"
        reject(f"{where}: keys {', '.join(keys)} are {problem}: trace the model again")
    return kind(
        **{name: _value(hints[name], plain[name], f"{where}.{name}", read) for name in plain}
    )


@cache
def _item_of(kind: Any) -> Any:
    """The type of the items of a tuple type; None for other types."""
    return get_args(kind)[0] if get_origin(kind) is tuple else None


@cache
def _required(kind: Any) -> frozenset[str]:
    """The fields of a dataclass that have no default."""
    fields = dataclasses.fields(kind)
    return frozenset(one.name for one in fields if one.default is dataclasses.MISSING)


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)


_KINDS: Mapping[type, str] = {
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "a mapping",
}


def _expect(kind: type, plain: Any, where: str) -> Any:
    if not isinstance(plain, kind):
        reject(f"{where}: {shown(plain)} is not {_KINDS[kind]}: trace the model again")
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
