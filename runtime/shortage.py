"""Out of memory: which stage, doing what, and what it held."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """``held_bytes`` are by class, as predictions name them; ``reason`` is the allocator's.

    ``outside_bytes`` are those of the device that torch's allocator does not hold; 0 on a CPU.
    """

    stage: int
    doing: str
    held_bytes: Mapping[str, int]
    outside_bytes: int = 0
    reason: str


class ShortageError(RuntimeError):
    """Memory of a device or of the host has run out."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(f"stage {shortage.stage} is out of memory at {shortage.doing}")
        self.shortage = shortage


@contextmanager
def refusals() -> Iterator[None]:
    """Let every allocator's refusal be a ``MemoryError``."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error).partition("\n")[0]) from error
    except RuntimeError as error:
        # So says torch's allocator of host memory.
        if "can't allocate memory" not in str(error):
            raise
        raise MemoryError(str(error).partition("\n")[0]) from error
