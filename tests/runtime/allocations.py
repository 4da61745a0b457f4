"""Counts the bytes of tensors from the results of operators, as an allocator on a device would.

Memory that kernels on a CPU take for themselves is not counted.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts storages that come and go while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes = 0
        self.most_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.note(leaf.untyped_storage())
        return result

    def note(self, storage: torch.UntypedStorage) -> None:
        """Count a storage until it goes."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone(_: object) -> None:
            del self._known[key]
            self.now_bytes -= size

        self._known[key] = weakref.ref(storage, gone)
        self.now_bytes += size
        self.most_bytes = max(self.most_bytes, self.now_bytes)
