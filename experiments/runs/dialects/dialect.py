"""Turns rows of tables of measured runs into typed columns, by rules that are listed for each
source of tables (its dialect).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, get_args, get_type_hints

from experiments.runs.run_row import RunRow
from experiments.runs.runs_table import text_of
from mistlab.core.files import parse_yaml

# Matches the parts of a model name: a number with its unit (8b); a number, in which _ before one
# digit is a decimal point (nemotron3_5); letters, except a v before a number (deepseekv3). So
# Qwen3.6-35B-A3B gives qwen, 3.6, 35b, a, 3b, and qwen-35b is not Qwen 3.5.
_WORD = re.compile(
    r"[0-9]+(?:\.[0-9]+)?[bmt](?![a-z0-9])|[0-9]+(?:\.[0-9]+|_[0-9](?![a-z0-9]))?|[a-z]+?(?=v[0-9])|[a-z]+"
)
# With this prefix, a value refers to a group of the pattern's match: $1 is the first group.
GROUP = "$"
# The file with rules for tables of all sources; its rules are applied last.
LAST = "common.yaml"


@lru_cache(maxsize=4096)
def words_of(name: str) -> tuple[str, ...]:
    """The words of a name in lower case; letters and digits that touch become separate words."""
    return tuple(word.replace("_", ".") for word in _WORD.findall(name.casefold()))


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectRule:
    """A rule of a dialect: patterns for the texts in some columns, and the typed columns that are
    set if all of them match.

    All patterns of ``when`` must match their columns in lower case, and all columns of ``named``
    must contain the given words one after another.
    """

    gives: Mapping[str, Any]
    when: Mapping[str, re.Pattern[str]]
    named: Mapping[str, tuple[str, ...]]

    def columns(self, texts: Mapping[str, str]) -> Mapping[str, Any]:
        """The typed columns that the rule sets for the texts of a row; none if the texts do not
        match its patterns.
        """
        if not all(_has(words_of(texts[name]), words) for name, words in self.named.items()):
            return {}
        matches = [pattern.search(texts[name]) for name, pattern in self.when.items()]
        if not all(matches):
            return {}
        groups = [text for found in matches if found for text in found.groups()]
        return {name: _value(name, value, groups) for name, value in self.gives.items()}


def _value(column: str, value: Any, groups: Sequence[str]) -> Any:
    """The value of a typed column, which is a constant or a group of the pattern's match."""
    if not isinstance(value, str) or not value.startswith(GROUP):
        return value
    return _kind(column)(groups[int(value.removeprefix(GROUP)) - 1])


def _has(given: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    starts = range(len(given) - len(wanted) + 1)
    return any(given[start : start + len(wanted)] == wanted for start in starts)


@cache
def _kind(column: str) -> type:
    """The type (int, float or str) of the values in the typed column of this name."""
    hint = get_type_hints(RunRow)[column]
    return next(kind for kind in (int, float, str) if kind in (hint, *get_args(hint)))


@cache
def rules() -> tuple[DialectRule, ...]:
    """The rules of all dialects, by the name of the dialect; those for all tables come last."""
    room = files("experiments.runs.dialects")
    named = {file.name: file for file in room.iterdir() if file.name.endswith(".yaml")}
    ordered = sorted(named, key=lambda name: (name == LAST, name))
    texts = (parse_yaml(named[name].read_text(encoding="utf-8"), name) for name in ordered)
    return tuple(_rule(entry) for text in texts for entry in text["rules"])


def _rule(entry: Mapping[str, Mapping[str, Any]]) -> DialectRule:
    when, named = entry.get("when", {}), entry.get("named", {})
    gives = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in entry["gives"].items()
    }
    return DialectRule(
        gives=gives,
        when={name: re.compile(pattern, re.DOTALL) for name, pattern in when.items()},
        named={name: words_of(words) for name, words in named.items()},
    )


@cache
def _columns_read() -> tuple[str, ...]:
    return tuple(sorted({name for rule in rules() for name in (*rule.when, *rule.named)}))


def row_of(cells: Mapping[str, str]) -> RunRow:
    """The typed columns of a table's row, by the rules of all dialects."""
    texts = tuple(text_of(cells, name).casefold() for name in _columns_read())
    return RunRow(cells=cells, **_typed(texts))


@lru_cache(maxsize=4096)
def _typed(texts: tuple[str, ...]) -> Mapping[str, Any]:
    return typed(rules(), dict(zip(_columns_read(), texts, strict=True)))


def typed(rules: Sequence[DialectRule], texts: Mapping[str, str]) -> dict[str, Any]:
    """The typed columns that follow from lower-case texts; if several rules set a column, the first
    one counts.
    """
    columns: dict[str, Any] = {}
    for rule in rules:
        columns = {**rule.columns(texts), **columns}
    return columns
