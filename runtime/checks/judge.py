"""Which pairs of uses of memory a trace leaves unordered, and what a single wait is needed for."""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from runtime.checks.trace import Access, Deed, Kind, Need, Source, Stretch, Trace, Wait


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceFinding:
    """Two deeds with the same memory that nothing orders."""

    kind: Kind
    memory: str
    first: Deed
    second: Deed

    @property
    def missing(self) -> str:
        """The wait that would order them."""
        first, second = self.first, self.second
        return f"a wait of {second.actor}, at {second.task}, for {first.task} on {first.actor}"

    def __str__(self) -> str:
        lines = (f"{self.kind}: {self.memory}", str(self.first), str(self.second))
        return "\n  ".join((*lines, f"missing: {self.missing}"))


@dataclass(eq=False)
class Judge:
    """A trace, and what must be in order in it."""

    trace: Trace
    _needs: dict[int, list[Need]] = field(init=False)

    def __post_init__(self) -> None:
        needs = defaultdict(list)
        for need in (*_conflicts(self.trace), *self.trace.needs):
            if self._actor(need.earlier) != self._actor(need.later):
                needs[need.later].append(need)
        self._needs = needs

    @cached_property
    def waits(self) -> list[tuple[int, Wait]]:
        """The waits of tasks, each with the stretch that begins behind it."""
        return [
            (number, source.wait)
            for number, stretch in enumerate(self.trace.stretches)
            for source in stretch.sources
            if source.wait is not None
        ]

    def findings(self, without: Wait | None = None) -> list[RaceFinding]:
        """What is unordered; ``without`` leaves a wait out."""
        return [self._finding(need) for need in self._unmet(without)]

    def is_needed(self, wait: Wait) -> bool:
        """Whether something is unordered if a wait is left out that was in order."""
        return any(True for _ in self._unmet(wait))

    def relied(self, wait: Wait) -> list[Need]:
        """What must be in order and comes behind a wait: what the wait could be needed for."""
        stretches = self.trace.stretches
        at = next(number for number, one in self.waits if one is wait)
        source = next(one.stretch for one in stretches[at].sources if one.wait is wait)
        before = self._before[source] | 1 << source
        return [
            need
            for later, needs in self._needs.items()
            if later == at or self._before[later] >> at & 1
            for need in needs
            if before >> need.earlier & 1
        ]

    def path(self, earlier: int, later: int, without: Wait | None = None) -> list[str]:
        """The stretches that lead from one to another, in words; empty if they are unordered."""
        came_from = {later: later}
        queue = deque([later])
        while queue:
            number = queue.popleft()
            if number == earlier:
                found = [number]
                while found[-1] != later:
                    found.append(came_from[found[-1]])
                return [self._words(one) for one in found]
            for source in self.trace.stretches[number].sources:
                if source.stretch not in came_from and _holds(source, without):
                    came_from[source.stretch] = number
                    queue.append(source.stretch)
        return []

    @cached_property
    def _before(self) -> list[int]:
        return _happened_before(self.trace.stretches)

    def _unmet(self, without: Wait | None) -> Iterator[Need]:
        before = self._before
        if without is not None:
            first = next(number for number, wait in self.waits if wait is without)
            before = _happened_before(self.trace.stretches, before[:first], without)
        for later, needs in self._needs.items():
            for need in needs:
                if not before[later] >> need.earlier & 1:
                    yield need

    def _finding(self, need: Need) -> RaceFinding:
        return RaceFinding(kind=need.kind, memory=need.memory, first=need.first, second=need.second)

    def _words(self, stretch: int) -> str:
        one = self.trace.stretches[stretch]
        return f"{one.task} on {one.actor}"

    def _actor(self, stretch: int) -> str:
        return self.trace.stretches[stretch].actor


def _holds(source: Source, without: Wait | None) -> bool:
    return without is None or source.wait is not without


def _happened_before(
    stretches: Sequence[Stretch], known: Sequence[int] = (), without: Wait | None = None
) -> list[int]:
    """For each stretch the set of those before it, as bits; ``known`` are those of the first."""
    before = list(known)
    for stretch in stretches[len(known) :]:
        bits = 0
        for source in stretch.sources:
            if _holds(source, without):
                bits |= before[source.stretch] | 1 << source.stretch
        before.append(bits)
    return before


def _conflicts(trace: Trace) -> Iterator[Need]:
    """Pairs of uses of the same bytes, of which one writes, with no other use in between.

    If each of these is in order, so is every pair of uses: order is transitive.
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
                        first=trace.deed(first),
                        second=trace.deed(second),
                        memory=trace.called(second),
                    )


def _neighbours(accesses: Sequence[Access]) -> Iterator[tuple[Access, Access]]:
    """Of one storage's uses, each with those that it must follow at once, byte range by range."""
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
        for one in before:
            yield one, access
