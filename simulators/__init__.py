"""Predictors of a plan's cost: a closed form, and a simulator that plays every task."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def __getattr__(name: str) -> Any:
    module = f"{__name__}.{name}"
    if name.startswith("_") or find_spec(module) is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return import_module(module)
