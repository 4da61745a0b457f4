"""How streams that run side by side slow one another down, for groups of any shape.

Axes: G measured shapes; J streams of a set.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.machine.slowdowns import (
    COMPUTE,
    SHARED_SETS,
    STREAMS,
    GroupSlowdowns,
    Interference,
    Slowdown,
)
from mistlab.schedule.stage_passes import PassKey, StagePass

# Derives the slowdowns of a shape of communicating group from those of measured shapes.
#
# A shape changes the joint speed of the streams, and how they share this speed. Both are expected
# to change smoothly with the size of the group, and factors follow from them. Each set of busy
# streams is treated by itself:
#
#     u_j   the work of stream j, in the time that a copy of its length would take alone
#     f_j   its factor, so 1 / f_j is its speed
#     C     what the copies and the communication get through together: the sum of u_j / f_j
#
# Logarithms of the f_j and of C are averaged over the measured shapes, with a slope in the size;
# the f_j are then scaled together until they get C through. Compute has no part in C.
#
# Axes: G measured shapes; J streams of a set.


# Derives the slowdowns of a shape of communicating group from those of measured shapes.
#
# A shape changes the joint speed of the streams, and how they share this speed. Both are expected
# to change smoothly with the size of the group, and factors follow from them. Each set of busy
# streams is treated by itself:
#
#     u_j   the work of stream j, in the time that a copy of its length would take alone
#     f_j   its factor, so 1 / f_j is its speed
#     C     what the copies and the communication get through together: the sum of u_j / f_j
#
# Logarithms of the f_j and of C are averaged over the measured shapes, with a slope in the size;
# the f_j are then scaled together until they get C through. Compute has no part in C.
#
# Axes: G measured shapes; J streams of a set.


# A shape at twice the size has 1/e^2 of the weight of a shape at the same size.
NEAR_DOUBLINGS = 0.5
# Slopes are damped as by this much measured weight, so that none is trusted far from all shapes.
DAMPING = 0.02


def slowdowns_of_group(machine: Interference, *, gpus_in_node: int, nodes: int) -> GroupSlowdowns:
    """The slowdowns of a shape of group: as measured, or derived from those of other shapes."""
    for group in machine.groups:
        if (group.gpus_in_node, group.nodes) == (gpus_in_node, nodes):
            return group
    return _derived(
        machine.groups,
        gpus_in_node=gpus_in_node,
        nodes=nodes,
        shared_links=machine.shared_links,
    )


def _derived(
    groups: Sequence[GroupSlowdowns], *, gpus_in_node: int, nodes: int, shared_links: bool
) -> GroupSlowdowns:
    """The slowdowns of a shape, from those of measured shapes.

    If the shape crosses nodes, they are derived from shapes that cross nodes, if there are any; if
    it does not, from shapes that do not.
    """
    alike = [group for group in groups if (group.nodes > 1) == (nodes > 1)] or groups
    influence = _influence([(g.gpus_in_node, g.nodes) for g in alike], (gpus_in_node, nodes))
    slowdowns = []
    for streams in SHARED_SETS:
        factors = np.array([group.factors(streams) for group in alike])
        work = [_work(streams, g.gpus_in_node * g.nodes, shared_links) for g in alike]
        capacities = np.sum(work / factors, axis=1)
        expected = np.exp(influence @ np.log(factors))
        capacity = np.exp(influence @ np.log(capacities))
        of_shape = _work(streams, gpus_in_node * nodes, shared_links)
        scaled = expected * np.where(of_shape > 0, np.sum(of_shape / expected) / capacity, 1)
        slowdowns.append(
            Slowdown(streams=streams, factors=tuple(float(f) for f in np.maximum(scaled, 1)))
        )
    return GroupSlowdowns(gpus_in_node=gpus_in_node, nodes=nodes, slowdowns=tuple(slowdowns))


def _work(streams: tuple[str, ...], gpus: int, shared_links: bool) -> Floats:
    """The work (J) in each second of a stream alone; with shared links, bytes over one direction.

    Communication uses both directions, and sends all but the GPU's own part of a message.
    """
    copies = sum(stream in ("host_to_device", "device_to_host") for stream in streams)
    traffic = (1 - 1 / gpus) if shared_links and copies else 1
    work = {"compute": 0, "gpu_to_gpu": traffic * max(copies, 1)}
    return np.array([work.get(stream, 1) for stream in streams], dtype=np.float64)


def _influence(measured: Sequence[tuple[int, int]], shape: tuple[int, int]) -> Floats:
    """The weights (G) of values measured on each shape, for the expected value of another shape."""
    sizes, size = _sizes(measured), _sizes([shape])[0]
    doublings = np.abs(np.log2(np.array(measured) / shape)).sum(axis=1)
    near = np.exp(-doublings / NEAR_DOUBLINGS)
    mean = near / near.sum()
    centred = sizes - mean @ sizes
    weighted = near * centred.T
    slopes = np.linalg.solve(weighted @ centred + DAMPING * np.eye(len(size)), weighted)
    # The weighted, centred sizes sum to zero, so a constant over all shapes makes no slope.
    return np.asarray(mean + (size - mean @ sizes) @ slopes)


def _sizes(shapes: Iterable[tuple[int, int]]) -> Floats:
    return np.array([(gpus / 2, np.log2(nodes)) for gpus, nodes in shapes])


# How long work on the four streams of a GPU takes while it runs side by side.
#
# While a set of streams is busy, each stream of the set runs slower by a factor. The factor
# depends on the set, and on the shape of the group of GPUs that communicates. When a stream has
# done its work, the others go on under the factors of the smaller set. The time of all work is
# never shorter than the longest stream's work alone, and never longer than the sum.
#
# More work on one stream may make the whole shorter: while two kinds of copies run, communication
# can slow a third less. ``lowered`` factors give a lower bound instead, for this work and for any
# greater work on the same streams. ``raised`` factors give an upper bound, for this work and for
# any lesser work (docs/decisions/0035-searches-that-prove.md).
#
# Axes: C cases; the four streams in the order of ``mistlab.machine.slowdowns.STREAMS``.


BITS = np.array([1, 2, 4, 8])
# All sets of streams.
BESIDE = range(1 << len(STREAMS))

# Cases worked on together: few enough that what is computed between stays in the cache.
BLOCK = 8192

LINK = STREAMS.index("gpu_to_gpu")
LINK_BIT = np.uint8(1 << LINK)
_FROM_HOST = STREAMS.index("host_to_device")
_BIT_OF_STREAM = BITS.astype(np.uint8)[:, None]

# Seconds of each of the four streams, which come first (4, ...).


@dataclass(frozen=True, slots=True, eq=False)
class SlowedBy:
    """The factors (4, F) of several groups in one ``table``, streams first for speed, and the
    ``first`` column (C) of each case's group in it. Groups are of ``size`` columns."""

    table: Floats
    first: Rows
    size: int

    @classmethod
    def of_all(cls, factors: Floats, cases: int) -> Self:
        """The same factors, which may be ``lowered`` or ``raised``, for all cases."""
        first = np.zeros(cases, dtype=np.intp)
        return cls(np.ascontiguousarray(factors.T), first, len(factors))

    @classmethod
    def of_groups(cls, groups: Iterable[tuple[Bools, Floats]], cases: int) -> Self:
        """The factors of each group, for the cases of its mask (C)."""
        tables: list[Floats] = []
        first = np.zeros(cases, dtype=np.intp)
        for rows, factors in groups:
            first[rows] = len(tables) * len(factors)
            tables.append(factors)
        return cls(np.ascontiguousarray(np.concatenate(tables).T), first, len(tables[0]))

    def chosen(self, cases: Rows) -> Self:
        """The factors of some of the cases."""
        return type(self)(self.table, self.first[cases], self.size)

    def place(self, begun: NDArray[np.uint8]) -> Rows:
        """The columns (C) of the empty set, for cases whose streams in the sets ``begun`` had work
        at first."""
        if self.size == len(BESIDE):
            return self.first
        return self.first + len(BESIDE) * begun.astype(np.intp)


