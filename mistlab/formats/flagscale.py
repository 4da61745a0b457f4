"""Reads FlagScale's training YAML: Megatron-LM's options in the sections system, model and data."""

from collections.abc import Mapping
from typing import Any

from mistlab.export.given import Given, Imported
from mistlab.formats.content import settings_of
from mistlab.formats.flags import Flags
from mistlab.formats.interpolation import resolved
from mistlab.shell.source import Source

_SECTIONS = ("system", "model", "data")
# Sections inside, without effect on cost.
_CALM = ("logging", "checkpoint", "learning_rate_scheduler", "optimizer")


def recognises(source: Source) -> bool:
    """Whether a file has FlagScale's sections with a model's blocks."""
    settings = settings_of(source)
    model = settings.get("model")
    return "system" in settings and isinstance(model, Mapping) and "num_layers" in model


def read(source: Source, given: Given) -> Imported:
    """The job of a file's options."""
    settings = resolved(settings_of(source), source.settings)
    flags = Flags(where="model")
    for name in _SECTIONS:
        _put(settings.get(name), flags, name)
    return flags.read(given)


def _put(section: Any, flags: Flags, where: str) -> None:
    if not isinstance(section, Mapping):
        return
    for key, value in section.items():
        if isinstance(value, Mapping):
            if key not in _CALM:
                _put(value, flags, f"{where}.{key}")
        else:
            flags.put(str(key), value, f"{where}.{key}")
