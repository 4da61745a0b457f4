"""Lists the buffers that each kind of task (forward, all-gather, offload, ...) reads and writes,
and derives from them which tasks wait for which.

A buffer is named by what it holds and a number: that of a layer, or of an entry in a ring buffer.
Weights, gradients and optimizer states have a part on the GPU and a part on the host.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mistlab.schedule.slots import Phase
from mistlab.stages.stage_shape import StageShape

Buffer = tuple[str | int, ...]
Buffers = tuple[Buffer, ...]
# The names of ring buffers, whose entries the layers use in turn. In the key of such a buffer, as
# in ("weight slot", 1), the number is that of the entry, not of the layer.
RINGS = frozenset(
    {
        *("weight slot", "gradient slot", "sum slot", "optimizer slot", "leaving", "returned"),
        *("fetched gradients", "stepped weights"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """The buffers that one layer's tasks may read or write in a pass, for one micro-batch.

    ``entry`` is the entry of the ring buffers that the layer uses.
    """

    shape: StageShape
    layer: int
    entry: int
    phase: Phase
    micro_batch: int

    @property
    def weights(self) -> Buffer:
        """The buffer from which the layer computes: its own weights, or an entry of a ring
        buffer.
        """
        rings = self.shape.rings_weights(self.layer)
        return ("weight slot", self.entry) if rings else ("weights", self.layer)

    @property
    def gradients(self) -> Buffer:
        """The buffer in which a backward pass accumulates the layer's gradients: its own, or an
        entry of a ring buffer.
        """
        rings = self.shape.rings_gradients(self.layer)
        return ("gradient slot", self.entry) if rings else ("gradients", self.layer)

    @property
    def sums(self) -> Buffer:
        """The buffer in which the layer's gradients are summed over micro-batches, and over ranks
        if they are sharded.
        """
        if self.shape.zero < 2:
            return self.gradients
        offloads = self.shape.offload_of(self.layer).gradients > 0
        return ("sum slot", self.entry) if offloads else ("gradients", self.layer)

    @property
    def state(self) -> Buffer:
        """The GPU buffer into which the layer's offloaded optimizer states are fetched for the
        step.
        """
        return ("optimizer slot", self.entry)

    @property
    def exchange(self) -> Buffer:
        """The host buffer for an optimizer step on the host: it receives the layer's gradients
        first, and then holds its new weights.
        """
        return ("exchange", self.layer)

    @property
    def away(self) -> Buffer:
        """The host buffers for offloaded activations, which all layers share."""
        return ("host activations",)

    def kept(self, what: str) -> Buffers:
        """The buffers that permanently hold a layer's weights or gradients, on the GPU and on the
        host.
        """
        return (what, self.layer), (f"host {what}", self.layer)

    def borrowed(self, what: str) -> Buffers:
        """The embedding's weights or gradients, if the layer is a head that uses the embedding's
        table (tied weights).
        """
        return ((what, self.shape.first_layer),) if self.shape.borrows_table(self.layer) else ()

    def forward(self) -> tuple[Buffers, Buffers]:
        """The buffers of task F (forward): it reads the layer's weights and computes.

        It reuses the activation memory of the layer that had the same entry of the ring buffer
        before, so it waits until those activations are offloaded. Embedding and head wait too: they
        offload nothing, but take an entry.
        """
        leaves = self.shape.offload.activations > 0
        reads = (self.weights, *self.borrowed("weights"))
        if self.shape.routers == "corrected":
            reads = (*reads, ("report",))
        return reads, ((("leaving", self.entry),) if leaves else ())

    def backward(self) -> tuple[Buffers, Buffers]:
        """The buffers of task B (backward): it reads the layer's weights and the activations that
        were fetched from the host.

        It also accumulates weight gradients, unless task W does.
        """
        returns = self.shape.offload_of(self.layer).activations > 0
        reads: Buffers = (("returned", self.entry),) if returns else ()
        reads = (self.weights, *self.borrowed("weights"), *reads)
        routed: Buffers = () if self.shape.routers == "none" else (("routed",),)
        if not self.shape.passes.splits_backward:
            return reads, (*self._added(), *self.borrowed("gradients"), *routed)
        in_b = self.shape.adds_table_in_b(self.layer)
        return reads, (*(self.borrowed("gradients") if in_b else ()), *routed)

    def of_weights(self) -> tuple[Buffers, Buffers]:
        """The buffers of task W (weight gradients), which uses tensors that the input-gradient pass
        (B) has kept.
        """
        in_b = self.shape.adds_table_in_b(self.layer)
        return (), (*self._added(), *(() if in_b else self.borrowed("gradients")))

    def _added(self) -> Buffers:
        """The buffers of the layer's own gradients, to which a backward or weight-gradient pass
        adds.
        """
        return (self.gradients, *self._squares(reduced=False))

    def step(self) -> tuple[Buffers, Buffers]:
        """The buffers of task S (optimizer step): it reads the layer's gradients, and writes its
        weights and optimizer states.
        """
        reads: Buffers = (("report",),) if self.shape.clips else ()
        state = (self.state,) if self.shape.stages_tail(self.layer) else ()
        writes = (self.weights, *self._resident(), *state)
        return (self.sums, *reads), (*writes, ("optimizer", self.layer))

    def step_on_host(self) -> tuple[Buffers, Buffers]:
        """The buffers of the part of the layer's optimizer step that the host computes."""
        reads: Buffers = (("report",),) if self.shape.clips else ()
        return reads, (self.exchange, ("host optimizer", self.layer))

    def leave_for_step(self) -> tuple[Buffers, Buffers]:
        """The buffers of task O>, which offloads the layer's optimizer states after the step; if
        the host takes the step, it offloads the layer's gradients.
        """
        if self.shape.steps_on_host:
            return (self.sums,), (self.exchange,)
        return (self.state,), (("host optimizer", self.layer),)

    def come_for_step(self) -> tuple[Buffers, Buffers]:
        """The buffers of task O<, which fetches the layer's optimizer states for the step; if the
        host takes the step, it fetches the new weights.
        """
        if self.shape.steps_on_host:
            return (), (self.exchange, self.weights, *self._resident())
        return (("host optimizer", self.layer),), (self.state,)

    def gather(self) -> tuple[Buffers, Buffers]:
        """The buffers of task U, which gathers the layer's weights into a ring buffer.

        It gathers from the shard that the rank keeps, or that was fetched into the ring buffer.
        """
        swapped = self.shape.offload_of(self.layer).weights > 0
        return (() if swapped else (("weights", self.layer),)), (self.weights,)

    def reduce(self) -> tuple[Buffers, Buffers]:
        """The buffers of task R, which reduces the layer's gradients over ranks and adds them to
        those of earlier micro-batches.
        """
        return (), (self.gradients, self.sums, *self._squares(reduced=True))

    def _resident(self) -> Buffers:
        """The rank's shard of the layer's weights, if it stays on the GPU and is gathered into a
        ring buffer.
        """
        offloads = self.shape.offload_of(self.layer).weights > 0
        keeps = self.shape.rings_weights(self.layer) and not offloads
        return (("weights", self.layer),) if keeps else ()

    def _squares(self, *, reduced: bool) -> Buffers:
        """The buffer to which the last task that uses a layer's gradients adds their squares, for
        the gradient norm; none for other tasks.
        """
        is_last = self.phase == "last_backward" and reduced == (self.shape.replicas > 1)
        return (("squares", self.layer),) if is_last else ()