def factors_of(group: GroupSlowdowns) -> Floats:
    """Factors (16, 4) by the set of busy streams, a bit for each stream."""
    table = np.ones((16, len(STREAMS)))
    for slowdown in group.slowdowns:
        chosen = [STREAMS.index(stream) for stream in slowdown.streams]
        table[BITS[chosen].sum(), chosen] = slowdown.factors
    return table


def lowered(factors: Floats) -> Floats:
    """Factors (256, 4) that bound ``factors`` from below and grow with the set of busy streams.

    A row is for the set A of streams that had work at first (times 16) and the set S that is still
    busy. It has the least factor of each stream over all sets T, where S is in T and T is in A.
    """
    sets = np.arange(len(factors))
    tables = []
    for first in sets:
        table = np.where(((sets & ~first) == 0)[:, None], factors, np.inf)
        for bit in BITS:
            without = sets[(sets & bit) == 0]
            table[without] = np.minimum(table[without], table[without + bit])
        # Streams that are not busy have no factor.
        tables.append(np.where(np.isfinite(table) & _is_in(sets), table, 1.0))
    return np.concatenate(tables)


def raised(factors: Floats) -> Floats:
    """Factors (16, 4) by the set of busy streams, for sets with the link between GPUs: the most
    that a stream has beside the link and any of these streams."""
    sets = np.arange(len(factors))
    table = np.where(_is_in(sets) & ((sets & (1 << LINK)) > 0)[:, None], factors, 1.0)
    for bit in BITS:
        with_it = sets[(sets & bit) > 0]
        table[with_it] = np.maximum(table[with_it], table[with_it - bit])
    return table


