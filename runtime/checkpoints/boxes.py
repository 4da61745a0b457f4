"""Writes and reads a rank's part of a checkpoint as boxes: rectangular slices of a model's tensors.

A box is a view of the flat vectors that a rank's optimizer steps, so a checkpoint needs no second
copy of them. A box in host memory is written directly. Boxes on a device pass one by one through a
buffer in host memory; so do moments of 16 and 8 bits, which are stored in 32 bits. Reading fills
the memory of a box directly; quantised moments are read twice, first to set the scales of all
blocks, then to quantise. ``Saver`` and ``Loader`` describe boxes to
``torch.distributed.checkpoint``. DTensor and ShardedTensor could not: they describe one rectangle
per rank, and a range of a flat vector may be several.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    create_default_global_load_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
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
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from runtime.comm.group import refusal_in
from runtime.engine.executor import Executor
from runtime.engine.storage.moment_codes import CODES, CodedSlice, narrowed
from runtime.engine.storage.pieces import Piece

KINDS = ("master", "moment1", "moment2")
# A larger box is divided into boxes of at most this many bytes, which also limits the buffer in
# host memory.
MOST_BYTES = 64 * 2**20


class UnlikeError(ValueError):
    """A checkpoint lacks a tensor with the name and shape that the run needs."""


class UnreadableError(ValueError):
    """The files of a checkpoint are damaged."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Box:
    """A rectangular slice of the tensor ``name``, with this rank's memory of it.

    ``whole`` is the shape of the whole tensor, in which the slice begins at ``offsets``. If
    ``values`` are quantised, ``coded`` has their scales too.
    """

    name: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor
    coded: CodedSlice | None = None

    @property
    def index(self) -> MetadataIndex:
        """The key of this slice in torch.distributed.checkpoint."""
        return MetadataIndex(self.name, torch.Size(self.offsets))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The offsets and the shape of this slice in the whole tensor."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.values.shape)


def boxes_of(executor: Executor, *, written: bool) -> Iterator[Box]:
    """All boxes (slices of the model's tensors) that a rank holds; with ``written``, only those
    that it writes to a checkpoint.

    If replicas have different weights, the boxes of the first replica have the model's names, so
    that a run with another plan can resume from them.
    """
    parameters, replica = executor.parameters, executor.connections.peers.rank
    prefix = f"replica {replica}." if replica else ""
    for layer, module in executor.layers.items():
        for piece in parameters.pieces(layer):
            if written and not parameters.writes(piece):
                continue
            for part in _cut(piece):
                for number, kind in enumerate(KINDS):
                    values, coded = parameters.values(layer, number, part)
                    yield Box(
                        name=f"{prefix}{kind}.{part.name}",
                        whole=module.whole_shape(part.name),
                        offsets=part.offsets,
                        values=values,
                        coded=coded,
                    )
    position = executor.connections.place
    is_first = position.data == position.context == position.tensor == 0
    for name, values in executor.routers.corrections().items():
        if is_first or not written:
            whole = tuple(values.shape)
            yield Box(name=name, whole=whole, offsets=(0,), values=values)


def scales_of(boxes: Sequence[Box]) -> list[Box]:
    """The boxes whose values are quantised. Their scales are set to zero, and reading then extends
    them.
    """
    coded = [box for box in boxes if box.coded is not None]
    for box in coded:
        assert box.coded is not None
        box.coded.scales.zero_()
    return coded


def boxes_of_averages(executor: Executor) -> Iterator[Box]:
    """The boxes of the states that averaging over replicas keeps on a rank: compression errors, or
    states of outer steps.
    """
    replica, rank = executor.connections.peers.rank, executor.connections.rank
    for name, vector in executor.kept_by_averages():
        yield Box(
            name=f"{name} of replica {replica} rank {rank}",
            whole=tuple(vector.shape),
            offsets=(0,),
            values=vector,
        )


