"""Reads sections of a configuration file: numbers and switches by name, and what is left over."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mistlab.export.found import Found, checked_whole
from mistlab.values.errors import InputError


def content_of(text: str) -> Mapping[str, Any]:
    """The object in a JSON text."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        message = f"line {error.lineno}, column {error.colno}: {error.msg}: correct the JSON"
        raise InputError(message) from None
    except RecursionError:
        message = "is nested too deeply: write at most a few levels"
        raise InputError(message) from None
    if not isinstance(content, dict):
        message = "holds no JSON object: give a configuration file"
        raise InputError(message)
    return content


class Section:
    """A section of a configuration; settings that nobody asks for are told of at the end."""

    def __init__(self, content: Mapping[str, Any], name: str, found: Found) -> None:
        self.content, self.name, self.found = content, name, found
        self._asked: dict[str, Section | None] = {}

    def get(self, key: str, default: object = None) -> Any:
        """A setting as it stands; ``auto`` stands for none."""
        self._asked.setdefault(key, None)
        value = self.content.get(key, default)
        if value == "auto":
            text = "auto, which the training script settles: taken as not given"
            self.found.remark("assumed", self.path(key), text)
            return default
        return value

    def section(self, key: str) -> "Section":
        """A section of this section; empty if it is not there."""
        if (known := self._asked.get(key)) is not None:
            return known
        content = self.content.get(key)
        if content is None:
            content = {}
        if not isinstance(content, Mapping):
            message = f"{self.path(key)}: {content!r} is no section: give its settings"
            raise InputError(message)
        made = Section(content, self.path(key), self.found)
        self._asked[key] = made
        return made

    def whole(self, key: str, *, minimum: int = 1) -> int | None:
        """A whole number, if it is there."""
        value = self.get(key)
        return None if value is None else checked_whole(self.path(key), value, minimum=minimum)

    def number(self, key: str, default: float, *, maximum: float = 1) -> float:
        """A number from 0 to a maximum."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            message = f"{self.path(key)}: {value!r} is not a number: give one"
            raise InputError(message)
        if not 0 <= value <= maximum:
            message = f"{self.path(key)}: {value:g} is out of range: give one from 0 to {maximum:g}"
            raise InputError(message)
        return float(value)

    def switch(self, key: str) -> bool:
        """Whether a setting is on."""
        value = self.get(key, default=False)
        if not isinstance(value, bool):
            message = f"{self.path(key)}: {value!r} is neither true nor false: give one of them"
            raise InputError(message)
        return value

    def path(self, key: str) -> str:
        """The place of a setting in the file."""
        return f"{self.name}.{key}" if self.name else key

    def tell_of_rest(self, harmless: Iterable[str]) -> None:
        """Remark on all settings that nobody asked for, sections of sections included."""
        left = [key for key in self.content if key not in self._asked]
        calm = [self.path(key) for key in left if key in harmless]
        if calm:
            text = f"{' '.join(calm)}: no effect on a step's cost that plans could tell"
            self.found.remark("ignored", "settings", text)
        for key in left:
            if key not in harmless:
                text = "is not known here; the prediction is without it"
                self.found.remark("ignored", self.path(key), text)
        for section in self._asked.values():
            if section is not None:
                section.tell_of_rest(harmless)
