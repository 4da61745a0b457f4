"""Derives from a pipeline order each stage's passes (forward, backward, weight-gradient), the
queues on which their tasks run, and the messages that each pass receives.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from mistlab.schedule.order_text import OrderedPass, PassKind, PipelineOrder, splits_backward
from mistlab.schedule.placement import Placement, StageChunk, loop
from mistlab.schedule.slots import Kind, Phase, Task

# Names the queues of a rank (called lanes), each of which runs its tasks in order: queues of the
# GPU and one of the host.


Lane = Literal[
    "compute",
    "host_to_device",
    "device_to_host",
    "all_gather",
    "reduce_scatter",
    "send_forward",
    "send_backward",
    "receive_forward",
    "receive_backward",
    "host",
    "tensor_parallel",
    "send_forward_up",
    "send_backward_up",
    "receive_forward_up",
    "receive_backward_up",
]
# Forward and backward messages have a queue each for sending and for receiving. Where a pipeline is
# laid out in a V, activations also go from a later to an earlier stage; messages in this direction
# have queues of their own ("up").
Transfer = Literal["send", "receive"]
LANES: tuple[Lane, ...] = get_args(Lane)


def lane_of(row: Task) -> Lane:
    """The queue on which a task of a layer runs: one for each stream, but all-gathers and
    reduce-scatters have one each.
    """
    if row.stream != "gpu_to_gpu":
        return row.stream
    return "all_gather" if row.kind == "U" else "reduce_scatter"


def lane_of_transfer(
    way: Transfer, kind: PassKind, sender: int, receiver: int, stages: int
) -> Lane:
    """The queue on which a stage sends or receives the outputs of passes of one kind (F or B).

    >>> lane_of_transfer("send", "F", 2, 0, 3), lane_of_transfer("send", "F", 2, 1, 3)
    ('send_forward', 'send_forward_up')
    """
    above, below = (sender, receiver) if kind == "F" else (receiver, sender)
    goes_down = below == (above + 1) % stages
    return _TRANSFERS[way, kind, goes_down]


_TRANSFERS: Mapping[tuple[Transfer, PassKind, bool], Lane] = {
    ("send", "F", True): "send_forward",
    ("send", "B", True): "send_backward",
    ("receive", "F", True): "receive_forward",
    ("receive", "B", True): "receive_backward",
    ("send", "F", False): "send_forward_up",
    ("send", "B", False): "send_backward_up",
    ("receive", "F", False): "receive_forward_up",
    ("receive", "B", False): "receive_backward_up",
}


# Derives the passes of each stage in an iteration from a pipeline order, for the event simulator
# and the runtime.


# What identifies a pass in a pipeline: its stage, kind, chunk and micro-batch.
PassKey = tuple[int, PassKind, int, int]
# The passes of all stages are cached for this many pipelines.
_MOST_KEPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePass:
    """A pass of a micro-batch through a chunk of a stage; ``number`` is its index in the stage's
    order.

    Its kind is F (forward), B (backward) or W (weight gradients). ``phase`` is ``first_forward``
    for a chunk's first F, and ``last_backward`` for its last B, or for its last W if the stage has
    W. ``is_first`` marks a chunk's first pass of each kind, with which sums of gradients begin.
    ``comes_from`` and ``goes_to`` are the chunks before and after this pass; None at the model's
    ends and for W.
    """

    stage: int
    number: int
    kind: PassKind
    chunk: int
    micro_batch: int
    phase: Phase
    is_first: bool
    comes_from: StageChunk | None
    goes_to: StageChunk | None

    @property
    def key(self) -> PassKey:
        """The stage, kind, chunk and micro-batch of the pass, which identify it in its pipeline."""
        return self.stage, self.kind, self.chunk, self.micro_batch

    @property
    def is_received(self) -> bool:
        """Whether the input of the pass comes from another stage."""
        return self.comes_from is not None and self.comes_from.stage != self.stage

    @property
    def is_sent(self) -> bool:
        """Whether the output of the pass goes to another stage."""
        return self.goes_to is not None and self.goes_to.stage != self.stage

    @property
    def needs(self) -> PassKey | None:
        """The pass, on this or another stage, whose output is this pass's input; None if there is
        no such pass.
        """
        source = self.comes_from
        if source is None:
            return None
        return source.stage, self.kind, source.chunk, self.micro_batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagePasses:
    """The passes of a stage, in the order in which the stage runs them.

    ``most_held`` is the largest number of micro-batches in flight at once, added up over the
    stage's chunks. ``placement`` says which stage holds each part of the model.
    """

    passes: tuple[StagePass, ...]
    placement: Placement
    most_held: int
    splits_backward: bool

    def __iter__(self) -> Iterator[StagePass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    @property
    def chunks(self) -> int:
        """The number of chunks of the stage."""
        return self.placement.chunks


# An empty list of passes, for a stage whose order of passes does not matter.
NO_PASSES = StagePasses(passes=(), placement=loop(1), most_held=0, splits_backward=False)


@lru_cache(maxsize=_MOST_KEPT)
def passes_of(order: PipelineOrder) -> tuple[StagePasses, ...]:
    """The passes of each stage of a pipeline, in the order in which the stage runs them."""
    return tuple(_of_stage(order, stage) for stage in range(order.num_stages))


@lru_cache(maxsize=_MOST_KEPT)
def in_turn(passes: tuple[StagePasses, ...]) -> tuple[StagePass, ...]:
    """All passes of a pipeline, each after the passes whose outputs it needs.

    Passes that a deadlock would block are left out.
    """
    ran: list[StagePass] = []
    ended: set[PassKey] = set()
    done = [0] * len(passes)
    waiting: dict[PassKey, int] = {}
    ready = list(range(len(passes)))
    while ready:
        stage = ready.pop()
        for stage_pass in passes[stage].passes[done[stage] :]:
            needs = stage_pass.needs
            if needs is not None and needs not in ended:
                waiting[needs] = stage
                break
            key = stage_pass.key
            ran.append(stage_pass)
            ended.add(key)
            done[stage] += 1
            if key in waiting:
                ready.append(waiting.pop(key))
    return tuple(ran)


def _of_stage(order: PipelineOrder, stage: int) -> StagePasses:
    actions = order.stages[stage]
    splits = splits_backward(actions)
    first: dict[tuple[PassKind, int], int] = {}
    last: dict[tuple[PassKind, int], int] = {}
    # A pass's phase, source and destination depend only on its kind, its chunk, and whether it is
    # the first or the last pass with this kind and chunk.
    for number, action in enumerate(actions):
        first.setdefault((action.kind, action.chunk), number)
        last[action.kind, action.chunk] = number
    ways = {
        (action.kind, action.chunk): (order.source(stage, action), order.destination(stage, action))
        for action in (actions[number] for number in first.values())
    }
    passes = []
    for number, action in enumerate(actions):
        key = action.kind, action.chunk
        is_first, is_last = first[key] == number, last[key] == number
        passes.append(
            StagePass(
                stage=stage,
                number=number,
                kind=action.kind,
                chunk=action.chunk,
                micro_batch=action.micro_batch,
                phase=_phase(action.kind, is_first=is_first, is_last=is_last, splits=splits),
                is_first=is_first,
                comes_from=ways[key][0],
                goes_to=ways[key][1],
            )
        )
    return StagePasses(
        passes=tuple(passes),
        placement=order.placement,
        most_held=_most_held(actions, frees="W" if splits else "B"),
        splits_backward=splits,
    )


def _phase(kind: PassKind, *, is_first: bool, is_last: bool, splits: bool) -> Phase:
    if kind == "F":
        return "first_forward" if is_first else "forward"
    return "last_backward" if is_last and (kind == "W" or not splits) else "backward"


def _most_held(actions: Sequence[OrderedPass], *, frees: PassKind) -> int:
    """The largest number of micro-batches that a stage has in flight at once, over all of its
    chunks.

    A micro-batch is in flight from its forward pass to its pass of kind ``frees``.
    """
    held = most = 0
    for action in actions:
        held += {"F": 1, frees: -1}.get(action.kind, 0)
        most = max(most, held)
    return most


# Selects the tasks of a pass where a stage computes weight gradients in separate passes (W).


# Kinds of tasks that handle weight gradients: R reduces them, G copies them to or from the host, O
# offloads them for an optimizer step on the host, or copies optimizer states.
_OF_GRADIENTS: frozenset[Kind] = frozenset({"R", "G", "O"})


def rows_of_pass(rows: Sequence[Task], stage_pass: StagePass, *, splits: bool) -> tuple[Task, ...]:
    """Select the tasks of a pass from the tasks that overlap in its phase (rows of a slot table).

    A backward pass may be split into a pass for input gradients (B) and one for weight gradients
    (W). Then row B stands for the computation of both. The B pass also has the tasks that gather
    weights and swap weights and activations. The W pass has those that reduce and swap gradients,
    or offload them for an optimizer step on the host.
    """
    if not splits or stage_pass.kind == "F":
        return tuple(rows)
    makes_gradients = stage_pass.kind == "W"
    return tuple(
        row for row in rows if row.kind == "B" or (row.kind in _OF_GRADIENTS) == makes_gradients
    )


# Decides before which pass a stage posts each receive from a neighbouring stage, and which buffer
# it uses.


_MOST_RECEIPTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A message that a stage must receive: the pass ``of`` needs it, and the stage posts the
    receive before pass number ``before``, into buffer number ``room``.
    """

    of: StagePass
    before: int
    room: int


