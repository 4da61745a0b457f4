"""The interface of lanes, the queues on which the executor of a plan runs work side by side.

A lane runs its work in order. All lanes are the device's but one, which is the host's. Work may be
told to wait for events, which are the ends of other work; apart from these waits, lanes run side by
side. The thread that issues work runs ahead of all lanes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from mistlab.schedule.lanes import Lane
from runtime.comm.group import Pending

LaneWork = Callable[[], Pending | None]
Event = Any


class Streams(Protocol):
    """Lanes of one device."""

    def submit(self, lane: Lane, work: LaneWork, waits: Sequence[Event]) -> Event:
        """Queue work that waits for events; return the event of the work's end."""

    def settle(self, pending: Pending | None) -> None:
        """Let the calling work wait for a collective that it has started."""

    def beside(self, collective: LaneWork, work: Callable[[], object]) -> None:
        """Run a collective on the lane of tensor-parallel ranks, and ``work`` on compute beside it.

        Called inside work on compute. Compute's next work waits for both.
        """

    def synchronize(self) -> None:
        """Wait, in the calling thread, for all work."""

    def spoil(self, tensor: Tensor) -> None:
        """Overwrite memory that nobody may read any more, if these streams check reads."""

    def spans(self) -> list[tuple[float, float]]:
        """Wait for all work; return start and end of each work since the last call, in seconds."""

    def close(self) -> None:
        """Begin no more work: the run is over, or has failed."""
