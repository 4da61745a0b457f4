"""Lists the tasks of one pass of a micro-batch through a stage, from a table of the tasks that
overlap while one layer computes (the slot table).

Tasks come in the order in which a host issues them, each with the buffers that it reads and writes
(``mistlab.stages.buffers``). Layers count through the whole model, the embedding first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mistlab.schedule.slots import SHARDED_GRADIENTS, SHARDED_WEIGHTS, Task, Template
from mistlab.schedule.stage_passes import Lane, StagePass, lane_of, rows_of_pass
from mistlab.stages.buffers import TOUCHES, Buffers, Hazards, Touched, Touches
from mistlab.stages.stage_shape import RING, StageShape, ring_entries, slots_of, tasks_of_slot

# The name of the host's part of an optimizer step, which runs on the host's own queue.
HOST_STEP = "host step"
_HOST_STEP = Task(stream="compute", kind="S", place="ahead")
# Tasks that allocate or free memory: "open" and "close" for the buffers of optimizer states, "let
# go" for activations that were offloaded.
Memory = Literal["open", "close", "let go"]
# The tasks around one layer are issued in this order: first those that free entries of ring
# buffers, then those that fill them, computation last.
_TURNS = ("R", "device_to_host", "host_to_device", "S", "U", "F", "B", "W")
# The tasks around one layer are issued in this order if an engine overlaps nothing: tasks that free
# entries of ring buffers come last.
_TURNS_ONE_AFTER_ANOTHER = ("host_to_device", "S", "U", "F", "B", "W", "R", "device_to_host")
# The tasks around one layer are issued in this order if the host runs optimizer steps: fetching new
# weights may block the issuing thread, so computation comes before it.
_TURNS_ON_HOST = ("R", "device_to_host", "host_to_device", "S", "F", "O<", "U", "B", "W")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTask:
    """A task of a pass: a row of the table of tasks that overlap while a layer computes (the slot
    table), applied to one layer of the pass.

    ``entry`` is the entry of the ring buffers that the layer uses. A task that only allocates or
    frees memory is for no layer.
    """

    name: str
    lane: Lane
    row: Task | Memory
    slot: int = 0
    position: int = 0
    layer: int = 0
    entry: int = 0
    reads: Buffers = ()
    writes: Buffers = ()


class PassTasks:
    """Makes the tasks of each pass of a stage."""

    def __init__(self, shape: StageShape, touches: Mapping[str, Touches] = TOUCHES) -> None:
        self.shape = shape
        self.touches = touches
        self.template = _stepping_on_host(shape.template) if shape.steps_on_host else shape.template

    def of_pass(self, stage_pass: StagePass) -> Iterator[PassTask]:
        """The tasks of one pass, in the order in which they are issued."""
        depth, count = self.template.depth, self._num_layers(stage_pass)
        if stage_pass.phase == "first_forward":
            yield from self._host_steps(stage_pass)
            yield from self._room("open", stage_pass)
        if stage_pass.kind == "B" and self.shape.offload.activations > 0:
            # Offloaded activations are freed here, to make room for those that are fetched back.
            yield self._memory("let go", "leaving")
        for slot in slots_of(count, depth):
            # Tasks on the same queue run in the order of the slot table (of tasks that overlap).
            rows = tasks_of_slot(self._rows(stage_pass), slot, count, depth)
            for row, position in sorted(rows, key=self.turn):
                if self.shape.has(row, self.shape.layer_at(position, stage_pass)):
                    yield self.task(row, slot, position, stage_pass)
        if stage_pass.phase == "first_forward":
            yield from self._room("close", stage_pass)

    def turn(self, row_and_position: tuple[Task, int]) -> int:
        """The position of a task in the order in which the tasks that overlap while one layer
        computes are issued.
        """
        row, _ = row_and_position
        turns = _TURNS_ON_HOST if self.shape.steps_on_host else _TURNS
        if self.template.depth == 0:
            turns = _TURNS_ONE_AFTER_ANOTHER
        return turns.index(row.name if row.name in turns else row.stream)

    def task(
        self, row: Task, slot: int, position: int, stage_pass: StagePass, name: str = ""
    ) -> PassTask:
        """Make a task of a pass from a row of the slot table (of tasks that overlap while one layer
        computes), for the layer at a position of the pass.
        """
        shape, name = self.shape, name or row.name
        layer = shape.layer_at(position, stage_pass)
        entry = shape.entry_at(position, stage_pass, self.template.depth)
        touched = Touched(
            shape=shape,
            layer=layer,
            entry=entry,
            phase=stage_pass.phase,
            micro_batch=stage_pass.micro_batch,
        )
        reads, writes = self.touches[name](touched)
        if row.kind in ("F", "B"):
            more = self._at_the_ends(position, layer, stage_pass)
            reads, writes = (*reads, *more[0]), (*writes, *more[1])
        return PassTask(
            name=name,
            lane=lane_of(row),
            row=row,
            slot=slot,
            position=position,
            layer=layer,
            entry=entry,
            reads=reads,
            writes=writes,
        )

    def _rows(self, stage_pass: StagePass) -> tuple[Task, ...]:
        splits = self.shape.passes.splits_backward
        rows = rows_of_pass(self.template.phases[stage_pass.phase], stage_pass, splits=splits)
        if stage_pass.kind != "W":
            return rows
        return tuple(replace(row, kind="W") if row.kind == "B" else row for row in rows)

    def _num_layers(self, stage_pass: StagePass) -> int:
        return len(self.shape.chunks[stage_pass.chunk].layers)

    def _room(self, task: Memory, stage_pass: StagePass) -> Iterator[PassTask]:
        blocks = self.shape.chunks[stage_pass.chunk].blocks
        if blocks and self.shape.stages_tail(blocks.start):
            yield self._memory(task, "optimizer slot")

    def _memory(self, task: Memory, ring: str) -> PassTask:
        """A task that allocates or frees the memory of a ring buffer, on the queue of
        computation.
        """
        entries = range(ring_entries(self.template.depth))
        rings: Buffers = tuple((ring, entry) for entry in entries)
        return PassTask(name=task, row=task, lane="compute", writes=rings)

    def _host_steps(self, stage_pass: StagePass) -> Iterator[PassTask]:
        """The optimizer steps on the host, issued together before the pass.

        Each starts once its layer's gradients have arrived.
        """
        for position in range(self._num_layers(stage_pass)):
            if self.shape.steps_tail(self.shape.layer_at(position, stage_pass)):
                yield replace(
                    self.task(_HOST_STEP, 0, position, stage_pass, HOST_STEP), lane="host"
                )

    def _at_the_ends(
        self, position: int, layer: int, stage_pass: StagePass
    ) -> tuple[Buffers, Buffers]:
        """The buffers that only the first or last layer of a pass uses: received inputs, outputs to
        be sent, and losses.
        """
        reads: Buffers = ()
        writes: Buffers = ()
        if position == 0 and stage_pass.is_received:
            reads = (("inbox", self.shape.receipts.room_of(stage_pass)),)
        if position == self._num_layers(stage_pass) - 1 and stage_pass.is_sent:
            writes = (("outbox", stage_pass.number % RING),)
        if layer == self.shape.last_layer and self.shape.has_head:
            if stage_pass.kind == "F":
                writes = (*writes, ("losses",))
            elif self.shape.clips:
                # Gradients are scaled by a factor that depends on the last step's gradient norm,
                # which is in the buffer "report".
                reads = (("report",),)
        return reads, writes


def _stepping_on_host(template: Template) -> Template:
    """An engine's slot table (of tasks that overlap while one layer computes), changed for
    optimizer steps on the host.

    Gradients are offloaded for the step (O>) in the last backward pass, rather than in the next
    first forward pass.
    """
    phases = dict(template.phases)
    leaves = next(row for row in phases["first_forward"] if row.name == "O>")
    phases["first_forward"] = tuple(row for row in phases["first_forward"] if row is not leaves)
    # Gradients for a step on the host are offloaded (O>) before other gradients (G>).
    phases["last_backward"] = (replace(leaves, place="behind"), *phases["last_backward"])
    return replace(template, phases=phases)


# Derives which tasks of a simulated pass wait for which: from the buffers that they use, and from
# rules about when layers and prefetches start.


COMPUTING = ("F", "B")
# The name of the queue in which layers compute, in forward and backward passes alike.
_PASSES = "passes"
_FETCHES = ("P<", "G<", "O<", "A<")
_STATE_FETCHES = ("G<", "O<")
_AWAY = "host activations"
# This task number stands for the end of the previous pass's computation.
_BEFORE = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PacedTasks:
    """The tasks of a pass in the order of the slot table, and which of them wait for which.

    ``for_ends`` and ``for_starts`` are pairs of task numbers: the second task waits until the first
    has ended, or has started. ``opening`` tasks wait until the pass before has computed. ``late``
    tasks may end after this pass has computed. The next pass computes only after the ``closing``
    tasks.
    """

    tasks: Sequence[PassTask]
    for_ends: Sequence[tuple[int, int]]
    for_starts: Sequence[tuple[int, int]]
    opening: Sequence[bool]
    late: Sequence[bool]
    closing: Sequence[int]


class Pace:
    """Finds which tasks of a simulated pass wait for which.

    Tasks are numbered from 1 as they are issued; 0 stands for the end of the previous pass. Most
    dependencies follow from the buffers that tasks use (``mistlab.stages.buffers``). The others
    are:

    - Tasks of one kind run in order. A layer computes after the optimizer steps issued before it,
    but steps run ahead of a pass that waits for its micro-batch.

    - A prefetch starts when the layer that computes in its time slot starts. A prefetch for a step
    starts when the step ``depth`` layers before starts. A prefetch ahead of the first layer starts
    when the previous pass has computed. Without overlap, it starts when the previous layer ends.

    - At most ``depth + 1`` layers are in progress: a layer computes only when the activations and
    gradients of the layer ``depth + 1`` before it have been offloaded and, where gradients are
    sharded, reduced.

    So the tasks of a pass start after the previous pass has computed.
    """

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
        # The numbers of the tasks that each task waits for. Tasks that only manage memory are not
        # simulated: their entries list the tasks that others must wait for instead.
        self.sources: list[set[int]] = [{_BEFORE}]
        self.for_starts: list[tuple[int, int]] = []

    def paced(self) -> PacedTasks:
        """All tasks of the pass, with the tasks that each of them waits for."""
        for number, task in self.tasks.items():
            self._add(number, task)
        played = sorted(self.tasks.keys() - self.memory, key=self._turn_in_table)
        position_of = {number: place for place, number in enumerate(played)}
        closing = self._stands_for(*self.hazards.last(_PASSES)) - {self.computing[-1]}
        return PacedTasks(
            tasks=[self.tasks[number] for number in played],
            for_ends=[
                (position_of[source], position_of[number])
                for number in played
                for source in sorted(self.sources[number] - {_BEFORE})
            ],
            for_starts=[
                (position_of[source], position_of[number]) for source, number in self.for_starts
            ],
            opening=[self._opens(number) for number in played],
            late=[self._is_late(number) for number in played],
            closing=[position_of[number] for number in sorted(closing)],
        )

    def _add(self, number: int, task: PassTask) -> None:
        queue = _queue(task)
        ended, started = self._paced(task)
        waits = {*self.hazards.last(queue), *ended}
        self.for_starts += [(source, number) for source in started]
        # If a layer that was issued later has started, this layer has ended.
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
        """The tasks that must have ended, and those that must have started, before a prefetch may
        start.
        """
        if task.name not in self.fetches:
            return (), ()
        steps = task.name in _STATE_FETCHES and ("S", task.position) in self.at
        pacer = "S" if steps else self.computes
        before = self.at.get((pacer, task.position - max(self.depth, 1)))
        if before is None:
            return () if steps else (_BEFORE,), ()
        return ((before,), ()) if self.depth == 0 else ((), (before,))

    def _room(self, task: PassTask) -> Iterator[int]:
        """The tasks that must end before a layer computes: earlier optimizer steps, and tasks that
        free the layer's buffers.
        """
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
        """Whether a task other than a layer's computation must wait for the previous pass
        explicitly.
        """
        if self.tasks[number].name in COMPUTING:
            return False
        is_paced = _BEFORE in self.sources[number]
        return is_paced or not self.hazards.has_ended(_BEFORE, by_end_of=number)

    def _is_late(self, number: int) -> bool:
        return not self.hazards.has_ended(number, by_end_of=self.computing[-1])


def leaves_of(zero: int) -> tuple[str, ...]:
    """The names of a layer's tasks that must end before another layer can use the same entry of the
    ring buffers.
    """
    return ("A>", "G>", "R") if zero >= SHARDED_GRADIENTS else ("A>", "G>")


def _queue(task: PassTask) -> str:
    return task.name if isinstance(task.row, Task) and task.name not in COMPUTING else _PASSES


def near(buffers: Buffers) -> Buffers:
    """The buffers other than those of activations on the host: waits for these are derived from
    layers and micro-batches instead.
    """
    return tuple(buffer for buffer in buffers if buffer[0] != _AWAY)
