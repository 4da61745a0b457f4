"""Finds pairs of memory accesses that a trace leaves unordered (races), and waits that are
redundant.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from runtime.checks.races.accesses import Access, Deed, Kind, Need, Stretch, Trace, Wait

Waits = frozenset[Wait]
NONE: Waits = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceFinding:
    """A data race: two accesses to the same memory, without a wait that orders them."""

    kind: Kind
    memory: str
    first: Deed
    second: Deed

    @property
    def missing(self) -> str:
        """A text that says which wait would order the two accesses."""
        first, second = self.first, self.second
        return f"a wait of {second.actor}, at {second.task}, for {first.task} on {first.actor}"

    def __str__(self) -> str:
        lines = (f"{self.kind}: {self.memory}", str(self.first), str(self.second))
        return "\n  ".join((*lines, f"missing: {self.missing}"))


@dataclass(eq=False)
class Judge:
    """Decides which pairs of stretches of work must be ordered, and which of these pairs are
    ordered.
    """

    trace: Trace
    _needs: dict[int, list[Need]] = field(init=False)

    def __post_init__(self) -> None:
        needs = defaultdict(list)
        for need in (*_conflicts(self.trace), *self.trace.needs):
            if self._actor(need.earlier) != self._actor(need.later):
                needs[need.later].append(need)
        self._needs = needs

    @cached_property
    def waits(self) -> dict[Wait, int]:
        """The waits between tasks, each with the number of the stretch of work that begins after
        it.
        """
        return {
            source.wait: number
            for number, stretch in enumerate(self.trace.stretches)
            for source in stretch.sources
            if source.wait is not None
        }

    def findings(self) -> list[RaceFinding]:
        """The pairs of accesses that must be ordered and are not."""
        return [self._finding(need) for need in self._unmet(NONE)]

    def is_needed(self, *waits: Wait) -> bool:
        """Whether a race would occur without these waits."""
        return any(True for _ in self._unmet(frozenset(waits)))

    def detours(self, wait: Wait) -> list[list[str]]:
        """The reasons why a wait is redundant: a list of other paths of waits that order the same
        stretches of work.

        If one path leads from the awaited work to the waiting work, the list has only this path.
        Otherwise it has a path for each pair of accesses that the wait orders, from the first
        access to the second. The list is empty if the wait orders nothing.
        """
        begins, source = self.waits[wait], self._source(wait)
        around = self.path(source, begins, frozenset([wait]))
        if around:
            return [around]
        before = self._before[source] | 1 << source
        return [
            self.path(need.earlier, later, frozenset([wait]))
            for later, needs in self._needs.items()
            if later == begins or self._before[later] >> begins & 1
            for need in needs
            if before >> need.earlier & 1
        ]

    def path(self, earlier: int, later: int, without: Waits = NONE) -> list[str]:
        """A path of order from one stretch of work to another, as text; empty if there is none."""
        came_from = {later: later}
        queue = deque([later])
        while queue:
            number = queue.popleft()
            if number == earlier:
                numbers = [number]
                while numbers[-1] != later:
                    numbers.append(came_from[numbers[-1]])
                return [self._stretch_text(one) for one in numbers]
            for source in self.trace.stretches[number].sources:
                is_left_out = source.wait is not None and source.wait in without
                if source.stretch not in came_from and not is_left_out:
                    came_from[source.stretch] = number
                    queue.append(source.stretch)
        return []

    @cached_property
    def _before(self) -> list[int]:
        """For each stretch of work, the stretches that come before it, as a bit mask."""
        before: list[int] = []
        for stretch in self.trace.stretches:
            before.append(_set_before(stretch, before, NONE))
        return before

    def _source(self, wait: Wait) -> int:
        sources = self.trace.stretches[self.waits[wait]].sources
        return next(one.stretch for one in sources if one.wait is wait)

    def _unmet(self, without: Waits) -> Iterator[Need]:
        """The pairs of accesses that must be ordered, but are not once the waits ``without`` are
        left out.

        Only stretches after the first of these waits can be affected.
        """
        first = min((self.waits[wait] for wait in without), default=0)
        before = self._before[:first]
        for number in range(first, len(self.trace.stretches)):
            before.append(_set_before(self.trace.stretches[number], before, without))
            for need in self._needs.get(number, ()):
                if not before[number] >> need.earlier & 1:
                    yield need

    def _finding(self, need: Need) -> RaceFinding:
        trace = self.trace
        return RaceFinding(
            kind=need.kind,
            memory=trace.called(need.memory),
            first=trace.deed(need.first),
            second=trace.deed(need.second),
        )

    def _stretch_text(self, stretch: int) -> str:
        stretch_there = self.trace.stretches[stretch]
        return f"{stretch_there.task} on {stretch_there.actor}"

    def _actor(self, stretch: int) -> str:
        return self.trace.stretches[stretch].actor


def _set_before(stretch: Stretch, before: Sequence[int], without: Waits) -> int:
    """The stretches that come before a stretch, as a bit mask made of the masks of its sources."""
    bits = 0
    for source in stretch.sources:
        if source.wait is None or source.wait not in without:
            bits |= before[source.stretch] | 1 << source.stretch
    return bits


def _conflicts(trace: Trace) -> Iterator[Need]:
    """Pairs of consecutive accesses to the same bytes of which at least one writes.

    If each of these pairs is ordered, all pairs of conflicting accesses are, since order is
    transitive.
    """
    by_storage: dict[int, list[Access]] = defaultdict(list)
    for access in trace.accesses:
        by_storage[access.storage].append(access)
    seen = set[tuple[int, int]]()
    for accesses in by_storage.values():
        if len({trace.stretches[one.stretch].actor for one in accesses}) > 1:
            for first, second in _neighbours(accesses):
                pair = (first.stretch, second.stretch)
                if first.stretch != second.stretch and pair not in seen:
                    seen.add(pair)
                    yield Need(
                        earlier=first.stretch,
                        later=second.stretch,
                        kind="race",
                        first=first,
                        second=second,
                        memory=second,
                    )


def _neighbours(accesses: Sequence[Access]) -> Iterator[tuple[Access, Access]]:
    """Pairs of accesses to a storage that must be ordered: each access and the last write before
    it, and each write and the reads since the previous write.
    """
    bounds = sorted({bound for one in accesses for bound in (one.begin, one.end)})
    places = {bound: number for number, bound in enumerate(bounds)}
    writer: list[Access | None] = [None] * len(bounds)
    readers: list[list[Access]] = [[] for _ in bounds]
    for access in accesses:
        before = set[Access]()
        for cell in range(places[access.begin], places[access.end]):
            last = writer[cell]
            if last is not None:
                before.add(last)
            if access.writes:
                before.update(readers[cell])
                writer[cell], readers[cell] = access, []
            else:
                readers[cell].append(access)
        for earlier in before:
            yield earlier, access
