"""Derives the tasks of a stage's simulated passes as columns, and which tasks wait for which,
within a pass and between passes.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, groupby
from typing import TypeVar

from mistlab.plan.plan import Offload
from mistlab.schedule.slots import Phase, Task, Template
from mistlab.schedule.stage_passes import StagePass
from mistlab.stages.buffers import RINGS, TOUCHES, Buffer, Buffers, Touched, Touches
from mistlab.stages.pass_tasks import COMPUTING, Pace, PassTask, PassTasks, leaves_of, near
from mistlab.stages.stage_shape import ChunkLayers, StageShape, goes_up, layer_at, ring_entries

# Lists the buffers of simulated tasks where they differ from those of the runtime: some tasks that
# share a buffer in the runtime have separate buffers in the simulator
# (docs/decisions/0016-waits.md).


def _forward(touched: Touched) -> tuple[Buffers, Buffers]:
    """The buffers of task F (forward), which takes an entry of the weights' ring buffer even if its
    layer's weights stay on the GPU.
    """
    reads, writes = touched.forward()
    return (*reads, ("weight slot", touched.entry)), writes


def _backward(touched: Touched) -> tuple[Buffers, Buffers]:
    """The buffers of task B (backward), which waits for fetched gradients; in simulation these have
    a buffer of their own.
    """
    reads, writes = touched.backward()
    return (*reads, *_fetched_gradients(touched)), writes


def _step(touched: Touched) -> tuple[Buffers, Buffers]:
    """The buffers of task S (optimizer step).

    It writes weights that are offloaded (P>) to a buffer of their own, too. For other weights it
    uses no entry of the weights' ring buffer, which only gathers (U) fill.
    """
    reads, writes = touched.step()
    if touched.shape.offload_of(touched.layer).weights > 0:
        writes = (*writes, ("stepped weights", touched.entry))
    else:
        writes = tuple(buffer for buffer in writes if buffer != ("weight slot", touched.entry))
    return (*reads, *_fetched_gradients(touched)), writes


def _fetch_gradients(touched: Touched) -> tuple[Buffers, Buffers]:
    """The buffers of task G<, which fetches gradients into a buffer of its own."""
    return touched.kept("gradients"), (("fetched gradients", touched.entry),)


def _evict_weights(touched: Touched) -> tuple[Buffers, Buffers]:
    """The buffers of task P>, which offloads the weights that an optimizer step has updated."""
    return (("stepped weights", touched.entry),), touched.kept("weights")


def _evict_activations(touched: Touched) -> tuple[Buffers, Buffers]:
    """The buffers of task A>, which copies one micro-batch's activations to the host."""
    return (("leaving", touched.entry),), (_away(touched),)


def _fetch_activations(touched: Touched) -> tuple[Buffers, Buffers]:
    """The buffers of task A<, which fetches activations.

    It also uses the buffer from which activations are offloaded, since the runtime frees both
    together.
    """
    return (_away(touched),), (("returned", touched.entry), ("leaving", touched.entry))


def _away(touched: Touched) -> Buffer:
    return (*touched.away, touched.layer, touched.micro_batch)


def _fetched_gradients(touched: Touched) -> Buffers:
    comes = touched.shape.offload_of(touched.layer).gradients > 0
    return (("fetched gradients", touched.entry),) if comes else ()


PLAYED: Mapping[str, Touches] = {
    **TOUCHES,
    "F": _forward,
    "B": _backward,
    "S": _step,
    "G<": _fetch_gradients,
    "P>": _evict_weights,
    "A>": _evict_activations,
    "A<": _fetch_activations,
}
# The event simulator leaves out these tasks of the runtime, which only free memory.
NOT_PLAYED = ("let go",)


# Derives the tasks of a pass and their dependencies as columns, once for all passes with equal
# layers.


