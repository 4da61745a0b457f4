"""What the tasks of a pass wait for when passes are played: buffers, and the pace of slots.

Most waits follow from the buffers that tasks use (``mistlab.schedule.buffers``,
``mistlab.schedule.hazards``). The others follow from the pace of slots:

- Tasks of one kind run in order. A layer computes after the steps that were issued before it, but
  steps run ahead of a pass that waits for its micro-batch.
- A prefetch begins when the layer that computes in its slot begins. A prefetch for a step begins
  when the step ``depth`` layers before begins. A prefetch ahead of the first layer begins when the
  pass before has computed. Where tasks run one after another, it begins when the layer before ends.
- At most ``depth + 1`` layers are under way. So a layer computes only when the activations and the
  gradients of the layer ``depth + 1`` before it have left and, where gradients are sharded, have
  been reduced.

So the tasks of a pass begin after the pass before has computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mistlab.schedule.buffers import Buffers
from mistlab.schedule.hazards import Hazards
from mistlab.schedule.pass_tasks import PassTask
from mistlab.schedule.slot_table import SHARDED_GRADIENTS, SHARDED_WEIGHTS, Task

COMPUTING = ("F", "B")
# Layers compute in one queue, whichever way a pass meets them.
_PASSES = "passes"
_FETCHES = ("P<", "G<", "O<", "A<")
_STATE_FETCHES = ("G<", "O<")
_AWAY = "host activations"
# The number of the end of the pass before, as far as it has computed.
_BEFORE = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PacedTasks:
    """The tasks of a pass in the order of the slot table, and their waits for one another.

    A pair is a task, and another task that waits for its end or its start. ``opening`` tasks wait
    until the pass before has computed. ``late`` tasks may end after this pass has computed. The
    next pass computes only after the ``closing`` tasks.
    """

    tasks: Sequence[PassTask]
    for_ends: Sequence[tuple[int, int]]
    for_starts: Sequence[tuple[int, int]]
    opening: Sequence[bool]
    late: Sequence[bool]
    closing: Sequence[int]


class Pace:
    """Tasks of a pass numbered as they are issued, from 1 on; 0 is the end of the pass before."""

    def __init__(
        self, tasks: Sequence[PassTask], rows: Sequence[Task], depth: int, zero: int
    ) -> None:
        self.depth = depth
        self.rows = {row: turn for turn, row in enumerate(rows)}
        self.tasks = dict(enumerate(tasks, start=1))
        self.at = {(task.name, task.position): number for number, task in self.tasks.items()}
        self.memory = {n for n, task in self.tasks.items() if isinstance(task.row, str)}
        self.computing = [n for n, task in self.tasks.items() if task.name in COMPUTING]
        self.computes = self.tasks[self.computing[0]].name
        self.leaves = leaves_of(zero)
        gathers = zero >= SHARDED_WEIGHTS or depth == 0
        self.fetches = (*_FETCHES, "U") if gathers else _FETCHES
        self.hazards = Hazards((_PASSES, *dict.fromkeys(task.name for task in tasks)))
        self.hazards.add(_PASSES, (), ())
        # For each task, the tasks whose ends it waits for. A task of memory is not played: here are
        # the tasks that others wait for in its place.
        self.sources: list[set[int]] = [{_BEFORE}]
        self.for_starts: list[tuple[int, int]] = []

    def paced(self) -> PacedTasks:
        """All tasks with their waits."""
        for number, task in self.tasks.items():
            self._add(number, task)
        played = sorted(self.tasks.keys() - self.memory, key=self._turn_in_table)
        place = {number: place for place, number in enumerate(played)}
        closing = self._stands_for(*self.hazards.last(_PASSES)) - {self.computing[-1]}
        return PacedTasks(
            tasks=[self.tasks[number] for number in played],
            for_ends=[
                (place[source], place[number])
                for number in played
                for source in sorted(self.sources[number] - {_BEFORE})
            ],
            for_starts=[(place[source], place[number]) for source, number in self.for_starts],
            opening=[self._opens(number) for number in played],
            late=[self._is_late(number) for number in played],
            closing=[place[number] for number in sorted(closing)],
        )

    def _add(self, number: int, task: PassTask) -> None:
        queue = _queue(task)
        ended, started = self._paced(task)
        waits = {*self.hazards.last(queue), *ended}
        self.for_starts += [(source, number) for source in started]
        # When a layer that is issued later has started, the layer before it has ended.
        known = self.hazards.last(_PASSES) if any(one > number for one in started) else ()
        back = self.hazards.add(
            queue,
            near(task.reads),
            near(task.writes),
            after=self._room(task),
            ended=(*ended, *known),
            started=[one for one in started if one < number],
        )
        waits.update(number - one for one in back)
        self.sources.append({one for source in waits for one in self._stands_for(source)})

    def _paced(self, task: PassTask) -> tuple[Sequence[int], Sequence[int]]:
        """The tasks that have ended, and those that have started, when a prefetch begins."""
        if task.name not in self.fetches:
            return (), ()
        steps = task.name in _STATE_FETCHES and ("S", task.position) in self.at
        pacer = "S" if steps else self.computes
        before = self.at.get((pacer, task.position - max(self.depth, 1)))
        if before is None:
            return () if steps else (_BEFORE,), ()
        return ((before,), ()) if self.depth == 0 else ((), (before,))

    def _room(self, task: PassTask) -> Iterator[int]:
        """The tasks after which a layer computes: earlier steps, and tasks that make room."""
        if task.name in COMPUTING:
            yield from self.hazards.last("S")
            yield from self._leaving(task.position - self.depth - 1)

    def _leaving(self, position: int) -> Iterator[int]:
        return (self.at[name, position] for name in self.leaves if (name, position) in self.at)

    def _stands_for(self, number: int) -> set[int]:
        return self.sources[number] if number in self.memory else {number}

    def _turn_in_table(self, number: int) -> tuple[int, int]:
        task = self.tasks[number]
        assert isinstance(task.row, Task)
        return task.slot, self.rows[task.row]

    def _opens(self, number: int) -> bool:
        """Whether a task beside the layers must be told to wait for the pass before."""
        if self.tasks[number].name in COMPUTING:
            return False
        is_paced = _BEFORE in self.sources[number]
        return is_paced or not self.hazards.has_ended(_BEFORE, by_end_of=number)

    def _is_late(self, number: int) -> bool:
        return not self.hazards.has_ended(number, by_end_of=self.computing[-1])


def leaves_of(zero: int) -> tuple[str, ...]:
    """The tasks of a layer that must have ended before another layer computes in its place."""
    return ("A>", "G>", "R") if zero >= SHARDED_GRADIENTS else ("A>", "G>")


def _queue(task: PassTask) -> str:
    return task.name if isinstance(task.row, Task) and task.name not in COMPUTING else _PASSES


def near(buffers: Buffers) -> Buffers:
    """The buffers without activations on the host, which are awaited by micro-batch."""
    return tuple(buffer for buffer in buffers if buffer[0] != _AWAY)
