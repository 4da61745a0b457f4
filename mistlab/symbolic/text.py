"""Turns expressions into text and back, without evaluating the text as code.

A graph file holds arithmetic on size symbols, ``Max``, ``Mod`` and comparisons. Anything else is
refused, so a file from a stranger can be read.
"""

import ast
from collections.abc import Callable, Mapping
from functools import cache

import sympy

from mistlab.symbolic.symbols import size_symbol
from mistlab.values.errors import InputError

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
    """The expression in a text from ``text_of``.

    >>> expression_from("2*b*s*h**2/tp")
    2*b*h**2*s/tp
    """
    try:
        return _build(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError) as error:
        message = f"{text[:80]!r} is not an expression in sizes: use + - * / ** and symbols"
        raise InputError(message) from error


@cache
def relation_from(text: str) -> sympy.Basic:
    """The comparison in a text that SymPy printed.

    >>> relation_from("s < 4096")
    s < 4096
    >>> relation_from("Ne(b, s)")
    Ne(b, s)
    """
    try:
        return _relation(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError) as error:
        message = f"{text[:80]!r} is not a comparison of sizes: use < <= > >= Eq Ne"
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
    """The terms of a sum: SymPy takes longer to add them one by one."""
    last: list[sympy.Expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        term = _build(node.right)
        last.append(-term if isinstance(node.op, ast.Sub) else term)
        node = node.left
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return [-_build(node.operand), *reversed(last)]
    return [_build(node), *reversed(last)]
