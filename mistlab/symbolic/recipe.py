"""Recipes: texts that name a call which compiles expressions, by its function and arguments.

Two calls with equal recipes make equal expressions, in any process of one version of the package.
Some values cannot be told apart by a text: an object of another package, or a function that a
script or a test made. They have no recipe, and their expressions are compiled in every process.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np

PACKAGE = Path(__file__).parents[1]


class NoRecipeError(Exception):
    """A value cannot be named in a recipe."""


def recipe_of(make: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    """The recipe of a call."""
    return json.dumps([_plain(make), [_plain(one) for one in arguments]], sort_keys=True)


@cache
def version() -> str:
    """A digest of everything that turns a recipe into source text.

    This is the package's own sources, and the versions of SymPy, NumPy and Python. SymPy is not
    imported.
    """
    digest = hashlib.sha256(f"{sys.version_info[:2]} {np.__version__}".encode())
    digest.update(_release_of_sympy())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _release_of_sympy() -> bytes:
    spec = find_spec("sympy")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "release.py").read_bytes()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, frozenset):
        return sorted(json.dumps(_plain(one)) for one in value)
    if isinstance(value, Mapping):
        return {"mapping": [[_plain(key), _plain(one)] for key, one in value.items()]}
    if isinstance(value, FunctionType):
        return _function(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _values(value)
    message = f"{value!r} has no recipe"
    raise NoRecipeError(message)


def _values(value: Any) -> Any:
    digest = getattr(value, "digest", None)
    name = _name_of(type(value))
    if digest is not None:
        return {name: digest}
    return {name: {one.name: _plain(getattr(value, one.name)) for one in fields(value)}}


def _function(function: FunctionType) -> Any:
    """A function of this package; the version has a digest of its source.

    A function without a name of its own (``<lambda>``) is named by its place and its code.
    """
    name, code = _name_of(function), function.__code__
    if "<" not in name:
        return name
    if function.__closure__ or any(isinstance(one, CodeType) for one in code.co_consts):
        message = f"{name} has no recipe: other values are part of it"
        raise NoRecipeError(message)
    place = [code.co_firstlineno, code.co_code.hex(), repr(code.co_consts), repr(code.co_names)]
    return {name: [*place, _plain(function.__defaults__)]}


def _name_of(what: Any) -> str:
    if what.__module__.partition(".")[0] != PACKAGE.name:
        message = f"{what.__qualname__} of {what.__module__} has no recipe"
        raise NoRecipeError(message)
    return f"{what.__module__}.{what.__qualname__}"
