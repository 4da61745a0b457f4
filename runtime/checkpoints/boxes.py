"""Boxes: rectangular slices of a model's tensors, in which a checkpoint writes and reads the parts
that a rank holds.

A box is a view of the flat vectors that a rank's optimizer steps, so a checkpoint needs no second
copy of them. A box on the host is written from where it is. Boxes on a device pass one after
another through one buffer on the host, as do moments of 16 and 8 bits, which are stored in 32. A
box is read straight into its place; of moments of 8 bits, first the scales of all blocks are taken.

``Saver`` and ``Loader`` describe boxes to ``torch.distributed.checkpoint``. DTensor and
ShardedTensor could not: they describe rectangles, and a range of a flat vector need not be one.
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
# A box with more bytes is divided into boxes of at most so many, which also limits the host's
# buffer.
MOST_BYTES = 64 * 2**20


class UnlikeError(ValueError):
    """A checkpoint has no tensor with the wanted name and shape."""


class UnreadableError(ValueError):
    """The files of a checkpoint are damaged."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Box:
    """A rectangular slice of the tensor ``name``, with this rank's memory of it.

    ``whole`` is the shape of the whole tensor; the box begins at ``offsets`` in it. Where values
    are codes, ``coded`` has their scales too.
    """

    name: str
    whole: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor
    coded: CodedSlice | None = None

    @property
    def index(self) -> MetadataIndex:
        """The key under which torch.distributed.checkpoint stores this slice."""
        return MetadataIndex(self.name, torch.Size(self.offsets))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The offsets and the shape of this slice in the whole tensor."""
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.values.shape)


def boxes_of(executor: Executor, *, written: bool) -> Iterator[Box]:
    """All slices of a model's tensors that a rank holds (boxes); with ``written``, only those that
    it writes.

    Of a run in replicas those of the first one have the model's names, so that a run of another
    plan may go on from them.
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
    """The boxes whose values are codes, with scales of zero, which reading then widens."""
    coded = [box for box in boxes if box.coded is not None]
    for box in coded:
        assert box.coded is not None
        box.coded.scales.zero_()
    return coded


def boxes_of_averages(executor: Executor) -> Iterator[Box]:
    """The slices (boxes) of the compression errors that a rank keeps, or of the states of its outer
    steps.
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
    """Divide the part of a tensor that a rank holds into slices of rows (or of elements) with at
    most ``MOST_BYTES`` each.
    """
    # The axis along which a rank's part of a tensor is divided; for a part of a single expert,
    # along that expert's rows.
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
    """Whether reading into a tensor needs a copy on the host: the tensor is on a device, or has 16
    or 8 bits and is stored in 32.
    """
    return not tensor.is_cpu or tensor.dtype in _SHORT


# The data types that are stored in 32 bits: those of short moments.
_SHORT = (torch.bfloat16, CODES)


def _stored_type(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in _SHORT else tensor.dtype


class Saver(SavePlanner):
    """Tells torch.distributed.checkpoint which slices (boxes) to write, and hands over one at a
    time.

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
        """Ignore the state dict, since the slices are already known."""

    def create_local_plan(self) -> SavePlan:
        """List the slices of tensors that this rank writes to a checkpoint."""
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
        """Combine the lists of slices that all ranks write."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Use the plan of writing as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The values of a slice of a tensor, on the host."""
        box = self._boxes[write_item.index]
        values = box.values
        if is_away(values):
            room = self._buffer[: values.numel()].view(values.shape)
            values = room.copy_(values if box.coded is None else box.coded.values())
        # Through NumPy the tensor's storage is only this slice; torch's writer would copy a larger
        # storage.
        return torch.from_numpy(values.numpy())


class Loader(LoadPlanner):
    """Tells torch.distributed.checkpoint which slices to read, and into which memory.

    ``is_placing`` is true while a box is being filled. With ``scales_only`` the boxes are codes, of
    which only the scales are taken.
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
        """Keep the checkpoint's list of tensors, for reading it."""
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """List the parts of the checkpoint that fill this rank's slices of tensors."""
        return LoadPlan([item for box in self._boxes.values() for item in self._items(box)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Combine the lists of slices that all ranks read."""
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Use the plan of reading as it is."""
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
        """Record that a part of a slice has been read, and quantise it where moments are codes."""
        coded = self._boxes[read_item.dest_index].coded
        if coded is not None:
            take = coded.widen_scales if self._scales_only else coded.set_codes
            take(read_item.dest_offsets, tensor)
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


# Reads a checkpoint's list of tensors without running code that the file names.
#
# torch.distributed.checkpoint pickles this list, and a pickle may call any function on the machine
# that reads it. Here only the classes of such a list are constructed. The tensors themselves are
# read by ``torch.load(weights_only=True)``, which has its own list of allowed types.


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
    # The module of these classes since Python 3.13.
    "pathlib": frozenset(("PosixPath", "WindowsPath")),
    "pathlib._local": frozenset(("PosixPath", "WindowsPath")),
}


class _ListUnpickler(pickle.Unpickler):
    """Unpickles a checkpoint's list of tensors, and refuses every other name."""

    def find_class(self, module: str, name: str, /) -> Any:
        """The class or the data type with this name, if it may occur in such a list."""
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


# The exceptions that reading raises where a file does not hold the bytes that were written.
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
    """Writes one file of slices for each rank in a single thread, and asks for a slice only when
    the previous one is written.

    Copying ahead would need many boxes at once, but ``Saver`` gives one at a time.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's slices of tensors to the checkpoint."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # An error of the file system is the context of the error that torch's archive writer
            # raises.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


class Reader(FileSystemReader):
    """Reads the files of a checkpoint, which another plan may have written."""

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
        """The checkpoint's list of tensors, as torch reads it, without allowing other names, since
        a checkpoint may come from a stranger.
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
    """Read the slices of the only process, by the steps that torch takes.

    ``torch.distributed.checkpoint.load`` warns a process that is alone, and warnings can only be
    hidden from all threads of the process together.
    """
    reader.reset()
    metadata = reader.metadata()
    loader.set_up_planner({}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    local_plan = reader.prepare_local_plan(loader.create_local_plan())
    (plan,) = reader.prepare_global_plan(loader.create_global_plan([local_plan]))
    reader.read_data(loader.finish_plan(plan), loader).wait()


def write_alone(writer: Writer, saver: Saver) -> None:
    """Write the slices of the only process, by the steps that torch takes."""
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
