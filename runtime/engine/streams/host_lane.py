"""The lane of a CUDA device's host: a thread that does what arithmetic is left to processors."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch

from runtime.engine.streams.lanes import Event, LaneWork

Span = tuple[float, float]
HostEvent = Future[Span]


class HostLane:
    """Work of the host in order; its events are futures, with the seconds that it ran.

    ``thread`` runs one piece of work at a time. ``aside`` is where the work issues the copies that
    it makes itself: none of the other lanes' streams, which are ahead.
    """

    def __init__(
        self,
        thread: Executor,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._thread = thread
        self._aside = aside

    def submit(self, work: LaneWork, waits: Sequence[Event]) -> HostEvent:
        """Queue work behind other work of the lane, and behind events of the device."""
        return self._thread.submit(self._run, work, tuple(waits))

    def close(self) -> None:
        """Let the thread end after the work that it is at; what is queued is not done any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, work: LaneWork, waits: Sequence[Event]) -> Span:
        for event in waits:
            event.synchronize()
        start = perf_counter()
        with torch.no_grad(), self._aside():
            work()
        return start, perf_counter()
