"""Turns the source text of compiled expressions into a function, if it is only arithmetic.

The text may come from a folder, so it is parsed first. Every part must be one that printing
expressions makes. Anything else (an import, an attribute of anything but NumPy, a call of another
name, a loop) is refused, so that running the text never does more than arithmetic.
"""

import ast
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

# The functions of NumPy that printed expressions use.
FUNCTIONS = frozenset(
    (
        *("maximum", "minimum", "amax", "amin", "where", "select", "mod", "floor", "ceil"),
        *("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
        *("logical_and", "logical_or", "logical_not", "sqrt", "abs", "asarray"),
    )
)
NODES = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.Name),
    *(ast.Load, ast.Store, ast.Constant, ast.List, ast.Tuple, ast.keyword, ast.Expr),
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.operator, ast.unaryop, ast.cmpop),
)
# Nodes that are by far the most, and their fields that hold other nodes.
_CHILDREN: Mapping[type[ast.AST], tuple[str, ...]] = {
    ast.BinOp: ("left", "right"),
    ast.UnaryOp: ("operand",),
    ast.Name: (),
}
_NUMBERS = frozenset((bool, int, float))
NAME = "compiled"


class RefusedError(Exception):
    """A text is more than arithmetic on columns."""


def function_of(source: str) -> Callable[..., tuple[Any, ...]]:
    """The function that a source text defines."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RefusedError(str(error)) from None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        message = "it is not one function"
        raise RefusedError(message)
    _check_all(tree)
    return _run(tree, tree.body[0].name)


def function_printed_here(source: str) -> Callable[..., tuple[Any, ...]]:
    """The function that a source text defines; the text was printed by this process."""
    return _run(source, NAME)


def _run(source: str | ast.Module, name: str) -> Callable[..., tuple[Any, ...]]:
    names: dict[str, Any] = {"__builtins__": {}, "numpy": np}
    exec(compile(source, "<expressions>", "exec"), names)
    function: Callable[..., tuple[Any, ...]] = names[name]
    return function


def _check_all(tree: ast.AST) -> None:
    """Refuse a tree with a part that is no arithmetic.

    Operators and contexts of names have no parts, and any of them is arithmetic. So only the fields
    of ``_CHILDREN`` are followed, which takes a third of the time of ``ast.walk``.
    """
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        kind = type(node)
        if kind is ast.Constant and type(node.value) in _NUMBERS:  # type: ignore[attr-defined]
            continue
        names = _CHILDREN.get(kind)
        if names is None:
            _check(node)
            waiting += ast.iter_child_nodes(node)
        else:
            waiting += [getattr(node, name) for name in names]


def _check(node: ast.AST) -> None:
    if not _is_arithmetic(node):
        message = f"{ast.unparse(node)[:60]!r} is not arithmetic on columns"
        raise RefusedError(message)


def _is_arithmetic(node: ast.AST) -> bool:
    match node:
        case ast.FunctionDef():
            return not node.decorator_list and node.returns is None
        case ast.Call():
            return isinstance(node.func, ast.Attribute)
        case ast.Attribute(value=ast.Name(id="numpy"), attr=name):
            return name in FUNCTIONS
        case ast.Attribute(value=ast.Attribute(attr="logical_and" | "logical_or"), attr="reduce"):
            return True
        case ast.Constant(value=value):
            return isinstance(value, bool | int | float)
        case _:
            return isinstance(node, NODES)
