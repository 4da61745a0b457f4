"""The tasks of a pass and their waits for one another, as columns: derived once for equal passes.

Passes are equal if their layers have the same tasks. If many equal layers follow one another, only
a few of them are worked out (``mistlab.schedule.pace``), and the slot in their middle is repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

from mistlab.schedule.pace import Pace
from mistlab.schedule.pass_tasks import PassTask, PassTasks
from mistlab.schedule.places import goes_up, layer_at
from mistlab.schedule.played import NOT_PLAYED, PLAYED
from mistlab.schedule.slot_table import Phase, Task, Template
from mistlab.schedule.stage_passes import StagePass
from mistlab.schedule.stage_shape import ChunkLayers, StageShape
from mistlab.values.plan import Offload

_Entry = TypeVar("_Entry")
# How far from a task the tasks are that wait for it.
Offsets = tuple[int, ...]
# Of so many passes the waits are kept.
MOST_KEPT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """Everything that the waits of a pass depend on.

    ``rows`` are the rows of its phase in the slot table; ``names`` names the tasks of each layer.
    """

    rows: tuple[Task, ...]
    depth: int
    phase: Phase
    zero: int
    names: tuple[frozenset[str], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassColumns:
    """The tasks of a pass in the order of the slot table, numbered from zero.

    ``after_end`` and ``after_start`` hold, for each task, the offsets of the tasks that wait for
    it; ``waits`` counts the tasks that it waits for. ``opening`` tasks wait until the pass before
    has computed. ``late`` tasks may end after this pass has computed. The next pass computes only
    after the ``closing`` tasks.
    """

    rows: list[Task]
    names: list[str]
    slots: list[int]
    positions: list[int]
    after_end: list[Offsets]
    after_start: list[Offsets]
    waits: list[int]
    opening: list[bool]
    late: list[bool]
    closing: list[int]
    # The names of all buffers that the tasks use.
    buffers: frozenset[str | int]

    def of_slot(self, slot: int) -> tuple[object, ...]:
        """Everything about the tasks of a slot except their places."""
        begin, end = self._span(slot)
        columns = (self.rows, self.after_end, self.after_start, self.waits, self.opening, self.late)
        return tuple(column[begin:end] for column in columns)

    def reach(self) -> int:
        """How many slots lie between a task and one that waits for it, at most."""
        waiting = zip(self.slots, self.after_end, self.after_start, strict=True)
        return max(
            abs(self.slots[number + offset] - slot)
            for number, (slot, ends, starts) in enumerate(waiting)
            for offset in (0, *ends, *starts)
        )

    def repeating(self, slot: int, times: int) -> "PassColumns":
        """The columns of a pass in which a slot comes several times more."""
        begin, end = self._span(slot)

        def more(column: list[_Entry]) -> list[_Entry]:
            return column[:end] + column[begin:end] * times + column[end:]

        def further(column: list[int]) -> list[int]:
            repeated = [one + time for time in range(1, times + 1) for one in column[begin:end]]
            return column[:end] + repeated + [one + times for one in column[end:]]

        added = times * (end - begin)
        return replace(
            self,
            rows=more(self.rows),
            names=more(self.names),
            slots=further(self.slots),
            positions=further(self.positions),
            after_end=more(self.after_end),
            after_start=more(self.after_start),
            waits=more(self.waits),
            opening=more(self.opening),
            late=more(self.late),
            closing=[number + added if number >= end else number for number in self.closing],
        )

    def _span(self, slot: int) -> tuple[int, int]:
        begin = self.slots.index(slot)
        return begin, begin + self.slots.count(slot)


def columns_of(shape: PassShape) -> PassColumns:
    """The columns of a pass."""
    few = 4 * shape.depth + 5
    begin, length = _longest_run(shape.names)
    if length <= few:
        return derived(shape)
    short = replace(shape, names=shape.names[: begin + few] + shape.names[begin + length :])
    columns, middle = derived(short), begin + few // 2
    if not _is_steady(columns, middle, shape.depth + 2):
        return derived(shape)
    return columns.repeating(middle, length - few)


def _longest_run(names: Sequence[frozenset[str]]) -> tuple[int, int]:
    """Where the longest run of equal layers begins, and how long it is."""
    begin, found = 0, (0, 0)
    for _, run in groupby(names):
        length = len(list(run))
        found = max(found, (begin, length), key=lambda one: one[1])
        begin += length
    return found


def _is_steady(columns: PassColumns, slot: int, around: int) -> bool:
    """Whether a slot can be repeated: the slots around it have the same tasks and the same waits,
    and no task waits for a task further away."""
    rows = [columns.of_slot(one)[0] for one in range(slot - around, slot + around + 1)]
    near_by = [columns.of_slot(one) for one in (slot - 1, slot, slot + 1)]
    alike = all(one == rows[0] for one in rows) and all(one == near_by[0] for one in near_by)
    return alike and columns.reach() <= around


@lru_cache(maxsize=MOST_KEPT)
def derived(shape: PassShape) -> PassColumns:
    """The columns of a pass, worked out task by task."""

    def is_played(task: PassTask) -> bool:
        if isinstance(task.row, str):
            return task.name not in NOT_PLAYED
        return task.name in shape.names[task.position]

    issued = PassTasks(stage_of(shape), PLAYED).of_pass(pass_of(shape))
    paced = Pace([*filter(is_played, issued)], shape.rows, shape.depth, shape.zero).paced()
    tasks = paced.tasks
    waits = [0] * len(tasks)
    for _, waiting in (*paced.for_ends, *paced.for_starts):
        waits[waiting] += 1
    return PassColumns(
        rows=[task.row for task in tasks if isinstance(task.row, Task)],
        names=[task.name for task in tasks],
        slots=[task.slot for task in tasks],
        positions=[task.position for task in tasks],
        after_end=_offsets(paced.for_ends, len(tasks)),
        after_start=_offsets(paced.for_starts, len(tasks)),
        waits=waits,
        opening=[*paced.opening],
        late=[*paced.late],
        closing=[*paced.closing],
        buffers=frozenset(buffer[0] for task in tasks for buffer in (*task.reads, *task.writes)),
    )


def _offsets(pairs: Sequence[tuple[int, int]], tasks: int) -> list[Offsets]:
    found: list[list[int]] = [[] for _ in range(tasks)]
    for source, task in pairs:
        found[source].append(task - source)
    return [tuple(offsets) for offsets in found]


def pass_of(shape: PassShape) -> StagePass:
    """A pass with this phase, the first of its stage."""
    return StagePass(
        stage=0,
        number=0,
        kind="F" if goes_up(shape.phase) else "B",
        chunk=0,
        micro_batch=0,
        phase=shape.phase,
        is_first=False,
        comes_from=None,
        goes_to=None,
    )


def stage_of(shape: PassShape) -> StageShape:
    """A stage that has at least the tasks of a pass; its layers count from zero."""
    layers = [
        layer_at(position, len(shape.names), shape.phase)
        for position, names in enumerate(shape.names)
        if any(name[-1] in "<>" for name in names)
    ]
    blocks = range(min(layers), max(layers) + 1) if layers else range(0)
    swapped = {name[0] for names in shape.names for name in names if name[-1] in "<>"}
    return StageShape(
        template=Template(phases={shape.phase: shape.rows}, depth=shape.depth),
        stage=0,
        num_stages=1,
        micro_batches=1,
        ends=(0, 0),
        chunks=(ChunkLayers(layers=range(len(shape.names)), blocks=blocks),),
        zero=shape.zero,
        data_parallel=2,
        offload=Offload(
            weights=float("P" in swapped),
            gradients=float("G" in swapped),
            optimizer=float("O" in swapped),
            activations=float("A" in swapped),
        ),
        clips=False,
        ties=False,
        shares_table=False,
        steps_on_host=False,
    )
