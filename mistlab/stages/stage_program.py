"""Makes the program of a stage: the tasks of an iteration, in the order in which the host issues
them.

It has the tasks of the stage's passes (``mistlab.stages.pass_tasks``) and the tasks that send to
and receive from other stages. A task says which buffers it reads and writes. Its buffers alone
decide which tasks it waits for (``mistlab.stages.buffers``).
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from mistlab.schedule.slots import Action, Kind, Phase, Task
from mistlab.schedule.stage_passes import (
    LANES,
    Lane,
    Receipt,
    StagePass,
    Transfer,
    lane_of_transfer,
)
from mistlab.stages.buffers import Buffers, Hazards
from mistlab.stages.pass_tasks import HOST_STEP, Memory, PassTask, PassTasks
from mistlab.stages.stage_shape import RING, StageShape

# The tasks of a first forward pass that a program for optimizer steps alone (``flush``) has, too.
_STEPPING = ("open", "S", HOST_STEP, "O<", "O>", "G<", "close")
# These tasks write to memory that is allocated when they are issued: they receive, fetch
# activations, or make the gradient of a shared table.
_AFTER_COMPUTE = ("Y", "A<", "tied")
# Tasks that belong to no layer: "tied" reduces the gradient of a table shared by embedding and
# head, "drop table" frees that table's memory, "report" reduces losses and gradient norms over
# ranks.
Extra = Literal["tied", "drop table", "report"] | Memory
# The programs of this many stages are cached: ranks with the same stage have the same programs.
_MOST_KEPT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One task of a stage's program, with the earlier tasks that it waits for.

    ``of`` is the pass that the task is part of; tasks after the last pass are part of none.
    ``entry`` is the entry of the ring buffers that its layer uses, ``room`` the buffer into which
    the input of its pass is received. ``waits`` are the tasks in other queues (lanes) that must end
    before it starts, each as a distance: 1 is the task issued just before.
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
    # The kind and direction of a task for a layer (such as P<), or the name of any other task.
    name: str = field(init=False, repr=False, compare=False)
    # Whether the pass of the task is the first of its kind, which starts new sums over
    # micro-batches.
    is_of_first: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # The name is computed only once, since the runtime asks for it in every iteration.
        object.__setattr__(self, "name", self._named())
        object.__setattr__(self, "is_of_first", self.of is not None and self.of.is_first)

    def _named(self) -> str:
        if isinstance(self.task, str):
            return self.task
        return HOST_STEP if self.lane == "host" else f"{self.task.kind}{self.task.direction or ''}"

    @property
    def layer(self) -> int:
        """The number of the layer that the task is for, if it is for a layer."""
        assert isinstance(self.task, Action)
        assert self.task.layer is not None
        return self.task.layer

    @property
    def micro_batch(self) -> int:
        """The micro-batch that the task is for, if it is for a layer."""
        assert isinstance(self.task, Action)
        return self.task.micro_batch

    @property
    def turn(self) -> int:
        """The entry of the ring buffer from which the output of the task's pass is sent."""
        assert self.of is not None
        return self.of.number % RING


@lru_cache(maxsize=_MOST_KEPT)
def iterations(shape: StageShape, count: int) -> tuple[tuple[Op, ...], ...]:
    """The programs of ``count`` successive iterations of a stage; the second and later ones are
    equal.
    """
    hazards, ops = Hazards(LANES), tuple(_Tasks(shape).iteration())
    return tuple(tuple(_ordered(op, hazards) for op in ops) for _ in range(count))


@lru_cache(maxsize=_MOST_KEPT)
def flush(shape: StageShape) -> tuple[Op, ...]:
    """A program that only takes the optimizer steps of the stage's layers, so that none is left
    to do, for instance before a checkpoint is written.
    """
    hazards = Hazards(LANES)
    return tuple(
        _ordered(op, hazards)
        for op in _Tasks(shape).iteration()
        if op.phase == "first_forward" and op.name in _STEPPING
    )


