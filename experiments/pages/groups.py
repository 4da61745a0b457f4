"""Groups items by key."""

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key")


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Groups items by a key; groups are in the order of their first items.

    >>> grouped(["one", "two", "three"], len)
    {3: ['one', 'two'], 5: ['three']}
    """
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
