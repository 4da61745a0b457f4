"""Reads the list of a checkpoint's tensors, and runs nothing that the file names.

torch.distributed.checkpoint pickles this list, and a pickle may call any function on the machine
that reads it. Here the classes of such a list are made, and nothing else. The tensors themselves
are read by ``torch.load(weights_only=True)``, which has a list of its own.
"""

import pickle
from collections.abc import Mapping
from typing import IO, Any

import torch

from runtime.boxes import UnreadableError

_OF_TORCH = "torch.distributed.checkpoint"
# What the list of a checkpoint is made of, by module.
_KNOWN: Mapping[str, frozenset[str]] = {
    f"{_OF_TORCH}.metadata": frozenset(
        (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
            *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
            "_MEM_FORMAT_ENCODING",
        )
    ),
    f"{_OF_TORCH}.filesystem": frozenset(("_StorageInfo",)),
    "torch": frozenset(("Size", "device")),
    "torch.serialization": frozenset(("_get_layout",)),
    # Its place since Python 3.13 is another.
    "pathlib": frozenset(("PosixPath", "WindowsPath")),
    "pathlib._local": frozenset(("PosixPath", "WindowsPath")),
}


class _ListUnpickler(pickle.Unpickler):
    """Makes the classes of a checkpoint's list; refuses any other name."""

    def find_class(self, module: str, name: str, /) -> Any:
        """A class or a type of numbers by its name."""
        is_number = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_number or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        message = f".metadata names {module}.{name}, which no list of tensors needs: not loaded"
        raise UnreadableError(message)


def tensors_listed(file: IO[bytes]) -> Any:
    """What a checkpoint's ``.metadata`` holds; raises ``UnreadableError`` where it would do more
    than hold a list of tensors."""
    return _ListUnpickler(file).load()
