"""The tasks of one pass of a micro-batch through a stage: the slot table, laid out over its layers.

Tasks come in the order in which a host issues them, each with the buffers that it reads and writes
(``mistlab.schedule.buffers``). Layers count through the whole model, the embedding first.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mistlab.schedule.buffers import TOUCHES, Buffers, Touched, Touches
from mistlab.schedule.lanes import Lane, lane_of
from mistlab.schedule.places import ring_entries, slots_of, tasks_of_slot
from mistlab.schedule.slot_table import Task, Template
from mistlab.schedule.split_passes import rows_of_pass
from mistlab.schedule.stage_passes import StagePass
from mistlab.schedule.stage_shape import RING, StageShape

# The host's part of a step: a task of its lane, whatever the name of its action.
HOST_STEP = "host step"
_HOST_STEP = Task(stream="compute", kind="S", place="ahead")
# The coming and going of the room in which optimizer state is staged, the end of activations that
# have left.
Memory = Literal["open", "close", "let go"]
# Issued first in a slot is what makes room in a ring, then what fills it, last what computes.
_TURNS = ("R", "device_to_host", "host_to_device", "S", "U", "F", "B", "W")
# Where a slot's tasks are all for one layer, what makes room comes last.
_TURNS_ONE_AFTER_ANOTHER = ("host_to_device", "S", "U", "F", "B", "W", "R", "device_to_host")
# Weights that the host steps may keep whoever issues waiting: there computation goes before them.
_TURNS_ON_HOST = ("R", "device_to_host", "host_to_device", "S", "F", "O<", "U", "B", "W")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTask:
    """A task of a pass: a ``row`` of the slot table for the layer at a position, in a slot.

    ``entry`` is the place of its layer in the rings. A task of memory has no layer.
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
    """The tasks of each pass of a stage."""

    def __init__(self, shape: StageShape, touches: Mapping[str, Touches] = TOUCHES) -> None:
        self.shape = shape
        self.touches = touches
        self.template = _stepping_on_host(shape.template) if shape.steps_on_host else shape.template

    def of_pass(self, one: StagePass) -> Iterator[PassTask]:
        """The tasks of one pass, in the order in which they are issued."""
        depth, count = self.template.depth, self._num_layers(one)
        if one.phase == "first_forward":
            yield from self._host_steps(one)
            yield from self._room("open", one)
        if one.kind == "B" and self.shape.offload.activations > 0:
            # What has left since the last forward makes room for what comes back.
            yield self._memory("let go", "leaving")
        for slot in slots_of(count, depth):
            # Lanes keep the table's order.
            rows = tasks_of_slot(self._rows(one), slot, count, depth)
            for row, position in sorted(rows, key=self.turn):
                if self.shape.has(row, self.shape.layer_at(position, one)):
                    yield self.task(row, slot, position, one)
        if one.phase == "first_forward":
            yield from self._room("close", one)

    def turn(self, found: tuple[Task, int]) -> int:
        """A row's place in the order in which the rows of a slot are issued."""
        row, _ = found
        turns = _TURNS_ON_HOST if self.shape.steps_on_host else _TURNS
        if self.template.depth == 0:
            turns = _TURNS_ONE_AFTER_ANOTHER
        return turns.index(row.name if row.name in turns else row.stream)

    def task(self, row: Task, slot: int, position: int, one: StagePass, name: str = "") -> PassTask:
        """The task of a row for the layer at a position."""
        shape, name = self.shape, name or row.name
        layer = shape.layer_at(position, one)
        entry = shape.entry_at(position, one, self.template.depth)
        touched = Touched(
            shape=shape, layer=layer, entry=entry, phase=one.phase, micro_batch=one.micro_batch
        )
        reads, writes = self.touches[name](touched)
        if row.kind in ("F", "B"):
            more = self._at_the_ends(position, layer, one)
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

    def _rows(self, one: StagePass) -> tuple[Task, ...]:
        splits = self.shape.passes.splits_backward
        rows = rows_of_pass(self.template.phases[one.phase], one, splits=splits)
        if one.kind != "W":
            return rows
        return tuple(replace(row, kind="W") if row.kind == "B" else row for row in rows)

    def _num_layers(self, one: StagePass) -> int:
        return len(self.shape.chunks[one.chunk].layers)

    def _room(self, task: Memory, one: StagePass) -> Iterator[PassTask]:
        blocks = self.shape.chunks[one.chunk].blocks
        if blocks and self.shape.stages_tail(blocks.start):
            yield self._memory(task, "optimizer slot")

    def _memory(self, task: Memory, ring: str) -> PassTask:
        """A task that allocates or frees a ring's memory, on the compute lane."""
        entries = range(ring_entries(self.template.depth))
        rings: Buffers = tuple((ring, entry) for entry in entries)
        return PassTask(name=task, row=task, lane="compute", writes=rings)

    def _host_steps(self, one: StagePass) -> Iterator[PassTask]:
        """The steps on the host, issued together: each begins when its gradients are there."""
        for position in range(self._num_layers(one)):
            if self.shape.steps_tail(self.shape.layer_at(position, one)):
                yield replace(self.task(_HOST_STEP, 0, position, one, HOST_STEP), lane="host")

    def _at_the_ends(self, position: int, layer: int, one: StagePass) -> tuple[Buffers, Buffers]:
        """More buffers that the first and the last layer of a pass read and write."""
        reads: Buffers = ()
        writes: Buffers = ()
        if position == 0 and one.is_received:
            reads = (("inbox", self.shape.receipts.room_of(one)),)
        if position == self._num_layers(one) - 1 and one.is_sent:
            writes = (("outbox", one.number % RING),)
        if layer == self.shape.last_layer and self.shape.has_head:
            if one.kind == "F":
                writes = (*writes, ("losses",))
            elif self.shape.clips:
                # Gradients are scaled by a number from the last report.
                reads = (("report",),)
        return reads, writes


def _stepping_on_host(template: Template) -> Template:
    """The template, with optimizer state leaving in the last backward pass instead of later."""
    phases = dict(template.phases)
    leaves = next(row for row in phases["first_forward"] if row.name == "O>")
    phases["first_forward"] = tuple(row for row in phases["first_forward"] if row is not leaves)
    # It comes before offloaded gradients are put away.
    phases["last_backward"] = (replace(leaves, place="behind"), *phases["last_backward"])
    return replace(template, phases=phases)
