"""Boxes of the model's tensors, read from a rank's memory and written back into it.

A box is a view of the flat vectors that a rank steps, so that a checkpoint needs no copy of them:
what is on the host is written from where it is, what is on a device goes through one buffer of the
host, box by box, and what is read goes where it belongs at once. Two planners tell
``torch.distributed.checkpoint`` of boxes: a range of a flat vector is no rectangle, so neither
DTensor nor ShardedTensor could.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    create_default_global_load_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from runtime.engine.executor import Executor
from runtime.engine.storage.pieces import Piece

KINDS = ("master", "moment1", "moment2")
# Larger boxes are cut: so much host memory holds what comes from a device, or from a file.
MOST_BYTES = 64 * 2**20


class UnlikeError(ValueError):
    """A checkpoint has no such tensor as is looked for."""


class UnreadableError(ValueError):
    """The files of a checkpoint are not what was written."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Box:
    """A box of the whole tensor ``name``; ``values`` are the memory in which the rank has it."""

    name: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor

    @property
    def index(self) -> MetadataIndex:
        """What torch.distributed.checkpoint calls it by."""
        return MetadataIndex(self.name, torch.Size(self.offsets))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where it is in the whole."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.values.shape)


def boxes_of(executor: Executor, *, written: bool) -> Iterator[Box]:
    """All boxes of a rank, or those that no other rank writes."""
    parameters = executor.parameters
    for layer, module in executor.layers.items():
        for piece in parameters.pieces(layer):
            if written and not parameters.writes(piece):
                continue
            for part in _cut(piece):
                for number, kind in enumerate(KINDS):
                    yield Box(
                        name=f"{kind}.{part.name}",
                        whole=module.whole_shape(part.name),
                        offsets=part.offsets,
                        values=parameters.values(layer, number, part),
                    )


def _cut(piece: Piece) -> Iterator[Piece]:
    """A piece as runs of rows (or of elements), each of no more than ``MOST_BYTES``."""
    first, *rest = piece.sizes
    width = prod(rest)
    most = max(1, MOST_BYTES // (width * torch.float32.itemsize))
    for begin in range(0, first, most):
        yield replace(
            piece,
            begin=piece.begin + begin * width,
            offsets=(piece.offsets[0] + begin, *piece.offsets[1:]),
            sizes=(min(most, first - begin), *rest),
        )


def is_away(tensor: Tensor) -> bool:
    """Whether a tensor must be copied for the host to read it."""
    return not tensor.is_cpu


class Saver(SavePlanner):
    """Gives boxes to be written, one at a time.

    Boxes of a device take turns in one buffer, so whoever asks for a box must have written the one
    before: a writer must have one thread and copy nothing ahead.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = {box.index: box for box in boxes}
        away = [box.values.numel() for box in boxes if is_away(box.values)]
        self._buffer = torch.empty(max(away, default=0))

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Nothing is taken from a state dict."""

    def create_local_plan(self) -> SavePlan:
        """This rank's boxes."""
        return SavePlan(
            [
                WriteItem(
                    index=index,
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=box.chunk,
                        properties=TensorProperties(dtype=box.values.dtype),
                        size=torch.Size(box.whole),
                    ),
                )
                for index, box in self._boxes.items()
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """All ranks' boxes together."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """A box's values, on the host."""
        values = self._boxes[write_item.index].values
        if is_away(values):
            values = self._buffer[: values.numel()].view(values.shape).copy_(values)
        # By way of NumPy its storage is the box alone; a writer would copy a part of a larger one.
        return torch.from_numpy(values.numpy())


class Loader(LoadPlanner):
    """Lets boxes be filled where they are; ``is_placing`` while a box is."""

    def __init__(self, boxes: Sequence[Box], stored_name: Callable[[str], str]) -> None:
        self._boxes = {box.index: box for box in boxes}
        self._stored_name = stored_name
        self.is_placing = False

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Note what there is."""
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """What of the checkpoint fills this rank's boxes."""
        return LoadPlan([item for box in self._boxes.values() for item in self._items(box)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """All ranks' needs together."""
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """There are tensors only."""
        raise AssertionError

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of a box that is to be filled."""
        target = self._boxes[read_item.dest_index].values
        lengths = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for axis, (begin, length) in enumerate(lengths):
            target = target.narrow(axis, begin, length)
        self.is_placing = True
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is in its place."""
        self.is_placing = False

    def _items(self, box: Box) -> list[ReadItem]:
        name = self._stored_name(box.name)
        stored = self._metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata) or stored.size != torch.Size(box.whole):
            message = f"it has no {box.name} of {box.whole}"
            raise UnlikeError(message)
        items = [
            replace(item, storage_index=replace(item.storage_index, fqn=name))
            for item in create_read_items_for_chunk_list(box.name, stored, [box.chunk])
        ]
        is_said = all(item.storage_index in self._metadata.storage_data for item in items)
        if not is_said or sum(prod(item.lengths) for item in items) != box.values.numel():
            message = f"it has {name} in part only"
            raise UnreadableError(message)
        return items
