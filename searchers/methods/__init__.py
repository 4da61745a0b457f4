"""The strategies of searchers, one in each file; a file is imported when it is first named."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def __getattr__(name: str) -> Any:
    module = f"{__name__}.{name}"
    if name.startswith("_") or find_spec(module) is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return import_module(module)