class StageReceipts:
    """All messages that a stage receives, in the order in which it posts the receives."""

    def __init__(self, receipts: Sequence[Receipt]) -> None:
        self.receipts = receipts
        self._rooms = {one.of.number: one.room for one in receipts}

    @property
    def rooms(self) -> int:
        """The number of buffers that the stage needs for received messages."""
        return max(self._rooms.values(), default=-1) + 1

    def room_of(self, stage_pass: StagePass) -> int:
        """The number of the buffer into which a pass's input is received; 0 for a pass that
        receives nothing.
        """
        return self._rooms.get(stage_pass.number, 0)


NO_RECEIPTS = StageReceipts(())


# What messages of one kind between two stages have in common: the receiving stage, the kind of
# passes (F or B), and the sending stage.
_Way = tuple[int, PassKind, int]


@dataclass(slots=True, kw_only=True)
class _Message:
    """A message from a pass of one stage to a pass of another. ``before`` is the number of the
    receiver's pass before which the receive is posted.
    """

    source: StagePass
    of: StagePass
    before: int


@lru_cache(maxsize=_MOST_RECEIPTS)
def receipts_of(passes: tuple[StagePasses, ...], rooms: int) -> tuple[StageReceipts, ...]:
    """The messages that each stage receives, in the order in which it posts the receives.

    A send ends when it is received, and a stage has buffers for ``rooms`` outputs that are not yet
    received. So a stage posts a receive one pass before the pass that needs the message. Where this
    would deadlock, the receiver posts earlier and has more buffers. Messages of one kind from one
    neighbour are received in the order in which the neighbour sends them.
    """
    ways = _messages(passes)
    _DryRun(passes=passes, ways=ways, rooms=rooms).let_all_end()
    return tuple(StageReceipts(_with_rooms(stage, ways, rooms)) for stage in range(len(passes)))