_Entry = TypeVar("_Entry")
# The tasks that wait for one task, each as its number minus the number of that task.
Offsets = tuple[int, ...]
# The dependencies of at most this many distinct passes are cached.
MOST_KEPT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """What determines the tasks of a pass and their dependencies.

    ``rows`` are the slot table's rows for the pass's phase; ``names`` has each layer's task names.
    """

    rows: tuple[Task, ...]
    depth: int
    phase: Phase
    zero: int
    names: tuple[frozenset[str], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassColumns:
    """The tasks of a pass as columns, numbered from 0 in the order of the slot table.

    Of many equal layers in sequence, only a few are derived, and the tasks around the middle one
    are repeated.

    ``after_end`` and ``after_start`` say which tasks wait for each task's end and start; ``waits``
    is how many tasks each waits for. ``opening`` tasks wait until the pass before has computed.
    ``late`` tasks may end after this pass. The next pass computes only after ``closing`` tasks.
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
    # The names of all buffers that the pass's tasks use.
    buffers: frozenset[str | int]

    def of_slot(self, slot: int) -> tuple[object, ...]:
        """The columns of the tasks in one time slot, without positions, to compare slots."""
        begin, end = self._span(slot)
        columns = (self.rows, self.after_end, self.after_start, self.waits, self.opening, self.late)
        return tuple(column[begin:end] for column in columns)

    def reach(self) -> int:
        """The largest number of time slots between a task and a task that waits for it."""
        waiting = zip(self.slots, self.after_end, self.after_start, strict=True)
        return max(
            abs(self.slots[number + offset] - slot)
            for number, (slot, ends, starts) in enumerate(waiting)
            for offset in (0, *ends, *starts)
        )

    def repeating(self, slot: int, times: int) -> "PassColumns":
        """The columns of a pass with more layers: one time slot is repeated ``times`` times."""
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
    """The tasks of a pass as columns, with their dependencies."""
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
    """The start and the length of the longest sequence of layers with equal tasks."""
    begin, longest = 0, (0, 0)
    for _, run in groupby(names):
        length = len(list(run))
        longest = max(longest, (begin, length), key=lambda one: one[1])
        begin += length
    return longest


def _is_steady(columns: PassColumns, slot: int, around: int) -> bool:
    """Whether the tasks of a time slot can be repeated to stand for further equal layers.

    The slots around it must have the same tasks and the same dependencies, and no task may wait for
    one further away.
    """
    rows = [columns.of_slot(one)[0] for one in range(slot - around, slot + around + 1)]
    near_by = [columns.of_slot(one) for one in (slot - 1, slot, slot + 1)]
    alike = all(one == rows[0] for one in rows) and all(one == near_by[0] for one in near_by)
    return alike and columns.reach() <= around


@lru_cache(maxsize=MOST_KEPT)
def derived(shape: PassShape) -> PassColumns:
    """The tasks of a pass as columns, with dependencies derived task by task."""

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
    offsets_of_tasks: list[list[int]] = [[] for _ in range(tasks)]
    for source, task in pairs:
        offsets_of_tasks[source].append(task - source)
    return [tuple(offsets) for offsets in offsets_of_tasks]


def pass_of(shape: PassShape) -> StagePass:
    """Make a pass of this phase, with a stage and a micro-batch that stand for any other."""
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
    """Make a stage whose layers, counted from 0, have at least the tasks of the pass."""
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
        replicas=2,
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


# Finds the tasks of a pass that tasks of other passes of the same stage may have to wait for.


@dataclass(slots=True)
class Uses:
    """The tasks that use a buffer: the one that writes it, if any, and those that read it."""

    writer: int | None = None
    readers: list[int] = field(default_factory=list)

    def tasks(self) -> list[int]:
        """All tasks that use the buffer."""
        return self.readers if self.writer is None else [*self.readers, self.writer]


class PassWaits:
    """The tasks of one pass as columns, and which of them later passes of the stage may wait for.

    ``computing`` are the tasks F or B of the pass's layers. ``kinds`` has the first and the last
    task of each other name. ``releases`` has for each of the last layers the tasks that free its
    buffers; ``make_room`` is the set of them all. ``brought`` has layers with the tasks that fetch
    their activations from the host; ``sent`` has layers with the tasks that offload them and may
    end late. Layers and ring entries count from zero.
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
        """The number, within the stage, of the layer that a task belongs to."""
        return layer_at(self.columns.positions[task], self.num_layers, self.shape.phase)

    def first_uses(self, entries: int, first_layer: int) -> "FirstUses":
        """The first tasks of the pass that use each buffer.

        ``entries`` are the ring entries used before the pass, ``first_layer`` the number of its
        first layer.
        """
        key = entries, first_layer
        if key not in self._first:
            self._first[key] = FirstUses(self, *key)
        return self._first[key]

    def late_uses(self, entries: int, first_layer: int) -> Mapping[Buffer, Uses]:
        """For each buffer, the last tasks that use it among those that may end after the pass.

        The arguments are those of ``first_uses``.
        """
        key = entries, first_layer
        if key not in self._late:
            last_uses: dict[Buffer, Uses] = {}
            for task in sorted(self.late, key=self._turn):
                reads, writes = self._touches(task)
                for buffer in writes:
                    last_uses[buffer] = Uses(task)
                for buffer in reads:
                    last_uses.setdefault(buffer, Uses()).readers.append(task)
            self._late[key] = {self.moved(buffer, *key): uses for buffer, uses in last_uses.items()}
        return self._late[key]

    def moved(self, buffer: Buffer, entries: int, layers: int) -> Buffer:
        """The name of the same buffer for a later layer: ``entries`` further in its ring or, if it
        is no ring buffer, ``layers`` layers further.
        """
        name, number = buffer
        assert isinstance(number, int)
        return name, (number + entries) % self.of_ring if name in RINGS else number + layers

    def uses(self, buffer: Buffer) -> Uses | None:
        """The first task of the pass that writes a buffer, and the tasks that read it before; None
        if no task uses it.
        """
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
        """The tasks of layers that may use a buffer, in the order in which they are issued."""
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
        columns, stage_pass = self.columns, pass_of(self.shape)
        row, slot, position = columns.rows[task], columns.slots[task], columns.positions[task]
        made = self._of_stage().task(row, slot, position, stage_pass)
        return near(made.reads), near(made.writes)

    def _of_stage(self) -> PassTasks:
        if self._tasks is None:
            self._tasks = PassTasks(stage_of(self.shape), PLAYED)
        return self._tasks


class FirstUses(dict[Buffer, Uses | None]):
    """The first tasks of a pass that use each buffer, derived only when asked for."""

    def __init__(self, waits: PassWaits, entries: int, first_layer: int) -> None:
        self.waits = waits
        self.back = -entries, -first_layer

    def __missing__(self, buffer: Buffer) -> Uses | None:
        uses = self[buffer] = self.waits.uses(self.waits.moved(buffer, *self.back))
        return uses


def pass_waits(
    template: Template, phase: Phase, zero: int, names: Sequence[frozenset[str]]
) -> PassWaits:
    """The tasks of a pass as columns, and which of them later passes may wait for."""
    rows, depth = template.phases[phase], template.depth
    return _waits(PassShape(rows=rows, depth=depth, phase=phase, zero=zero, names=tuple(names)))


@lru_cache(maxsize=MOST_KEPT)
def _waits(shape: PassShape) -> PassWaits:
    return PassWaits(shape, columns_of(shape))


# Finds the tasks of a pass that wait for tasks of earlier passes of the same stage.


# A pair of task numbers: the second task waits until the first one has ended.
Wait = tuple[int, int]


class PassLinks:
    """Finds which tasks wait for tasks of earlier passes of one stage.

    All passes' tasks are numbered together. All tasks of a pass start after the previous pass has
    computed (``mistlab.stages.pass_tasks``). So only tasks that may end later matter here: tasks of
    the last layers, and tasks whose buffers are used again.

    ``computed`` is the task that computes the last layer of the previous pass. ``holding`` is the
    task after which the next pass computes: the same task, or a send that blocks. Both are -1
    before the first pass.
    """

    def __init__(self, depth: int) -> None:
        self.computed = self.holding = -1
        self.of_ring = ring_entries(depth)
        self._layers_passed = 0
        self._last: dict[str, int] = {}
        self._closing: list[int] = []
        # The previous pass, the numbers of its first task and first layer, and the number of layers
        # that passes had visited before it.
        self._before: tuple[PassWaits, int, int, int] | None = None
        # The tasks that free the buffers of each of the last layers visited, and in ``_late`` the
        # last tasks that use each buffer.
        self._releases: list[list[int]] = [[] for _ in range(self.of_ring)]
        self._late: dict[Buffer, Uses] = {}
        self._fleeting: list[Buffer] = []
        # The task that offloaded the activations of each layer and micro-batch.
        self._away: dict[tuple[int, int], int] = {}

    def follow(self, waits: PassWaits, begin: int, first_layer: int, micro_batch: int) -> set[Wait]:
        """Add the stage's next pass from task ``begin`` on; returns its waits as pairs of tasks."""
        waits_of_pass = {
            *self._in_order(waits, begin),
            *self._paced(waits, begin),
            *self._at_buffers(waits, begin, first_layer),
            *self._brought(waits, begin, first_layer, micro_batch),
        }
        self.computed = self.holding = begin + waits.computing[-1]
        self._closing = [begin + task for task in waits.columns.closing]
        self._layers_passed += waits.num_layers
        return waits_of_pass

    def last(self, name: str) -> int:
        """The number of the last task so far with this name; -1 if there is none."""
        return self._last.get(name, -1)

    def _in_order(self, waits: PassWaits, begin: int) -> Iterator[Wait]:
        for name, (first, last) in waits.kinds.items():
            if name in self._last:
                yield self._last[name], begin + first
            self._last[name] = begin + last

    def _paced(self, waits: PassWaits, begin: int) -> Iterator[Wait]:
        if self.computed >= 0:
            yield from ((self.computed, begin + task) for task in waits.opening)
            first = begin + waits.computing[0]
            yield from ((source, first) for source in (self.holding, *self._closing))
        for task, before in zip(waits.computing, self._releases, strict=False):
            yield from ((source, begin + task) for source in before)
        freed = [[begin + task for task in tasks] for tasks in waits.releases]
        self._releases = [*self._releases, *freed][-self.of_ring :]

    def _leave(self, waits: PassWaits, begin: int, first_layer: int, layers_passed: int) -> None:
        """Record the buffers that tasks of a pass may still use after the pass has computed."""
        entries = layers_passed % self.of_ring
        self._fleeting = []
        for buffer, uses in waits.late_uses(entries, first_layer).items():
            late = self._late.get(buffer)
            if late is None:
                late = self._late[buffer] = Uses()
                if waits.make_room.issuperset(uses.tasks()):
                    self._fleeting.append(buffer)
            late.writer = late.writer if uses.writer is None else begin + uses.writer
            late.readers += [begin + task for task in uses.readers]

    def _at_buffers(self, waits: PassWaits, begin: int, first_layer: int) -> Iterator[Wait]:
        if self._before is not None:
            self._leave(*self._before)
        self._before = waits, begin, first_layer, self._layers_passed
        first = waits.first_uses(self._layers_passed % self.of_ring, first_layer)
        for buffer in list(self._late):
            uses = first[buffer]
            if uses is not None:
                yield from self._after(buffer, uses, waits, begin)
        if waits.num_layers >= self.of_ring:
            # A buffer that the previous pass frees needs no further waits, since this pass's first
            # layers wait for its release.
            for buffer in self._fleeting:
                self._late.pop(buffer, None)

    def _after(self, buffer: Buffer, uses: Uses, waits: PassWaits, begin: int) -> Iterator[Wait]:
        late = self._late[buffer]
        writers = [] if uses.writer is None else [uses.writer]
        if late.writer is not None:
            yield from ((late.writer, begin + task) for task in (*uses.readers, *writers))
        for task in writers:
            yield from ((source, begin + task) for source in late.readers)
        if writers:
            # Later passes wait for this pass's writing task instead.
            del self._late[buffer]
        elif not all(waits.columns.late[task] for task in uses.readers):
            late.writer = None
            if not late.readers:
                del self._late[buffer]

    def _brought(
        self, waits: PassWaits, begin: int, first_layer: int, micro_batch: int
    ) -> Iterator[Wait]:
        for layer, task in waits.brought:
            source = self._away.pop((first_layer + layer, micro_batch), None)
            if source is not None:
                yield source, begin + task
        for layer, task in waits.sent:
            self._away[first_layer + layer, micro_batch] = begin + task
