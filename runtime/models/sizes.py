"""Sizes of a model: numbers, or symbols while a model is traced.

The module that makes symbols (``runtime.sizes``) takes seconds to import. It is imported only if a
size is a symbol, so that processes that train start quickly.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from runtime.sizes import SizeSpace

# A torch.SymInt passes for an int everywhere; PyTorch's own annotations say int.
Size = int


def space_of(sizes: Iterable[object]) -> "SizeSpace | None":
    """The ``SizeSpace`` of the symbols among ``sizes``; None if all sizes are numbers."""
    symbols = [size for size in sizes if isinstance(size, torch.SymInt)]
    if not symbols:
        return None
    from runtime.sizes import SizeSpace  # noqa: PLC0415 (slow to import)

    spaces = (size.node.shape_env for size in symbols)
    return next((space for space in spaces if isinstance(space, SizeSpace)), None)


def construction(sizes: Iterable[object]) -> AbstractContextManager[object]:
    """The context in which to build a module of these sizes.

    It is a fake-tensor mode if a size is a symbol, and changes nothing otherwise.
    """
    space = space_of(sizes)
    return nullcontext() if space is None else space.fake_mode


def value_of(size: Size) -> int:
    """The number that a size is or, as a symbol, stands for."""
    return size if isinstance(size, int) else int(size.node.hint)
