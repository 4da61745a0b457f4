"""The host's lane beside a GPU: a thread for the arithmetic that the host's processors do."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch

from runtime.engine.streams.lanes import Event, LaneWork

Span = tuple[float, float]
HostEvent = Future[Span]


class HostLane:
    """Runs work of the host in order; its events are futures of start and end in seconds.

    ``thread`` runs one piece of work at a time. Within ``aside`` the work issues its own copies, on
    a stream that no other lane uses: other lanes' streams have later work queued already.
    """

    def __init__(
        self,
        thread: Executor,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._thread = thread
        self._aside = aside

    def submit(self, work: LaneWork, waits: Sequence[Event]) -> HostEvent:
        """Queue work after the lane's other work, and after events of the device."""
        return self._thread.submit(self._run, work, tuple(waits))

    def close(self) -> None:
        """Let the thread end after its current work; queued work is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, work: LaneWork, waits: Sequence[Event]) -> Span:
        for event in waits:
            event.synchronize()
        start = perf_counter()
        with torch.no_grad(), self._aside():
            work()
        return start, perf_counter()
