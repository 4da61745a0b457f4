"""Writes and reads the files of a checkpoint, by torch.distributed.checkpoint.

A file that cannot be written raises ``OSError``. A file that cannot be read raises
``UnreadableError``. Errors of a device, and errors for want of memory, are passed on unchanged.
"""

import pickle
from pathlib import Path
from typing import cast

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from runtime.boxes import Loader, Saver, UnreadableError
from runtime.checkpoint_metadata import tensors_listed
from runtime.comm.shortage import refusal_in

# What reading raises if a file does not hold the bytes that were written.
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
    """Writes one file a rank in one thread, and asks for a box only when the last one is written.

    Copying ahead would need many boxes at once, but ``Saver`` gives one at a time.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the boxes of this rank."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch's writer of archives reports its position, not the file system's error.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


class Reader(FileSystemReader):
    """Reads the files of a checkpoint, which another plan may have written."""

    def metadata(self) -> Metadata:
        """The list of the checkpoint's tensors; raises ``UnreadableError`` if it is damaged."""
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
        """The list of the checkpoint's tensors, as torch reads it, but for names of anything else
        in the file: a checkpoint may be a stranger's."""
        with (Path(self.path) / METADATA).open("rb") as file:
            found = tensors_listed(file)
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return cast("Metadata", found)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the boxes of this rank."""
        loader = cast("Loader", planner)
        try:
            return super().read_data(plan, loader)
        except SENSELESS as error:
            is_of_file = not loader.is_placing or isinstance(error, AssertionError)
            if not is_of_file or refusal_in(error) is not None:
                raise
            raise UnreadableError(_reason(error)) from error


def read_alone(reader: Reader, loader: Loader) -> None:
    """Fill the boxes of the only process, step by step as torch does it.

    ``torch.distributed.checkpoint.load`` warns a process that is alone, and warnings can only be
    hidden from all threads of the process together.
    """
    reader.reset()
    metadata = reader.metadata()
    loader.set_up_planner({}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    own = reader.prepare_local_plan(loader.create_local_plan())
    (plan,) = reader.prepare_global_plan(loader.create_global_plan([own]))
    reader.read_data(loader.finish_plan(plan), loader).wait()


def write_alone(writer: Writer, saver: Saver) -> None:
    """Write the boxes of the only process, step by step as torch does it."""
    writer.reset()
    saver.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    own = writer.prepare_local_plan(saver.create_local_plan())
    plans, metadata = saver.create_global_plan([own])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(saver.finish_plan(plan), saver).wait()
    writer.finish(metadata, [written])


def _reason(error: BaseException) -> str:
    """The first line of an error's message, or the error's class if it has none."""
    said = str(error).strip().partition("\n")[0]
    return said if said and isinstance(error, OSError | RuntimeError) else type(error).__name__
