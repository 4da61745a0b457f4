"""A table whose entries are made when they are first asked for: listing its names costs nothing."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any, TypeVar

Entry = TypeVar("Entry")


def imported(path: str) -> Callable[[], Any]:
    """A function that imports an object by its path, such as ``searchers.registry:SEARCHERS``."""
    module, _, name = path.partition(":")
    return lambda: getattr(import_module(module), name)


def called(path: str, *arguments: str) -> Callable[[], Any]:
    """A function that imports a function by its path, and returns its result."""
    return lambda: imported(path)()(*arguments)


class OnUse(MutableMapping[str, Entry]):
    """Entries by name, each made once, by a function that may import what the entry needs."""

    def __init__(self, makers: Mapping[str, Callable[[], Entry]]) -> None:
        self._makers = dict(makers)
        self._made: dict[str, Entry] = {}

    def __getitem__(self, name: str) -> Entry:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __setitem__(self, name: str, entry: Entry) -> None:
        self._makers[name] = lambda: entry
        self._made[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._makers[name]
        self._made.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)
