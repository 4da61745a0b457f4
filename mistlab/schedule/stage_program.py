"""The tasks of an iteration of a stage in the order that the host issues them: the slot table.

A task says which buffers it reads and writes (``mistlab.schedule.buffers``); what it waits
for follows from that alone (``mistlab.schedule.hazards``). Layers count through the whole
model, as in ``simulators``.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from mistlab.schedule.buffers import Buffers, Touched
from mistlab.schedule.hazards import Hazards
from mistlab.schedule.lanes import Lane, lane_of
from mistlab.schedule.places import entry_of, layer_at, slots_of, tasks_of_slot
from mistlab.schedule.receipts import Receipt
from mistlab.schedule.slot_table import Action, Kind, Phase, Task, Template
from mistlab.schedule.stage_passes import StagePass
from mistlab.schedule.stage_shape import RING, StageShape

# The host's part of a step: a task of its lane, whatever the name of its action.
_HOST = "host step"
_HOST_STEP = Task(stream="compute", kind="S", place="ahead")
# What of a first forward a flush does.
_STEPPING = ("open", "S", _HOST, "O<", "O>", "G<", "close")
# Tasks into memory that was allocated when they were issued.
_AFTER_COMPUTE = ("Y", "A<", "tied")
# Besides the slot table's tasks: the sum of a table of tokens that two layers share, and the end of
# its memory; the sum of losses and norms; the coming and going of the room in which optimizer state
# is staged, the end of activations that left.
Extra = Literal["tied", "drop table", "report", "open", "close", "let go"]
# Issued first in a slot is what makes room in a ring, then what fills it, last what computes.
_TURNS = ("R", "device_to_host", "host_to_device", "S", "U", "F", "B")
# Weights that the host steps may keep whoever issues waiting: there computation goes before them.
_TURNS_ON_HOST = ("R", "device_to_host", "host_to_device", "S", "F", "O<", "U", "B")


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A task as the host issues it.

    It is part of a pass, ``of`` which stage; those after the passes are of none. ``entry`` is its
    entry of the layers' rings, ``room`` where the input of its pass waits that another stage sends.
    ``waits`` are the tasks on other lanes whose ends it waits for, counted back from itself: 1 is
    the task issued just before.
    """

    task: Action | Extra
    lane: Lane
    phase: Phase
    of: StagePass | None = None
    entry: int = 0
    room: int = 0
    reads: Buffers = ()
    writes: Buffers = ()
    waits: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Kind and direction of a table's task; the name of another."""
        if isinstance(self.task, str):
            return self.task
        return _HOST if self.lane == "host" else _name(self.task)

    @property
    def layer(self) -> int:
        """The layer of a table's task."""
        assert isinstance(self.task, Action)
        assert self.task.layer is not None
        return self.task.layer

    @property
    def micro_batch(self) -> int:
        """The micro-batch of a table's task."""
        assert isinstance(self.task, Action)
        return self.task.micro_batch

    @property
    def is_of_first(self) -> bool:
        """Whether its pass is the first of its kind: what adds up over passes begins with it."""
        return self.of is not None and self.of.is_first

    @property
    def held(self) -> int:
        """The slot in which the activations of its micro-batch are held."""
        assert self.of is not None
        return self.of.held

    @property
    def turn(self) -> int:
        """The entry of its pass in the ring of outcomes that go to other stages."""
        assert self.of is not None
        return self.of.number % RING


def iterations(shape: StageShape, count: int) -> list[list[Op]]:
    """The programs of successive iterations; all after the first are alike."""
    hazards = Hazards()
    return [[_ordered(op, hazards) for op in _Tasks(shape).iteration()] for _ in range(count)]


def flush(shape: StageShape) -> list[Op]:
    """The program that only steps the layers, after everything before it has ended."""
    hazards = Hazards()
    return [
        _ordered(op, hazards)
        for op in _Tasks(shape).iteration()
        if op.phase == "first_forward" and op.name in _STEPPING
    ]


def _ordered(op: Op, hazards: Hazards) -> Op:
    # What gets memory that compute has let go of must not write it before compute is past that.
    after: Lane | None = "compute" if op.name in _AFTER_COMPUTE else None
    return replace(op, waits=hazards.add(op.lane, op.reads, op.writes, after=after))


