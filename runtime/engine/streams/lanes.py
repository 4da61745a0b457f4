"""Streams and events: one small interface, met by CUDA and by simulated streams.

A lane is a queue of work that runs in order: of the device or, one of them, of the host. Work may
be told to wait for events, the ends of other work; apart from that, lanes run side by side. Who
issues runs ahead of all of them.
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
        """Queue work that waits for events; the event of its end."""

    def settle(self, pending: Pending | None) -> None:
        """Let the work that calls this wait for a collective that it has started."""

    def beside(self, collective: LaneWork, work: Callable[[], object]) -> None:
        """Inside work on compute: a collective on the lane of tensor-parallel ranks while compute
        does other work; what compute does next waits for both."""

    def synchronize(self) -> None:
        """Let the host wait for everything."""

    def spoil(self, tensor: Tensor) -> None:
        """Make what nobody may read any more useless, where that is checked."""

    def spans(self) -> list[tuple[float, float]]:
        """When each work since the last call ran, in seconds on one clock; waits for all."""

    def close(self) -> None:
        """Begin nothing any more: the run is over, or has failed."""
