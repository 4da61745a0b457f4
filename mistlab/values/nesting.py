"""Refuses YAML that is nested too deeply, or grows without bound, before it is built.

libyaml builds nested mappings and lists by recursion in C: a text of 60 KB with 30,000 brackets
ends the process. An alias stands for all of its anchor: nine lines can stand for a billion
entries. A real file of this package has five levels and no alias.
"""

import re

import yaml

from mistlab.values.errors import InputError

if yaml.__with_libyaml__:
    from yaml import CSafeLoader as EventLoader
else:
    from yaml import SafeLoader as EventLoader  # type: ignore[assignment]

MOST_LEVELS = 100
MOST_ENTRIES = 10**6

# Texts with fewer brackets, without long runs of indicators ("- - - ..."), far indented lines and
# aliases are shallow enough to build. Others are looked through event by event, which takes a third
# of the time of building them.
_FEW_BRACKETS = 500
_STRANGE = re.compile(r"(?:[-?:][ \t]+){50}|^ {200}|[*<]", re.MULTILINE)


def check_nesting(text: str) -> None:
    """Refuse a YAML text that is too deep, or too large once its aliases are filled in."""
    if text.count("[") + text.count("{") > _FEW_BRACKETS or _STRANGE.search(text):
        _Walk().over(text)


class _Walk:
    """A walk over a text's events: the open collections, and the entries of each anchor."""

    def __init__(self) -> None:
        # Of each open collection the anchor, and the entries so far.
        self._open: list[tuple[str | None, int]] = []
        self._entries: dict[str, int] = {}

    def over(self, text: str) -> None:
        """Refuse a text that is too deep, or has too many entries; malformed text ends the walk, as
        building it tells what is wrong."""
        try:
            for event in yaml.parse(text, Loader=EventLoader):
                self._take(event)
        except yaml.YAMLError:
            return

    def _take(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.CollectionStartEvent):
            self._open.append((event.anchor, 1))
            if len(self._open) > MOST_LEVELS:
                _refuse(event, f"nested more than {MOST_LEVELS} levels deep: write fewer levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, entries = self._open.pop()
            self._add(event, anchor, entries)
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in self._open):
                _refuse(event, f"alias *{event.anchor} stands inside of its own anchor: remove it")
            self._add(event, None, self._entries.get(event.anchor or "", 1))
        elif isinstance(event, yaml.ScalarEvent):
            self._add(event, event.anchor, 1)

    def _add(self, event: yaml.Event, anchor: str | None, entries: int) -> None:
        """Count the entries of what has ended, in the collection around it."""
        if anchor is not None:
            self._entries[anchor] = entries
        if self._open:
            name, before = self._open[-1]
            self._open[-1] = (name, before + entries)
            if before + entries > MOST_ENTRIES:
                _refuse(event, f"more than {MOST_ENTRIES:,} entries, aliases filled in: use fewer")


def _refuse(event: yaml.Event, problem: str) -> None:
    mark = event.start_mark
    message = f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem
    raise InputError(message)
