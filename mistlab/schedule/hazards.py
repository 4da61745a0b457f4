"""What a task waits for, from the buffers that tasks read and write.

Vector clocks: for each task, how many tasks of each lane have ended before it begins for sure. A
wait that the clock already implies is left out, so that every wait in a program is needed.
"""

from collections.abc import Iterable, Sequence

from mistlab.schedule.buffers import Buffer, Buffers

Clock = tuple[int, ...]


class Hazards:
    """Orders tasks, numbered as they are issued, on lanes that each run their tasks in order."""

    def __init__(self, lanes: Sequence[str]) -> None:
        self._numbers = {lane: number for number, lane in enumerate(lanes)}
        self._lanes: list[int] = []
        self._places: list[int] = []
        self._clocks: list[Clock] = []
        self._last: dict[str, int] = {}
        self._writer: dict[Buffer, int] = {}
        self._readers: dict[Buffer, list[int]] = {}

    def add(
        self,
        lane: str,
        reads: Buffers,
        writes: Buffers,
        *,
        after: Iterable[int] = (),
        ended: Iterable[int] = (),
        started: Iterable[int] = (),
    ) -> tuple[int, ...]:
        """The tasks that the next task waits for, counted back from it.

        Whatever buffers the next task touches, it comes after the tasks ``after``. Other rules
        already let it begin only when the tasks ``ended`` have ended and ``started`` have started.
        """
        number, own = len(self._lanes), self._numbers[lane]
        clock = self._known(lane, ended, started)
        waits = []
        # Latest first: what was issued later is never implied by what was issued earlier.
        for source in sorted(self._sources(reads, writes).union(after), reverse=True):
            if clock[self._lanes[source]] <= self._places[source]:
                waits.append(number - source)
                clock = _later(clock, self._clocks[source])
        self._lanes.append(own)
        self._places.append(clock[own])
        self._clocks.append((*clock[:own], clock[own] + 1, *clock[own + 1 :]))
        self._note(number, lane, reads, writes)
        return tuple(waits)

    def last(self, lane: str) -> tuple[int, ...]:
        """The last task of a lane, if it has any."""
        return (self._last[lane],) if lane in self._last else ()

    def has_ended(self, task: int, *, by_end_of: int) -> bool:
        """Whether a task has ended for sure when another one ends."""
        return self._clocks[by_end_of][self._lanes[task]] > self._places[task]

    def _known(self, lane: str, ended: Iterable[int], started: Iterable[int]) -> Clock:
        """The tasks that have ended before a lane's next task, whatever buffers it touches."""
        clock: Clock = (0,) * len(self._numbers)
        for source in (*self.last(lane), *ended):
            clock = _later(clock, self._clocks[source])
        for source in started:
            here = self._lanes[source]
            before = self._clocks[source]
            clock = _later(clock, (*before[:here], self._places[source], *before[here + 1 :]))
        return clock

    def _sources(self, reads: Buffers, writes: Buffers) -> set[int]:
        sources = {self._writer[b] for b in (*reads, *writes) if b in self._writer}
        for buffer in writes:
            sources.update(self._readers.get(buffer, ()))
        return sources

    def _note(self, number: int, lane: str, reads: Buffers, writes: Buffers) -> None:
        self._last[lane] = number
        for buffer in reads:
            self._readers.setdefault(buffer, []).append(number)
        for buffer in writes:
            self._writer[buffer] = number
            self._readers[buffer] = []


def _later(one: Clock, other: Clock) -> Clock:
    return tuple(map(max, one, other))
