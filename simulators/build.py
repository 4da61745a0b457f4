"""Builds the task graph of an iteration for the event simulator, pass by pass."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.order_text import PassKind
from mistlab.schedule.placement import StageChunk
from mistlab.schedule.slots import IN_TURN, Action, Direction, Kind, Phase, Task, Template
from mistlab.schedule.stage_passes import StagePass, StagePasses, rows_of_pass
from mistlab.stages.pass_columns import Offsets, PassLinks, PassWaits, pass_waits
from mistlab.stages.stage_shape import layer_at
from simulators.graph import LANES, SENDS, Label, TaskGraph, Use

# One pass of a micro-batch through a stage, as columns of tasks and their dependencies.
#
# The pipeline schedule determines the tasks and what they wait for
# (``mistlab.stages.pass_columns``). The tasks' durations come from the stage's costs.


# What a task does: its kind and, for copies, a direction. ("F", None) is a forward computation,
# ("P", "<") brings weights in, ("A", ">") sends activations out.
Name = tuple[Kind, Direction | None]

# Kinds of tasks that compute a layer: forward, backward, and weight gradients.
_COMPUTING = ("F", "B", "W")
# Kinds of tasks that a graph contains even if they take no time.
_ALWAYS = ("F", "B", "S")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTasks:
    """How long the tasks of one stage take: ``seconds`` has one time per layer for each kind and
    direction of task.

    The first layer has the number ``first_layer``. Forward and backward include the tensor-parallel
    collectives for which the layer waits. ``send_s`` is the time to send a micro-batch's
    activations to the next stage, or their gradients back. ``networks`` has the links that sends
    after forward (F) and backward (B) passes use. ``tied_s`` is the time to reduce the gradient of
    a token table that embedding and head share, ``averaged_s`` the time in which replicas that step
    independently then average all weights. ``issues`` has the host's seconds to issue passes of
    each layer, by kind. If the host never runs ahead of the GPU, passes take at least ``pace``
    times as long as they compute.
    """

    stage: int
    first_layer: int
    zero: int
    seconds: Mapping[Name, Sequence[float]]
    send_s: float
    networks: Mapping[Kind, tuple[Use, ...]] = field(default_factory=dict)
    tied_s: float = 0.0
    averaged_s: float = 0.0
    issues: Mapping[Kind, Sequence[float]] = field(default_factory=dict)
    pace: float = 1.0

    @property
    def num_layers(self) -> int:
        """The number of the stage's layers: its blocks, and the embedding and the head if it has
        them.
        """
        return len(self.seconds["F", None])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pattern:
    """The tasks of one pass of a stage as columns, numbered from 0: each task's label, stream and
    seconds, and the tasks that wait for it.

    ``derived`` is the pass as derived from the schedule, with its links to other passes.
    """

    labels: Sequence[Label]
    streams: Sequence[int]
    seconds: Sequence[float]
    waits: Sequence[int]
    after_end: Sequence[Offsets]
    after_start: Sequence[Offsets]
    derived: PassWaits


def pattern_of(tasks: StageTasks, template: Template, phase: Phase) -> Pattern:
    """The tasks of one forward or backward pass of a stage, as columns; ``phase`` says which
    pass.
    """
    rows = [row for row in template.phases[phase] if tasks.zero >= row.from_zero]
    layers = [layer_at(at, tasks.num_layers, phase) for at in range(tasks.num_layers)]
    derived = pass_waits(template, phase, tasks.zero, _names(tasks, rows, layers))
    columns = derived.columns
    of_row = {
        row: (row.kind, row.direction, STREAMS.index(row.stream), tasks.seconds[_name(row)])
        for row in rows
    }
    labels, streams, seconds = [], [], []
    for row, position in zip(columns.rows, columns.positions, strict=True):
        kind, direction, stream, seconds_of = of_row[row]
        layer = layers[position]
        labels.append((kind, direction, tasks.first_layer + layer))
        streams.append(stream)
        seconds.append(seconds_of[layer])
    return Pattern(
        labels=labels,
        streams=streams,
        seconds=seconds,
        waits=columns.waits,
        after_end=columns.after_end,
        after_start=columns.after_start,
        derived=derived,
    )


def _names(tasks: StageTasks, rows: Sequence[Task], layers: Sequence[int]) -> list[frozenset[str]]:
    """For each layer, the kinds and directions of its tasks: of those that take time, and of the
    kinds in ``_ALWAYS``.
    """
    seconds = [(row.name, row.name in _ALWAYS, tasks.seconds[_name(row)]) for row in rows]
    return [
        frozenset(name for name, is_there, of_layer in seconds if is_there or of_layer[layer] > 0)
        for layer in layers
    ]


def _name(row: Task) -> Name:
    return row.kind, row.direction


# The passes of a stage whose weight gradients are computed in a pass (W) of their own.


_BACKWARD: Name = ("B", None)
_OF_WEIGHTS: Name = ("W", None)


def pattern_of_pass(
    stage_pass: StagePass, tasks: StageTasks, template: Template, *, splits: bool
) -> Pattern:
    """The tasks of one pass as columns. If the stage ``splits`` its backward passes, pass B
    computes input gradients and pass W weight gradients.
    """
    if not splits or stage_pass.kind == "F":
        return pattern_of(tasks, template, stage_pass.phase)
    rows = rows_of_pass(template.phases[stage_pass.phase], stage_pass, splits=splits)
    of_pass = _with_rows(template, stage_pass, rows)
    if stage_pass.kind == "B":
        return pattern_of(tasks, of_pass, stage_pass.phase)
    seconds = {**tasks.seconds, _BACKWARD: tasks.seconds[_OF_WEIGHTS]}
    pattern = pattern_of(replace(tasks, seconds=seconds), of_pass, stage_pass.phase)
    labels: list[Label] = [
        ("W" if kind == "B" else kind, direction, layer)
        for kind, direction, layer in pattern.labels
    ]
    return replace(pattern, labels=labels)


def _with_rows(template: Template, stage_pass: StagePass, rows: tuple[Task, ...]) -> Template:
    phases: Mapping[Phase, tuple[Task, ...]] = {**template.phases, stage_pass.phase: rows}
    return replace(template, phases=phases)


# Builds the task graph of an iteration: every pass of every micro-batch through every stage.
#
# Layers are numbered through the whole model: the embedding is 0, blocks start at 1, and the head
# is last. A send is a task of the sending stage, and names the layer whose output it sends. A
# blocking send runs on the sender's compute stream, which continues when the send has ended. The
# receiver waits for the send. On engines where sender and receiver must meet, a further task before
# the pass blocks the receiver's compute stream for as long as the send takes, and the receiver's
# host issues nothing meanwhile; on other engines receiving takes no time.


# Identifies a pass of a stage: its kind, chunk and micro-batch.
PassKey = tuple[PassKind, int, int]


def build_graph(
    parts: Sequence[StageTasks], template: Template, passes: Sequence[StagePasses]
) -> TaskGraph:
    """The graph of all tasks of an iteration, made of the passes of all stages."""
    graph = _empty_graph(parts, passes)
    built = [
        _StageTasks(graph, parts, stage, template).build(of_stage)
        for stage, of_stage in enumerate(passes)
    ]
    for (sender, above), (receiver, below) in pairwise(passes[0].placement.places):
        ends = (built[sender], above), (built[receiver], below)
        ways: tuple[tuple[PassKind, _End, _End], ...] = (("F", *ends), ("B", *ends[::-1]))
        for kind, (here, of_here), (there, of_there) in ways:
            for micro_batch in here.micro_batches:
                begins = there.begins[kind, of_there, micro_batch]
                sent = here.sent[kind, of_here, micro_batch]
                graph.wait(begins, end_of=sent)
                if graph.labels[sent][0] == "X":
                    graph.sends.append((sent, begins))
    first, last = built[0], built[-1]
    if first.tied is not None and last.tied is not None:
        graph.wait(first.tied, end_of=last.reduced)
        graph.wait(last.tied, end_of=first.reduced)
    return graph


def build_stage(
    parts: Sequence[StageTasks], stage: int, template: Template, passes: Sequence[StagePasses]
) -> TaskGraph:
    """The graph of one stage's tasks, as if it never waited for another stage."""
    graph = _empty_graph(parts, passes)
    _StageTasks(graph, parts, stage, template).build(passes[stage])
    return graph


