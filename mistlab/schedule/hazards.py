"""What a task waits for, from the buffers that tasks read and write.

Vector clocks: for each task, how many tasks of each lane have ended before it begins for sure. A
wait that the clock already implies is left out, so that every wait in a program is needed.
"""

from mistlab.schedule.buffers import Buffer, Buffers
from mistlab.schedule.lanes import LANES, Lane

Clock = tuple[int, ...]


class Hazards:
    """Orders tasks as they are issued."""

    def __init__(self) -> None:
        self._lanes: list[int] = []
        self._places: list[int] = []
        self._clocks: list[Clock] = []
        self._last: dict[Lane, int] = {}
        self._writer: dict[Buffer, int] = {}
        self._readers: dict[Buffer, list[int]] = {}

    def add(
        self,
        lane: Lane,
        reads: Buffers,
        writes: Buffers,
        *,
        after: Lane | None = None,
    ) -> tuple[int, ...]:
        """The tasks that the next task waits for, counted back from it.

        ``after`` names a lane whose last task it follows too: one whose memory it may inherit.
        """
        number, own = len(self._lanes), LANES.index(lane)
        sources = self._sources(reads, writes)
        if after is not None and after in self._last:
            sources.add(self._last[after])
        clock = [0] * len(LANES)
        if lane in self._last:
            clock = list(self._clocks[self._last[lane]])
        waits = []
        # Latest first: what was issued later is never implied by what was issued earlier.
        for source in sorted(sources, reverse=True):
            if clock[self._lanes[source]] <= self._places[source]:
                waits.append(number - source)
                pairs = zip(clock, self._clocks[source], strict=True)
                clock = [max(pair) for pair in pairs]
        self._lanes.append(own)
        self._places.append(clock[own])
        clock[own] += 1
        self._clocks.append(tuple(clock))
        self._note(number, lane, reads, writes)
        return tuple(waits)

    def _sources(self, reads: Buffers, writes: Buffers) -> set[int]:
        sources = {self._writer[b] for b in (*reads, *writes) if b in self._writer}
        for buffer in writes:
            sources.update(self._readers.get(buffer, ()))
        return sources

    def _note(self, number: int, lane: Lane, reads: Buffers, writes: Buffers) -> None:
        self._last[lane] = number
        for buffer in reads:
            self._readers.setdefault(buffer, []).append(number)
        for buffer in writes:
            self._writer[buffer] = number
            self._readers[buffer] = []
