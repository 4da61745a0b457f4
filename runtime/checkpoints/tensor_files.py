"""Reads and writes safetensors files, and their headers.

A file begins with the length of the header in eight bytes. Then follows the header in JSON, with
the type, shape and position of each tensor, and then the bytes of the tensors.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mistlab.core.values import InputError, reject

TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
TYPE_NAMES = {kind: name for name, kind in TYPES.items()}
_ALIGNMENT = 8
# The shape and the data type of each tensor of a file, by name, in the order of their bytes.
TensorKinds = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor is stored: its file, its first byte there, its data type and its shape."""

    file: Path
    begin: int
    kind: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The number of bytes of the tensor."""
        return prod(self.shape) * self.kind.itemsize


def tensors_of(file: Path) -> Iterator[tuple[str, TensorPlace]]:
    """Where each tensor of a file is stored, by name; raises an error if the file is truncated or
    damaged.
    """
    try:
        whole = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_ALIGNMENT), "little")
            entries = json.loads(opened.read(min(length, whole)))
        entries.pop("__metadata__", None)
        first = length + _ALIGNMENT
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            shape, kind = tuple(entry["shape"]), TYPES[entry["dtype"]]
            if first + end > whole or end - begin != prod(shape) * kind.itemsize:
                reject(
                    f"{file}: {name} reaches beyond the end of the file, which is truncated: copy "
                    "it again"
                )
            yield name, TensorPlace(file, first + begin, kind, shape)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        reject(f"{file} is not a safetensors file, or damaged ({error}): copy it again")


def header_of(path: Path, kinds: TensorKinds) -> tuple[bytes, dict[str, TensorPlace]]:
    """The header of a file with these tensors, and where each tensor will be stored in it."""
    entries, places, begin = {}, {}, 0
    for name, (shape, kind) in kinds.items():
        end = begin + prod(shape) * kind.itemsize
        ends = [begin, end]
        entries[name] = {"dtype": TYPE_NAMES[kind], "shape": list(shape), "data_offsets": ends}
        places[name] = TensorPlace(path, begin, kind, shape)
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(_ALIGNMENT, "little") + text
    return header, {
        name: TensorPlace(
            path, len(header) + place_in_file.begin, place_in_file.kind, place_in_file.shape
        )
        for name, place_in_file in places.items()
    }


def write_tensors(path: Path, tensors: Iterator[tuple[str, Tensor]], kinds: TensorKinds) -> None:
    """Write tensors into one file; they must come in the order of ``kinds``."""
    header, _ = header_of(path, kinds)
    with path.open("wb") as file:
        file.write(header)
        for _, tensor in tensors:
            file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
