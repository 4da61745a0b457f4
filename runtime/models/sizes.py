"""Sizes of a model: numbers, or symbols while a model is traced.

The module that makes symbols (``runtime.sizes``) takes seconds to import. Nothing here imports it,
so that processes that train start quickly.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch

# A torch.SymInt passes for an int everywhere; PyTorch's own annotations say int.
Size = int


@runtime_checkable
class Space(Protocol):
    """Makes the symbols of one trace; ``runtime.sizes.SizeSpace`` does."""

    fake_mode: Any

    def size(self, name: str, value: int) -> Size:
        """A new symbol ``name``; ``value`` stands for it where code needs a number."""

    def refuse_fixed(self, culprit: str, place: str = "") -> None:
        """Raise if traced code has fixed a symbol to a number, or to another symbol."""


def space_of(sizes: Iterable[object]) -> Space | None:
    """The space of the symbols among ``sizes``; None if all sizes are numbers."""
    symbols = (size for size in sizes if isinstance(size, torch.SymInt))
    spaces = (symbol.node.shape_env for symbol in symbols)
    return next((space for space in spaces if isinstance(space, Space)), None)


def construction(sizes: Iterable[object]) -> AbstractContextManager[object]:
    """The context in which to build a module of these sizes.

    It is a fake-tensor mode if a size is a symbol, and changes nothing otherwise.
    """
    space = space_of(sizes)
    return nullcontext() if space is None else space.fake_mode


def value_of(size: Size) -> int:
    """The number that a size is or, as a symbol, stands for."""
    return size if isinstance(size, int) else int(size.node.hint)
