"""Errors that say where memory ran out: on which stage, at which task, with how much held."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed

from runtime.comm.group import RankLostError

# Words in the errors of other allocators than torch's: the host's; CUDA's, which its libraries use;
# NCCL's (src/include/alloc.h); the allocators of cuBLAS and cuDNN.
_WORDS = (
    "can't allocate memory",
    "out of memory",
    "failed to cuda malloc",
    "failed to cuda calloc",
    "failed to cuda host alloc",
    "status_alloc_failed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Where and how memory ran out.

    ``held_bytes`` has a size for each class of memory, under the names that predictions use.
    ``outside_bytes`` are the bytes of the device taken outside torch's allocator; 0 on a CPU.
    ``reason`` is the allocator's message.
    """

    stage: int
    doing: str
    held_bytes: Mapping[str, int]
    outside_bytes: int = 0
    reason: str


class ShortageError(RuntimeError):
    """Memory of a device or of the host ran out."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(f"stage {shortage.stage} is out of memory at {shortage.doing}")
        self.shortage = shortage


@contextmanager
def refusals() -> Iterator[None]:
    """Within the ``with`` block, turn every allocator's error into a ``MemoryError``."""
    try:
        yield
    except RuntimeError as error:
        reason = refusal_in(error)
        if reason is None:
            raise
        raise MemoryError(reason) from error


def refusal_in(error: BaseException) -> str | None:
    """The line of an error in which an allocator refuses memory; None for any other error.

    This project's own errors about a shortage, on this rank or another, do not count.
    """
    lines = str(error).strip().splitlines()
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return lines[0] if lines else type(error).__name__
    if not isinstance(error, RuntimeError) or isinstance(error, ShortageError | RankLostError):
        return None
    said = next((line for line in lines if any(word in line.lower() for word in _WORDS)), None)
    if said is not None and isinstance(error, distributed.DistBackendError):
        said = f"NCCL: {said}"
    return said
