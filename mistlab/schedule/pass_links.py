"""The waits of a pass for earlier passes of its stage, when the passes are simulated in turn.

All tasks of a pass begin after the pass before has computed (``mistlab.schedule.pace``). So only
tasks that may end later matter here: tasks of the last layers passed, and tasks whose buffers are
used again.
"""

from collections.abc import Iterator

from mistlab.schedule.buffers import Buffer
from mistlab.schedule.pass_waits import PassWaits, Uses
from mistlab.schedule.places import ring_entries

# A task and one that waits for its end.
Wait = tuple[int, int]


class PassLinks:
    """Links the passes of one stage, whose tasks have numbers across all passes.

    ``computed`` is the task of the last layer in the pass before. ``holding`` is the task that the
    next pass computes after: the same task, or a send that blocks. Both are -1 before the first
    pass.
    """

    def __init__(self, depth: int) -> None:
        self.computed = self.holding = -1
        self.of_ring = ring_entries(depth)
        self._layers_passed = 0
        self._last: dict[str, int] = {}
        self._closing: list[int] = []
        # The pass before, its first task and layer, and how many layers were passed before it.
        self._before: tuple[PassWaits, int, int, int] | None = None
        # The tasks that make room, for each of the last layers passed; the last uses of each
        # buffer.
        self._releases: list[list[int]] = [[] for _ in range(self.of_ring)]
        self._late: dict[Buffer, Uses] = {}
        self._fleeting: list[Buffer] = []
        # The task that carried the activations of a layer and micro-batch to the host.
        self._away: dict[tuple[int, int], int] = {}

    def follow(self, waits: PassWaits, begin: int, first_layer: int, micro_batch: int) -> set[Wait]:
        """The waits of a pass whose tasks are numbered from ``begin`` on."""
        found = {
            *self._in_order(waits, begin),
            *self._paced(waits, begin),
            *self._at_buffers(waits, begin, first_layer),
            *self._brought(waits, begin, first_layer, micro_batch),
        }
        self.computed = self.holding = begin + waits.computing[-1]
        self._closing = [begin + task for task in waits.columns.closing]
        self._layers_passed += waits.num_layers
        return found

    def last(self, name: str) -> int:
        """The last task of a kind; -1 if there was none."""
        return self._last.get(name, -1)

    def _in_order(self, waits: PassWaits, begin: int) -> Iterator[Wait]:
        for name, (first, last) in waits.kinds.items():
            if name in self._last:
                yield self._last[name], begin + first
            self._last[name] = begin + last

    def _paced(self, waits: PassWaits, begin: int) -> Iterator[Wait]:
        if self.computed >= 0:
            yield from ((self.computed, begin + task) for task in waits.opening)
            first = begin + waits.computing[0]
            yield from ((source, first) for source in (self.holding, *self._closing))
        for task, before in zip(waits.computing, self._releases, strict=False):
            yield from ((source, begin + task) for source in before)
        freed = [[begin + task for task in tasks] for tasks in waits.releases]
        self._releases = [*self._releases, *freed][-self.of_ring :]

    def _leave(self, waits: PassWaits, begin: int, first_layer: int, layers_passed: int) -> None:
        """Note the late tasks of a pass that another one follows."""
        entries = layers_passed % self.of_ring
        self._fleeting = []
        for buffer, uses in waits.late_uses(entries, first_layer).items():
            late = self._late.get(buffer)
            if late is None:
                late = self._late[buffer] = Uses()
                if waits.make_room.issuperset(uses.tasks()):
                    self._fleeting.append(buffer)
            late.writer = late.writer if uses.writer is None else begin + uses.writer
            late.readers += [begin + task for task in uses.readers]

    def _at_buffers(self, waits: PassWaits, begin: int, first_layer: int) -> Iterator[Wait]:
        if self._before is not None:
            self._leave(*self._before)
        self._before = waits, begin, first_layer, self._layers_passed
        first = waits.first_uses(self._layers_passed % self.of_ring, first_layer)
        for buffer in list(self._late):
            uses = first[buffer]
            if uses is not None:
                yield from self._after(buffer, uses, waits, begin)
        if waits.num_layers >= self.of_ring:
            # The first layers of this pass compute after all that made room in the one before.
            for buffer in self._fleeting:
                self._late.pop(buffer, None)

    def _after(self, buffer: Buffer, uses: Uses, waits: PassWaits, begin: int) -> Iterator[Wait]:
        late = self._late[buffer]
        writers = [] if uses.writer is None else [uses.writer]
        if late.writer is not None:
            yield from ((late.writer, begin + task) for task in (*uses.readers, *writers))
        for task in writers:
            yield from ((source, begin + task) for source in late.readers)
        if writers:
            # Later passes come after this writer, or it is late itself.
            del self._late[buffer]
        elif not all(waits.columns.late[task] for task in uses.readers):
            late.writer = None
            if not late.readers:
                del self._late[buffer]

    def _brought(
        self, waits: PassWaits, begin: int, first_layer: int, micro_batch: int
    ) -> Iterator[Wait]:
        for layer, task in waits.brought:
            source = self._away.pop((first_layer + layer, micro_batch), None)
            if source is not None:
                yield source, begin + task
        for layer, task in waits.sent:
            self._away[first_layer + layer, micro_batch] = begin + task
