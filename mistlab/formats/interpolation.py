"""Settings that refer to other settings, or to variables of the environment, made plain.

OmegaConf writes ``${model.d_model}``, ``${.hidden_size}`` for a neighbour and ``${multiply:4,
${.hidden_size}}`` for NeMo's resolvers; Primus writes ``${PRIMUS_TP:1}`` with a default. What
cannot be resolved stays as it is written, and is refused where its value is needed.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mistlab.core.values import InputError
from mistlab.formats.launched import valued

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_DEEPEST = 20
# How many references are followed in a file: one that doubles itself would take hours.
_MOST = 10_000
_OPERATIONS: Mapping[str, Callable[[list[float]], float]] = {
    "multiply": lambda numbers: numbers[0] * numbers[1],
    "divide": lambda numbers: numbers[0] / numbers[1],
    "sum": sum,
    "add": sum,
}
_Path = tuple[str, ...]


def resolved(settings: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Settings without references, as far as they can be resolved; variables' values win."""
    try:
        result = _Resolver(settings, variables).value(settings, (), 0)
    except RecursionError:
        message = "its references go too deep: give values in their place"
        raise InputError(message) from None
    assert isinstance(result, dict)
    return result


@dataclass(slots=True)
class _Resolver:
    """The settings that references look into, values of variables, and how many references were
    followed."""

    root: Mapping[str, Any]
    variables: Mapping[str, str]
    followed: int = 0

    def value(self, value: Any, path: _Path, depth: int) -> Any:
        """A value without references, as far as they can be resolved."""
        if depth > _DEEPEST:
            message = f"{'.'.join(path)}: refers to itself: give a value"
            raise InputError(message)
        if isinstance(value, Mapping):
            return {
                key: self.value(below, (*path, str(key)), depth) for key, below in value.items()
            }
        if isinstance(value, list):
            return [self.value(below, path, depth) for below in value]
        if isinstance(value, str) and "${" in value:
            return self._text(value, path, depth)
        return value

    def _text(self, text: str, path: _Path, depth: int) -> Any:
        """A text with its references resolved from the inside out; a number where it is one."""
        for _ in range(_DEEPEST):
            match = _INNERMOST.search(text)
            if match is None:
                return valued(text)
            self.followed += 1
            if self.followed > _MOST:
                message = f"{'.'.join(path)}: has more than {_MOST} references: give values"
                raise InputError(message)
            known, meant = self._meant(match[1], path)
            if not known:
                return text
            if match[0] == text:
                return self.value(meant, path, depth + 1)
            if isinstance(meant, Mapping | list):
                return text
            text = text.replace(match[0], str(meant))
        return text

    def _meant(self, words: str, path: _Path) -> tuple[bool, Any]:
        """Whether it is known what a reference stands for, and what that is."""
        name, colon, rest = words.partition(":")
        if name == "oc.env":
            name, colon, rest = rest.partition(",")
        if name.strip() in self.variables:
            return True, valued(self.variables[name.strip()])
        if name in _OPERATIONS:
            return _computed(name, rest)
        if colon or words.startswith("oc.env"):
            return bool(colon), valued(rest.strip().removeprefix("-"))
        return self._looked_up(name, path)

    def _looked_up(self, name: str, path: _Path) -> tuple[bool, Any]:
        """The setting at a path; each dot in front goes one section up."""
        inner = name.lstrip(".")
        ups = len(name) - len(inner)
        content: Any = self.root
        for part in (*(path[: len(path) - ups] if ups else ()), *inner.split(".")):
            if not isinstance(content, Mapping) or part not in content:
                return False, None
            content = content[part]
        return True, content


def _computed(name: str, rest: str) -> tuple[bool, Any]:
    try:
        result = _OPERATIONS[name]([float(part) for part in rest.split(",")])
    except (ValueError, ZeroDivisionError, IndexError):
        return False, None
    return True, int(result) if result == int(result) else result