def _is_in(sets: Ints) -> Bools:
    """Whether each stream (4) is in each set."""
    return np.asarray((sets[:, None] & BITS) > 0)


def overlapped(alone: Floats, factors: Floats, awaited: Sequence[str] = STREAMS) -> Floats:
    """Seconds (C) until the ``awaited`` streams have done their work, where all streams work at the
    same time. The work of each stream takes ``alone`` (C, 4) by itself. Factors may be
    ``lowered``."""
    work = np.ascontiguousarray(alone.T)
    return until(awaited, ends_of_streams(work, SlowedBy.of_all(factors, len(alone))), work)


def until(awaited: Sequence[str], ends: Floats, alone: Floats) -> Floats:
    """Seconds (...) until the ``awaited`` streams are done, whose work ends at ``ends``: never less
    than the longest of them takes ``alone``, and never more than all streams one after another."""
    chosen = [STREAMS.index(stream) for stream in awaited]
    least, last = (one if awaited is STREAMS else one[chosen] for one in (alone, ends))
    last = np.maximum(last.max(axis=0), least.max(axis=0))
    return np.asarray(np.minimum(last, alone.sum(axis=0)))


def ends_of_streams(alone: Floats, slowed: SlowedBy) -> Floats:
    """Seconds (4, C) until each stream has done its work, which takes ``alone`` (4, C) by itself,
    where all streams work at the same time; zero for a stream without work."""
    # What nothing runs beside takes as long as it does by itself.
    ends = alone.copy()
    several = np.flatnonzero((alone > 0).sum(axis=0, dtype=np.uint8) > 1)
    for start in range(0, len(several), BLOCK):
        block = several[start : start + BLOCK]
        ends[:, block] = ends_of_several(alone.take(block, axis=1), slowed.chosen(block))
    return ends


def ends_of_several(left: Floats, slowed_by: SlowedBy) -> Floats:
    """``ends_of_streams`` for cases in which several streams have work."""
    ends, elapsed = np.zeros_like(left), np.zeros(left.shape[1])
    offset = slowed_by.place(sets_of(left > 0))
    for _ in STREAMS:
        busy = left > 0
        slowed = slowed_by.table.take(offset + sets_of(busy), axis=1)
        ahead = np.where(busy, left * slowed, np.inf)
        first = ahead.min(axis=0)
        step = np.where(np.isfinite(first), first, 0.0)
        is_done = ahead <= step
        left = np.where(is_done, 0.0, np.maximum(left - step / slowed, 0.0))
        elapsed += step
        ends += is_done * elapsed
    return ends


def endless(alone: Floats, slowed_by: SlowedBy) -> tuple[Floats, Floats]:
    """Seconds (C) until all other streams have done their work of ``alone`` (4, C) while the link
    between GPUs never rests; and the work (C) that the link does in this time."""
    left = alone.copy()
    left[LINK] = 0.0
    elapsed, done = np.zeros(left.shape[1]), np.zeros(left.shape[1])
    offset = slowed_by.place(sets_of(left > 0) | LINK_BIT) + LINK_BIT
    for _ in STREAMS[1:]:
        busy = left > 0
        slowed = slowed_by.table.take(offset + sets_of(busy), axis=1)
        ahead = np.where(busy, left * slowed, np.inf)
        first = ahead.min(axis=0)
        step = np.where(np.isfinite(first), first, 0.0)
        left = np.where(ahead <= step, 0.0, np.maximum(left - step / slowed, 0.0))
        elapsed += step
        done += step / slowed[LINK]
    return elapsed, done


