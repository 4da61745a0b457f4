"""Parts of a model's tensors, called boxes, which a checkpoint writes from and reads into memory.

A box is a view of the flat vectors that a rank's optimizer steps, so a checkpoint needs no second
copy of them. A box on the host is written from where it is. Boxes on a device pass one after
another through one buffer on the host. A box is read straight into its place.

``Saver`` and ``Loader`` describe boxes to ``torch.distributed.checkpoint``. DTensor and
ShardedTensor could not: they describe rectangles, and a range of a flat vector need not be one.
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
# Larger boxes are cut into boxes of this size, which also limits the size of the host's buffer.
MOST_BYTES = 64 * 2**20


class UnlikeError(ValueError):
    """A checkpoint has no tensor of the wanted name and shape."""


class UnreadableError(ValueError):
    """The files of a checkpoint are damaged."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Box:
    """A rectangular part of the tensor ``name``, and the memory in which this rank holds it.

    ``whole`` is the shape of the whole tensor; the box begins at ``offsets`` in it.
    """

    name: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor

    @property
    def index(self) -> MetadataIndex:
        """The box's key in torch.distributed.checkpoint."""
        return MetadataIndex(self.name, torch.Size(self.offsets))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Offsets and shape of the box in the whole tensor."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.values.shape)


def boxes_of(executor: Executor, *, written: bool) -> Iterator[Box]:
    """All boxes of a rank; with ``written``, only the boxes that this rank writes."""
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
    """Cut a piece into runs of rows (or of elements) of at most ``MOST_BYTES`` each."""
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
    """Whether a tensor lies on a device, so that the host must copy it to read it."""
    return not tensor.is_cpu


class Saver(SavePlanner):
    """Tells torch.distributed.checkpoint which boxes to write, and gives it one box at a time.

    Boxes of a device take turns in one buffer. So the writer must have written a box before it asks
    for the next: it must have one thread and copy nothing ahead.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = {box.index: box for box in boxes}
        away = [box.values.numel() for box in boxes if is_away(box.values)]
        self._buffer = torch.empty(max(away, default=0))

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Ignore the state dict: the boxes are known already."""

    def create_local_plan(self) -> SavePlan:
        """List this rank's boxes."""
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
        """Join the lists of all ranks."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The values of a box, on the host."""
        values = self._boxes[write_item.index].values
        if is_away(values):
            values = self._buffer[: values.numel()].view(values.shape).copy_(values)
        # Through NumPy the tensor's storage is the box alone; of a larger storage the writer would
        # make a copy.
        return torch.from_numpy(values.numpy())


class Loader(LoadPlanner):
    """Tells torch.distributed.checkpoint what to read, and into which memory.

    ``is_placing`` is true while a box is being filled.
    """

    def __init__(self, boxes: Sequence[Box], stored_name: Callable[[str], str]) -> None:
        self._boxes = {box.index: box for box in boxes}
        self._stored_name = stored_name
        self.is_placing = False

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Note the list of the checkpoint's tensors."""
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """List the parts of the checkpoint that fill this rank's boxes."""
        return LoadPlan([item for box in self._boxes.values() for item in self._items(box)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Join the lists of all ranks."""
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called: a checkpoint holds tensors only."""
        raise AssertionError

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The memory of the part of a box that is to be filled next."""
        target = self._boxes[read_item.dest_index].values
        lengths = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for axis, (begin, length) in enumerate(lengths):
            target = target.narrow(axis, begin, length)
        self.is_placing = True
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Note that the part is filled."""
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