class _Tasks:
    """One iteration's tasks without their waits."""

    def __init__(self, shape: StageShape) -> None:
        self.shape = shape
        self.template = _stepping_on_host(shape.template) if shape.steps_on_host else shape.template
        # Where the input of a pass waits, if it comes from another stage.
        self.rooms: dict[int, int] = {}

    def iteration(self) -> Iterator[Op]:
        shape = self.shape
        receipts: dict[int, list[Receipt]] = defaultdict(list)
        for receipt in shape.receipts:
            receipts[receipt.before].append(receipt)
            self.rooms[receipt.of.number] = receipt.room
        for action in shape.passes:
            # What later passes need may come while this one computes.
            for receipt in receipts[action.number]:
                yield self._receive(receipt)
            yield from self._pass(action)
            yield from self._send(action)
        yield from self._end()

    def _end(self) -> Iterator[Op]:
        shape = self.shape
        layers = range(shape.first_layer, shape.last_layer + 1)
        squares: Buffers = tuple(("squares", layer) for layer in layers)
        if shape.ties:
            ends = {shape.first_layer, shape.last_layer} - set(shape.blocks)
            tables: Buffers = (*(("gradients", layer) for layer in sorted(ends)), ("squares", -1))
            yield self._reduction("tied", writes=(*tables, ("table",)))
            yield Op(task="drop table", lane="compute", phase="step", writes=(("table",),))
            squares = (*squares, ("squares", -1))
        yield self._reduction("report", reads=(*squares, ("losses",)), writes=(("report",),))

    def _reduction(self, task: Extra, *, reads: Buffers = (), writes: Buffers) -> Op:
        return Op(task=task, lane="reduce_scatter", phase="step", reads=reads, writes=writes)

    def _pass(self, action: StagePass) -> Iterator[Op]:
        phase = action.phase
        depth, count = self.template.depth, self.shape.num_layers
        if phase == "first_forward":
            yield from self._host_steps(action)
            yield from self._room("open")
        if action.kind == "B" and self.shape.offload.activations > 0:
            # What has left since the last forward makes room for what comes back.
            yield self._memory("let go", "leaving", phase)
        for slot in slots_of(count, depth):
            # Lanes keep the table's order.
            rows = tasks_of_slot(self.template.phases[phase], slot, count, depth)
            for row, position in sorted(rows, key=self._turn):
                if self.shape.has(row, self._layer(action, position)):
                    yield self._op(row, position, action)
        if phase == "first_forward":
            yield from self._room("close")

    def _room(self, task: Extra) -> Iterator[Op]:
        if self.shape.stages_tail(self.shape.blocks.start):
            yield self._memory(task, "optimizer slot", "first_forward")

    def _memory(self, task: Extra, ring: str, phase: Phase) -> Op:
        """Memory comes and goes while compute is the current lane."""
        entries: Buffers = tuple((ring, entry) for entry in range(RING))
        return Op(task=task, lane="compute", phase=phase, writes=entries)

    def _turn(self, found: tuple[Task, int]) -> int:
        row, _ = found
        turns = _TURNS_ON_HOST if self.shape.steps_on_host else _TURNS
        return turns.index(_name(row) if _name(row) in turns else row.stream)

    def _host_steps(self, action: StagePass) -> Iterator[Op]:
        """All at once, since each begins as soon as its gradients are there."""
        for position in range(self.shape.num_layers):
            if self.shape.steps_tail(self._layer(action, position)):
                yield self._op(_HOST_STEP, position, action, lane="host")

    def _layer(self, action: StagePass, position: int) -> int:
        return self.shape.first_layer + layer_at(position, self.shape.num_layers, action.phase)

    def _op(self, row: Task, position: int, action: StagePass, lane: Lane | None = None) -> Op:
        layer, phase = self._layer(action, position), action.phase
        entry = entry_of(action.number, position, self.shape.num_layers, self.template.depth)
        touched = Touched(
            shape=self.shape,
            layer=layer,
            entry=entry,
            phase=phase,
            held=action.held,
        )
        reads, writes = touched.by(_HOST if lane == "host" else _name(row))
        if row.kind in ("F", "B"):
            more = self._at_the_ends(position, action)
            reads, writes = (*reads, *more[0]), (*writes, *more[1])
        return Op(
            task=Action(
                stage=action.stage,
                kind=row.kind,
                direction=row.direction,
                layer=layer,
                micro_batch=action.micro_batch,
            ),
            lane=lane or lane_of(row),
            of=action,
            phase=phase,
            entry=entry,
            room=self.rooms.get(action.number, 0),
            reads=reads,
            writes=writes,
        )

    def _at_the_ends(self, position: int, action: StagePass) -> tuple[Buffers, Buffers]:
        """What the first and the last layer of a pass touch besides."""
        reads: Buffers = ()
        writes: Buffers = ()
        if position == 0 and action.comes_from is not None:
            reads = (("inbox", self.rooms[action.number]),)
        if position == self.shape.num_layers - 1 and action.goes_to is not None:
            writes = (("outbox", action.number % RING),)
        if self._layer(action, position) == self.shape.last_layer and self.shape.has_head:
            if action.kind == "F":
                writes = (*writes, ("losses",))
            elif self.shape.clips:
                # Gradients are scaled as the last report says.
                reads = (("report",),)
        return reads, writes

    def _receive(self, receipt: Receipt) -> Op:
        lane: Lane = "receive_forward" if receipt.of.kind == "F" else "receive_backward"
        return self._transfer("Y", lane, receipt.of, writes=(("inbox", receipt.room),))

    def _send(self, action: StagePass) -> Iterator[Op]:
        if action.goes_to is not None:
            lane: Lane = "send_forward" if action.kind == "F" else "send_backward"
            yield self._transfer("X", lane, action, reads=(("outbox", action.number % RING),))

    def _transfer(
        self,
        kind: Kind,
        lane: Lane,
        action: StagePass,
        *,
        reads: Buffers = (),
        writes: Buffers = (),
    ) -> Op:
        above = (action.kind == "F") == (kind == "X")
        layer = self.shape.last_layer if above else self.shape.first_layer
        return Op(
            task=Action(stage=action.stage, kind=kind, layer=layer, micro_batch=action.micro_batch),
            of=action,
            lane=lane,
            phase=action.phase,
            room=self.rooms.get(action.number, 0),
            reads=reads,
            writes=writes,
        )


def _stepping_on_host(template: Template) -> Template:
    """Gradients leave during the last backward, where the table has optimizer state leave later."""
    phases = dict(template.phases)
    leaves = next(row for row in phases["first_forward"] if (row.kind, row.direction) == ("O", ">"))
    phases["first_forward"] = tuple(row for row in phases["first_forward"] if row is not leaves)
    # Before gradients are put away that are offloaded themselves.
    phases["last_backward"] = (replace(leaves, place="behind"), *phases["last_backward"])
    return replace(template, phases=phases)


def _name(task: Task | Action) -> str:
    return f"{task.kind}{task.direction or ''}"
