"""Finds pairs of tasks in a program that use the same buffer in no certain order.

It checks ``mistlab.stages.buffers`` and shares no code with it. For each task it finds the
tasks that happen before it, from lanes and waits alone. Then it looks at every pair that shares a
buffer.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from mistlab.schedule.stage_passes import Lane
from mistlab.stages.stage_program import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Two tasks, by number, in no certain order; at least one of them writes the buffer."""

    earlier: int
    later: int
    buffer: tuple[str | int, ...]


def races(ops: Sequence[Op]) -> list[Race]:
    """The races of a program, or of successive programs put together."""
    before = _happened_before(ops)
    touching: dict[tuple[str | int, ...], list[tuple[int, bool]]] = {}
    for number, op in enumerate(ops):
        for buffer in {*op.reads, *op.writes}:
            touching.setdefault(buffer, []).append((number, buffer in op.writes))
    return [
        Race(earlier=earlier, later=later, buffer=buffer)
        for buffer, tasks in touching.items()
        for (earlier, writes), (later, writes_too) in combinations(tasks, 2)
        if (writes or writes_too) and not before[later] >> earlier & 1
    ]


def unallocated(ops: Sequence[Op]) -> list[int]:
    """Tasks that take over memory from compute, and may run before compute's last use of it."""
    before = _happened_before(ops)
    last, found = -1, []
    for number, op in enumerate(ops):
        if op.lane == "compute":
            last = number
        if op.name in ("Y", "A<") and last >= 0 and not before[number] >> last & 1:
            found.append(number)
    return found


def needless(ops: Sequence[Op], begin: int = 0) -> list[tuple[int, int]]:
    """The waits, of tasks from number ``begin`` on, without which nothing would be wrong."""
    return [
        (number, wait)
        for number in range(begin, len(ops))
        for wait in ops[number].waits
        if not _is_needed(ops, number, wait)
    ]


def _is_needed(ops: Sequence[Op], number: int, wait: int) -> bool:
    changed = without_wait(ops, number, wait)
    is_ordered = bool(path(changed, number - wait, number))
    return not is_ordered and bool(races(changed) or unallocated(changed))


def without_wait(ops: Sequence[Op], number: int, wait: int) -> list[Op]:
    """The program without one wait of one task."""
    changed = list(ops)
    waits = tuple(one for one in ops[number].waits if one != wait)
    changed[number] = replace(ops[number], waits=waits)
    return changed


def path(ops: Sequence[Op], earlier: int, later: int) -> list[int]:
    """Tasks that lead from one to another, each before the next; empty if there is no order."""
    came_from: dict[int, int] = {later: later}
    queue = deque([later])
    previous = _previous_of_lane(ops)
    while queue:
        number = queue.popleft()
        if number == earlier:
            found = [number]
            while found[-1] != later:
                found.append(came_from[found[-1]])
            return found
        for source in _sources(ops, number, previous):
            if source not in came_from:
                came_from[source] = number
                queue.append(source)
    return []


def _happened_before(ops: Sequence[Op]) -> list[int]:
    """For each task the set of tasks before it, as bits."""
    previous, before = _previous_of_lane(ops), list[int]()
    for number in range(len(ops)):
        bits = 0
        for source in _sources(ops, number, previous):
            bits |= before[source] | 1 << source
        before.append(bits)
    return before


def _sources(ops: Sequence[Op], number: int, previous: Sequence[int | None]) -> Iterator[int]:
    in_lane = previous[number]
    if in_lane is not None:
        yield in_lane
    for wait in ops[number].waits:
        if wait <= number:
            yield number - wait


def _previous_of_lane(ops: Sequence[Op]) -> list[int | None]:
    last: dict[Lane, int] = {}
    previous: list[int | None] = []
    for number, op in enumerate(ops):
        previous.append(last.get(op.lane))
        last[op.lane] = number
    return previous