def _cut(piece: Piece) -> Iterator[Piece]:
    """Divide a slice of a tensor into slices of at most ``MOST_BYTES``, along its first axis longer
    than 1.
    """
    # The axis of division. A slice of one expert's tensor is divided along the rows of that expert.
    axis = next((at for at, size in enumerate(piece.sizes) if size > 1), 0)
    width, size = prod(piece.sizes[axis + 1 :]), piece.sizes[axis]
    most = max(1, MOST_BYTES // (width * torch.float32.itemsize))
    for begin in range(0, size, most):
        offsets, sizes = list(piece.offsets), list(piece.sizes)
        offsets[axis] += begin
        sizes[axis] = min(most, size - begin)
        yield replace(
            piece,
            begin=piece.begin + begin * width,
            offsets=tuple(offsets),
            sizes=tuple(sizes),
        )


def is_away(tensor: Tensor) -> bool:
    """Whether reading into a tensor needs a buffer in host memory: the tensor is on a device, or
    its values have 16 or 8 bits but are stored in 32.
    """
    return not tensor.is_cpu or tensor.dtype in _SHORT


# The data types of moments that are stored in 32 bits.
_SHORT = (torch.bfloat16, CODES)


def _stored_type(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in _SHORT else tensor.dtype


class Saver(SavePlanner):
    """Tells torch.distributed.checkpoint which boxes (slices of tensors) a rank writes, and gives
    it one box at a time.

    Boxes on a device share one buffer in host memory. So the writer must write a box before it asks
    for the next: it must have one thread, and copy nothing ahead.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = {box.index: box for box in boxes}
        away = [box.values.numel() for box in boxes if is_away(box.values)]
        self._buffer = torch.empty(max(away, default=0))

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Ignore ``state_dict``, since the boxes are already known."""

    def create_local_plan(self) -> SavePlan:
        """List the boxes (slices of tensors) that this rank writes to a checkpoint."""
        return SavePlan(
            [
                WriteItem(
                    index=index,
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=box.chunk,
                        properties=TensorProperties(dtype=_stored_type(box.values)),
                        size=torch.Size(box.whole),
                    ),
                )
                for index, box in self._boxes.items()
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Combine the boxes that all ranks write into the checkpoint's list of tensors."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Use the combined plan for writing as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The values of one box (slice of a tensor), in host memory."""
        box = self._boxes[write_item.index]
        values = box.values
        if is_away(values):
            room = self._buffer[: values.numel()].view(values.shape)
            values = room.copy_(values if box.coded is None else box.coded.values())
        # By way of NumPy the tensor's storage is exactly this slice; torch's writer would copy a
        # larger storage.
        return torch.from_numpy(values.numpy())


class Loader(LoadPlanner):
    """Tells torch.distributed.checkpoint which boxes (slices of tensors) a rank reads, and into
    which memory.

    ``is_placing`` is true while a box is being filled. With ``scales_only`` all boxes are
    quantised, and reading sets only their scales.
    """

    def __init__(
        self,
        boxes: Sequence[Box],
        stored_name: Callable[[str], str],
        *,
        scales_only: bool = False,
    ) -> None:
        self._boxes = {box.index: box for box in boxes}
        self._stored_name = stored_name
        self._scales_only = scales_only
        self.is_placing = False

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the checkpoint's list of tensors for later."""
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """List the parts of the checkpoint that fill this rank's boxes (slices of tensors)."""
        return LoadPlan([item for box in self._boxes.values() for item in self._items(box)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Combine the lists of slices that all ranks read."""
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Use the combined plan for reading as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called: a checkpoint holds tensors only."""
        raise AssertionError

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The memory into which the next part of a slice is read."""
        box = self._boxes[read_item.dest_index]
        self.is_placing = True
        if box.coded is not None:
            return torch.empty(read_item.lengths)
        return narrowed(box.values, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Record that the next part of a slice has been read; if the slice is quantised, set its
        scales or quantise the values.
        """
        coded = self._boxes[read_item.dest_index].coded
        if coded is not None:
            take = coded.widen_scales if self._scales_only else coded.set_codes
            take(read_item.dest_offsets, tensor)
        self.is_placing = False

    def _items(self, box: Box) -> list[ReadItem]:
        name = self._stored_name(box.name)
        stored = self._metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata) or stored.size != torch.Size(box.whole):
            message = f"it has no tensor {box.name} of shape {box.whole}"
            raise UnlikeError(message)
        items = [
            replace(item, storage_index=replace(item.storage_index, fqn=name))
            for item in create_read_items_for_chunk_list(box.name, stored, [box.chunk])
        ]
        is_said = all(item.storage_index in self._metadata.storage_data for item in items)
        if not is_said or sum(prod(item.lengths) for item in items) != box.values.numel():
            message = f"it has only a part of tensor {name}"
            raise UnreadableError(message)
        return items


# Reads a checkpoint's list of tensors without running code that the file names.
#
# torch.distributed.checkpoint pickles this list, and unpickling may call any function on the
# reader's machine. Here only classes that such a list needs can be constructed. The tensors
# themselves are read by ``torch.load(weights_only=True)``, which has its own list of allowed types.


_OF_TORCH = "torch.distributed.checkpoint"
# The classes that may occur in a checkpoint's list of tensors, by module.
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
    # The module of these two classes since Python 3.13.
    "pathlib": frozenset(("PosixPath", "WindowsPath")),
    "pathlib._local": frozenset(("PosixPath", "WindowsPath")),
}


class _ListUnpickler(pickle.Unpickler):
    """Unpickles a checkpoint's list of tensors, and raises an error for any class that such a list
    does not need.
    """

    def find_class(self, module: str, name: str, /) -> Any:
        """The class or data type with this name, if a checkpoint's list of tensors may contain
        it.
        """
        is_number = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_number or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        message = f".metadata names {module}.{name}, which no list of tensors needs: not loaded"
        raise UnreadableError(message)


def tensors_listed(file: IO[bytes]) -> Any:
    """The list of tensors in a checkpoint's ``.metadata``; raises ``UnreadableError`` if the file
    holds anything else.
    """
    return _ListUnpickler(file).load()


# Writes and reads the files of a checkpoint by torch.distributed.checkpoint.
#
# A file that cannot be written raises ``OSError``. A file that cannot be read raises
# ``UnreadableError``. Errors of a device, and out-of-memory errors, are passed on unchanged.


# The exceptions that reading raises if a file's bytes are not those that were written.
SENSELESS = (
    OSError,
    EOFError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


METADATA = ".metadata"


class Writer(FileSystemWriter):
    """Writes one file of boxes (slices of tensors) per rank, in a single thread, and asks for a box
    only when the previous one is written.

    Copying ahead would need several boxes at once, but ``Saver`` gives one at a time.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's slices of tensors to the checkpoint."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch's archive writer hides an error of the file system as the context of its own
            # error.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


class Reader(FileSystemReader):
    """Reads the files of a checkpoint, which a run with another plan may have written."""

    def metadata(self) -> Metadata:
        """The checkpoint's list of tensors; raises ``UnreadableError`` if its file is damaged."""
        try:
            metadata = self.read_metadata()
        except UnreadableError:
            raise
        except SENSELESS as error:
            raise UnreadableError(_reason(error)) from error
        if not isinstance(metadata, Metadata):
            message = f".metadata holds a {type(metadata).__name__}"
            raise UnreadableError(message)
        return metadata

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        """The checkpoint's list of tensors. Classes that such a list does not need are not
        constructed, since the file may come from a stranger.
        """
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata = tensors_listed(file)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return cast("Metadata", metadata)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's slices of tensors from the checkpoint."""
        loader = cast("Loader", planner)
        try:
            return super().read_data(plan, loader)
        except SENSELESS as error:
            is_of_file = not loader.is_placing or isinstance(error, AssertionError)
            if not is_of_file or refusal_in(error) is not None:
                raise
            raise UnreadableError(_reason(error)) from error


def read_alone(reader: Reader, loader: Loader) -> None:
    """Read the boxes of a run with a single process, by the steps of torch.distributed.checkpoint.

    ``torch.distributed.checkpoint.load`` would warn a single process, and Python can hide a warning
    only from all threads of the process.
    """
    reader.reset()
    metadata = reader.metadata()
    loader.set_up_planner({}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    local_plan = reader.prepare_local_plan(loader.create_local_plan())
    (plan,) = reader.prepare_global_plan(loader.create_global_plan([local_plan]))
    reader.read_data(loader.finish_plan(plan), loader).wait()


def write_alone(writer: Writer, saver: Saver) -> None:
    """Write the boxes of a run with a single process, by the steps of
    torch.distributed.checkpoint.
    """
    writer.reset()
    saver.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    local_plan = writer.prepare_local_plan(saver.create_local_plan())
    plans, metadata = saver.create_global_plan([local_plan])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(saver.finish_plan(plan), saver).wait()
    writer.finish(metadata, [written])


def _reason(error: BaseException) -> str:
    """The first line of an error's message, or its class name if it has none."""
    message = str(error).strip().partition("\n")[0]
    return (
        message if message and isinstance(error, OSError | RuntimeError) else type(error).__name__
    )
