"""When a stage gets ready to receive from its neighbours, and in which room a message waits.

A send ends when it is received, and a stage has room for two outcomes under way. So a stage gets
ready for a message one pass before the pass that needs it. Where stages would then wait for one
another for ever, the receiver gets ready earlier and has more rooms. Messages of one kind from one
neighbour are received in the order in which the neighbour sends them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from mistlab.schedule.order_text import PassKind
from mistlab.schedule.stage_passes import PassKey, StagePass, StagePasses

_MOST_KEPT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A message that a stage's pass ``of`` needs: the stage gets ready for it before its pass
    number ``before``, and keeps it in ``room``."""

    of: StagePass
    before: int
    room: int


class StageReceipts:
    """All messages that a stage receives, in order."""

    def __init__(self, receipts: Sequence[Receipt]) -> None:
        self.receipts = receipts
        self._rooms = {one.of.number: one.room for one in receipts}

    @property
    def rooms(self) -> int:
        """The number of rooms that the stage needs."""
        return max(self._rooms.values(), default=-1) + 1

    def room_of(self, one: StagePass) -> int:
        """The room of the message that a pass needs; zero if it receives nothing."""
        return self._rooms.get(one.number, 0)


NO_RECEIPTS = StageReceipts(())


# The stage that receives, the kind of passes, and the stage that sends.
_Way = tuple[int, PassKind, int]


@dataclass(slots=True, kw_only=True)
class _Message:
    """A message from one pass to another, and the pass of the receiver before which it gets
    ready."""

    source: StagePass
    of: StagePass
    before: int


@lru_cache(maxsize=_MOST_KEPT)
def receipts_of(passes: tuple[StagePasses, ...], rooms: int) -> tuple[StageReceipts, ...]:
    """The messages that each stage receives, in order. ``rooms`` is each sender's room for outcomes
    that are not received yet."""
    ways = _messages(passes)
    _Dealings(passes=passes, ways=ways, rooms=rooms).let_all_end()
    return tuple(StageReceipts(_with_rooms(stage, ways, rooms)) for stage in range(len(passes)))


def _messages(passes: Sequence[StagePasses]) -> dict[_Way, list[_Message]]:
    """The messages of each way, in the order in which they are sent."""
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
        # Nobody is ready for a later message before an earlier one.
        for earlier, later in zip(messages[-2::-1], messages[:0:-1], strict=True):
            earlier.before = min(earlier.before, later.before)
    return ways


@dataclass(slots=True, kw_only=True)
class _Dealings:
    """Plays pass by pass which stages wait for one another; if no stage can move, a receiver gets
    ready earlier."""

    passes: Sequence[StagePasses]
    ways: dict[_Way, list[_Message]]
    rooms: int
    done: list[int] = field(default_factory=list)
    received: dict[_Way, int] = field(default_factory=dict)
    arrived: set[PassKey] = field(default_factory=set)
    left: set[PassKey] = field(default_factory=set)

    def let_all_end(self) -> None:
        """Let receivers get ready earlier, until every pass can end."""
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
        for one in passes[begun:]:
            before = passes[one.number - self.rooms] if one.number >= self.rooms else None
            is_kept = before is not None and before.is_sent and before.key not in self.left
            if is_kept or (one.is_received and one.key not in self.arrived):
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


class _Turn(NamedTuple):
    """The place of a receipt among all receipts of a stage; receipts of one way stay in order."""

    before: int
    latest: int
    place: int


def _with_rooms(stage: int, ways: dict[_Way, list[_Message]], rooms: int) -> tuple[Receipt, ...]:
    turns: list[tuple[_Turn, _Message]] = []
    for (receiver, *_), messages in ways.items():
        latest = 0
        for place, message in enumerate(messages if receiver == stage else ()):
            latest = max(latest, message.of.number)
            turns.append((_Turn(message.before, latest, place), message))
    # Until which pass each room is taken.
    taken: dict[int, int] = {}
    receipts = []
    for turn, message in sorted(turns, key=lambda pair: pair[0]):
        room = message.of.number % rooms
        while taken.get(room, -1) >= turn.before:
            room = max(room + 1, rooms)
        taken[room] = message.of.number
        receipts.append(Receipt(of=message.of, before=turn.before, room=room))
    return tuple(receipts)