def link_after(alone: Floats, slowed_by: SlowedBy, first: str) -> Floats:
    """Seconds (C) until the link between GPUs is done, if the stream ``first`` works beside it, and
    the other streams begin when ``first`` is done. Zero where the link is done before they begin.
    """
    after_s = np.zeros(alone.shape[1])
    stream = STREAMS.index(first)
    rows = np.flatnonzero((alone[LINK] > 0) & (alone[stream] > 0))
    left, slowed_by = alone.take(rows, axis=1), slowed_by.chosen(rows)
    pair = slowed_by.first + BITS[[LINK, stream]].sum()
    before = left[stream] * slowed_by.table[stream, pair]
    left[LINK] -= before / slowed_by.table[LINK, pair]
    left[stream] = 0.0
    last = np.flatnonzero(left[LINK] > 0)
    left = left.take(last, axis=1)
    ends = ends_of_streams(left, slowed_by.chosen(last))
    after_s[rows[last]] = before[last] + until((STREAMS[LINK],), ends, left)
    return after_s


def link_behind(
    tasks: Iterable[tuple[Floats, Floats]], computing: Floats, linking: Floats
) -> Floats:
    """Seconds (2, C) until the last of some tasks is computed, and until the link is done with what
    all but the last one leave to it.

    ``tasks`` are computed one after another, each for so many seconds (C) alone, and then the link
    works for so many. Beside one another both take ``computing`` and ``linking`` (C) times as long.
    """
    elapsed = np.zeros_like(computing)
    left, after = np.zeros_like(computing), np.zeros_like(computing)
    for compute, link in tasks:
        left = left + np.where(compute > 0, after, 0.0)
        beside = np.minimum(compute * computing, left * linking)
        elapsed += beside + np.maximum(compute - beside / computing, 0.0)
        left = np.maximum(left - beside / linking, 0.0)
        after = np.where(compute > 0, link, after)
    return np.stack([elapsed, elapsed + left])


def sets_of(busy: Bools) -> NDArray[np.uint8]:
    """The set of busy streams of each case, a bit for each stream, from a mask (4, C)."""
    return np.asarray(np.bitwise_or.reduce(busy * _BIT_OF_STREAM, axis=0))


# What leaves a GPU when its layer has computed, slot after slot.
#
# A slot is over when the work that it began with is done. What its own layer leaves, reduced before
# it goes to the host, begins as soon as the layer has computed. If the slot lasts longer, because
# it waits for copies, part of it is done before the next slot, which may then be over sooner.

_AWAY = STREAMS.index("device_to_host")


def slots_in_turn(
    alone: Sequence[Floats], reduced: Sequence[Floats], slowed_by: SlowedBy, *, slots: int
) -> Sequence[Floats]:
    """Seconds (C) of each of some ``slots``, of two kinds in turn whose streams work for ``alone``
    (4, C); of the link's work ``reduced`` (C) are the reduction of what leaves then."""
    # What is left of the slot before: its reduction, then what leaves.
    left, lasts = (reduced[0], alone[0][_AWAY]), []
    for number in range(slots):
        here, after = number % 2, (number + 1) % 2
        gathered = np.maximum(alone[here][LINK] - reduced[here], 0.0)
        on_link = left[0], gathered, reduced[after]
        lasts_s, left = _passed(alone[here], slowed_by, on_link, (left[1], alone[after][_AWAY]))
        lasts.append(lasts_s)
    return lasts


def _passed(
    alone: Floats,
    slowed_by: SlowedBy,
    on_link: tuple[Floats, Floats, Floats],
    leaving: tuple[Floats, Floats],
) -> tuple[Floats, tuple[Floats, Floats]]:
    """Seconds (C) of a slot, and what is left of its own reduction and of what it leaves. The link
    does what is left of the reduction before, gathers, and reduces what the slot's own layer has
    computed; what leaves follows its reduction."""
    elapsed = np.zeros(alone.shape[1])
    rest = alone.copy()
    links, away = [one.copy() for one in on_link], [one.copy() for one in leaving]
    for _ in range(len(STREAMS) + 3):
        computed = rest[COMPUTE] <= 0
        turn = np.select([links[0] > 0, links[1] > 0, computed & (links[2] > 0)], [0, 1, 2], 3)
        goes = np.select(
            [
                (links[0] <= 0) & (away[0] > 0),
                (away[0] <= 0) & computed & (links[2] <= 0) & (away[1] > 0),
            ],
            [0, 1],
            2,
        )
        rest[LINK] = np.choose(turn, [*links, np.zeros_like(elapsed)])
        rest[_AWAY] = np.choose(goes, [*away, np.zeros_like(elapsed)])
        busy = rest > 0
        waits = [one > 0 for one in (rest[COMPUTE], rest[_FROM_HOST], links[0], links[1], away[0])]
        goes_on = np.logical_or.reduce(waits)
        slowed = slowed_by.table.take(slowed_by.first + sets_of(busy), axis=1)
        ahead = np.where(busy, rest * slowed, np.inf)
        step = np.where(goes_on, ahead.min(axis=0), 0.0)
        rest = np.where(busy & (ahead <= step), 0.0, np.maximum(rest - step / slowed, 0.0))
        links = [np.where(turn == place, rest[LINK], one) for place, one in enumerate(links)]
        away = [np.where(goes == place, rest[_AWAY], one) for place, one in enumerate(away)]
        elapsed += step
    return elapsed, (links[2], away[1])