def _messages(passes: Sequence[StagePasses]) -> dict[_Way, list[_Message]]:
    """The messages between stages, for each receiver, kind of passes and sender, in the order of
    sending.
    """
    needed: dict[PassKey, StagePass] = {
        one.needs: one for of_stage in passes for one in of_stage if one.needs is not None
    }
    ways: dict[_Way, list[_Message]] = {}
    for of_stage in passes:
        for source in of_stage:
            of = needed.get(source.key)
            if of is not None and of.is_received:
                message = _Message(source=source, of=of, before=max(0, of.number - 1))
                ways.setdefault((of.stage, of.kind, source.stage), []).append(message)
    for messages in ways.values():
        # A later message is never received before an earlier one.
        for earlier, later in zip(messages[-2::-1], messages[:0:-1], strict=True):
            earlier.before = min(earlier.before, later.before)
    return ways


@dataclass(slots=True, kw_only=True)
class _DryRun:
    """Runs the passes of all stages one by one, to find deadlocks; in a deadlock it lets a receiver
    post its receive earlier.
    """

    passes: Sequence[StagePasses]
    ways: dict[_Way, list[_Message]]
    rooms: int
    done: list[int] = field(default_factory=list)
    received: dict[_Way, int] = field(default_factory=dict)
    arrived: set[PassKey] = field(default_factory=set)
    left: set[PassKey] = field(default_factory=set)

    def let_all_end(self) -> None:
        """Let stages post receives earlier, until every pass can end."""
        self.done = [0] * len(self.passes)
        self.received = dict.fromkeys(self.ways, 0)
        while any(count < len(of) for count, of in zip(self.done, self.passes, strict=True)):
            moved = [self._exchange(way) for way in self.ways]
            moved += [self._advance(stage) for stage in range(len(self.passes))]
            if not any(moved):
                self._get_ready_earlier()

    def _exchange(self, way: _Way) -> bool:
        messages, begun = self.ways[way], self.received[way]
        for message in messages[begun:]:
            if not self._is_sent(message) or message.before > self.done[way[0]]:
                break
            self.received[way] += 1
            self.arrived.add(message.of.key)
            self.left.add(message.source.key)
        return self.received[way] > begun

    def _is_sent(self, message: _Message) -> bool:
        return self.done[message.source.stage] > message.source.number

    def _advance(self, stage: int) -> bool:
        passes, begun = self.passes[stage].passes, self.done[stage]
        for stage_pass in passes[begun:]:
            before = (
                passes[stage_pass.number - self.rooms] if stage_pass.number >= self.rooms else None
            )
            is_kept = before is not None and before.is_sent and before.key not in self.left
            if is_kept or (stage_pass.is_received and stage_pass.key not in self.arrived):
                break
            self.done[stage] += 1
        return self.done[stage] > begun

    def _get_ready_earlier(self) -> None:
        for way, messages in self.ways.items():
            number, stage = self.received[way], way[0]
            if number < len(messages) and self._is_sent(messages[number]):
                messages[number].before = self.done[stage]
                return
        problem = "an order that was checked waits for nothing but messages"
        raise AssertionError(problem)


class _ReceiptKey(NamedTuple):
    """A sort key for the receives of a stage: by the pass before which they are posted, then so
    that messages of one kind and sender keep their order.
    """

    before: int
    latest: int
    place: int


def _with_rooms(stage: int, ways: dict[_Way, list[_Message]], rooms: int) -> tuple[Receipt, ...]:
    turns: list[tuple[_ReceiptKey, _Message]] = []
    for (receiver, *_), messages in ways.items():
        latest = 0
        for number, message in enumerate(messages if receiver == stage else ()):
            latest = max(latest, message.of.number)
            turns.append((_ReceiptKey(message.before, latest, number), message))
    # For each receive buffer of the stage, the number of the last pass that uses it so far.
    taken: dict[int, int] = {}
    receipts = []
    for turn, message in sorted(turns, key=lambda pair: pair[0]):
        room = message.of.number % rooms
        while taken.get(room, -1) >= turn.before:
            room = max(room + 1, rooms)
        taken[room] = message.of.number
        receipts.append(Receipt(of=message.of, before=turn.before, room=room))
    return tuple(receipts)
