"""Plain data with some entries wrong: left out, of another type, or far too large."""

import copy
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from tests.hostile import values


def _places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all entries of nested mappings and lists."""
    entries: Sequence[tuple[Any, Any]] = ()
    if isinstance(content, dict):
        entries = [*content.items()]
    elif isinstance(content, list):
        entries = [*enumerate(content)]
    for key, value in entries:
        yield (*path, key)
        yield from _places(value, (*path, key))


def changed(random: Random, content: Any) -> tuple[str, Any]:
    """A copy of plain data with one to three entries wrong, and which."""
    whole, told = copy.deepcopy(content), []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = [*_places(whole)]
        if not places:
            break
        *holder, key = random.choice(places)
        at = whole
        for step in holder:
            at = at[step]
        told.append(_change_entry(random, at, key, ".".join(map(str, [*holder, key]))))
    return "; ".join(told), whole


def _change_entry(random: Random, at: Any, key: Any, name: str) -> str:
    """Make an entry of a mapping or a list wrong, and say how."""
    draw, old = random.random(), at[key]
    if draw < 0.1:
        del at[key]
        return f"{name} left out"
    if draw < 0.15 and isinstance(at, dict):
        at[random.choice(("unknown", f"{key} ", str(key).upper(), "", 7, None))] = old
        return f"a strange key beside {name}"
    is_number = isinstance(old, int | float) and not isinstance(old, bool)
    if draw < 0.4 and is_number:
        factor = random.choice((0, -1, 2, 3, 0.5, 7, 1000, 10**6, 10**9, 1e-9))
        at[key] = type(old)(old * factor)
        return f"{name} times {factor}"
    # A later change may go into what is put here.
    at[key] = copy.deepcopy(random.choice(values.FIELD_VALUES))
    if isinstance(at[key], str) and len(at[key]) > 100:
        return f"{name}: 60 KB of text"
    return f"{name}: {at[key]!r}"
