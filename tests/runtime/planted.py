"""Faults that are planted in functions of the runtime, as lines of their files, and found there."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from runtime.checks.fake.watch import Kind, WaitFinding

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A piece of a function that is another instead, and the finding that it is to give.

    ``at`` is a piece of the line where it is found, if that is another.
    """

    function: Callable[..., Any]
    right: str
    wrong: str
    kind: Kind
    operator: str
    task: str
    lane: str
    at: tuple[Callable[..., Any], str] | None = None

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        plant(patch, self.function, self.right, self.wrong)

    def found_in(self, findings: tuple[WaitFinding, ...]) -> bool:
        function, piece = self.at or (self.function, self.right)
        wanted = (self.kind, self.operator, self.task, self.lane, place_of(function, piece))
        return wanted in [
            (one.kind, one.operator, one.task, one.lane, one.place.partition(" ")[0])
            for one in findings
        ]


def plant(patch: pytest.MonkeyPatch, function: Callable[..., Any], right: str, wrong: str) -> None:
    """Let a function run as if a piece of its file were another; no line moves."""
    path = Path(function.__code__.co_filename)
    text = path.read_text(encoding="utf-8")
    assert text.count(right) == 1, f"{path.name} has changed: plant the fault elsewhere"
    module = compile(text.replace(right, wrong), str(path), "exec")
    patch.setattr(function, "__code__", code_of(module, function.__qualname__))


def place_of(function: Callable[..., Any], piece: str) -> str:
    """The file and line of a piece of a function."""
    path = Path(function.__code__.co_filename)
    before, found, _ = path.read_text(encoding="utf-8").partition(piece)
    assert found
    return f"{path.relative_to(ROOT).as_posix()}:{before.count(chr(10)) + 1}"


def code_of(code: CodeType, name: str) -> CodeType:
    """The code of a function in that of its module."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    for one in inner:
        if one.co_qualname == name:
            return one
    return next(code_of(one, name) for one in inner if name.startswith(one.co_qualname))