def _empty_graph(parts: Sequence[StageTasks], passes: Sequence[StagePasses]) -> TaskGraph:
    """A graph without tasks for this many stages; if stages have several chunks, it records which
    stage holds each part of the model.
    """
    stages = len(passes)
    if len(parts) == stages:
        return TaskGraph(stages=stages)
    return TaskGraph(
        stages=stages,
        first_layers=tuple(part.first_layer for part in parts),
        places=passes[0].placement.places,
    )


class _StageTasks:
    """Adds the tasks of one stage to the graph, pass after pass."""

    def __init__(
        self,
        graph: TaskGraph,
        parts: Sequence[StageTasks],
        stage: int,
        template: Template,
    ) -> None:
        self.graph = graph
        self.parts = parts
        self.stage = stage
        self.chunks = [part for part in parts if part.stage == stage]
        self.send_s: Mapping[StageChunk, float] = {}
        self.template = template
        self.patterns: dict[tuple[PassKind, int, Phase], Pattern] = {}
        self.links = PassLinks(template.depth)
        self.last_send = -1
        self.begins: dict[PassKey, int] = {}
        self.sent: dict[PassKey, int] = {}
        self.micro_batches: list[int] = []
        self.splits = False
        # ``reduced``: the number of the last task of the last backward pass or gradient reduction;
        # -1 while there is none. ``tied``: the task that reduces a tied embedding table's gradient,
        # if any.
        self.reduced = -1
        self.tied: int | None = None

    def build(self, passes: StagePasses) -> "_StageTasks":
        self.splits = passes.splits_backward
        places = passes.placement.places
        self.send_s = {place: one.send_s for place, one in zip(places, self.parts, strict=True)}
        for stage_pass in passes:
            self._pass(stage_pass)
        self.micro_batches = sorted({one.micro_batch for one in passes})
        self._step(passes.passes[-1].micro_batch)
        return self

    def _pass(self, stage_pass: StagePass) -> None:
        tasks = self.chunks[stage_pass.chunk]
        named = stage_pass.kind, stage_pass.chunk, stage_pass.phase
        pattern = self.patterns.get(named)
        if pattern is None:
            pattern = self.patterns[named] = pattern_of_pass(
                stage_pass, tasks, self.template, splits=self.splits
            )
        send, receive = self._send(stage_pass, tasks), self._receive(stage_pass)
        graph, base = self.graph, len(self.graph)
        graph.labels += pattern.labels
        graph.micro_batches += [stage_pass.micro_batch] * len(pattern.labels)
        graph.lanes += [len(LANES) * self.stage + stream for stream in pattern.streams]
        graph.seconds += pattern.seconds
        graph.waits += pattern.waits
        graph.after_end += pattern.after_end
        graph.after_start += pattern.after_start
        links = self.links.follow(pattern.derived, base, tasks.first_layer, stage_pass.micro_batch)
        for source, task in links:
            graph.wait(task, end_of=source)
        self._issue(stage_pass, pattern, base)
        key, computed = (
            (stage_pass.kind, stage_pass.chunk, stage_pass.micro_batch),
            self.links.computed,
        )
        self.begins[key] = base + pattern.derived.computing[0]
        if receive is not None:
            graph.wait(self.begins[key], end_of=receive)
        self.sent[key] = computed
        if send is not None:
            graph.wait(send, end_of=computed)
            self.sent[key] = send
            if self.template.sends in IN_TURN:
                self.links.holding = send

    def _issue(self, stage_pass: StagePass, pattern: Pattern, base: int) -> None:
        """Record in the graph how long the host takes to issue the tasks of a pass; for engines
        whose host is never ahead, record how much the late issue lengthens these tasks.
        """
        tasks = self.chunks[stage_pass.chunk]
        for index, (kind, _, layer) in enumerate(pattern.labels):
            if tasks.pace > 1 and kind in _COMPUTING:
                self.graph.paces[base + index] = tasks.pace
            of_layers = tasks.issues.get(kind)
            if of_layers and layer is not None:
                self.graph.issues[base + index] = of_layers[layer - tasks.first_layer]

    def _send(self, stage_pass: StagePass, tasks: StageTasks) -> int | None:
        """Add a task that sends the output of a pass, if another stage receives it and the send
        takes any time.
        """
        if stage_pass.goes_to is None or stage_pass.goes_to.stage == self.stage:
            return None
        sends_forward = stage_pass.kind == "F"
        seconds = self._link_s(stage_pass if sends_forward else stage_pass.goes_to)
        if not seconds:
            return None
        last = tasks.first_layer + (tasks.num_layers - 1 if sends_forward else 0)
        send = self.graph.add(
            Action(stage=self.stage, kind="X", layer=last, micro_batch=stage_pass.micro_batch),
            "compute" if self.template.sends in IN_TURN else SENDS,
            seconds,
            after=[] if self.last_send < 0 else [self.last_send],
        )
        if self.template.sends == "meeting":
            self.graph.holds.add(send)
        uses = tasks.networks.get(stage_pass.kind)
        if uses:
            self.graph.networks[send] = uses
        self.last_send = send
        return send

    def _receive(self, stage_pass: StagePass) -> int | None:
        """Add a task on the receiver that blocks it during a send, for engines where sender and
        receiver must meet.
        """
        source = stage_pass.comes_from
        if self.template.sends != "meeting" or source is None or source.stage == self.stage:
            return None
        comes_forward = stage_pass.kind == "F"
        seconds = self._link_s(source if comes_forward else stage_pass)
        if not seconds:
            return None
        tasks = self.chunks[stage_pass.chunk]
        first = tasks.first_layer + (0 if comes_forward else tasks.num_layers - 1)
        action = Action(stage=self.stage, kind="Y", layer=first, micro_batch=stage_pass.micro_batch)
        before = [] if self.links.holding < 0 else [self.links.holding]
        receive = self.graph.add(action, "compute", seconds, after=before)
        self.graph.holds.add(receive)
        return receive

    def _link_s(self, lower: StagePass | StageChunk) -> float:
        """The seconds of a send from one part of the model to the next; gradients go back over the
        same link.
        """
        return self.send_s[StageChunk(lower.stage, lower.chunk)]

    def _step(self, micro_batch: int) -> None:
        """Add the tasks that follow the last backward pass, one after another: the optimizer step,
        and the averaging of replicas' weights.
        """
        reduction = self.links.last("R")
        self.reduced = self.links.computed if reduction < 0 else reduction
        before = [self.links.holding, self.reduced]
        tied_s = max(tasks.tied_s for tasks in self.chunks)
        if tied_s:
            action = Action(stage=self.stage, kind="R", micro_batch=micro_batch)
            self.tied = self.graph.add(action, "gpu_to_gpu", tied_s, after=before)
            before = [self.tied]
        for row, layer, seconds in self._tasks_of_step():
            action = Action(
                stage=self.stage,
                kind=row.kind,
                direction=row.direction,
                layer=layer,
                micro_batch=micro_batch,
            )
            before = [self.graph.add(action, row.stream, seconds, after=before)]
        if averaged_s := sum(tasks.averaged_s for tasks in self.chunks):
            action = Action(stage=self.stage, kind="U", micro_batch=micro_batch)
            self.graph.add(action, "gpu_to_gpu", averaged_s, after=before)

    def _tasks_of_step(self) -> Iterator[tuple[Task, int, float]]:
        """The tasks of the optimizer step that take time, each with its layer and its seconds."""
        for row in self.template.phases["step"]:
            for tasks in self.chunks:
                of_layers = tasks.seconds[row.kind, row.direction]
                for layer, seconds in enumerate(of_layers, tasks.first_layer):
                    if seconds > 0 and tasks.zero >= row.from_zero:
                        yield row, layer, seconds


# The sender or the receiver of a send: a stage's tasks, and the number of its chunk (part of the
# model).
_End = tuple[_StageTasks, int]