# A function that gives the buffers that a task of a layer reads, and those that it writes.
Touches = Callable[[Touched], tuple[Buffers, Buffers]]
TOUCHES: Mapping[str, Touches] = {
    "F": Touched.forward,
    "B": Touched.backward,
    "W": Touched.of_weights,
    "S": Touched.step,
    "host step": Touched.step_on_host,
    "U": Touched.gather,
    "R": Touched.reduce,
    "P<": lambda t: (t.kept("weights"), (t.weights,)),
    "P>": lambda t: ((t.weights,), t.kept("weights")),
    "G<": lambda t: (t.kept("gradients"), (t.sums,)),
    "G>": lambda t: ((t.sums,), t.kept("gradients")),
    "O<": Touched.come_for_step,
    "O>": Touched.leave_for_step,
    "A<": lambda t: ((t.away,), (("returned", t.entry),)),
    "A>": lambda t: ((("leaving", t.entry),), (t.away,)),
}


# Derives which tasks wait for which, from the buffers that they read and write.


Clock = tuple[int, ...]


class Hazards:
    """Finds which tasks must wait for which, if each queue ("lane") runs its tasks in order.

    Tasks are numbered as they are issued. This uses vector clocks: for each task, the number of
    tasks on each lane that have certainly ended before it starts. A dependency that the clock
    already implies is omitted, so every wait in a program is needed.
    """

    def __init__(self, lanes: Sequence[str]) -> None:
        self._numbers = {lane: number for number, lane in enumerate(lanes)}
        self._lanes: list[int] = []
        self._places: list[int] = []
        self._clocks: list[Clock] = []
        self._last: dict[str, int] = {}
        self._writer: dict[Buffer, int] = {}
        self._readers: dict[Buffer, list[int]] = {}

    def add(
        self,
        lane: str,
        reads: Buffers,
        writes: Buffers,
        *,
        after: Iterable[int] = (),
        ended: Iterable[int] = (),
        started: Iterable[int] = (),
    ) -> tuple[int, ...]:
        """Add the next task of a queue, and return the tasks that it must wait for.

        Each task to wait for is returned as a distance: 1 is the task issued just before.

        The next task also waits for the tasks ``after``, whatever buffers it uses. Other rules
        already ensure that it starts only when the tasks ``ended`` have ended and the tasks
        ``started`` have started, so these need no wait.
        """
        number, own_lane = len(self._lanes), self._numbers[lane]
        clock = self._known(lane, ended, started)
        waits = []
        # Waiting for an earlier task never implies that a later task has ended, so the latest tasks
        # are tried first.
        for source in sorted(self._sources(reads, writes).union(after), reverse=True):
            if clock[self._lanes[source]] <= self._places[source]:
                waits.append(number - source)
                clock = _later(clock, self._clocks[source])
        self._lanes.append(own_lane)
        self._places.append(clock[own_lane])
        self._clocks.append((*clock[:own_lane], clock[own_lane] + 1, *clock[own_lane + 1 :]))
        self._note(number, lane, reads, writes)
        return tuple(waits)

    def last(self, lane: str) -> tuple[int, ...]:
        """The number of the latest task of a queue, in a tuple; an empty tuple if the queue has no
        task yet.
        """
        return (self._last[lane],) if lane in self._last else ()

    def has_ended(self, task: int, *, by_end_of: int) -> bool:
        """Whether one task has certainly ended when another one ends."""
        return self._clocks[by_end_of][self._lanes[task]] > self._places[task]

    def _known(self, lane: str, ended: Iterable[int], started: Iterable[int]) -> Clock:
        """The number of tasks of each queue that have certainly ended when the next task of queue
        ``lane`` starts, before any waits for buffers.
        """
        clock: Clock = (0,) * len(self._numbers)
        for source in (*self.last(lane), *ended):
            clock = _later(clock, self._clocks[source])
        for source in started:
            here = self._lanes[source]
            before = self._clocks[source]
            clock = _later(clock, (*before[:here], self._places[source], *before[here + 1 :]))
        return clock

    def _sources(self, reads: Buffers, writes: Buffers) -> set[int]:
        sources = {self._writer[b] for b in (*reads, *writes) if b in self._writer}
        for buffer in writes:
            sources.update(self._readers.get(buffer, ()))
        return sources

    def _note(self, number: int, lane: str, reads: Buffers, writes: Buffers) -> None:
        self._last[lane] = number
        for buffer in reads:
            self._readers.setdefault(buffer, []).append(number)
        for buffer in writes:
            self._writer[buffer] = number
            self._readers[buffer] = []


def _later(before: Clock, other: Clock) -> Clock:
    return tuple(map(max, before, other))