def _ordered(op: Op, hazards: Hazards) -> Op:
    # Receives, fetches of activations and the gradient of a shared table write to memory that
    # queued computation may still use, so they wait for the last task in that queue.
    after = hazards.last("compute") if op.name in _AFTER_COMPUTE else ()
    return replace(op, waits=hazards.add(op.lane, op.reads, op.writes, after=after))


class _Tasks:
    """Makes the tasks of one iteration of a stage, without the waits between them."""

    def __init__(self, shape: StageShape) -> None:
        self.shape = shape
        self.tasks = PassTasks(shape)

    def iteration(self) -> Iterator[Op]:
        receipts: dict[int, list[Receipt]] = defaultdict(list)
        for receipt in self.shape.receipts.receipts:
            receipts[receipt.before].append(receipt)
        for stage_pass in self.shape.passes:
            # Messages for later passes may arrive while this pass computes, so their receives are
            # posted before.
            for receipt in receipts[stage_pass.number]:
                yield self._receive(receipt)
            for task in self.tasks.of_pass(stage_pass):
                yield self._op(task, stage_pass)
            yield from self._send(stage_pass)
        yield from self._end()

    def _op(self, task: PassTask, stage_pass: StagePass) -> Op:
        row = task.row
        return Op(
            task=Action(
                stage=stage_pass.stage,
                kind=row.kind,
                direction=row.direction,
                layer=task.layer,
                micro_batch=stage_pass.micro_batch,
            )
            if isinstance(row, Task)
            else row,
            lane=task.lane,
            phase=stage_pass.phase,
            entry=task.entry,
            of=stage_pass,
            room=self.shape.receipts.room_of(stage_pass),
            reads=task.reads,
            writes=task.writes,
        )

    def _end(self) -> Iterator[Op]:
        shape = self.shape
        squares: Buffers = tuple(("squares", layer) for layer in shape.layers)
        if shape.ties:
            ends = {*shape.layers} - {*shape.blocks}
            tables: Buffers = (*(("gradients", layer) for layer in sorted(ends)), ("squares", -1))
            yield self._reduction("tied", writes=(*tables, ("table",)))
            yield Op(task="drop table", lane="compute", phase="step", writes=(("table",),))
            squares = (*squares, ("squares", -1))
        routed: Buffers = () if shape.routers == "none" else (("routed",),)
        reads = (*squares, ("losses",))
        yield self._reduction("report", reads=reads, writes=(("report",), *routed))

    def _reduction(self, task: Extra, *, reads: Buffers = (), writes: Buffers) -> Op:
        return Op(task=task, lane="reduce_scatter", phase="step", reads=reads, writes=writes)

    def _receive(self, receipt: Receipt) -> Op:
        source = receipt.of.comes_from
        assert source is not None
        lane = self._lane("receive", receipt.of, source.stage, self.shape.stage)
        return self._transfer("Y", lane, receipt.of, writes=(("inbox", receipt.room),))

    def _send(self, stage_pass: StagePass) -> Iterator[Op]:
        if stage_pass.goes_to is not None and stage_pass.is_sent:
            lane = self._lane("send", stage_pass, self.shape.stage, stage_pass.goes_to.stage)
            yield self._transfer(
                "X", lane, stage_pass, reads=(("outbox", stage_pass.number % RING),)
            )

    def _lane(self, way: Transfer, stage_pass: StagePass, sender: int, receiver: int) -> Lane:
        return lane_of_transfer(way, stage_pass.kind, sender, receiver, self.shape.num_stages)

    def _transfer(
        self,
        kind: Kind,
        lane: Lane,
        stage_pass: StagePass,
        *,
        reads: Buffers = (),
        writes: Buffers = (),
    ) -> Op:
        above = (stage_pass.kind == "F") == (kind == "X")
        layers = self.shape.chunks[stage_pass.chunk].layers
        layer = layers[-1] if above else layers[0]
        return Op(
            task=Action(
                stage=stage_pass.stage, kind=kind, layer=layer, micro_batch=stage_pass.micro_batch
            ),
            lane=lane,
            phase=stage_pass.phase,
            of=stage_pass,
            room=self.shape.receipts.room_of(stage_pass),
            reads=reads,
            writes=writes,
        )