# Sends of several stages beside one another.
#
# A stage sends one outcome after another. Sends of different stages that leave the same node, or
# come to the same node, share its network while they last: of two that each ask for all of it,
# each is later by as long as both would be on. Passes are gone through in the order of time, so a
# send finds those that began before it; these are made later, too.
#
# Axes: C candidates.

# From one stage to another.
Way = tuple[int, int]
# How many of the last sends of each way a send may meet.
_MET = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedNetworks:
    """The ways of sends that share the network of a node with others: for each, by how much (C) a
    second beside a send on another way makes it later."""

    weights: Mapping[Way, Mapping[Way, Floats | float]]

    @classmethod
    def of(cls, nodes: Ints, shares: Mapping[Way, Floats]) -> Self:
        """The ways of stages on such ``nodes`` (C, stages), each of which asks for a share (C) of
        the networks that it uses: none within a node."""
        weights: dict[Way, dict[Way, Floats | float]] = {}
        for way, share in shares.items():
            for other, other_share in shares.items():
                meets = (nodes[:, way[0]] == nodes[:, other[0]]) | (
                    nodes[:, way[1]] == nodes[:, other[1]]
                )
                uses = (share > 0) & (other_share > 0) & meets & (way[0] != other[0])
                weight = np.where(uses, np.maximum(share + other_share - 1, 0.0), 0.0)
                if weight.any():
                    used = weight if len(weight) > 1 else weight.item()
                    weights.setdefault(way, {})[other] = used
        return cls(weights=weights)


@dataclass(slots=True, eq=False)
class _Send:
    """A send between two times (C), which would take so many seconds (C) alone."""

    begins: Any
    ends: Any
    seconds: Any

    def left_s(self, since: Any) -> Any:
        """Seconds of it alone that are left at a time; nothing once it has ended."""
        # Of a send that takes no time nothing is ever left.
        lasts_s = np.maximum(self.ends - self.begins, np.finfo(np.float64).tiny)
        return np.maximum(self.ends - since, 0.0) * self.seconds / lasts_s


class Sends:
    """What stages send one another: each stage sends one outcome after another, and those that
    share a network slow one another down."""

    def __init__(self, networks: SharedNetworks | None) -> None:
        self.weights = {} if networks is None else networks.weights
        # The send of each pass, the last one of each stage, and the last ones of each way.
        self.of_pass: dict[PassKey, _Send] = {}
        self.last: dict[int, _Send] = {}
        self.recent: dict[Way, list[_Send]] = {}

    def add(self, stage_pass: StagePass, end: Any, seconds: Any, *, queue: bool) -> None:
        """The outcome of a pass that has ended is sent on; stages' sends may ``queue``."""
        goal, begins = stage_pass.goes_to, end
        assert goal is not None, "it sends nothing"
        if queue and stage_pass.stage in self.last:
            begins = np.maximum(end, self.last[stage_pass.stage].ends)
        send = _Send(begins, begins + seconds, seconds)
        self.of_pass[stage_pass.key] = self.last[stage_pass.stage] = send
        way = stage_pass.stage, goal.stage
        if way not in self.weights:
            return
        for other, weight in self.weights[way].items():
            for met in self.recent.get(other, ()):
                both = np.maximum(send.begins, met.begins)
                later = weight * np.minimum(send.left_s(both), met.left_s(both))
                send.ends, met.ends = send.ends + later, met.ends + later
        self.recent[way] = [*self.recent.get(way, ()), send][-_MET:]

    def come_s(self, stage_pass: StagePass, end: Any) -> Any:
        """When the input of a pass has come, whose own pass has ended."""
        send = None if stage_pass.needs is None else self.of_pass.get(stage_pass.needs)
        return end if send is None else send.ends
