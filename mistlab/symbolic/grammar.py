"""Turns the source text of compiled expressions into a function, if it is only arithmetic.

The text may come from a folder, so it is parsed first. Every part must be one that printing
expressions makes. Anything else (an import, an attribute of anything but NumPy, a call of another
name, a loop) is refused, so that running the text never does more than arithmetic.
"""

import ast
from collections.abc import Callable
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
# The most of these, which a look in a set tells sooner than ``isinstance``.
_PLAIN = frozenset(
    (
        *(ast.Name, ast.Load, ast.Store, ast.BinOp, ast.Assign, ast.arg),
        *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub),
    )
)
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
    for node in ast.walk(tree):
        if type(node) not in _PLAIN:
            _check(node)
    names: dict[str, Any] = {"__builtins__": {}, "numpy": np}
    exec(compile(tree, "<expressions>", "exec"), names)
    function: Callable[..., tuple[Any, ...]] = names[tree.body[0].name]
    return function


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
