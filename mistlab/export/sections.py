"""Reads sections of a configuration file: numbers and switches by name, and what is left over."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mistlab.core.values import InputError, near_matches
from mistlab.export.found import Found, checked_whole

# How many unknown settings get a line of their own, and how many names a line lists.
MOST_NAMED = 3
MOST_LISTED = 5
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


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

    def words(self, key: str) -> list[str]:
        """A list of words; empty if it is not there."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            message = f"{self.path(key)}: {value!r} is no list: give [NAME, ...]"
            raise InputError(message)
        return [str(word) for word in value]

    def switch(self, key: str, *, default: bool = False) -> bool:
        """Whether a setting is on; command lines and some files write it as a word."""
        value = self.get(key, default=default)
        if isinstance(value, str):
            value = _WORDS.get(value.lower(), value)
        if value is None:
            return default
        if not isinstance(value, bool):
            message = f"{self.path(key)}: {value!r} is neither true nor false: give one of them"
            raise InputError(message)
        return value

    def text(self, key: str, default: str = "") -> str:
        """A setting as text; a default if it is not there, or null."""
        value = self.get(key)
        return default if value is None else str(value)

    def choice(self, key: str, known: Iterable[str], default: str) -> str:
        """One of some words in lower case; a default if it is not there."""
        value = self.text(key, default)
        names = tuple(known)
        if value.lower() not in names:
            message = f"{self.path(key)}: {value!r} is unknown{near_matches(value, names)}"
            raise InputError(message)
        return value.lower()

    def has(self, key: str) -> bool:
        """Whether a setting is there, and says something."""
        return self.get(key) is not None

    def take_all(self) -> None:
        """Ask for every setting: nothing of the section is told of any more."""
        for key in self.content:
            self._asked.setdefault(str(key), None)

    def unsaid(self, taken: Mapping[str, str]) -> None:
        """Remark on settings that change cost in ways that plans cannot say: what is taken instead,
        by key."""
        for key, instead in taken.items():
            value = self.get(key)
            off = (None, False, 0, "", "none", "None", "no", "false", "False")
            if not isinstance(value, list | dict) and value in off:
                continue
            said = "" if isinstance(value, list | dict) or value is True else f"{value}: "
            self.found.remark("ignored", self.path(key), f"{said}{instead}")

    def path(self, key: str) -> str:
        """The place of a setting in the file."""
        return f"{self.name}.{key}" if self.name else key

    def tell_of_rest(self, harmless: Iterable[str]) -> None:
        """Remark on all settings that nobody asked for, sections of sections included: settings
        that change no cost in one remark, unknown settings each, the first few of them."""
        names = frozenset(harmless)
        left = list(self._left())
        calm = [path for key, path in left if key in names]
        strange = [path for key, path in left if key not in names]
        for path in strange[:MOST_NAMED]:
            text = "is not known here; the prediction is without it"
            self.found.remark("ignored", path, text)
        if more := strange[MOST_NAMED:]:
            text = f"and {len(more)} more settings are not known here: {listed(more)}"
            self.found.remark("ignored", "settings", text)
        if calm:
            text = f"{listed(calm)}: no effect on a step's cost that plans could tell"
            self.found.remark("noted", "settings", text)

    def _left(self) -> Iterator[tuple[str, str]]:
        """Keys and paths of settings that nobody asked for and that say something."""
        for key, value in self.content.items():
            name = str(key)
            if name in self._asked:
                section = self._asked[name]
                if section is not None:
                    yield from section._left()
            elif value is not None:
                yield name, self.path(name)


def listed(names: Sequence[str], between: str = " ") -> str:
    """Names with blanks, or other marks, between them; of many their number, and the first few.

    >>> listed(["lr", "seed"])
    'lr seed'
    """
    if len(names) <= MOST_LISTED:
        return between.join(names)
    return f"{len(names)} settings ({' '.join(names[:MOST_LISTED])} ...)"
