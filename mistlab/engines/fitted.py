"""Fitted constants of engines, from ``mistlab/catalog/engines.yaml``, where each has its source."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from mistlab.core.files import parse_yaml


def fitted(name: str) -> dict[str, Any]:
    """The fitted constants of an engine, as a mapping from fields of ``Engine`` or its parts to
    values.
    """
    facts = _file()[name]
    return {key: value for fact in facts for key, value in fact.items() if key != "source"}


@cache
def _file() -> Mapping[str, Any]:
    file = files("mistlab") / "catalog" / "engines.yaml"
    return parse_yaml(file.read_text(encoding="utf-8"), file.name)
