"""Writes trained weights as one safetensors file, in the run's precision (only the adapters, if
those are trained).

Every rank writes its own parts of the tensors into the file.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from mistlab.plan.workload import Workload
from runtime.checkpoints.tensor_files import TensorPlace, header_of
from runtime.comm.processes import meet
from runtime.engine.executor import Executor
from runtime.engine.work.own_layers import own_shapes_of
from runtime.models.config import TYPE_OF_PRECISION
from runtime.models.experts import CORRECTION
from runtime.models.families import is_adapter, shapes_of_model


def export(executor: Executor, workload: Workload, path: Path) -> None:
    """Write the master weights, rounded, under the names of the unsplit model. If replicas have
    different weights, those of the first replica are written.
    """
    executor.flush()
    unfinished = path.with_name(path.name + ".part")
    kind = TYPE_OF_PRECISION[workload.precision]
    kinds = {
        # The biases that correct routers stay in 32 bits, since rounding could change the choice of
        # experts.
        name: (shape, torch.float32 if name.endswith(CORRECTION) else kind)
        for name, shape in _shapes_of(workload).items()
    }
    header, places = header_of(unfinished, kinds)
    if executor.connections.is_first:
        with unfinished.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(one.size_bytes for one in places.values()))
    meet()
    _write(executor, kind, places)
    meet()
    if executor.connections.is_first:
        unfinished.rename(path)
    meet()


def _shapes_of(workload: Workload) -> dict[str, tuple[int, ...]]:
    if workload.model.family == "custom":
        return own_shapes_of(workload)
    shapes = shapes_of_model(workload)
    if workload.train == "all":
        return shapes
    return {name: shape for name, shape in shapes.items() if is_adapter(name)}


def _write(executor: Executor, kind: torch.dtype, places: Mapping[str, TensorPlace]) -> None:
    parameters = executor.parameters
    # The values are copied as integers with the same bits, since NumPy lacks bfloat16.
    bits, plain = (torch.int32, "<i4") if kind.itemsize == 4 else (torch.int16, "<i2")
    for layer in executor.layers:
        masters = parameters.masters(layer)
        for piece in parameters.pieces(layer):
            if executor.connections.peers.rank or not parameters.writes(piece):
                continue
            tensor_place = places[piece.name]
            file = np.memmap(
                tensor_place.file, plain, "r+", offset=tensor_place.begin, shape=tensor_place.shape
            )
            box = tuple(
                slice(at, at + size) for at, size in zip(piece.offsets, piece.sizes, strict=True)
            )
            flat = masters[piece.begin : piece.begin + piece.numel].to(kind).view(bits)
            file[box] = flat.view(piece.sizes).numpy()
            file.flush()
    of_rank = executor.connections.place
    if of_rank.data == of_rank.context == of_rank.tensor == 0:
        for name, values in executor.routers.corrections().items():
            correction_place = places[name]
            file = np.memmap(
                correction_place.file,
                "<f4",
                "r+",
                offset=correction_place.begin,
                shape=correction_place.shape,
            )
            file[:] = values.cpu().numpy()
            file.flush()
