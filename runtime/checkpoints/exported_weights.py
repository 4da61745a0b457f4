"""Writes trained weights as one safetensors file, in the precision of the run.

The file begins with eight bytes for the length of the header. A JSON header with types, shapes and
places follows, then the tensors' bytes. Every rank writes its own parts of tensors into the file.
"""

import json
from math import prod
from pathlib import Path

import numpy as np
import torch

from mistlab.values.workload import Workload
from runtime.comm.processes import meet
from runtime.engine.executor import Executor
from runtime.models.config import TYPE_OF_PRECISION
from runtime.models.families import model_of

_TYPE_NAMES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
_ALIGNMENT = 8


def export(executor: Executor, workload: Workload, path: Path) -> None:
    """Write the master weights, rounded, under the names of an unsplit model."""
    executor.flush()
    header, places = _header(workload)
    unfinished = path.with_name(path.name + ".part")
    if executor.connections.rank == 0:
        with unfinished.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(size for _, _, size in places.values()))
    meet()
    _write(executor, workload, unfinished, len(header), places)
    meet()
    if executor.connections.rank == 0:
        unfinished.rename(path)
    meet()


# A tensor's shape, the place of its first byte, and its size in bytes.
_TensorBytes = tuple[tuple[int, ...], int, int]


def _header(workload: Workload) -> tuple[bytes, dict[str, _TensorBytes]]:
    kind = TYPE_OF_PRECISION[workload.precision]
    places: dict[str, _TensorBytes] = {}
    begin = 0
    with torch.device("meta"):
        named = [(name, tuple(p.shape)) for name, p in model_of(workload).named_parameters()]
    for name, shape in named:
        size = prod(shape) * kind.itemsize
        places[name] = shape, begin, size
        begin += size
    entries = {
        name: {
            "dtype": _TYPE_NAMES[workload.precision],
            "shape": list(shape),
            "data_offsets": [begin, begin + size],
        }
        for name, (shape, begin, size) in places.items()
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, places


def _write(
    executor: Executor, workload: Workload, path: Path, start: int, places: dict[str, _TensorBytes]
) -> None:
    kind, parameters = TYPE_OF_PRECISION[workload.precision], executor.parameters
    # The bits are copied as integers, because NumPy has no bfloat16.
    bits, plain = (torch.int32, "<i4") if kind.itemsize == 4 else (torch.int16, "<i2")
    for layer in executor.layers:
        masters = parameters.stepped(layer, 0)
        for piece in parameters.pieces(layer):
            if not parameters.writes(piece):
                continue
            shape, begin, _ = places[piece.name]
            file = np.memmap(path, plain, "r+", offset=start + begin, shape=shape)
            box = tuple(
                slice(at, at + size) for at, size in zip(piece.offsets, piece.sizes, strict=True)
            )
            flat = masters[piece.begin : piece.begin + piece.numel].to(kind).view(bits)
            file[box] = flat.view(piece.sizes).numpy()
            file.flush()
