"""The tasks of a pass that other passes of its stage may wait for.

The tasks of each pass and their waits inside it are columns (``mistlab.schedule.pass_columns``).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

from mistlab.schedule.buffers import RINGS, Buffer, Buffers
from mistlab.schedule.pace import COMPUTING, leaves_of, near
from mistlab.schedule.pass_columns import (
    MOST_KEPT,
    PassColumns,
    PassShape,
    columns_of,
    pass_of,
    stage_of,
)
from mistlab.schedule.pass_tasks import PassTasks
from mistlab.schedule.places import layer_at, ring_entries
from mistlab.schedule.played import PLAYED
from mistlab.schedule.slot_table import Phase, Template


@dataclass(slots=True)
class Uses:
    """The tasks that use a buffer: the task that writes it, if any, and the tasks that read it."""

    writer: int | None = None
    readers: list[int] = field(default_factory=list)

    def tasks(self) -> list[int]:
        """All tasks that use the buffer."""
        return self.readers if self.writer is None else [*self.readers, self.writer]


class PassWaits:
    """A pass of a stage: its columns, and the tasks that other passes of the stage may wait for.

    ``computing`` are the tasks F or B of its layers. ``kinds`` has the first and the last task of
    each name. ``releases`` are the tasks of the last layers that ``make_room`` for other layers.
    ``brought`` are layers and the tasks that fetch their activations from the host; ``sent`` are
    layers and the tasks that carry them there and may be late. Layers and entries of rings count
    from zero.
    """

    def __init__(self, shape: PassShape, columns: PassColumns) -> None:
        self.shape = shape
        self.columns = columns
        self.of_ring = ring_entries(shape.depth)
        names, positions = columns.names, columns.positions
        self.opening = [task for task, opens in enumerate(columns.opening) if opens]
        self.late = [task for task, is_late in enumerate(columns.late) if is_late]
        self.computing = [task for task, name in enumerate(names) if name in COMPUTING]
        self.num_layers = len(shape.names)
        self.kinds = {
            name: (names.index(name), len(names) - 1 - names[::-1].index(name))
            for name in dict.fromkeys(names)
            if name not in COMPUTING
        }
        self._of_position: dict[int, list[int]] = defaultdict(list)
        for task, position in enumerate(positions):
            self._of_position[position].append(task)
        leaves = leaves_of(shape.zero)
        lasts = range(max(0, self.num_layers - self.of_ring), self.num_layers)
        self.releases = [
            [task for task in self._of_position[position] if names[task] in leaves]
            for position in lasts
        ]
        self.make_room = frozenset(chain.from_iterable(self.releases))
        self.brought = [(self.layer(task), task) for task, n in enumerate(names) if n == "A<"]
        self.sent = [(self.layer(task), task) for task in self.late if names[task] == "A>"]
        self._first: dict[tuple[int, int], FirstUses] = {}
        self._late: dict[tuple[int, int], Mapping[Buffer, Uses]] = {}
        self._tasks: PassTasks | None = None

    def layer(self, task: int) -> int:
        """The layer of a task."""
        return layer_at(self.columns.positions[task], self.num_layers, self.shape.phase)

    def first_uses(self, entries: int, first_layer: int) -> "FirstUses":
        """The first uses of buffers, where rings are at an entry and layers count from another."""
        key = entries, first_layer
        if key not in self._first:
            self._first[key] = FirstUses(self, *key)
        return self._first[key]

    def late_uses(self, entries: int, first_layer: int) -> Mapping[Buffer, Uses]:
        """The last uses of buffers by late tasks, likewise."""
        key = entries, first_layer
        if key not in self._late:
            found: dict[Buffer, Uses] = {}
            for task in sorted(self.late, key=self._turn):
                reads, writes = self._touches(task)
                for buffer in writes:
                    found[buffer] = Uses(task)
                for buffer in reads:
                    found.setdefault(buffer, Uses()).readers.append(task)
            self._late[key] = {self.moved(buffer, *key): uses for buffer, uses in found.items()}
        return self._late[key]

    def moved(self, buffer: Buffer, entries: int, layers: int) -> Buffer:
        """The buffer, moved on by ``entries`` in its ring, or else by ``layers``."""
        name, number = buffer
        assert isinstance(number, int)
        return name, (number + entries) % self.of_ring if name in RINGS else number + layers

    def uses(self, buffer: Buffer) -> Uses | None:
        """The first writer of a buffer, and its readers before; None if no task uses it."""
        if buffer[0] not in self.columns.buffers:
            return None
        uses = Uses()
        for task in self._in_turn(buffer):
            reads, writes = self._touches(task)
            if buffer in reads:
                uses.readers.append(task)
            if buffer in writes:
                uses.writer = task
                break
        return None if uses == Uses() else uses

    def _in_turn(self, buffer: Buffer) -> Iterator[int]:
        """The tasks of the layers that may use a buffer, in the order in which they are issued."""
        name, number = buffer
        assert isinstance(number, int)
        if name in RINGS:
            positions = range(number, self.num_layers, self.of_ring)
        else:
            position = layer_at(number, self.num_layers, self.shape.phase)
            positions = range(position, position + 1)
        for position in positions:
            yield from sorted(self._of_position[position], key=self._turn)

    def _turn(self, task: int) -> tuple[int, int]:
        columns = self.columns
        turn = self._of_stage().turn((columns.rows[task], columns.positions[task]))
        return columns.slots[task], turn

    def _touches(self, task: int) -> tuple[Buffers, Buffers]:
        columns, one = self.columns, pass_of(self.shape)
        row, slot, position = columns.rows[task], columns.slots[task], columns.positions[task]
        made = self._of_stage().task(row, slot, position, one)
        return near(made.reads), near(made.writes)

    def _of_stage(self) -> PassTasks:
        if self._tasks is None:
            self._tasks = PassTasks(stage_of(self.shape), PLAYED)
        return self._tasks


class FirstUses(dict[Buffer, Uses | None]):
    """The first uses of buffers by a pass, each worked out when it is first asked for."""

    def __init__(self, waits: PassWaits, entries: int, first_layer: int) -> None:
        self.waits = waits
        self.back = -entries, -first_layer

    def __missing__(self, buffer: Buffer) -> Uses | None:
        uses = self[buffer] = self.waits.uses(self.waits.moved(buffer, *self.back))
        return uses


def pass_waits(
    template: Template, phase: Phase, zero: int, names: Sequence[frozenset[str]]
) -> PassWaits:
    """A pass that meets layers with tasks of these names, one after another."""
    rows, depth = template.phases[phase], template.depth
    return _waits(PassShape(rows=rows, depth=depth, phase=phase, zero=zero, names=tuple(names)))


@lru_cache(maxsize=MOST_KEPT)
def _waits(shape: PassShape) -> PassWaits:
    return PassWaits(shape, columns_of(shape))
