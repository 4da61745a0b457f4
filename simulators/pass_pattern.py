"""One pass of a micro-batch through a stage, as a pattern of tasks: the slot table, laid out.

The table says what belongs to which slot. A slot is no barrier here: what a task waits for is

    F B    the layer before it; its parameters gathered (U) and swapped in (P<), its state stepped
           (S), activations and gradients back (A< G<); what leaves the buffers that it takes, those
           of the layer depth + 1 before (A> G>, from ZeRO-2 on R); the step of the layer depth
           after it, which the table has before it
    A<     of a pass after another: what leaves the buffers that it takes (A>)
    pass   after the one that steps: the last O>, for its activations come where that was
    U      its own part of the parameters: P<, S
    S      O< and G<; where weights are offloaded also the buffers of the layer depth + 1 before
    R      B;   A> after its F or B;   G> after B and R;   O> and P> after S
    ahead  fetching into one of depth + 1 buffers: the layer that computes in the slot has started;
           for O< and G< of a step, the step of the layer depth before it has. Before the first
           layer, the pass before has computed. U fetches into buffers with ZeRO-3 only

Tasks of one kind keep the order of the table. Positions count through the pass: a backward pass
meets the stage's last layer at 0.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.places import goes_up, layer_at, slots_of, tasks_of_slot
from mistlab.schedule.slot_table import (
    SHARDED_GRADIENTS,
    SHARDED_WEIGHTS,
    Direction,
    Kind,
    Phase,
    Template,
)
from simulators.graph import Label, Offsets
from simulators.network import Use

# A kind of task and its direction: F, P<, A>.
Name = tuple[Kind, Direction | None]

_GATHER: Name = ("U", None)
_STEP: Name = ("S", None)
_REDUCE: Name = ("R", None)
_FETCHES: tuple[Name, ...] = (("P", "<"), ("G", "<"), ("O", "<"), ("A", "<"))
_STATE_FETCHES: tuple[Name, ...] = (("G", "<"), ("O", "<"))
_LEAVES: tuple[Name, ...] = (("A", ">"), ("G", ">"), _REDUCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTasks:
    """What one stage's tasks take: ``seconds`` of each of its layers in order, by name.

    The first layer has the number ``first_layer``. Forward and backward include the tensor-parallel
    collectives that the layer waits for. ``send_s`` is what a micro-batch takes to the next stage,
    and back; ``networks`` are the links that sends after forward (F) and backward passes (B) take.
    ``tied_s`` is the reduction of the embedding's gradient with a head that shares its table.
    """

    stage: int
    first_layer: int
    zero: int
    seconds: Mapping[Name, Sequence[float]]
    send_s: float
    networks: Mapping[Kind, tuple[Use, ...]] = field(default_factory=dict)
    tied_s: float = 0.0

    @property
    def num_layers(self) -> int:
        """Layers, the embedding and the head among them."""
        return len(self.seconds["F", None])


@dataclass(slots=True, kw_only=True)
class Pattern:
    """The tasks of a pass, numbered from zero, and what they wait for inside the pass.

    ``computing`` are the layers' F or B in order, ``fetching`` what brings each of them its
    activations, or itself; ``opening`` waits for the pass before to have computed; ``first`` and
    ``last`` of each name link passes; ``by_layer`` finds tasks.
    """

    labels: list[Label] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    after_end: list[Offsets] = field(default_factory=list)
    after_start: list[Offsets] = field(default_factory=list)
    by_layer: dict[tuple[Name, int], int] = field(default_factory=dict)
    computing: list[int] = field(default_factory=list)
    fetching: list[int] = field(default_factory=list)
    opening: list[int] = field(default_factory=list)
    first: dict[Name, int] = field(default_factory=dict)
    last: dict[Name, int] = field(default_factory=dict)
    # For each position, the tasks that free the buffers of its layer.
    releases: list[list[int]] = field(default_factory=list)


def pattern_of(tasks: StageTasks, template: Template, phase: Phase) -> Pattern:
    """The pattern of a pass in a phase that computes."""
    return _Layout(tasks, template, phase).pattern()


class _Layout:
    def __init__(self, tasks: StageTasks, template: Template, phase: Phase) -> None:
        self.tasks = tasks
        self.phase = phase
        self.rows = template.phases[phase]
        self.depth = template.depth
        self.count = tasks.num_layers
        in_place = tasks.zero < SHARDED_GRADIENTS
        self.releases = tuple(name for name in _LEAVES if name != _REDUCE or not in_place)
        self.computes: Name = ("F" if goes_up(phase) else "B", None)
        # Of each position, what is there; and of each task, its slot.
        self.at: dict[tuple[Name, int], int] = {}
        self.slot: list[int] = []
        self.ends: dict[int, list[int]] = defaultdict(list)
        self.starts: dict[int, list[int]] = defaultdict(list)
        self.made = Pattern()

    def pattern(self) -> Pattern:
        self._place()
        for position in range(self.count):
            self._compute(position)
            self._step(position)
            self._gather(position)
            self._leave(position)
        for name in dict.fromkeys(name for name, _ in self.at):
            self._in_order(name)
        return self._finished()

    def _place(self) -> None:
        """Number the tasks of all slots in the table's order."""
        for slot in slots_of(self.count, self.depth):
            for row, position in tasks_of_slot(self.rows, slot, self.count, self.depth):
                if self.tasks.zero < row.from_zero:
                    continue
                name: Name = (row.kind, row.direction)
                layer = layer_at(position, self.count, self.phase)
                seconds = self.tasks.seconds[name][layer]
                if seconds > 0 or name in (self.computes, _STEP):
                    task = self.at[name, position] = len(self.slot)
                    self.slot.append(slot)
                    self.made.labels.append((*name, self.tasks.first_layer + layer))
                    self.made.streams.append(STREAMS.index(row.stream))
                    self.made.seconds.append(seconds)
                    self.made.by_layer[name, layer] = task

    def _wait(self, task: int, position: int, *names: Name) -> None:
        """Let a task wait for the ends of some at a position, as far as they are there."""
        for name in names:
            source = self.at.get((name, position))
            if source is not None:
                self.ends[source].append(task)

    def _compute(self, position: int) -> None:
        task = self.at[self.computes, position]
        self._wait(task, position, _GATHER, ("P", "<"), _STEP, ("A", "<"))
        self._wait(task, position - self.depth - 1, *self.releases)
        if self.depth > 0:
            self._wait(task, position + self.depth, _STEP)
        if (_STEP, position) not in self.at:
            self._wait(task, position, ("G", "<"))
        for name in _FETCHES:
            self._fetch(name, position)

    def _fetch(self, name: Name, position: int) -> None:
        task = self.at.get((name, position))
        if task is None:
            return
        step = self.at.get((_STEP, position))
        if step is None or name not in _STATE_FETCHES:
            self._enter(task)
            return
        if self.depth == 0:
            self._wait(task, position - 1, _STEP)
        elif position >= self.depth:
            self.starts[self.at[_STEP, position - self.depth]].append(task)
        self._wait(task, position - self.depth - 1, (name[0], ">"))

    def _step(self, position: int) -> None:
        task = self.at.get((_STEP, position))
        if task is None:
            return
        self._wait(task, position, *_STATE_FETCHES)
        if (("P", ">"), position) in self.at:
            self._wait(task, position - self.depth - 1, ("P", ">"), self.computes)

    def _gather(self, position: int) -> None:
        task = self.at.get((_GATHER, position))
        if task is None:
            return
        self._wait(task, position, ("P", "<"), _STEP)
        if self.tasks.zero >= SHARDED_WEIGHTS or self.depth == 0:
            self._enter(task)

    def _leave(self, position: int) -> None:
        for name in (*_LEAVES, ("O", ">"), ("P", ">")):
            task = self.at.get((name, position))
            if task is None:
                continue
            if name[0] in "OP":
                self._wait(task, position, _STEP)
            else:
                self._wait(task, position, self.computes)
                if name == ("G", ">"):
                    self._wait(task, position, _REDUCE)

    def _enter(self, task: int) -> None:
        """Let a fetching task wait for its slot to begin."""
        slot = self.slot[task]
        if slot >= 0 and self.depth > 0:
            self.starts[self.at[self.computes, slot]].append(task)
        elif slot > 0:
            self.ends[self.at[self.computes, slot - 1]].append(task)
        else:
            self.made.opening.append(task)

    def _in_order(self, name: Name) -> None:
        tasks = [self.at[name, p] for p in range(self.count) if (name, p) in self.at]
        for earlier, later in pairwise(tasks):
            self.ends[earlier].append(later)
        self.made.first[name], self.made.last[name] = tasks[0], tasks[-1]

    def _finished(self) -> Pattern:
        made, tasks = self.made, range(len(self.slot))
        made.after_end = [tuple(later - task for later in self.ends[task]) for task in tasks]
        made.after_start = [tuple(later - task for later in self.starts[task]) for task in tasks]
        made.waits = [0] * len(tasks)
        for waiting in (*self.ends.values(), *self.starts.values()):
            for task in waiting:
                made.waits[task] += 1
        positions = range(self.count)
        made.computing = [self.at[self.computes, p] for p in positions]
        made.fetching = [
            self.at.get((("A", "<"), p), task) for p, task in enumerate(made.computing)
        ]
        made.releases = [
            [self.at[name, p] for name in self.releases if (name, p) in self.at] for p in positions
        ]
        return made
