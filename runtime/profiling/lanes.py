"""Running work on several streams side by side: CUDA streams, or threads on a CPU."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, final

import torch

from mistlab.interference import STREAMS
from runtime.profiling.timing import Work


class Lanes(Protocol):
    """Streams that do not wait for one another."""

    def side_by_side(self, works: Sequence[Work]) -> None:
        """Start all at once; the caller's own stream goes on when all are done."""


@final
class ThreadLanes:
    """A thread for each stream."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(len(STREAMS))

    def side_by_side(self, works: Sequence[Work]) -> None:
        """Start all at once, and wait for all."""
        for done in [self._threads.submit(work) for work in works]:
            done.result()


@final
class StreamLanes:
    """A CUDA stream for each stream."""

    def __init__(self, device: torch.device) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in STREAMS]

    def side_by_side(self, works: Sequence[Work]) -> None:
        """Launch each behind what the current stream has done, and let it wait for all."""
        current = torch.cuda.current_stream()
        start = current.record_event()
        for stream, work in zip(self._streams, works, strict=False):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                work()
            current.wait_event(stream.record_event())


def lanes_of(device: torch.device) -> Lanes:
    """The lanes of a device."""
    return StreamLanes(device) if device.type == "cuda" else ThreadLanes()
