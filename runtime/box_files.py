"""The files that hold boxes, as torch.distributed.checkpoint writes and reads them.

A file that cannot be written is an ``OSError`` here, one that cannot be read ``UnreadableError``.
Whatever goes wrong elsewhere meanwhile, on a device or for want of memory, stays what it is.
"""

import pickle
from pathlib import Path
from typing import cast

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from runtime.boxes import Loader, UnreadableError
from runtime.shortage import refusal_in

# What unpickling raises where a file holds anything else than what was written.
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


class Writer(FileSystemWriter):
    """One file a rank, by one thread, each box written before the next is asked for.

    Copying ahead would keep many boxes at once, and ``Saver`` gives one at a time.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write a rank's boxes."""
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch's writer of archives says where it stood, not what the file system said.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


class Reader(FileSystemReader):
    """Files that another plan may have written."""

    def metadata(self) -> Metadata:
        """What is in them; ``read_metadata`` for whoever wants to know first if it can be read."""
        try:
            metadata = self.read_metadata()
        except SENSELESS as error:
            raise UnreadableError(_reason(error)) from error
        if not isinstance(metadata, Metadata):
            message = f".metadata holds a {type(metadata).__name__}"
            raise UnreadableError(message)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill a rank's boxes."""
        loader = cast("Loader", planner)
        try:
            return super().read_data(plan, loader)
        except SENSELESS as error:
            is_of_file = not loader.is_placing or isinstance(error, AssertionError)
            if not is_of_file or refusal_in(error) is not None:
                raise
            raise UnreadableError(_reason(error)) from error


def _reason(error: BaseException) -> str:
    """The first line of what is said, or else the kind of error."""
    said = str(error).strip().partition("\n")[0]
    return said if said and isinstance(error, OSError | RuntimeError) else type(error).__name__
